"""Ranks of one host meet by its loopback addresses, whatever of them there is, and whatever its names stand for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import COMMAND

PROGRAM = str(Path(__file__).with_name("launchers.py"))
BY_HAND = f"""
for rank in 1 0; do RANK=$rank WORLD_SIZE=2 MASTER_ADDR=$1 MASTER_PORT=29500 {sys.executable} {PROGRAM} & done
wait
"""
UP, ONLY_IPV6 = "ip link set lo up", "ip link set lo up && ip addr del 127.0.0.1/8 dev lo"
ONLY_IPV4 = "ip link set lo up && echo 1 > /proc/sys/net/ipv6/conf/lo/disable_ipv6"
NO_NAMES = "mount --bind /dev/null /etc/hosts"

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


def apart(prepared: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command in a network and a view of files of its own."""
    return subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", f'{prepared} && exec "$@"', "sh", *words],
        capture_output=True,
        text=True,
        timeout=90,
    )


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
@pytest.mark.parametrize("prepared", [UP, ONLY_IPV4, ONLY_IPV6, f"{UP} && {NO_NAMES}"])
def test_ranks_by_hand(prepared: str, address: str) -> None:
    ended = apart(prepared, "sh", "-c", BY_HAND, "sh", address)
    for rank in range(2):
        assert f"rank {rank} of 2 sums to 11" in ended.stdout, ended.stderr


@pytest.mark.parametrize("prepared", [ONLY_IPV4, ONLY_IPV6, f"{ONLY_IPV6} && {NO_NAMES}"])
@pytest.mark.parametrize(
    "program",
    [[PROGRAM], [PROGRAM, "torch"], ["env", "-u", "MASTER_ADDR", sys.executable, PROGRAM, "torch"]],
    ids=["numpy", "torch", "torch at a store of ours"],
)
def test_multiring_run(prepared: str, program: list[str]) -> None:
    if "torch" in program and not importlib.util.find_spec("torch"):
        pytest.skip("torch is not installed")
    ended = apart(prepared, *COMMAND, "-n", "2", *program)
    for rank in range(2):
        assert f"rank {rank} of 2 sums to 11" in ended.stdout, ended.stderr


def test_no_loopback_is_said_at_once() -> None:
    began = time.monotonic()
    by_hand = apart("true", "sh", "-c", BY_HAND, "sh", "127.0.0.1")
    launched = apart("true", *COMMAND, "-n", "2", PROGRAM)
    assert time.monotonic() - began < 60  # init would wait for 40 s twice
    said = "this host has no loopback address (127.0.0.1: Network is unreachable"
    assert by_hand.stderr.count(said) == 2
    assert launched.stderr.startswith(f"multiring run: {said}")
    assert launched.stderr.count("\n") == 1
