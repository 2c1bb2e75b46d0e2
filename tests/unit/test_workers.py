"""Functions that a test program offers: run by their names; other names are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import workers

PROGRAM = """
import sys
from workers import run, worker

@worker
def first():
    print("the first")

@worker
def second():
    print("the second")

def helper():
    print("never")

run(sys.argv[1:])
"""


def run(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environment = {"PYTHONPATH": str(Path(workers.__file__).parent)}
    return subprocess.run([sys.executable, program, *names], env=environment, capture_output=True, text=True)


def test_functions_are_run_in_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    done = run(tmp_path, "second", "first")
    assert (done.returncode, done.stdout) == (0, "the second\nfinished second\nthe first\nfinished first\n")


def test_an_unknown_name_lists_those_that_are_known(tmp_path: Path) -> None:
    done = run(tmp_path, "first", "helper")
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.endswith("LookupError: 'helper' is not offered: first, second can be run\n")


def test_each_module_offers_its_own() -> None:
    @workers.worker
    def one() -> None:
        raise AssertionError("it is not to be called")

    assert workers.workers(__name__) == [one]
    assert workers.named("one", __name__) is one
    assert workers.workers("another module") == []
