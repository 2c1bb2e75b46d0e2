"""How one function runs as a rank in a worker of a cluster engine, and how its driver says what became of it.

Such workers are reused: a rank leaves nothing behind in its process, be it environment, descriptors or a communicator.
"""

from __future__ import annotations

import pickle
import platform
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from multiring.errors import CollectiveTimeout, Mismatch, MultiringError, PeerLost
from multiring.version import __version__

MAX_ERROR = 1 << 20
"""Most bytes of a pickled exception; of a larger one the driver gets the words alone."""

CONSEQUENCES = (PeerLost, CollectiveTimeout, Mismatch)
"""What a rank raises because of another one."""


@dataclass(frozen=True)
class Seat:
    """What a worker has to know to be a rank: the arguments of `init`, and who the driver is."""

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


@dataclass(frozen=True)
class RankFailure:
    """Why a rank ended without a result."""

    rank: int
    words: str
    """The class of the exception and its text, on one line."""
    trace: str
    """The traceback as text."""
    error: bytes | None
    """The exception pickled, None if it cannot be."""

    @property
    def is_consequence(self) -> bool:
        """Whether it was raised because of what another rank did."""
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


def run_rank(seat: Seat, call: Callable[[], Any], dumps: Callable[[Any], bytes]) -> bytes | RankFailure:
    """Join the job, make the call, leave; the pickled result, or why there is none.

    Whatever ``call`` raises is a failure, SystemExit and KeyboardInterrupt too; the other ranks are told at once.
    """
    from multiring import api

    try:
        seat.check()
        if api.is_initialized():
            raise MultiringError(
                f"the worker of rank {seat.rank} (host {seat.host}) is in a job of multiring already, which code that "
                "it ran before has joined and not left: that code has to call multiring.shutdown()",
                rank=seat.rank,
                host=seat.host,
            )
    except MultiringError as error:
        return _failure(seat.rank, error, dumps)
    try:
        api.init(
            rank=seat.rank,
            world_size=seat.size,
            store=list(seat.store),
            secret=seat.secret,
            job=seat.job,
            **{"host": seat.host, **seat.settings},
        )
        result = _pickled(seat.rank, call(), dumps)
        api.shutdown()
    except BaseException as error:  # handed to the driver
        failure = _failure(seat.rank, error, dumps)
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
