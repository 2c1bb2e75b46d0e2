"""The fuzzed parsers for a moment, and everything that one of them has ever stumbled over."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from targets import SEEDS, TARGETS, close_store

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    yield
    close_store()


def known(target: str) -> list[bytes]:
    return [*SEEDS[target], *(path.read_bytes() for path in sorted((HERE / "corpus" / target).glob("*")))]


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_known(target: str) -> None:
    for data in known(target):
        TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
def test_new_inputs_for_a_moment(target: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    runs = len(known(target)) + 50
    command = [sys.executable, str(HERE / "fuzz.py"), target, str(tmp_path), f"-runs={runs}", "-seed=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(re.search(r"^Done (\d+) runs", done.stderr, re.MULTILINE)[1]) >= runs
