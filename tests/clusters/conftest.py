"""These tests need what `make test-engines` installs: elsewhere they are not collected."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

NEEDS = {
    "test_spark.py": "pyspark",
    "test_estimators.py": "pyspark",
    "test_dask.py": "distributed",
    "test_ray.py": "ray",
}
collect_ignore = [file for file, package in NEEDS.items() if find_spec(package) is None]

HERE = Path(__file__).parent
LAUNCHERS = ("MULTIRING_", "SLURM_", "OMPI_", "PMI", "PET_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
PATIENT = {  # a loaded machine needs more time
    "spark.network.timeout": "600s",
    "spark.executor.heartbeatInterval": "60s",
    "spark.rpc.askTimeout": "600s",
    "spark.python.authenticate.socketTimeout": "300s",
}


@pytest.fixture(scope="session")
def spark(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One context for all tests of a master: a process has one at a time."""
    from pyspark import SparkConf, SparkContext

    path = os.pathsep.join(
        [str(HERE), str(HERE.parents[1] / "examples"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
            patch.delenv(name)
        patch.setenv("PYTHONPATH", path)
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("KERAS_BACKEND", "torch")  # which the Estimators' tests import anyway
        conf = SparkConf().setMaster(request.param).setAppName("multiring").setExecutorEnv("PYTHONPATH", path)
        conf.setExecutorEnv("KERAS_BACKEND", "torch")
        conf.set("spark.ui.enabled", "false").set("spark.driver.memory", "512m").set("spark.executor.memory", "512m")
        for name, value in PATIENT.items():
            conf.set(name, value)
        before = signal.getsignal(signal.SIGINT)
        context = SparkContext(conf=conf)
        context.setLogLevel("ERROR")
        try:
            yield context
        finally:
            context.stop()
            signal.signal(signal.SIGINT, before)
