"""Ranks in the executors of Spark: in its local mode, and in a cluster of two executors on this machine."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import odd_exceptions
import pytest
import spark_ranks
from begun import processes, when_begun
from pyspark import SparkContext
from spark_masters import CLUSTER, LOCAL

import multiring as mr
import multiring.spark

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # files and sockets of pyspark's own

EXAMPLES = Path(__file__).parents[2] / "examples"
local = pytest.mark.parametrize("spark", [LOCAL], indirect=True)
cluster = pytest.mark.parametrize("spark", [CLUSTER], indirect=True)


def assert_ended(found: list[int], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while left := [process for process in found if os.path.exists(f"/proc/{process}")]:
        assert time.monotonic() < until, f"processes {left} of ranks {found} still run"
        time.sleep(0.05)


def assert_works(ranks: int) -> None:
    found = mr.spark.run(spark_ranks.total, (2,), num_proc=ranks)
    assert [each["sum"][3] for each in found] == [ranks * (ranks + 1) // 2 * 2 * 3] * ranks


@local
@pytest.mark.parametrize(("num_proc", "ranks"), [(None, 3), (3, 3), (2, 2), (1, 1)])
def test_results_come_by_rank(num_proc: int | None, ranks: int, spark: SparkContext) -> None:
    found = mr.spark.run(spark_ranks.total, (10,), {"offset": 1}, num_proc, encrypt=num_proc == 3)
    assert [each["place"] for each in found] == [(rank, ranks, ranks) for rank in range(ranks)]
    expected = [10 * ranks * (ranks + 1) // 2 * index + ranks for index in range(5)]
    assert [each["sum"] for each in found] == [expected] * ranks


@local
def test_a_script_of_any_launcher_is_handed_over(spark: SparkContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from anywhere import main

    assert mr.spark.run(main, num_proc=3) == [(rank, 3, 3.0, -2.0) for rank in range(3)]


@local
def test_workers_are_used_again_and_keep_nothing(spark: SparkContext) -> None:
    """Spark takes turns among those that are idle, also among those that other tests have left.

    A rank's number decides how many descriptors it has during a job, and a worker's first job imports.
    """
    uses: Counter[int] = Counter()
    seen: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    number = 0
    while max(map(len, seen.values()), default=0) < 2:
        number += 1
        assert number < 30, "no worker was the same rank again"
        job = mr.spark.run(spark_ranks.total, (number,), num_proc=3)
        assert job[2]["sum"][4] == 4 * 6 * number
        for rank, each in enumerate(job):
            if uses[each["process"]]:
                seen[each["process"], rank].append(each)
            uses[each["process"]] += 1
    before, last = next(each for each in seen.values() if len(each) == 2)
    assert last["descriptors"] <= before["descriptors"]
    assert last["environment"] == before["environment"]
    assert not [name for name, _ in last["environment"] if name.startswith("MULTIRING_")]


@local
def test_more_ranks_than_slots_are_refused_at_once(spark: SparkContext) -> None:
    with pytest.raises(ValueError, match=r"num_proc=5, and Spark runs 3 task\(s\).*spark.task.cpus=1"):
        mr.spark.run(spark_ranks.total, (1,), num_proc=5)


@local
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_proc": 0}, ValueError, "num_proc=0: expected 1 rank or more"),
        ({"num_proc": True}, ValueError, "num_proc=True: expected 1 rank or more"),
        ({"num_proc": 1.5}, TypeError, "num_proc=1.5: expected a whole number"),
        ({"start_timeout": 0}, ValueError, "start_timeout=0: expected seconds"),
        ({"host": "a"}, ValueError, "host='a': Spark says on which host"),
        ({"colour": "red"}, (TypeError, ValueError), "colour"),
        ({"function": 7}, TypeError, "function=7: expected a function"),
        ({"args": 10}, TypeError, "args=10: expected a tuple or a list"),
        ({"args": "ab"}, TypeError, "args='ab': expected a tuple or a list"),
        ({"kwargs": 10}, TypeError, "kwargs=10: expected a dictionary"),
        ({"args": (threading.Lock(),)}, TypeError, "total and its arguments cannot be pickled.*lock"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], words: str, spark: SparkContext) -> None:
    with pytest.raises(error, match=words):
        mr.spark.run(**{"function": spark_ranks.total, "args": (1,), **arguments})


@local
@pytest.mark.parametrize("peers", ["reduce", "compute"])
def test_what_a_rank_raises_is_raised_here(peers: str, spark: SparkContext, tmp_path: Path) -> None:
    with pytest.raises(odd_exceptions.OddData) as raised:
        mr.spark.run(spark_ranks.fail, ("raise", 1, str(tmp_path), peers), num_proc=3)
    assert raised.value.cell == (1, 7)
    found = processes(tmp_path, 3)
    account = str(raised.value.__cause__)
    assert re.search(rf"rank 1 \(executor \S+, process {found[1]}\) of 3 raised", account)
    assert "spark_ranks.py" in account
    if peers == "reduce":
        for rank in (0, 2):
            assert re.search(rf"rank {rank} saw PeerLost: rank 1 \(host \S+\) ended with OddData: \(1, 7\)", account)
    else:
        assert_ended([found[0], found[2]])
    assert_works(3)


@local
@pytest.mark.parametrize(
    ("how", "words"), [("sealed", "rank 2 ended with Sealed: rank 2"), ("exit", "rank 2 ended with SystemExit: 42")]
)
def test_what_cannot_be_raised_here_is_told(how: str, words: str, spark: SparkContext, tmp_path: Path) -> None:
    with pytest.raises(mr.MultiringError, match=words):
        mr.spark.run(spark_ranks.fail, (how, 2, str(tmp_path), "reduce"), num_proc=3)


@local
@pytest.mark.parametrize("how", ["vanish", "kill"])
@pytest.mark.parametrize("peers", ["reduce", "compute"])
def test_a_lost_rank_is_named(how: str, peers: str, spark: SparkContext, tmp_path: Path) -> None:
    with pytest.raises(mr.PeerLost) as raised:
        mr.spark.run(spark_ranks.fail, (how, 2, str(tmp_path), peers), num_proc=3)
    found = processes(tmp_path, 3)
    words = str(raised.value)
    assert raised.value.rank == 2
    assert re.match(rf"rank 2 \(executor \S+, process {found[2]}\) of 3 was lost: .*crashed", words)
    if peers == "reduce":
        for rank in (0, 1):
            assert re.search(rf"rank {rank} saw PeerLost: rank 2 ", words), words
    assert_ended(found if peers == "compute" else found[2:])
    assert_works(3)


@local
def test_a_result_that_cannot_be_pickled(spark: SparkContext) -> None:
    with pytest.raises(TypeError, match="the result of rank 0, a generator, cannot be pickled"):
        mr.spark.run(spark_ranks.result_of, ("generator",), num_proc=2)


@local
def test_slots_that_another_job_holds(spark: SparkContext) -> None:
    def hold() -> None:
        spark.addJobTag("holds")
        with pytest.raises(Exception, match="cancelled"):
            spark.parallelize(range(3), 3).map(lambda _: time.sleep(600)).collect()

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        time.sleep(3)
        with pytest.raises(mr.RendezvousError, match="none of the 3 ranks was started by Spark within 2 s"):
            mr.spark.run(spark_ranks.total, (1,), num_proc=3, start_timeout=2)
    finally:
        spark.cancelJobsWithTag("holds")
        holder.join()
    assert_works(3)


@local
def test_a_cancelled_group_ends_the_ranks(spark: SparkContext, tmp_path: Path) -> None:
    spark.setJobGroup("group of the test", "")
    waiting = when_begun(tmp_path, 3, lambda: spark.cancelJobGroup("group of the test"))
    try:
        with pytest.raises(mr.MultiringError, match=r"Spark ended the job of 3 rank\(s\): .*cancelled"):
            mr.spark.run(spark_ranks.sleep, (str(tmp_path),), num_proc=3)
    finally:
        waiting.join()
        spark.setLocalProperty("spark.jobGroup.id", None)
    assert_ended(processes(tmp_path, 3))
    assert_works(3)


@local
def test_ctrl_c_ends_the_ranks(spark: SparkContext, tmp_path: Path) -> None:
    waiting = when_begun(tmp_path, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        mr.spark.run(spark_ranks.sleep, (str(tmp_path),), num_proc=3)
    waiting.join()
    assert_ended(processes(tmp_path, 3))
    assert_works(3)


def everywhere(spark: SparkContext, task: Callable[[Iterator[int]], list[int]]) -> None:
    """Run a task in every Python worker."""
    spark.parallelize(range(3), 3).barrier().mapPartitions(task).collect()


@local
def test_a_worker_that_is_in_a_job_already(spark: SparkContext) -> None:
    everywhere(spark, spark_ranks.join)
    try:
        with pytest.raises(mr.MultiringError, match=r"the worker of rank \d .* is in a job of multiring already"):
            mr.spark.run(spark_ranks.total, (1,), num_proc=3)
    finally:
        everywhere(spark, spark_ranks.leave)
    assert_works(3)


@local
def test_executors_without_multiring(spark: SparkContext) -> None:
    def hide(_: Iterator[int]) -> list[int]:
        import sys

        sys.modules["hidden"] = sys.modules.pop("multiring", None)  # type: ignore[assignment]
        sys.modules["multiring"] = None  # type: ignore[assignment]
        return []

    def show(_: Iterator[int]) -> list[int]:
        import sys

        if "hidden" in sys.modules:  # else it is a worker that has come since
            del sys.modules["multiring"]
            if (hidden := sys.modules.pop("hidden")) is not None:
                sys.modules["multiring"] = hidden
        return []

    everywhere(spark, hide)
    try:
        with pytest.raises(mr.RendezvousError, match=r"rank \d of 3 did not start: .*cannot import multiring"):
            mr.spark.run(spark_ranks.total, (1,), num_proc=3)
    finally:
        everywhere(spark, show)
    assert_works(3)


@local
def test_another_version_on_the_executors(spark: SparkContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiring.spark.stage.__version__", "99.1")
    with pytest.raises(mr.RendezvousError, match=rf"multiring {mr.__version__} is installed .* multiring 99.1 on the"):
        mr.spark.run(spark_ranks.total, (1,), num_proc=3)


@local
def test_contexts_that_run_no_barrier_stages(spark: SparkContext, monkeypatch: pytest.MonkeyPatch) -> None:
    spark._conf.set("spark.dynamicAllocation.enabled", "true")
    try:
        with pytest.raises(mr.MultiringError, match=r"spark.dynamicAllocation.enabled=true: .* set it to false"):
            mr.spark.run(spark_ranks.total, (1,))
    finally:
        spark._conf.set("spark.dynamicAllocation.enabled", "false")
    for active in spark, None:  # a local session of Spark Connect has a context in the driver's process
        monkeypatch.setattr(SparkContext, "_active_spark_context", active)
        with monkeypatch.context() as connected:
            connected.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
            with pytest.raises(mr.MultiringError, match="Spark Connect session"):
                mr.spark.run(spark_ranks.total, (1,))
    with pytest.raises(mr.MultiringError, match="no active SparkContext"):
        mr.spark.run(spark_ranks.total, (1,))


@local
@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.3])
def test_ctrl_c_before_spark_knows_the_job_leaves_the_executors_free(
    seconds: float, spark: SparkContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        time.sleep(seconds)
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr("multiring.spark.stage._Stage.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mr.spark.run(time.sleep, (300,), num_proc=2)
    assert spark.statusTracker().getActiveJobsIds() == []
    assert_works(3)


@local
def test_torch_distributor_finds_the_backend(spark: SparkContext) -> None:
    from pyspark.ml.torch.distributor import TorchDistributor
    from pyspark.sql import SparkSession

    SparkSession(spark)
    found = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(spark_ranks.torch_total, 5)
    assert found == [0.0, 15.0, 30.0]


@cluster
def test_two_executors_of_a_machine_share_memory(spark: SparkContext) -> None:
    mr.spark.run(spark_ranks.total, (10,), num_proc=2)  # which waits for both
    found = mr.spark.run(spark_ranks.total, (10,))
    assert [each["place"] for each in found] == [(0, 2, 2), (1, 2, 2)]
    assert [each["sum"] for each in found] == [[30 * index for index in range(5)]] * 2
    assert found[0]["executor"] != found[1]["executor"]


@cluster
def test_a_lost_executor_is_named(spark: SparkContext, tmp_path: Path) -> None:
    with pytest.raises(mr.PeerLost) as raised:
        mr.spark.run(spark_ranks.fail, ("executor", 1, str(tmp_path), "reduce"), num_proc=2)
    words = str(raised.value)
    assert raised.value.rank == 1
    assert re.match(r"rank 1 \(executor \S+, process \d+\) of 2 was lost: .*ExecutorLostFailure", words), words
    assert "; rank 0 saw PeerLost: rank 1 " in words
    assert_ended(processes(tmp_path, 2)[1:])
    assert_works(2)
