"""The profiler that finds where a late rank is: each request is carried out, whenever it comes."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from multiring.runtime import sampler as sampling
from multiring.runtime.sampler import Sampler


class Latch:
    """A lock before whose release by a sampler that has told of a place another thread has its turn."""

    def __init__(self, sampler: Sampler, turn: threading.Thread) -> None:
        self._lock = threading.Lock()
        self._sampler = sampler
        self._turn = turn

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking)

    def release(self) -> None:
        if self._sampler.places and threading.current_thread().name == "sampler" and self._turn.ident is None:
            self._turn.start()
            self._turn.join(0.2)  # it may wait for this lock
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def found(sampler: Sampler, reason: str) -> bool:
    """True if it has told of a place for that reason within 5 s."""
    deadline = time.monotonic() + 5.0
    while reason not in sampler.places and time.monotonic() < deadline:
        time.sleep(0.001)
    return reason in sampler.places


def test_a_request_that_comes_as_the_one_before_ends_is_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_samples", lambda *_: Counter({"train.py:1": sampling.FEWEST}))
    sampler = Sampler("rank 0")
    second = threading.Thread(target=sampler.look, args=("computes", True))
    monkeypatch.setattr(sampler, "_lock", Latch(sampler, second))
    sampler.look("sleeps", is_caller=True)
    assert found(sampler, "sleeps")
    assert found(sampler, "computes")
    second.join(5)


def test_a_request_that_fails_stands_in_the_way_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(thread: int) -> int:
        raise OSError(3, "No such process")

    monkeypatch.setattr(sampling, "_samples", lambda *_: Counter({"train.py:1": sampling.FEWEST}))
    sampler = Sampler("rank 0")
    with monkeypatch.context() as broken:
        broken.setattr(time, "pthread_getcpuclockid", ended)
        with pytest.raises(OSError, match="No such process"):
            sampler.look("sleeps", is_caller=True)
    with monkeypatch.context() as broken:
        broken.setattr(
            threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start new thread"))
        )
        sampler.look("sleeps", is_caller=True)
    assert not sampler.places
    sampler.look("sleeps", is_caller=True)
    assert found(sampler, "sleeps")


def test_a_thread_that_has_ended_is_looked_at_without_an_error() -> None:
    """Its clock is gone as well."""
    clocks: list[tuple[int, sampling._Clock]] = []

    def run() -> None:
        ident = threading.get_ident()
        clocks.append((ident, sampling._Clock(time.pthread_getcpuclockid(ident), threading.get_native_id())))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (ended,) = clocks
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:  # Python's thread has ended, the system's is just about to
        try:
            ended[1].now()
        except OSError:
            break
    assert sampling._samples(*ended, None) == Counter()
