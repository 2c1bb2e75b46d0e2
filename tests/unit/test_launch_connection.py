"""Messages that the launcher hears from an agent that is cut off."""

from __future__ import annotations

import asyncio
import os
import socket
import struct

import pytest

from multiring.launch.connection import AgentStreams
from multiring.launch.join import JoinedAgent
from multiring.launch.messages import encode


def reset(sock: socket.socket) -> None:
    """Close it so that the other side's next write fails."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("told", [0, 3])
def test_an_agent_that_is_cut_off_is_gone_and_what_it_told_before_is_heard(told: int) -> None:
    async def meet() -> list[object]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            far = socket.create_connection(server.getsockname())
            near, _ = server.accept()
        agent = JoinedAgent("far", await AgentStreams.of_socket(near), None)
        far.sendall(b"".join(encode("ended", number=number, pid=os.getpid()) for number in range(told)))
        await asyncio.sleep(0.1)
        reset(far)
        await asyncio.sleep(0.1)
        assert not agent.gone or told == 0
        heard = []
        while (message := await agent.receive()) is not None:
            agent.send("more")  # to one that is gone: not an error
            heard.append(message["number"])
        assert agent.gone
        await agent.close()
        return heard

    assert asyncio.run(meet()) == list(range(told))
