"""A world of ranks as threads: engines in one process, and the plans that they run."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from fractions import Fraction

import numpy as np

from multiring import _native as native
from multiring.errors import Mismatch, MultiringError
from multiring.planning.plan import IN_BLOCKS, WHOLE, Phase, Plan, Ring, Span
from multiring.planning.schedule import schedule

DTYPE = {name: code for code, name in enumerate(native.DTYPES)}
OP = {name: code for code, name in enumerate(native.OPS)}
COLLECTIVE = {name: code for code, name in enumerate(native.COLLECTIVES)}


def contribution(rank: int, count: int, dtype: str = "float32") -> np.ndarray:
    """Small whole numbers that depend on rank and index: their sums are exact in every type."""
    return ((np.arange(count) * 7 + rank * 3) % 11 - 3).astype(dtype)


def whole_ring(size: int) -> tuple[Ring, ...]:
    return (Ring(tuple(range(size)), (WHOLE,)),)


def all_reduce_plan(size: int, method: str, segment_bytes: int = 1 << 18) -> Plan:
    """One ring over all ranks: reduce and gather by ``method``, or, named ``at once``, everybody sends to everybody."""
    if size == 1:
        return Plan("all_reduce", 1, (), segment_bytes)
    if method == "at once":
        return Plan("all_reduce", size, (Phase("all_reduce", "rank", "direct", whole_ring(size)),), segment_bytes)
    kinds = ("reduce_scatter", "all_gather")
    return Plan("all_reduce", size, tuple(Phase(k, "rank", method, whole_ring(size)) for k in kinds), segment_bytes)


def blocked_plan(collective: str, size: int, segment_bytes: int = 1 << 18) -> Plan:
    """One direct ring over all ranks for a collective over blocks."""
    phases = () if size == 1 else (Phase(collective, "rank", "direct", whole_ring(size)),)
    return Plan(collective, size, phases, segment_bytes)


def rooted_plan(collective: str, size: int, root: int, method: str, segment_bytes: int = 1 << 18) -> Plan:
    members = (root, *(rank for rank in range(size) if rank != root))
    phases = () if size == 1 else (Phase(collective, "rank", method, (Ring(members, (WHOLE,)),)),)
    return Plan(collective, size, phases, segment_bytes, root)


def two_level_plan(hosts: int, per_host: int, segment_bytes: int = 1 << 18) -> Plan:
    """all_reduce over hosts of equal size: reduce in the host, across the hosts, gather in the host."""
    size = hosts * per_host
    local = tuple(Ring(tuple(range(h * per_host, (h + 1) * per_host)), (WHOLE,)) for h in range(hosts))
    across = tuple(
        Ring(tuple(range(i, size, per_host)), (Span(Fraction(i, per_host), Fraction(i + 1, per_host)),))
        for i in range(per_host)
    )
    phases = (
        Phase("reduce_scatter", "rank", "direct", local),
        Phase("all_reduce", "host", "direct", across),
        Phase("all_gather", "rank", "direct", local),
    )
    return Plan("all_reduce", size, phases, segment_bytes)


class Rank:
    """One engine and what it has installed."""

    def __init__(self, engine: native.Engine, rank: int):
        self.engine = engine
        self.rank = rank
        self._installed: dict[tuple[int, int], int] = {}
        self._calls: dict[int, native.NativeCalls] = {}

    def install(self, plan: Plan, communicator: int = 0, member: int | None = None) -> int:
        key = communicator, plan.number
        if key not in self._installed:
            table, peers = schedule(plan, self.rank if member is None else member).table()
            self._installed[key] = self.engine.install(
                communicator,
                table,
                peers,
                native.PlanFacts(plan.blocks, plan.segment_bytes, plan.window, plan.number, plan.grain),
            )
        return self._installed[key]

    def calls(self, plan: Plan, communicator: int = 0) -> native.NativeCalls:
        """Calls that have this plan."""
        handle = self.install(plan, communicator)
        if handle not in self._calls:
            self._calls[handle] = self.engine.calls(self.rank, plan.world_size, 30.0, lambda *_: handle)
        return self._calls[handle]

    def _call(self, plan: Plan, array: np.ndarray, op: str, timeout: float, label: int = 0) -> native.Call:
        described = native.describe(array)
        blocks = plan.blocks if plan.collective in IN_BLOCKS else 1
        collective, count, dtype = COLLECTIVE[plan.collective], described.count // blocks, DTYPE[described.dtype]
        return native.Call(collective, described.pointer, count, dtype, timeout, OP[op], plan.root, label)

    def run(
        self,
        plan: Plan,
        array: np.ndarray,
        op: str = "sum",
        timeout: float = 30.0,
        communicator: int = 0,
        label: int = 0,
    ) -> np.ndarray:
        self.calls(plan, communicator).run(self._call(plan, array, op, timeout, label))
        return array

    def start(
        self, plan: Plan, array: np.ndarray, op: str = "sum", timeout: float = 30.0, communicator: int = 0
    ) -> native.Work:
        return self.calls(plan, communicator).start(self._call(plan, array, op, timeout), array)

    def send(self, to: int, array: np.ndarray, tag: int = 0, timeout: float = 30.0) -> native.Work:
        return message(self.engine, "send", 0, to, array, tag, timeout)

    def recv(self, source: int, array: np.ndarray, tag: int = 0, timeout: float = 30.0) -> native.Work:
        return message(self.engine, "recv", 0, source, array, tag, timeout)


def message(
    engine: native.Engine, direction: str, communicator: int, peer: int, array: np.ndarray, tag: int, timeout: float
) -> native.Work:
    """Start to send or receive one."""
    described = native.describe(array)
    call = native.Call(
        COLLECTIVE[direction], described.pointer, described.count, DTYPE[described.dtype], timeout, tag=tag
    )
    return engine.start_message(communicator, peer, call, array)


def in_threads(ranks: list[Rank], program: Callable[[Rank], object]) -> list[object]:
    """Run a program as every rank at once; the first error of any of them is raised."""
    results: list[object] = [None] * len(ranks)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = program(ranks[i])
        except BaseException as error:  # raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def connected_sockets(count: int) -> tuple[list[int], list[int]]:
    """Both ends of TCP connections over loopback, as descriptors."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near, far = [], []
        for _ in range(count):
            near.append(socket.create_connection(server.getsockname()).detach())
            far.append(server.accept()[0].detach())
    return near, far


