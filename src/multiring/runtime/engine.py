"""Interfaces of engines: of the native one (``_native.Engine``), and of that over MPI (``mpi.engine``).

A call is one value, `_native.Call`, for both. Buffers are addresses, which the caller answers for; types, reductions
and collectives are codes (``_native``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from multiring.net.local_engine import LocalEngine

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from multiring._native import Call, PlanFacts, Trials


class Waitable(Protocol):
    """Something in flight that can be waited for: a part of a call, or all of it (`multiring.runtime.work.Work`)."""

    def done(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> Any: ...


class Part(Waitable, Protocol):
    """An operation in flight."""

    @property
    def other(self) -> int:
        """The rank at the other end of a message that is done."""

    @property
    def ended(self) -> float:
        """Time of its end, in seconds of time.monotonic(); 0 before."""


class DevicePart(Part, Protocol):
    """An operation on a buffer that lies on a CUDA device; it is done when the device is."""

    @property
    def last_stream(self) -> int:
        """The stream of the device on which the last of it is queued; 0 if nothing is."""

    def join(self, stream: int) -> None:
        """Make a stream of the device wait until it is done there."""

    def error(self) -> BaseException | None: ...


ChoosePlan = Callable[[int, int, int, float], "int | Trials"]
"""From the code of a collective, the bytes of all blocks together, the root and the seconds that a call has: the handle
of an installed schedule, or trials that are not all taken."""


class Calls(Protocol):
    """The collectives of one communicator: each call is given its plan, or one to try, and run or started."""

    def all_reduce_plain(self, x: Any, op: Any, timeout: float | None = None, label: int = 0) -> bool:
        """All-reduce an array or tensor in one step; False, and nothing is done, where an argument is not plain.

        The communicator's ``timeout`` unless given.
        """

    def barrier(self, timeout: float) -> None: ...

    def run(self, call: Call) -> None:
        """Return when the call is done here."""

    def start(self, call: Call, owner: object) -> Part:
        """Begin the call; ``owner`` keeps the buffer."""

    def start_on_device(
        self,
        call: Call,
        owner: object,
        device: int,
        stream: int,
        out: tuple[int, int, int, int] | None,
        into: tuple[int, int, int, int] | None,
    ) -> DevicePart:
        """The same on blocks of a CUDA device; `multiring.runtime.buffers.DeviceBuffer` says what they are."""


class Engine(LocalEngine, Protocol):
    """Executes installed schedules, by the calls of each communicator, and moves messages between two ranks.

    `_native.Engine` says what each method does.
    """

    def attached(self, peer: int) -> bool: ...

    def departed(self, peer: int) -> bool: ...

    def miss_connection(self, peer: int, seconds: float) -> None: ...

    def expect_links(self, links: list[tuple[list[int], float, float]]) -> None: ...

    def communicator(self, id: int, members: list[int], incarnation: int = 0) -> None: ...

    def forget(self, id: int) -> None: ...

    def install(
        self,
        communicator: int,
        instructions: NDArray[np.int64],
        peers: NDArray[np.int32],
        facts: PlanFacts,
    ) -> int: ...

    def calls(
        self, rank: int, size: int, timeout: float, choose_plan: ChoosePlan, need_residual: bool = False
    ) -> Calls: ...

    def start_message(self, communicator: int, peer: int, call: Call, owner: object) -> Part: ...

    def empty(self, nbytes: int, copy: bool = False) -> Any: ...

    def fail(self, kind: str, rank: int, message: str) -> None: ...

    def failure(self) -> BaseException | None: ...

    def publish(self, communicator: int, calls: Any) -> None: ...

    def withdraw(self, communicator: int) -> None: ...

    def statistics(self) -> dict[str, Any]: ...

    def installed_record(self, handle: int) -> tuple[int, int, float]: ...

    def completed(self, communicator: int) -> int: ...

    def recorded(self) -> bytes: ...

    def traced(self) -> list[tuple[int, bool, int, bytes]]: ...

    def shutdown(self, timeout: float = 5.0) -> None: ...


@runtime_checkable
class Remembering(Protocol):
    """A further method of an engine that remembers what it called."""

    def disputed(self) -> tuple[int, int, str, str] | None: ...


@runtime_checkable
class Connecting(Protocol):
    """Further methods of an engine that connects the hosts itself; others are given links (`multiring.net.links`)."""

    def connect(self) -> None: ...
