"""The native engine: peers, communicators, installed schedules, operations.

Ranks are world ranks, except in schedules, whose peers are indices into the communicator's member list.
Errors are raised as the classes of ``multiring.errors``.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES: tuple[str, ...]
"""float32 float64 float16 bfloat16 int8 uint8 int16 int32 int64 bool complex64 complex128; position = code."""

OPS: tuple[str, ...]
"""sum avg min max prod band bor bxor; position = code."""

COLLECTIVES: tuple[str, ...]
"""all_reduce reduce_scatter all_gather broadcast reduce all_to_all barrier send recv; position = code."""

class Description:
    """What a caller's buffer is: NumPy array, buffer object or DLPack tensor."""

    pointer: int
    count: int
    itemsize: int
    dtype: str
    shape: tuple[int, ...]
    contiguous: bool
    writable: bool
    device: str

def describe(x: Any) -> Description:
    """Describe a buffer without copying it; TypeError if it is none."""

def cut(numerator: int, denominator: int, count: int, itemsize: int) -> int:
    """The element at which a slice of ``count`` elements is cut at a fraction (docs/design.md)."""

def features() -> dict[str, str]:
    """Instruction set chosen for reductions, compiler, ABI: for ``doctor``."""

class Work:
    """Handle of an operation in flight; keeps ``owner`` alive until it is done."""

    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None:
        """Block, GIL released, signals seen; raise the operation's error, or CollectiveTimeout when the time is up."""

    def error(self) -> BaseException | None: ...

class Engine:
    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        generation: int = 0,
        hosts: list[str] | None = None,
        arena_bytes: int = 0,
        spin_seconds: float | None = None,
        inproc: bool = False,
    ) -> None:
        """``hosts[r]`` is the name of rank r's host, for messages. ``spin_seconds`` None: 100e-6, or 0 (yield) when
        the ranks of this host outnumber its available cores. ``arena_bytes`` bounds the shared memory, 0 by the
        machine's memory; pages are taken as they are needed."""

    @property
    def memory_fd(self) -> int: ...
    @property
    def doorbell_fd(self) -> int: ...
    def attach_local(self, peer: int, memory_fd: int, doorbell_fd: int, socket_fd: int) -> None:
        """A rank of this host. Takes ownership of the three descriptors; the unix socket tells of its death."""

    def attach_inproc(self, peer: int, engine: Engine) -> None: ...
    def attach_tcp(self, peer: int, sockets: list[int]) -> None:
        """A rank elsewhere, over connected and authenticated sockets (data), taken into ownership."""

    def attach_control(self, peer: int, socket: int) -> None:
        """A control connection to the lowest rank of another host."""

    def attached(self, peer: int) -> bool:
        """Whether messages can go to ``peer``."""

    def communicator(self, id: int, members: list[int]) -> None:
        """Register a communicator; ``id`` is a 32-bit number that all members share."""

    def forget(self, id: int) -> None: ...
    def install(
        self,
        communicator: int,
        instructions: NDArray[np.int64],
        peers: NDArray[np.int32],
        blocks: int,
        segment_bytes: int,
        plan_id: int,
    ) -> int:
        """Install a schedule and return its handle.

        ``instructions`` has a row (kind, phase, first_peer, peer_count, block, lo_num, lo_den, hi_num, hi_den, final)
        per instruction, kind being 0 send, 1 reduce, 2 store; ``peers[first_peer:first_peer + peer_count]`` are its
        peers. ValueError for a malformed table.
        """

    def run(
        self, schedule: int, collective: int, pointer: int, count: int, dtype: int, op: int, root: int, timeout: float
    ) -> None:
        """Execute a schedule in the calling thread; ``count`` is elements per block."""

    def start(
        self,
        schedule: int,
        collective: int,
        pointer: int,
        count: int,
        dtype: int,
        op: int,
        root: int,
        timeout: float,
        owner: object = None,
    ) -> Work:
        """The same by the progress thread."""

    def send(
        self,
        communicator: int,
        dst: int,
        tag: int,
        pointer: int,
        count: int,
        dtype: int,
        timeout: float,
        owner: object = None,
    ) -> Work: ...
    def recv(
        self,
        communicator: int,
        src: int,
        tag: int,
        pointer: int,
        count: int,
        dtype: int,
        timeout: float,
        owner: object = None,
    ) -> Work: ...
    def empty(self, nbytes: int) -> Any:
        """A uint8 array of ``nbytes`` in the arena, 64-byte aligned, freed with its last reference."""

    def fail(self, kind: str, rank: int, message: str) -> None:
        """Fail everything pending and tell the other ranks; ``kind`` is the name of an error class."""

    def failure(self) -> BaseException | None: ...
    def statistics(self) -> dict[str, Any]:
        """Counters since the engine was made.

        ``operations``, ``segments``, ``arena_allocated`` and ``arena_committed`` (bytes), ``seconds_in_calls`` (that
        callers spent in run and wait) and ``seconds_waiting`` (of these, with nothing to do); ``peers[rank]`` has
        ``messages_sent``, ``bytes_sent``, ``messages_received``, ``bytes_received`` and ``connections``.
        """

    def shutdown(self, timeout: float = 5.0) -> None:
        """Say farewell, join the progress thread, close everything; pending operations fail. May be called twice."""
