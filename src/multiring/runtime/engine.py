"""What the communicator asks of an engine: the native one (``_native.Engine``), or that over MPI (``mpi.engine``).

Buffers are addresses, which the caller answers for; types, reductions and collectives are codes (``_native``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Part(Protocol):
    """An operation in flight."""

    @property
    def other(self) -> int:
        """The rank at the other end of a message that is done."""

    @property
    def ended(self) -> float:
        """When it was done, in seconds of time.monotonic(); 0 before."""

    def done(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> None: ...


class CardPart(Part, Protocol):
    """An operation on a buffer that lies on a card; it is done when the card is."""

    @property
    def last_stream(self) -> int:
        """The stream of the card on which the last of it is queued; 0 if nothing is."""

    def join(self, stream: int) -> None:
        """Make a stream of the card wait until it is done there."""

    def error(self) -> BaseException | None: ...


class NativeCalls(Protocol):
    """Calls of a communicator that are made in one step."""

    def all_reduce(self, x: Any, op: Any, timeout: float | None = None, label: int = 0) -> bool:
        """False, and nothing is done, where an argument is not plain; the communicator's ``timeout`` unless given."""

    def barrier(self, timeout: float) -> None: ...


class Engine(Protocol):
    """Executes installed schedules, and moves messages between two ranks; `_native.Engine` says what each call does."""

    def attached(self, peer: int) -> bool: ...

    def departed(self, peer: int) -> bool: ...

    def communicator(self, id: int, members: list[int], incarnation: int = 0) -> None: ...

    def forget(self, id: int) -> None: ...

    def install(
        self,
        communicator: int,
        instructions: NDArray[np.int64],
        peers: NDArray[np.int32],
        blocks: int,
        segment_bytes: int,
        window: int,
        plan_id: int,
    ) -> int: ...

    def run(
        self,
        schedule: int,
        collective: int,
        pointer: int,
        count: int,
        dtype: int,
        op: int,
        root: int,
        timeout: float,
        label: int = 0,
    ) -> None: ...

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
        label: int = 0,
        owner: object = None,
    ) -> Part: ...

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
        part_of: int = ...,
    ) -> Part: ...

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
        part_of: int = ...,
    ) -> Part: ...

    def start_on_card(
        self,
        schedule: int,
        collective: int,
        count: int,
        dtype: int,
        op: int,
        root: int,
        timeout: float,
        label: int,
        owner: object,
        device: int,
        stream: int,
        out: tuple[int, int, int, int] | None,
        into: tuple[int, int, int, int] | None,
    ) -> CardPart: ...

    def empty(self, nbytes: int) -> Any: ...

    def fail(self, kind: str, rank: int, message: str) -> None: ...

    def failure(self) -> BaseException | None: ...

    def native_calls(self, rank: int, size: int, timeout: float, choose_plan: Any) -> NativeCalls | None: ...

    def publish(self, communicator: int, calls: Any) -> None: ...

    def withdraw(self, communicator: int) -> None: ...

    def statistics(self) -> dict[str, Any]: ...

    def installed_record(self, handle: int) -> tuple[int, int, float]: ...

    def completed(self, communicator: int) -> int: ...

    def traced(self) -> list[tuple[int, bool, int, bytes]]: ...

    def shutdown(self, timeout: float = 5.0) -> None: ...
