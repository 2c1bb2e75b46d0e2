"""Sampling profiler that finds, in some seconds, where a late rank is between its collectives."""

from __future__ import annotations

import contextlib
import linecache
import logging
import os
import random
import sys
import sysconfig
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

SECONDS, INTERVAL = 5.0, 0.02
ENOUGH = 150
FEWEST = 5
"""Samples between collectives from which on it is said where they were."""
LONGEST_LINE = 80

_HERE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple({path + os.sep for name, path in sysconfig.get_paths().items() if name.endswith(("lib", "stdlib"))})
_ASLEEP = {"sleeps": True, "computes": False}
"""State of the thread in samples that count, by reason; other reasons count all."""
_IS = {"sleeps": "is asleep at", "computes": "is busy at"}
_log = logging.getLogger("multiring")


class Sampler:
    """Looks where the thread is that calls collectives, when its rank is found to keep the others waiting."""

    def __init__(self, name: str):
        """``name``: "rank 1 (host b)"."""
        self.places: dict[str, str] = {}
        """Place where the thread was found most often, "file:line in function: source", for each reason."""
        self._name = name
        self._lock = threading.Lock()
        self._wanted: _Request | None = None
        self._runs = False

    def look(self, reason: str, is_caller: bool) -> None:
        """Begin to look where the calling thread is, or do so next if another look is on; what is found is logged.

        It looks at the main thread if this one does not call (``is_caller``), or is a framework's and runs no program.
        """
        thread = threading.current_thread()
        if not is_caller or isinstance(thread, threading._DummyThread):
            thread = threading.main_thread()
        assert thread.ident is not None  # it has begun
        assert thread.native_id is not None
        clock = _Clock(time.pthread_getcpuclockid(thread.ident), thread.native_id)
        with self._lock:
            self._wanted = _Request(reason, thread.ident, clock)
            if self._runs:
                return
            self._runs = True
        try:
            threading.Thread(target=self._run, daemon=True, name="sampler").start()
        except RuntimeError as error:  # no thread can be had
            with self._lock:
                self._runs = False
            _log.warning("%s: where it is between collectives cannot be told: %s", self._name, error)

    def _run(self) -> None:
        done: _Request | None = None
        try:
            while (request := self._next(done)) is not None:
                self._tell(request.reason, _samples(request.thread, request.clock, _ASLEEP.get(request.reason)))
                done = request
        except BaseException:
            with self._lock:
                self._runs = False
            raise

    def _next(self, done: _Request | None) -> _Request | None:
        """Return the last request, unless it is for what was just ``done``; None: this thread ends."""
        with self._lock:
            request, self._wanted = self._wanted, None
            self._runs = request is not None and request != done
            return request if self._runs else None

    def _tell(self, reason: str, found: Counter[str]) -> None:
        total = found.total()
        if total < FEWEST:
            return
        (place, count), *_ = found.most_common(1)
        self.places[reason] = place
        _log.warning(
            "%s, for which the others wait, %s %s (%d of %d samples between collectives)",
            self._name,
            _IS.get(reason, "is at"),
            place,
            count,
            total,
        )


@dataclass(frozen=True)
class _Clock:
    """Seconds in which a thread has been awake: on a core, or ready to run where others had it."""

    cpu: int
    """Identifier of the clock of its processor time."""
    thread: int
    """Its number in the system."""

    def now(self) -> float:
        """OSError where the thread has ended."""
        ran = time.clock_gettime(self.cpu)
        try:
            queued = int(Path(f"/proc/self/task/{self.thread}/schedstat").read_text().split()[1])
        except (OSError, IndexError, ValueError):  # this system does not tell
            queued = 0
        return ran + 1e-9 * queued


@dataclass(frozen=True)
class _Request:
    """A thread to be looked at, and why."""

    reason: str
    thread: int
    clock: _Clock


def _samples(thread: int, clock: _Clock, asleep: bool | None) -> Counter[str]:
    """Count the places of the thread in the samples that count, until it ends."""
    found: Counter[str] = Counter()
    end = time.monotonic() + SECONDS
    try:
        before = time.monotonic(), clock.now()
    except OSError:  # it has ended already
        return found
    while time.monotonic() < end and found.total() < ENOUGH:
        time.sleep(INTERVAL * random.uniform(0.5, 1.5))  # or it might keep step with what it looks at
        frame = sys._current_frames().get(thread)
        if frame is None:
            break
        place = _place(frame)
        del frame
        try:
            now = time.monotonic(), clock.now()
        except OSError:  # it has ended
            break
        slept = 2 * (now[1] - before[1]) < now[0] - before[0]
        before = now
        if place and asleep in (None, slept):
            found[place] += 1
    return found


def _place(frame: FrameType) -> str:
    """The innermost line of the user's program, and the library's function that it is in; "" in a collective."""
    each: FrameType | None = frame
    while each is not None and _is_library(each.f_code.co_filename):
        if each.f_code.co_filename.startswith(_HERE):
            return ""
        each = each.f_back
    if each is None:
        return _told(frame)
    return _told(each) + ("" if each is frame else f", in {frame.f_code.co_name} of {_short(frame)}")


def _told(frame: FrameType) -> str:
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    if len(line) > LONGEST_LINE:
        line = line[: LONGEST_LINE - 3] + "..."
    return f"{_short(frame)}:{frame.f_lineno} in {frame.f_code.co_name}" + (f": {line}" if line else "")


def _short(frame: FrameType) -> str:
    """The file's path, from the working directory or from the library's where it lies in one of them."""
    path = frame.f_code.co_filename
    directories = sorted(_LIBRARIES, key=len, reverse=True)
    with contextlib.suppress(FileNotFoundError):  # the directory is gone
        directories.append(os.getcwd() + os.sep)
    for directory in directories:
        if path.startswith(directory):
            return path[len(directory) :]
    return path


def _is_library(path: str) -> bool:
    return path.startswith((_HERE, "<frozen", *_LIBRARIES)) or "site-packages" in path or "dist-packages" in path
