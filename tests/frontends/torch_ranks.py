"""Run a function in real processes, one a rank, forked from a server that has imported torch and multiring."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.distributed", "torch._dynamo", "multiring.torch.create", "pytest"]  # optimizers import _dynamo
)


@dataclass
class Outcome:
    """The end of a rank: the value it returned, or its traceback, or neither if it was killed."""

    value: Any = None
    error: str = ""
    exitcode: int | None = None


def run(function: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 100.0) -> list[Outcome]:
    """Call ``function(*args)`` in each rank, its launcher's variables set and FOLDER naming one that they share."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world_size):
            here, there = _context.Pipe(duplex=False)
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "FOLDER": folder,
            }
            process = _context.Process(target=_child, args=(there, environment, function, args))
            process.start()
            there.close()
            ranks.append((process, here))
        try:
            return [_collect(process, pipe, timeout) for process, pipe in ranks]
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


def values(function: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 100.0) -> list[Any]:
    """`run`, for functions that are to succeed: what each rank returned."""
    outcomes = run(function, *args, world_size=world_size, timeout=timeout)
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"rank {rank}:\n{outcome.error}"
        assert outcome.exitcode == 0, f"rank {rank} ended with exit code {outcome.exitcode}"
    return [outcome.value for outcome in outcomes]


def _child(pipe: Connection, environment: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        pipe.send(Outcome(value=function(*args)))
    except BaseException:
        pipe.send(Outcome(error=traceback.format_exc()))


def _collect(process: Any, pipe: Connection, timeout: float) -> Outcome:
    if not pipe.poll(timeout):
        return Outcome(error=f"no answer within {timeout} s")
    try:
        outcome = pipe.recv()
    except EOFError:
        outcome = Outcome()
    process.join(timeout)
    outcome.exitcode = process.exitcode
    return outcome


def the_killed_last_rank_is_named(outcomes: list[Outcome]) -> None:
    """Check that the last rank was killed, and that what the others returned names it."""
    *survivors, dead = outcomes
    assert dead.exitcode == -signal.SIGKILL
    for survivor in survivors:
        assert not survivor.error
        assert f"rank {len(survivors)}" in survivor.value
