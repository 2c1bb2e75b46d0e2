"""One function as a rank in a worker of a cluster engine, and the driver's report of what became of it.

Such workers are reused: a rank leaves nothing behind in its process, be it environment, descriptors or a communicator.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import platform
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from multiring.errors import CollectiveTimeout, Mismatch, MultiringError, PeerLost
from multiring.job.store import Client, Server
from multiring.net import local
from multiring.version import __version__

MAX_ERROR = 1 << 20
"""Most bytes of a pickled exception; of a larger one the driver gets the words alone."""

CONSEQUENCES = (PeerLost, CollectiveTimeout, Mismatch)
"""Errors that a rank raises because of another one."""


@dataclass(frozen=True)
class RankAssignment:
    """Arguments of `init` for a worker that is to be a rank, and its driver."""

    rank: int
    size: int
    store: tuple[str, ...]
    secret: bytes = field(repr=False)
    host: str
    settings: Mapping[str, Any]
    job: str = ""
    version: str = __version__
    python: str = platform.python_version()

    def check(self) -> None:
        """MultiringError if this worker has another version of multiring or Python than the driver."""
        here = f"Python {platform.python_version()}, multiring {__version__}"
        driver = f"Python {self.python}, multiring {self.version}"
        minor = [text.rpartition(".")[0] for text in (self.python, platform.python_version())]
        if self.version != __version__ or minor[0] != minor[1]:
            raise MultiringError(
                f"the worker of rank {self.rank} (host {self.host}) has {here}, and the driver {driver}: install the "
                "same for both",
                rank=self.rank,
                host=self.host,
            )

    def join(self) -> None:
        """Make this process the rank, with what `multiring.init` raises."""
        from multiring import api

        api.init(
            rank=self.rank,
            world_size=self.size,
            store=list(self.store),
            secret=self.secret,
            job=self.job,
            **{"host": self.host, **self.settings},
        )


@dataclass(frozen=True)
class RankFailure:
    """Reason why a rank ended without a result."""

    rank: int
    words: str
    """The class of the exception and its text, on one line."""
    trace: str
    """The traceback as text."""
    error: bytes | None
    """The exception pickled, None if it cannot be."""

    @property
    def is_consequence(self) -> bool:
        """True if it was raised because of what another rank did."""
        return isinstance(self.exception(), CONSEQUENCES)

    def exception(self) -> Exception:
        """The exception itself, or where it cannot be had here a MultiringError with its words."""
        try:
            found = None if self.error is None else pickle.loads(self.error)
        except Exception as error:  # the class is the user's, and may be missing or wrong here
            return MultiringError(f"{self.words} (and it cannot be unpickled here: {reason_of(error)})", rank=self.rank)
        if isinstance(found, Exception):
            return found
        return MultiringError(
            f"rank {self.rank} ended with {self.words}", rank=self.rank
        )  # SystemExit would end a driver


def run_rank(given: RankAssignment, call: Callable[[], Any], dumps: Callable[[Any], bytes]) -> bytes | RankFailure:
    """Join the job, make the call, leave; the pickled result, or why there is none.

    Whatever ``call`` raises is a failure, SystemExit and KeyboardInterrupt too; the other ranks are told at once.
    """
    from multiring import api

    try:
        given.check()
        if api.is_initialized():
            raise MultiringError(
                f"the worker of rank {given.rank} (host {given.host}) is in a job of multiring already, which code "
                "that it ran before has joined and not left: that code has to call multiring.shutdown()",
                rank=given.rank,
                host=given.host,
            )
    except MultiringError as error:
        return _failure(given.rank, error, dumps)
    try:
        given.join()
        result = _pickled(given.rank, call(), dumps)
        api.shutdown()
    except BaseException as error:  # handed to the driver
        failure = _failure(given.rank, error, dumps)
        try:
            api.abandon(error)
        except MultiringError as late:
            return RankFailure(failure.rank, f"{failure.words}; then {reason_of(late)}", failure.trace, failure.error)
        return failure
    return result


def _pickled(rank: int, result: Any, dumps: Callable[[Any], bytes]) -> bytes:
    try:
        return dumps(result)
    except Exception as error:
        raise TypeError(
            f"the result of rank {rank}, a {type(result).__name__}, cannot be pickled ({reason_of(error)}): return "
            "what can be, such as numbers, text and arrays"
        ) from error


def _failure(rank: int, error: BaseException, dumps: Callable[[Any], bytes]) -> RankFailure:
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        packed: bytes | None = dumps(error)
        if packed is not None and not isinstance(pickle.loads(packed), type(error)):
            packed = None
    except Exception:  # a class that cannot be pickled, or not be made again: the words stand for it
        packed = None
    if packed is not None and len(packed) > MAX_ERROR:
        packed = None
    return RankFailure(rank, reason_of(error), trace[-MAX_ERROR:], packed)


def reason_of(error: BaseException) -> str:
    """The class of an exception and its text, on one line."""
    try:
        text = in_a_line(str(error))
    except Exception:  # it is the user's code that makes it
        text = "its text cannot be had"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def in_a_line(text: str, limit: int = 2000) -> str:
    """The text without line breaks, with its middle left out where it is too long."""
    joined = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    return joined if len(joined) <= limit else f"{joined[: limit // 2]} ... {joined[-limit // 2 :]}"


def host_label(address: str) -> str:
    """A name for the host at this address, which its ranks have in common, and no other host that has the address."""
    return f"{address}/{hashlib.sha256(local.machine().encode()).hexdigest()[:8]}"


class Reporter:
    """Tells the store of the driver what becomes of a rank."""

    def __init__(self, driver: Client, rank: int) -> None:
        self._driver = driver
        self._rank = rank

    def came(self, place: Mapping[str, str]) -> None:
        """The rank has begun, at this place; the store itself notes when its process is gone."""
        self._driver.set_at_end(_key("gone", self._rank), b"1")
        self._driver.set(_key("came", self._rank), json.dumps(place).encode())

    def ended(self, outcome: bytes | RankFailure) -> None:
        """The rank has a result, which the engine brings to the driver, or has failed."""
        self._driver.set(_key("ended", self._rank), pickle.dumps(outcome) if isinstance(outcome, RankFailure) else b"")


class Reports:
    """Reports of a job's ranks to the store of their driver."""

    def __init__(self, server: Server, size: int) -> None:
        self._server = server
        self._size = size

    def came(self) -> list[int]:
        """Ranks that have begun."""
        return list(self._said("came"))

    def place(self, rank: int) -> dict[str, str]:
        """Return the place at which a rank has begun; empty if it has not."""
        said = self._server.peek(_key("came", rank))
        return {} if said is None else dict(json.loads(said))

    def missing(self) -> list[int]:
        """Ranks that have not begun."""
        came = self.came()
        return [rank for rank in range(self._size) if rank not in came]

    def ended(self) -> list[int]:
        """Ranks that have said how they ended."""
        return list(self._said("ended"))

    def failures(self) -> list[RankFailure]:
        """Return the failures of the ranks that have no result."""
        return [pickle.loads(said) for said in self._said("ended").values() if said]

    def gone(self) -> list[int]:
        """Ranks whose process has ended, or cannot reach the driver any more, without having said how they ended."""
        ended = self.ended()
        return [rank for rank in self._said("gone") if rank not in ended]

    def unheard(self) -> set[int]:
        """Ranks that have begun and whose end is unknown."""
        return set(self.came()) - set(self.ended()) - set(self.gone())

    def _said(self, what: str) -> dict[int, bytes]:
        found = ((rank, self._server.peek(_key(what, rank))) for rank in range(self._size))
        return {rank: value for rank, value in found if value is not None}


def _key(what: str, rank: int) -> str:
    return f"rank/{rank}/{what}"


def seen(failures: Iterable[RankFailure], lost: int) -> str:
    """Return what ranks other than the lost one saw, to be appended to a message."""
    return "".join(f"; rank {failure.rank} saw {failure.words}" for failure in failures if failure.rank != lost)


def unpickled(rank: int, result: bytes) -> Any:
    """The result of a rank; MultiringError if it cannot be had here."""
    try:
        return pickle.loads(result)
    except Exception as error:  # classes are the user's, and may be missing here
        raise MultiringError(
            f"the result of rank {rank} cannot be unpickled by the driver: {reason_of(error)}"
        ) from error
