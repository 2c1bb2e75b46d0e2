"""A collective in flight, as torch sees it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Part(Protocol):
    """What the communicator returns for an asynchronous call."""

    def done(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> Any: ...


class Watchable(Protocol):
    """What a watcher waits for."""

    def exception(self) -> BaseException | None:
        """Wait and return the error, if any."""


class Work(dist.Work):
    """One or more works of the communicator and what remains to be done after them.

    ``finish`` moves what arrived from staging into the caller's tensors. It is called once, in the thread that first
    asks for the outcome. ``result`` is the value of the future.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        result: list[Any],
        finish: Sequence[Callable[[], None]] = (),
        *,
        watcher: Watcher,
        devices: Sequence[torch.device] = (),
    ) -> None:
        super().__init__()
        self._devices: list[int | str | torch.device] = [*devices]
        self._parts = parts
        self._result = result
        self._finish = finish
        self._watcher = watcher
        self._lock = threading.Lock()
        self._settled = not parts and not finish
        self._future: torch.futures.Future[Any] | None = None
        self._then: Callable[[], None] | None = None

    def when_known(self, then: Callable[[], None]) -> None:
        """Call ``then`` once, in the thread that first learns how this ended."""
        with self._lock:
            if not self._settled:
                self._then = then
                return
        then()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until done; raise what went wrong, or CollectiveTimeout when ``timeout`` (0: no limit) is up."""
        if self._settled:
            return True
        seconds = timeout.total_seconds()
        deadline = time.monotonic() + seconds if seconds > 0 else None
        try:
            for part in self._parts:
                part.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except Exception:
            if all(part.done() for part in self._parts):
                self._tell()
            raise
        with self._lock:
            if not self._settled:
                for step in self._finish:
                    step()
                self._settled = True
        self._tell()
        return True

    def _tell(self) -> None:
        with self._lock:
            then, self._then = self._then, None
        if then is not None:
            then()

    def is_completed(self) -> bool:
        """Whether it succeeded or failed; the tensors may be used then."""
        if not self._settled:
            if not all(part.done() for part in self._parts):
                return False
            self.exception()
        return True

    def is_success(self) -> bool:
        """Whether it is completed without an error."""
        return self.is_completed() and self._settled

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

    def followed_by(self, step: Callable[[], None], result: list[Any], device: torch.device) -> Work:
        """This work and a step after it, which writes ``result`` on a device; it takes this one's place."""
        steps = [*self._finish, step]
        return Work(self._parts, result, steps, watcher=self._watcher, devices=[device])

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the written tensors, which raises the error of a failed work.

        Handing an error to ``Future.set_exception`` from another thread crashes DistributedDataParallel; raising it in
        a callback is safe, hence the second future.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            completed: torch.futures.Future[None] = torch.futures.Future(devices=self._devices)
            future = self._future = completed.then(lambda _: self.result())
        self._watcher.watch(self, completed)
        return future


class Watcher:
    """Completes the futures of works that complete by themselves, by one thread for each work."""

    def watch(self, work: Watchable, completed: torch.futures.Future[None]) -> None:
        """Set ``completed`` once ``work`` has succeeded or failed."""
        threading.Thread(target=_complete, args=(work, completed), name="multiring-future", daemon=True).start()


class OrderedWatcher(Watcher):
    """Completes the futures of one group's collectives in the order in which they were started.

    One thread at a time waits for the oldest, since no collective waits for a later one of its group. But what is
    called when a future completes may: before a thread completes one, another is ready to take its turn.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Watchable, torch.futures.Future[None]] | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._ready = 0  # threads that have the turn or wait for it
        self._closed = False

    def watch(self, work: Watchable, completed: torch.futures.Future[None]) -> None:
        with self._lock:
            closed = self._closed
            if not closed:
                self._queue.put((work, completed))
        if closed:
            super().watch(work, completed)
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
                item = self._queue.get()
                if item is None:
                    self._queue.put(None)  # for the others
                    return
                work, completed = item
                work.exception()
            with self._lock:
                self._ready -= 1
            self._have_one_ready()
            completed.set_result(None)
            del item, work, completed  # the tensors of a finished work are not kept until the next one
            with self._lock:
                self._ready += 1


def _complete(work: Watchable, completed: torch.futures.Future[None]) -> None:
    work.exception()
    completed.set_result(None)
