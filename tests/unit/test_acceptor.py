"""Messages between ranks that look for each other."""

from __future__ import annotations

import asyncio
import os
import socket
import struct

import pytest

from multiring import _native
from multiring.net import auth
from multiring.net.acceptor import RankConnection
from multiring.net.channel import ProvenChannel

PATIENCE = 1.0
BEATS = PATIENCE / 5
"""Seconds from one sign of life to the next."""


def connected(encrypted: bool) -> tuple[ProvenChannel, ProvenChannel]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    hello = auth.Hello(auth.SURVIVOR, encrypted=encrypted)
    one, other = os.urandom(32), os.urandom(32)
    keys = [(one, other), (other, one)] if encrypted else [None, None]
    for sock in (near, far):
        sock.setblocking(False)
    return tuple(  # type: ignore[return-value]
        ProvenChannel(sock, auth.Proven(hello, key and _native.Records(*key)))
        for sock, key in zip((near, far), keys, strict=True)
    )


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_last_word_is_heard_by_one_that_comes_to_it_late(encrypted: bool) -> None:
    """It has sent signs of life meanwhile, which nobody reads, to a side that has ended."""

    async def meet() -> list[dict[str, object]]:
        leader, follower = (RankConnection(channel, PATIENCE) for channel in connected(encrypted))
        await asyncio.sleep(1.5 * BEATS)
        for number in range(3):
            await leader.send({"kind": "word", "number": number})
        leader.close()
        await asyncio.sleep(3.5 * BEATS)
        heard = [await follower.receive() for _ in range(3)]
        with pytest.raises(ConnectionError, match="closed by the other side"):
            await follower.receive()
        follower.close()
        follower.close()
        for connection in (leader, follower):
            assert connection._parting
            await connection._parting
        return heard

    assert asyncio.run(meet()) == [{"kind": "word", "number": number} for number in range(3)]


def test_one_that_never_parts_is_left_after_a_time() -> None:
    async def part() -> tuple[float, int]:
        here, there = connected(encrypted=False)
        connection = RankConnection(here, PATIENCE)
        began = asyncio.get_running_loop().time()
        connection.close()
        assert connection._parting
        await connection._parting
        there.close()
        return asyncio.get_running_loop().time() - began, here.sock.fileno()

    seconds, descriptor = asyncio.run(part())
    assert PATIENCE <= seconds < 20
    assert descriptor == -1


def test_a_connection_that_is_reset_or_falls_silent_is_an_error() -> None:
    async def lose(reset: bool) -> str:
        here, there = connected(encrypted=False)
        connection = RankConnection(here, PATIENCE)
        if reset:
            there.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            there.close()
        with pytest.raises(ConnectionError) as caught:
            await connection.receive()
        connection.close()
        there.close()
        assert connection._parting
        await connection._parting
        return str(caught.value)

    assert "reset" in asyncio.run(lose(True))
    assert asyncio.run(lose(False)) == "silent for 1 s"
