"""Ranks of one host meet by its loopback addresses, whatever of them there is, and whatever its names stand for."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
from launching import COMMAND

HERE = Path(__file__).parent
PROGRAM = str(HERE / "launchers.py")
ADDRESSES = ["127.0.0.1", "localhost", "::1"]
UP, ONLY_IPV6 = "ip link set lo up", "ip link set lo up && ip addr del 127.0.0.1/8 dev lo"
ONLY_IPV4 = "ip link set lo up && echo 1 > /proc/sys/net/ipv6/conf/lo/disable_ipv6"
MODULES = [str(HERE), str(HERE.parent / "helpers"), str(HERE.parents[1] / "src")]
NO_NAMES = "mount --bind /dev/null /etc/hosts"

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


def apart(prepared: str, *words: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    """A command in a network and a view of files of its own."""
    return subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", f'{prepared} && exec "$@"', "sh", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*MODULES, os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@cache
def by_hand(prepared: str, *addresses: str) -> dict[str, list[str]]:
    """Return the outputs of two ranks for each address; the pairs run one after the other in one network."""
    ended = apart(prepared, sys.executable, str(HERE / "by_hand.py"), *addresses, timeout=200)
    assert ended.returncode == 0, ended.stderr
    said: dict[str, list[str]] = json.loads(ended.stdout)
    return said


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("prepared", [UP, ONLY_IPV4, ONLY_IPV6, f"{UP} && {NO_NAMES}"])
def test_ranks_by_hand(prepared: str, address: str) -> None:
    said = "".join(by_hand(prepared, *ADDRESSES)[address])
    for rank in range(2):
        assert f"rank {rank} of 2 sums to 11" in said


PROGRAMS = {"numpy": [], "torch": ["torch"], "torch at a store of ours": ["torch", "without MASTER_ADDR"]}
"""Words for the program, by what it then does."""


@cache
def launched(prepared: str) -> dict[str, list[str]]:
    """Return the output and error of ``multiring run`` of each program, one after the other in one network."""
    programs = {name: words for name, words in PROGRAMS.items() if not words or importlib.util.find_spec("torch")}
    ended = apart(prepared, sys.executable, str(HERE / "launched.py"), PROGRAM, json.dumps(programs), timeout=280)
    assert ended.returncode == 0, ended.stderr
    said: dict[str, list[str]] = json.loads(ended.stdout)
    return said


@pytest.mark.timeout(300)  # three launches, if it is the first
@pytest.mark.parametrize("prepared", [ONLY_IPV4, ONLY_IPV6, f"{ONLY_IPV6} && {NO_NAMES}"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_multiring_run(prepared: str, program: str) -> None:
    if PROGRAMS[program] and not importlib.util.find_spec("torch"):
        pytest.skip("torch is not installed")
    output, error = launched(prepared)[program]
    for rank in range(2):
        assert f"rank {rank} of 2 sums to 11" in output, error


def test_no_loopback_is_said_at_once() -> None:
    began = time.monotonic()
    ranks = by_hand("true", "127.0.0.1")["127.0.0.1"]
    ended = apart("true", *COMMAND, "-n", "2", PROGRAM)
    assert time.monotonic() - began < 60  # init would wait for 40 s twice
    said = "this host has no loopback address (127.0.0.1: Network is unreachable"
    assert [said in rank for rank in ranks] == [True, True]
    assert ended.stderr.startswith(f"multiring run: {said}")
    assert ended.stderr.count("\n") == 1
