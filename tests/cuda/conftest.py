from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "unit"), str(HERE.parent / "multiprocess")]

from standins import Environment, Standin, paths  # noqa: E402


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Standin:
    """The environment in which a process finds the stand-in driver, by macros that it is compiled with."""
    made: dict[tuple[str, ...], Path] = {}

    def environment(*macros: str, **settings: object) -> Environment:
        if macros not in made:
            made[macros] = tmp_path_factory.mktemp("driver")
            flags = ["-std=c++20", "-O1", "-g", "-shared", "-fPIC", "-pthread", *(f"-D{macro}" for macro in macros)]
            library = str(made[macros] / "libcuda.so.1")
            subprocess.run(
                ["g++", *flags, "-o", library, str(HERE / "standin" / "driver.cpp")], check=True, timeout=110
            )
        return {**paths(made[macros]), **{f"STANDIN_{name.upper()}": str(value) for name, value in settings.items()}}

    return environment
