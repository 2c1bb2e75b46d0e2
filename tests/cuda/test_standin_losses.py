"""Failures while buffers lie on a device: nothing hangs, and nothing wrong is taken for a result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import pytest
import standin_losses
from standins import Standin, paths, run

FEW = pytest.mark.parametrize(("size", "hosts"), [(2, None), (3, "abb")], ids=["2 shared", "3 on two hosts"])


def survivors_of(program: Callable[..., object], size: int, hosts: str | None, environment: dict[str, str]) -> Any:
    """Return the results of all but the last rank, which is killed."""
    outcomes = jobs.start(program, size, hosts=hosts and list(hosts), environment=environment).wait(60)
    assert outcomes[-1].code == -9
    return [outcome.value for outcome in outcomes[:-1]]


@FEW
def test_a_rank_that_dies_with_copies_in_flight(standin: Standin, size: int, hosts: str | None) -> None:
    for error in survivors_of(standin_losses.a_rank_dies, size, hosts, standin()):
        assert f"rank {size - 1} " in error
    survivors_of(standin_losses.a_rank_dies_with_many_calls, size, hosts, standin())


@FEW
def test_a_rank_that_does_not_come(standin: Standin, size: int, hosts: str | None) -> None:
    for error in run(standin_losses.a_rank_is_late, size, hosts, standin())[:-1]:
        assert f"rank {size - 1} " in error
        assert "timeout of 3 s is up" in error


def test_a_stream_that_does_not_come_to_its_call(standin: Standin) -> None:
    (error,) = run(standin_losses.its_own_stream_is_late, 1, None, standin())
    assert "timeout of 0.5 s is up" in error


@FEW
def test_shutdown_with_calls_in_flight(standin: Standin, size: int, hosts: str | None) -> None:
    for error in run(standin_losses.shutdown_in_flight, size, hosts, standin())[1:]:
        assert not error or "rank 0 " in error


@FEW
def test_a_group_that_is_closed_with_calls_in_flight(standin: Standin, size: int, hosts: str | None) -> None:
    run(standin_losses.group_closed_in_flight, size, hosts, standin())


@pytest.mark.parametrize("number", [1, 3, 6, 8])
def test_a_copy_that_the_driver_refuses(standin: Standin, number: int) -> None:
    own, other = run(standin_losses.a_copy_fails, 2, None, standin(), number)
    for error in (own, other):
        assert "the CUDA driver was asked for a copy: invalid argument (1)" in error
        assert "rank 0 " in error


def test_an_arena_without_room_for_the_slots(standin: Standin) -> None:
    for error in run(standin_losses.no_room, 2, None, {**standin(), "MULTIRING_ARENA_BYTES": "16M"}):
        assert "MULTIRING_ARENA_BYTES" in error


@FEW
def test_a_fork_with_calls_in_flight(standin: Standin, size: int, hosts: str | None) -> None:
    run(standin_losses.forked, size, hosts, standin())


@pytest.mark.parametrize(
    ("macros", "settings", "words"),
    [
        ((), {"no_init": 1}, "the CUDA driver was asked to start (cuInit): no CUDA-capable device is detected (100)"),
        (
            (),
            {"version": 11060},
            "the CUDA driver of this host is for CUDA 11.6, and 11.7 or newer is needed: update it",
        ),
        ((), {"no_register": 1}, "bytes of shared memory: out of memory (2)"),
        (("WITHOUT_MEMORY_OPERATIONS",), {}, "(libcuda.so.1) has no cuStreamBatchMemOp_v2: it is older than CUDA 11.7"),
    ],
    ids=["cuInit", "old", "registering", "symbol"],
)
def test_a_driver_that_does_not_serve(
    standin: Standin, macros: tuple[str, ...], settings: dict[str, object], words: str
) -> None:
    for error in run(standin_losses.no_driver, 2, None, standin(*macros, **settings)):
        assert words in error
        assert "\n" not in error


def test_no_driver(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").touch()  # before one that this machine may have
    for error in run(standin_losses.no_driver, 1, None, paths(tmp_path)):
        assert error.startswith("a tensor lies on a CUDA device, and the driver cannot be loaded (")
        assert error.endswith("install the NVIDIA driver where this process finds libcuda.so.1")
