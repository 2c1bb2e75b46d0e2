"""A call in flight, whatever it is: who drives it needs to know no more."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from multiring._native import ANY_SOURCE, COLLECTIVES, ITEMSIZES, Call
from multiring.errors import MultiringError
from multiring.runtime.mpi.channel import Channel
from multiring.runtime.mpi.signature import Signature


class Operation(ABC):
    """Advanced until it is done; ``owner`` is what keeps the buffer of the call."""

    def __init__(self, channel: Channel, signature: Signature, call: Call, owner: object) -> None:
        self.channel = channel
        self.signature = signature
        self.pointer = call.pointer
        self.timeout = call.timeout
        self.owner = owner
        self.began = time.monotonic()
        self.ended_at = 0.0
        self.error: MultiringError | None = None
        self.other = ANY_SOURCE
        self.late_at = 1
        """After how many times the patience of `MULTIRING_LATE_WARNING` it is next said that this waits."""

    @abstractmethod
    def advance(self) -> bool:
        """Do what can be done without waiting; whether that was anything. Calls `complete` at the end."""

    @abstractmethod
    def waits_for(self) -> list[int]:
        """The world ranks without which it cannot go on."""

    @property
    def counted_as(self) -> str:
        """The collective under which it is counted."""
        return COLLECTIVES[self.signature.collective]

    @property
    def nbytes(self) -> int:
        """Bytes of its buffer, of all blocks together."""
        return self.signature.elements * ITEMSIZES[self.signature.dtype]

    def described(self) -> str:
        """The call in the user's words."""
        return self.signature.described()

    def complete(self) -> None:
        """Note that all is done, and when."""
        self.ended_at = time.monotonic()

    @property
    def is_complete(self) -> bool:
        return self.ended_at > 0

    @property
    def has_ended(self) -> bool:
        """True if it is complete or has failed."""
        return self.is_complete or self.error is not None
