"""The program of a rank to which something is done: collectives without end, every result checked to the last bit.

    python victims.py FOLDER CALLS [PAUSE]

CALLS names a row of the table below; PAUSE is the time between two steps. In FOLDER, the file ``stop`` ends the job,
``order-RANK`` makes that rank misbehave, and ``settled`` says that the fault is over: then a rank that has raised looks
whether somebody wrote to what it was handed back. What became of a rank is in ``RANK.json``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import multiring as mr

SETTLE_SECONDS = 40.0


def own(rank: int, step: int, count: int) -> np.ndarray[Any, Any]:
    return np.arange(count) % 1021 * (rank + 1.0) + step


def total(size: int, step: int, count: int) -> np.ndarray[Any, Any]:
    return np.arange(count) % 1021 * (size * (size + 1) / 2) + step * size


class Steps:
    """Calls that a rank repeats; each leaves its buffers in ``held``."""

    def __init__(self) -> None:
        self.rank, self.size = mr.rank(), mr.world_size()
        self.held: list[np.ndarray[Any, Any]] = []

    def all_reduce(self, step: int, count: int, works: int = 0) -> None:
        self.held = [own(self.rank, step + k, count) for k in range(max(works, 1))]
        if works:
            for work in [mr.all_reduce(x, async_op=True) for x in self.held]:
                work.wait()
        else:
            mr.all_reduce(self.held[0])
        for k, x in enumerate(self.held):
            assert (x == total(self.size, step + k, count)).all(), f"wrong sum in step {step}"

    def all_gather(self, step: int) -> None:
        self.held = [np.zeros((self.size, 3000))]
        mr.all_gather(own(self.rank, step, 3000), out=self.held[0])
        for rank, row in enumerate(self.held[0]):
            assert (row == own(rank, step, 3000)).all(), f"wrong blocks in step {step}"

    def reduce_scatter(self, step: int) -> None:
        whole = np.tile(own(self.rank, step, 2000), (self.size, 1)) + np.arange(self.size)[:, None]
        self.held = [np.zeros((1, 2000))]
        mr.reduce_scatter(whole, out=self.held[0])
        assert (self.held[0] == total(self.size, step, 2000) + self.size * self.rank).all(), f"wrong block in {step}"

    def all_to_all(self, step: int) -> None:
        """Every rank exchanges bytes with every other one."""
        blocks = np.tile(own(self.rank, step, 500), (self.size, 1)) + np.arange(self.size)[:, None]
        self.held = [np.zeros((self.size, 500))]
        mr.all_to_all(blocks, out=self.held[0])
        for rank, row in enumerate(self.held[0]):
            assert (row == own(rank, step, 500) + self.rank).all(), f"wrong blocks in step {step}"

    def broadcast(self, step: int) -> None:
        root = step % self.size
        self.held = [own(self.rank, step, 20_000)]
        mr.broadcast(self.held[0], root)
        assert (self.held[0] == own(root, step, 20_000)).all(), f"wrong copy in step {step}"

    def pass_on(self, step: int) -> None:
        """A message to the next rank and one from the previous."""
        x, previous = own(self.rank, step, 5000), (self.rank - 1) % self.size
        self.held = [np.zeros(5000)]
        sent = mr.send(x, (self.rank + 1) % self.size, async_op=True)
        mr.recv(self.held[0], previous)
        sent.wait()
        assert (self.held[0] == own(previous, step, 5000)).all(), f"wrong message in step {step}"


CALLS: dict[str, Callable[[Steps, int], None]] = {
    "small": lambda steps, step: steps.all_reduce(step, 512),
    "medium": lambda steps, step: steps.all_reduce(step, 30_000),
    "large": lambda steps, step: steps.all_reduce(step, 1_000_000),
    "asynchronous": lambda steps, step: steps.all_reduce(step, 8192, works=4),
    "all_gather": lambda steps, step: steps.all_gather(step),
    "reduce_scatter": lambda steps, step: steps.reduce_scatter(step),
    "all_to_all": lambda steps, step: steps.all_to_all(step),
    "broadcast": lambda steps, step: steps.broadcast(step),
    "messages": lambda steps, step: steps.pass_on(step),
}


def obey(order: str, folder: Path) -> None:
    if order == "raise":
        raise ValueError("no such sample: 42")
    if order == "leave":
        mr.shutdown()
        sys.exit(0)
    if order == "linger":
        while not (folder / "settled").exists():
            time.sleep(0.05)


def work(folder: Path, calls: str, pause: float) -> dict[str, Any]:
    mr.init()
    if (folder / "hold").exists():
        print("held", flush=True)
        while not (folder / "parted").exists():
            time.sleep(0.05)
    steps, step, stop = Steps(), 0, np.zeros(1)
    order = folder / f"order-{mr.rank()}"
    try:
        while True:
            CALLS[calls](steps, step)
            stop[0] = (folder / "stop").exists()
            mr.all_reduce(stop, "max")
            if stop[0]:
                return {"kind": "", "steps": step + 1, "unchanged": True}
            if order.exists():
                obey(order.read_text(), folder)
            time.sleep(pause)
            step += 1
            if step == 2:
                print("running", flush=True)
    except mr.MultiringError as error:
        raised = time.time()
        before = [x.tobytes() for x in steps.held]
        print("raised", flush=True)
        deadline = time.monotonic() + SETTLE_SECONDS
        while not (folder / "settled").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return {
            "kind": type(error).__name__,
            "rank": error.rank,
            "host": error.host,
            "collective": error.collective,
            "number": error.number,
            "seconds": error.seconds,
            "apart": getattr(error, "apart", -1),
            "message": str(error),
            "raised": raised,
            "steps": step,
            "unchanged": before == [x.tobytes() for x in steps.held],
        }


def main() -> None:
    folder = Path(sys.argv[1])
    outcome = work(folder, sys.argv[2], float(sys.argv[3]))
    rank, started = mr.rank(), time.monotonic()
    mr.shutdown()
    outcome["leaving"], outcome["left"] = time.monotonic() - started, time.time()
    (folder / f"{rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
