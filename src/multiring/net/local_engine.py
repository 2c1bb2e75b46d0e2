"""The part of an engine that ranks of one host attach to; here, as an engine does without what local.py imports."""

from __future__ import annotations

from typing import Protocol


class LocalEngine(Protocol):
    """`multiring.runtime.engine.Engine` has the rest."""

    @property
    def memory_fd(self) -> int: ...
    @property
    def doorbell_fd(self) -> int: ...
    def attach_local(self, peer: int, memory_fd: int, doorbell_fd: int, socket_fd: int) -> None: ...