BothEnds = tuple[list[native.Records], list[native.Records]]
"""The records of both ends of some connections."""


def ciphers(count: int) -> BothEnds:
    """Encrypted ones."""
    secrets = [(os.urandom(32), os.urandom(32)) for _ in range(count)]
    return [native.Records(*pair) for pair in secrets], [native.Records(*reversed(pair)) for pair in secrets]


def checksums(count: int) -> BothEnds:
    """Records with checksums."""
    return [native.Records() for _ in range(count)], [native.Records() for _ in range(count)]


@contextmanager
def world(
    size: int,
    hosts: list[int] | None = None,
    streams: int = 1,
    records: Callable[[int], BothEnds] | None = None,
    **options: object,
) -> Iterator[list[Rank]]:
    """Engines of all ranks, attached to each other, with communicator 0 over all of them.

    Ranks of the same host (``hosts[rank]``; all of one by default) are attached in process, others over TCP, with a
    control connection between the lowest ranks of two hosts.
    """
    hosts = hosts or [0] * size
    names = [f"h{rank}" for rank in range(size)]
    engines = [native.Engine(rank, size, hosts=names, inproc=True, **options) for rank in range(size)]
    for a, b in itertools.combinations(range(size), 2):
        if hosts[a] == hosts[b]:
            engines[a].attach_inproc(b, engines[b])
            engines[b].attach_inproc(a, engines[a])
            continue
        pairs = records(streams) if records else ([], [])
        for end, other, sockets, own in zip((a, b), (b, a), connected_sockets(streams), pairs, strict=True):
            engines[end].attach_tcp(other, sockets, own)
        if hosts.index(hosts[a]) == a and hosts.index(hosts[b]) == b:
            pairs = records(1) if records else ([None], [None])
            for end, other, sockets, own in zip((a, b), (b, a), connected_sockets(1), pairs, strict=True):
                engines[end].attach_control(other, sockets[0], own[0])
    for engine in engines:
        engine.communicator(0, list(range(size)))
    try:
        yield [Rank(engine, rank) for rank, engine in enumerate(engines)]
    finally:
        close(engines)


def close(engines: Sequence[native.Engine]) -> None:
    """Shut down at once, as each waits for a moment until the others have read what it sent."""

    def shut_down(engine: native.Engine) -> None:
        with suppress(Mismatch):  # what a test provoked and has seen elsewhere
            engine.shutdown()

    with ThreadPoolExecutor(len(engines)) as pool:
        list(pool.map(shut_down, engines))


def errors_of(ranks: list[Rank], program) -> list[BaseException | None]:
    def caught(rank: Rank) -> BaseException | None:
        try:
            program(rank)
        except MultiringError as error:
            return error
        return None

    return in_threads(ranks, caught)
