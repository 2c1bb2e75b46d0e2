"""A collective in flight, as torch sees it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from multiring.runtime.engine import Waitable


class Watched(Protocol):
    """A work whose future a watcher completes."""

    def learn(self) -> None:
        """Block until it is known how this ended."""

    def complete(self) -> None:
        """Complete the future."""


class TorchWork(dist.Work):
    """One or more works of the communicator and what remains to be done after them.

    ``finish`` moves what arrived from staging into the caller's tensors. It is called once, in the thread that first
    asks for the outcome. ``result`` is the value of the future, which is done for whoever knows the outcome: after
    `wait` has returned or raised the work's own error, and after `is_completed` has returned True.
    """

    def __init__(
        self,
        parts: Sequence[Waitable],
        result: list[Any],
        finish: Sequence[Callable[[], None]] = (),
        *,
        watcher: Watcher,
        devices: Sequence[torch.device] = (),
    ) -> None:
        """``devices``: those other than the CPU on which ``finish`` writes."""
        super().__init__()
        self._devices: list[int | str | torch.device] = [*devices]
        self._parts = parts
        self._result = result
        self._finish = finish
        self._watcher = watcher
        self._lock = threading.Lock()
        self._known = not parts and not finish
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._completes: torch.futures.Future[None] | None = None
        """Future to complete, until a thread has taken it to do so."""
        self._then: Callable[[], None] | None = None

    def when_known(self, then: Callable[[], None]) -> None:
        """Call ``then`` once, in the thread that first learns how this ended."""
        with self._lock:
            if not self._known:
                self._then = then
                return
        then()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until done; raise what went wrong, or CollectiveTimeout when ``timeout`` (0: no limit) is up."""
        if not self._known:
            self.learn(timeout.total_seconds() or None)
        if self._future is not None:
            self._see_to_future(self._future)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return True

    def learn(self, seconds: float | None = None) -> None:
        """Block until it is known how this ended; CollectiveTimeout when ``seconds`` are up before."""
        deadline = None if seconds is None else time.monotonic() + seconds
        failed = False
        for part in self._parts:
            try:
                part.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except Exception:
                if deadline is not None and not part.done():
                    raise
                failed = True
        # A time limit may have been up in the moment in which the part was done.
        error = next(filter(None, map(_error_of, self._parts)), None) if failed else None
        with self._lock:
            if not self._known:
                self._error = error or self._finished()
                self._finish = ()
                self._known = True
            then, self._then = self._then, None
        if then is not None:
            then()

    def _finished(self) -> Exception | None:
        try:
            for step in self._finish:
                step()
        except Exception as error:
            return error
        return None

    def complete(self) -> None:
        """Complete the future, unless another thread does so, and call in this one what waits for it."""
        with self._lock:
            completes, self._completes = self._completes, None
        if completes is not None:
            completes.set_result(None)

    def _see_to_future(self, future: torch.futures.Future[Any]) -> None:
        """Return when the future is done. Its callbacks may wait for what this thread holds, so they have their own."""
        if future.done():
            return
        if self._completes is not None:
            threading.Thread(target=self.complete, name="multiring-future", daemon=True).start()
        with contextlib.suppress(Exception):  # whoever asked for the future is told by it
            future.wait()

    def is_completed(self) -> bool:
        """True if it succeeded or failed; the tensors may be used then."""
        if not self._known and not all(part.done() for part in self._parts):
            return False
        self.exception()
        return True

    def is_success(self) -> bool:
        """True if it is completed without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Wait and return the error, if any."""
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def synchronize(self) -> None:
        """`wait`: there are no streams on a CPU."""
        self.wait()

    def result(self) -> list[Any]:
        """The tensors that the collective wrote."""
        self.wait()
        return self._result

    def source_rank(self) -> int:
        """The rank, within the group, that a receive heard from."""
        self.wait()
        source = self._parts[0].wait() if self._parts else None
        if not isinstance(source, int):
            raise RuntimeError("only a receive has a source rank")
        return source

    _source_rank = source_rank

    def followed_by(self, step: Callable[[], None], result: list[Any], device: torch.device) -> TorchWork:
        """This work and a step after it, which writes ``result`` on a device; it takes this one's place."""
        steps = [*self._finish, step]
        return TorchWork(self._parts, result, steps, watcher=self._watcher, devices=[device])

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the written tensors, which raises the error of a failed work; the same one each time.

        Handing an error to ``Future.set_exception`` from another thread crashes DistributedDataParallel; raising it in
        a callback is safe, hence the second future.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            completes: torch.futures.Future[None] = torch.futures.Future(devices=self._devices)
            if self._known:
                completes.set_result(None)
            else:
                self._completes = completes
            future = self._future = completes.then(lambda _: self._value())
            known = self._known
        if not known:
            self._watcher.watch(self)
        return future

    def _value(self) -> list[Any]:
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._result


def _error_of(part: Waitable) -> Exception | None:
    try:
        part.wait()
    except Exception as error:
        return error
    return None


class Watcher:
    """Completes the futures of works that complete by themselves, by one thread for each work."""

    def watch(self, work: Watched) -> None:
        """Complete the future of ``work`` once it has succeeded or failed."""
        threading.Thread(target=_complete, args=(work,), name="multiring-future", daemon=True).start()


class OrderedWatcher(Watcher):
    """Completes the futures of one group's collectives in the order in which they were started, or sooner those that
    somebody waits for.

    One thread at a time waits for the oldest, since no collective waits for a later one of its group. But what is
    called when a future completes may: before a thread completes one, another is ready to take its turn.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Watched | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._ready = 0  # threads that have the turn or wait for it
        self._closed = False

    def watch(self, work: Watched) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._queue.put(work)
        if closed:
            super().watch(work)
        else:
            self._have_one_ready()

    def close(self) -> None:
        """End the threads after the futures that they have; one that is asked for later has its own."""
        with self._lock:
            self._closed = True
            self._queue.put(None)

    def _have_one_ready(self) -> None:
        with self._lock:
            if self._ready:
                return
            self._ready = 1
        threading.Thread(target=self._run, name="multiring-futures", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._turn:
                work = self._queue.get()
                if work is None:
                    self._queue.put(None)  # the other threads end by it, too
                    return
                work.learn()
            with self._lock:
                self._ready -= 1
            self._have_one_ready()
            work.complete()
            del work  # the tensors of a finished work are not kept until the next one
            with self._lock:
                self._ready += 1


def _complete(work: Watched) -> None:
    work.learn()
    work.complete()
