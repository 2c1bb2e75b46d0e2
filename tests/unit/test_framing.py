"""Messages over a connection: whole, in order, however their bytes arrive, and none that is too large."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable

import pytest

from multiring.net import auth, framing

MESSAGES = [{"kind": "news", "members": [0, 2]}, {"text": "\u00fc" * 100}, {}]
STREAM = framing.SIGN_OF_LIFE.join(framing.pack(message) for message in MESSAGES) + framing.SIGN_OF_LIFE


def reading(sock: socket.socket, deadline: float) -> Callable[[int], bytes]:
    return lambda size: auth.receive(sock, size, deadline)


def test_messages_arrive_however_their_bytes_do() -> None:
    one, other = socket.socketpair()
    with one, other:
        sender = threading.Thread(target=lambda: [one.sendall(STREAM[at : at + 7]) for at in range(0, len(STREAM), 7)])
        sender.start()
        until = time.monotonic() + 20
        assert [framing.receive(reading(other, until), 1000) for _ in MESSAGES] == MESSAGES
        sender.join()


def test_messages_are_read_in_an_event_loop_as_well() -> None:
    async def read_all() -> list[framing.Message]:
        reader = asyncio.StreamReader()
        reader.feed_data(STREAM)
        return [await framing.receive_async(reader.readexactly, 1000) for _ in MESSAGES]

    assert asyncio.run(read_all()) == MESSAGES


def test_a_message_that_is_too_large_ends_the_connection() -> None:
    size = len(framing.pack(MESSAGES[1])) - 4
    one, other = socket.socketpair()
    with one, other:
        for limit in (size, size - 1):
            one.sendall(framing.pack(MESSAGES[1]))
            if limit == size:
                assert framing.receive(reading(other, time.monotonic() + 20), limit) == MESSAGES[1]
                continue
            with pytest.raises(ConnectionError, match=f"^a message of {size} bytes$"):
                framing.receive(reading(other, time.monotonic() + 20), limit)


def test_signs_of_life_do_not_put_off_the_deadline() -> None:
    one, other = socket.socketpair()
    ended = threading.Event()

    def live() -> None:
        while not ended.wait(0.02):
            one.sendall(framing.SIGN_OF_LIFE)

    with one, other:
        living = threading.Thread(target=live)
        living.start()
        try:
            with pytest.raises(TimeoutError):
                framing.receive(reading(other, time.monotonic() + 0.3), 1000)
        finally:
            ended.set()
            living.join()
