"""The errors that a user can recover from; wrong arguments are ValueError or TypeError."""

from __future__ import annotations

import errno


class MultiringError(RuntimeError):
    """Base of all recoverable errors; ``rank`` is the culprit where one is known, else -1.

    ``seconds`` is how long it had been silent or waited for.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        host: str = "",
        collective: str = "",
        number: int = -1,
        seconds: float = 0.0,
    ):
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.collective = collective
        self.number = number
        self.seconds = seconds


class PeerLost(MultiringError):
    """A rank died, closed its connections, or went silent.

    If the rank lives, but its host and another one cannot reach each other, every rank raises this with the same
    ``rank``, and ``apart`` is a rank of the other host; else ``apart`` is -1.
    """

    apart: int = -1


class CollectiveTimeout(MultiringError):
    """A collective did not complete in time; ``rank`` is the rank that was waited for in the end."""


class Mismatch(MultiringError):
    """Ranks called different collectives, or with different arguments; the message shows what two of them called.

    ``rank``: for each of these two, the other one. For a third rank, the one whose call differs from its own; if it has
    made neither call, the higher of the two. ``collective`` and ``number`` are those of this rank's own call.
    """


class RendezvousError(MultiringError):
    """The ranks of a job could not find, reach or recognise each other."""


class ResourceError(MultiringError):
    """Out of shared memory, descriptors or ports."""


def system_message(error: BaseException) -> str:
    """The words of an error, with the remedy where a limit of the process stands behind it."""
    remedies = {errno.EMFILE: "ulimit -n", errno.ENFILE: "ulimit -n", errno.EFBIG: "ulimit -f"}
    limit = remedies.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{error} (raise {limit})" if limit else str(error)
