"""An event loop in a thread of its own, so that a caller may be inside another event loop (a notebook is); and a limit
of time that forgets no cancellation."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import select
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from multiring.errors import ResourceError, system_message

_T = TypeVar("_T")

CLOSE_SECONDS = 20.0
"""Seconds that the tasks of a thread may take to end when they are cancelled."""

_log = logging.getLogger("multiring")


def check_room() -> None:
    """ResourceError unless an event loop can be created: one that fails half-way complains when it is collected."""
    try:
        one, other = socket.socketpair()
        with one, other, select.epoll():
            pass
    except OSError as error:
        raise ResourceError(f"cannot create an event loop: {system_message(error)}") from error


async def within(seconds: float, awaitable: Awaitable[_T], discard: Callable[[_T], None] = lambda _: None) -> _T:
    """The result of ``awaitable``, or asyncio.TimeoutError after ``seconds``; one that nobody gets goes to ``discard``.

    Unlike `asyncio.wait_for` before Python 3.12, this is always cancelled when it is told to be: that one forgets it
    when the result comes in the same moment, and whoever then waits for the cancelled task does so for ever.
    """
    future = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait([future], timeout=max(seconds, 0.0))
        if future.done():
            return future.result()
    except asyncio.CancelledError:
        await _end(future, discard)
        raise
    await _end(future, discard)
    raise asyncio.TimeoutError


async def _end(future: asyncio.Future[_T], discard: Callable[[_T], None]) -> None:
    future.cancel()
    await asyncio.wait([future])
    if not future.cancelled() and future.exception() is None:
        discard(future.result())


class LoopThread:
    """Runs coroutines in a daemon thread until closed.

    The portal of ``anyio.from_thread`` would do but for its cancellation, which ends each await of who was cancelled
    (4.16): `within` could not wait for what it cancels, nor discard its result. Its task groups would wrap each
    error in a group. Its import takes 20 ms of a rank's processor time, ``init`` 110 (2 ranks, 2 cores, Python 3.11).
    """

    def __init__(self, name: str) -> None:
        check_room()
        self._loop = asyncio.new_event_loop()
        self._is_left = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Run a coroutine in the loop; the caller goes on."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the loop and wait for its result; an interrupted wait cancels it."""
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what runs, end the thread. May be called twice.

        A thread that hears nothing any more, as in a program that has closed all descriptors, is left after a time.
        """
        if self.closed:
            return
        try:
            self.start(self._cancel_all()).result(CLOSE_SECONDS)
        except concurrent.futures.TimeoutError:
            _log.warning(
                "the thread %r does not end within %g s, and is left: has the program closed descriptors that are not "
                "its own?",
                self._thread.name,
                CLOSE_SECONDS,
            )
            self._is_left = True
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def closed(self) -> bool:
        """True if the loop has ended, as it has in a process that was forked: its thread is the parent's."""
        return self._is_left or self._loop.is_closed() or not self._thread.is_alive()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
