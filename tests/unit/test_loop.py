"""Limits of time in an event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from multiring.net.loop import within


def test_the_result_comes_before_the_limit() -> None:
    async def soon() -> int:
        await asyncio.sleep(0.01)
        return 7

    assert asyncio.run(within(10, soon())) == 7


@pytest.mark.parametrize("seconds", [0.01, 0.0, -1.0])
def test_the_limit_ends_what_takes_longer(seconds: float) -> None:
    ended = []

    async def late() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("late")

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(within(seconds, late()))
    assert ended == ["late"] or seconds <= 0  # it may not have begun


def test_an_error_is_that_of_the_awaited() -> None:
    async def fails() -> None:
        raise ConnectionError("closed")

    with pytest.raises(ConnectionError, match="closed"):
        asyncio.run(within(10, fails()))


def test_a_cancellation_is_kept_when_the_result_comes_in_the_same_moment() -> None:
    discarded: list[int] = []

    async def both() -> None:
        result: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waits = asyncio.create_task(within(10, result, discarded.append))
        await asyncio.sleep(0)  # it waits now
        await asyncio.sleep(0)
        result.set_result(7)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    asyncio.run(both())
    assert discarded == [7]


def test_a_result_that_comes_in_spite_of_the_end_is_discarded() -> None:
    discarded: list[int] = []

    async def stubborn() -> int:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return 7
        return 8

    async def limited() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await within(0.01, stubborn(), discarded.append)

    asyncio.run(limited())
    assert discarded == [7]


CLOSED = """
import os
from multiring.net import loop
loop.CLOSE_SECONDS = 0.5
thread = loop.LoopThread("ours")
os.closerange(3, 100)
thread.close()
thread.close()
print("closed" if thread.closed else "open")
"""


def test_a_thread_whose_descriptors_were_closed_is_left() -> None:
    ended = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "closed\n", ended.stderr
    assert (
        "the thread 'ours' does not end within 0.5 s, and is left: has the program closed descriptors" in ended.stderr
    )
