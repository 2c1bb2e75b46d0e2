"""The errors that a user can recover from; wrong arguments are ValueError or TypeError."""

from __future__ import annotations


class MultiringError(RuntimeError):
    """Base of all recoverable errors; ``rank`` is the culprit where one is known, else -1."""

    def __init__(self, message: str, *, rank: int = -1, host: str = "", collective: str = "", number: int = -1):
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.collective = collective
        self.number = number


class PeerLost(MultiringError):
    """A rank died, closed its connections, or went silent."""


class CollectiveTimeout(MultiringError):
    """A collective did not complete in time; ``rank`` is the first rank that was waited for."""


class Mismatch(MultiringError):
    """Ranks called different collectives, or with different arguments."""


class RendezvousError(MultiringError):
    """The ranks of a job could not find, reach or recognise each other."""


class ResourceError(MultiringError):
    """Out of shared memory, descriptors or ports."""
