"""Resources opened in several steps: kept open if all steps succeed, closed if one fails."""

from __future__ import annotations

import asyncio
import socket

import pytest

from multiring.net.closing import closed_on_error


def test_what_was_opened_in_full_stays_open() -> None:
    one, other = socket.socketpair()
    with one, other:
        with closed_on_error(one):
            one.sendall(b"first")
        one.sendall(b", second")
        assert other.recv(100) == b"first, second"


@pytest.mark.parametrize(
    "error", [ValueError("port=70000"), KeyboardInterrupt("Ctrl-C"), SystemExit(3), asyncio.CancelledError("late")]
)
def test_whatever_ends_the_block_closes_it_and_goes_on_to_the_caller(error: BaseException) -> None:
    one, other = socket.socketpair()
    with other:
        with pytest.raises(type(error)) as raised, closed_on_error(one):
            raise error
        assert raised.value is error
        assert one.fileno() == -1
        assert other.recv(1) == b""  # its end has closed


def test_a_cancelled_task_closes_what_it_was_opening() -> None:
    one, other = socket.socketpair()

    async def opens() -> None:
        with closed_on_error(one):
            await asyncio.sleep(60)

    async def cancels() -> None:
        opening = asyncio.create_task(opens())
        await asyncio.sleep(0)  # it sleeps now
        assert one.fileno() >= 0
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    with other:
        asyncio.run(cancels())
        assert one.fileno() == -1
        assert other.recv(1) == b""
