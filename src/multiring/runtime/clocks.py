"""Offsets that turn the time of a rank's monotonic clock into another rank's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from multiring.runtime.buffers import Piece, writable
from multiring.runtime.engine import Part
from multiring.runtime.work import seconds_until

ROUND_TRIPS = 16
"""Round trips of which `best_offset` takes the shortest."""

BARRIERS = 4
"""Barriers by which `offset_by_barriers` compares the clocks of hosts."""


class GroupCalls(Protocol):
    """Calls of a group (`multiring.runtime.group.Group`) that clock offsets and tuning need."""

    rank: int
    size: int

    @property
    def hosts(self) -> tuple[str, ...]: ...
    @property
    def oldest(self) -> int: ...
    def barrier(self, *, timeout: float | None = None) -> None: ...
    def run(
        self, collective: str, piece: Piece, op: str = "sum", root: int = 0, *, timeout: float | None = None
    ) -> None: ...
    def send(self, piece: Piece, dst: int) -> Part: ...
    def recv(self, piece: Piece, src: int) -> Part: ...
    def broadcast_object(self, value: Any = None, root: int = 0, *, timeout: float | None = None) -> Any: ...
    def all_gather_object(self, value: Any) -> list[Any]: ...


def job_offset(group: GroupCalls, known: int, clock: Callable[[], int] = time.monotonic_ns) -> int:
    """Nanoseconds from this rank's clock to that of the job. All ranks call it, with the offset ``known`` so far.

    The rank that has been in the job for longest knows the job's clock, though rank 0 may have been lost meanwhile.
    """
    machines = group.all_gather_object(_boot())
    first, guide = machines.index(machines[group.rank]), group.oldest
    told = group.all_gather_object((_ask(group, machines, guide, clock), known))
    measured: int = told[first][0]
    of_guide: int = told[guide][1]
    return measured + of_guide


def offset_by_barriers(group: GroupCalls, until: float) -> float:
    """Seconds from this rank's clock to that of rank 0; ranks of one host share a clock. All ranks call it.

    CollectiveTimeout at the monotonic time ``until``.
    """
    if len(set(group.hosts)) == 1:
        return 0.0
    stamps = np.empty((BARRIERS, 2))
    for row in stamps:
        row[0] = time.monotonic()
        group.barrier(timeout=seconds_until(until))
        row[1] = time.monotonic()
    reference = stamps.copy()
    group.run("broadcast", writable(reference), timeout=seconds_until(until))
    return barrier_offset(stamps, reference)


def barrier_offset(mine: np.ndarray, reference: np.ndarray) -> float:
    """Seconds to add to this clock to read the reference's, from (entry, exit) of the same barriers on both, in rows.

    Nobody leaves a barrier before the other has entered. Clocks that may agree are taken to agree: they are one
    machine's.
    """
    least = float(np.max(reference[:, 0] - mine[:, 1]))
    most = float(np.min(reference[:, 1] - mine[:, 0]))
    return 0.0 if least <= 0 <= most else (least + most) / 2


def best_offset(round_trips: Sequence[tuple[int, int, int]]) -> int:
    """Nanoseconds to add to this clock to have the other, by (sent, answered, received); ``answered`` is the other's.

    The answer is taken to lie in the middle of the shortest round trip, half of which it may err (Cristian 1989).
    """
    sent, answered, received = min(round_trips, key=lambda trip: trip[2] - trip[0])
    return answered - (sent + received) // 2


def _ask(group: GroupCalls, machines: Sequence[str], guide: int, clock: Callable[[], int]) -> int:
    """The lowest rank of each other machine asks rank ``guide`` for the time, one after the other."""
    time_there = np.zeros(1, np.int64)
    piece = writable(time_there)
    leaders = [machines.index(machine) for machine in dict.fromkeys(machines) if machine != machines[guide]]
    if group.rank == guide:
        for leader in leaders:
            for _ in range(ROUND_TRIPS):
                group.recv(piece, leader).wait()
                time_there[0] = clock()
                group.send(piece, leader).wait()
        return 0
    if group.rank not in leaders:
        return 0
    trips = []
    for _ in range(ROUND_TRIPS):
        sent = clock()
        group.send(piece, guide).wait()
        group.recv(piece, guide).wait()
        trips.append((sent, int(time_there[0]), clock()))
    return best_offset(trips)


def _boot() -> str:
    """Text that is the same for processes with the same monotonic clock."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = Path("/proc/self/ns/time")  # since Linux 5.6
    return f"{boot} {namespace.stat().st_ino if namespace.exists() else 0}"
