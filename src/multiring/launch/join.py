"""Hosts on which the command was typed find each other: the agents of all but host 0 connect to the launcher there."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from multiring import env
from multiring.env import join_address
from multiring.errors import ResourceError
from multiring.launch import LaunchError
from multiring.launch.agent import TypedCommand
from multiring.launch.connection import AgentConnection, AgentStreams, host_patience
from multiring.net import auth, dial, listen
from multiring.net.channel import ProvenChannel
from multiring.net.loop import LoopThread, within
from multiring.net.relay import Relay

RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class HostMeeting:
    """The hosts' meeting point, their number, and the number of this one; host 0 listens."""

    address: tuple[str, int]
    hosts: int
    index: int
    seconds: float
    encrypt: bool

    def __str__(self) -> str:
        return join_address(*self.address)


def _listen(meeting: HostMeeting) -> socket.socket:
    port = meeting.address[1]
    try:
        return listen.bind("", range(port, port + 1))
    except ResourceError:
        raise LaunchError(
            f"the rendezvous port {port} is taken on this host: end what uses it (ss -tlnp shows it), or name another "
            f"one on all hosts"
        ) from None


async def accept(meeting: HostMeeting, typed: TypedCommand, note: Callable[[str], None]) -> list[AgentConnection]:
    """Connections to the agents of hosts 1, 2, ...; LaunchError if they have not all come in time."""
    loop = asyncio.get_running_loop()
    arrivals: asyncio.Queue[ProvenChannel] = asyncio.Queue()

    async def hand_on(channel: ProvenChannel) -> None:
        loop.call_soon_threadsafe(arrivals.put_nowait, channel)

    hello = auth.Hello(auth.LAUNCH, rank=0, encrypted=meeting.encrypt)
    listening = _listen(meeting)
    thread = LoopThread("multiring-rendezvous")
    listener = listen.Listener(
        thread, [listening], lambda: auth.server(_key(typed), hello), hand_on, f"the rendezvous at {meeting}"
    )
    deadline = time.monotonic() + meeting.seconds
    found: dict[int, AgentConnection] = {}
    try:
        while missing := sorted(set(range(1, meeting.hosts)) - found.keys()):
            note(f"waiting at {meeting} for host {', '.join(map(str, missing))} of {meeting.hosts}")
            try:
                arrived = await within(deadline - time.monotonic(), arrivals.get())
            except asyncio.TimeoutError:
                raise LaunchError(
                    f"host {', '.join(map(str, missing))} of {meeting.hosts} has not come to {meeting} within "
                    f"{meeting.seconds:g} s (MULTIRING_INIT_TIMEOUT): type the same command there with its --host-index"
                ) from None
            agent, index = await JoinedAgent.connect(arrived), arrived.hello.rank
            reason = await _examine(agent, index, meeting, typed, found)
            if reason:
                note(reason)
                agent.send("refuse", text=reason)
                await agent.close()
            else:
                found[index] = agent
    except BaseException:
        await asyncio.gather(*(agent.close() for agent in found.values()))
        raise
    finally:
        listener.close()
        thread.close()
    return [found[index] for index in sorted(found)]


class JoinedAgent(AgentConnection):
    """An agent on a host where the command was typed, at the other end of a socket."""

    def __init__(self, host: str, streams: AgentStreams, relay: Relay | None) -> None:
        super().__init__(host, streams)
        self._relay = relay

    @classmethod
    async def connect(cls, channel: ProvenChannel) -> JoinedAgent:
        """The connection over one that has been proved."""
        _keep_alive(channel)
        host: str = channel.sock.getpeername()[0]
        relay = Relay(channel, f"the agent at {host}") if channel.is_encrypted else None
        return cls(host, await AgentStreams.of_socket(relay.inner if relay else channel.sock), relay)

    async def why(self) -> str:
        return "the connection to its agent is lost"

    async def end(self, seconds: float) -> None:
        try:
            await within(seconds, self.streams.writer.wait_closed())
        except (OSError, asyncio.TimeoutError):
            self.streams.writer.transport.abort()
        if self._relay is not None:
            await asyncio.to_thread(self._relay.end, seconds)


async def _examine(
    agent: AgentConnection, index: int, meeting: HostMeeting, typed: TypedCommand, found: dict[int, AgentConnection]
) -> str:
    """Return why a newcomer cannot be part of the job; "" if it can."""
    try:
        hello = await agent.greet()
    except LaunchError as error:
        return str(error)
    agent.host = hello["host"]
    if not 1 <= index < meeting.hosts:
        return f"host {agent.host} was started with --host-index {index}, but there are {meeting.hosts} hosts"
    if index in found and not found[index].gone:
        return f"host {agent.host} and host {found[index].host} were both started with --host-index {index}"
    theirs, ours = hello["typed"], typed.as_dict()
    for name, value in ours.items():
        if theirs[name] != value:
            return (
                f"host {agent.host} was started with {name} {theirs[name]}, host 0 with {value}: type the same on all"
            )
    return ""


def reach(meeting: HostMeeting, typed: TypedCommand) -> ProvenChannel:
    """A connection to host 0, from another one; LaunchError if it does not answer in time, or refuses."""
    hello = auth.Hello(auth.LAUNCH, rank=meeting.index, peer=0, encrypted=meeting.encrypt)

    async def try_all() -> ProvenChannel:
        deadline = time.monotonic() + meeting.seconds
        while True:
            numeric = await dial.resolve([meeting.address])
            try:
                return await dial.race(numeric, lambda address: dial.connect(address, auth.client(_key(typed), hello)))
            except dial.Unreachable as error:
                if error.refused:
                    raise LaunchError(
                        f"the rendezvous cannot be used: {error} (MULTIRING_SECRET_FILE must be the same on all hosts)"
                    ) from None
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"host 0 does not answer within {meeting.seconds:g} s (MULTIRING_INIT_TIMEOUT): {error}"
                    ) from None
            await asyncio.sleep(RETRY_SECONDS)

    channel = asyncio.run(try_all())
    _keep_alive(channel)
    return channel


def _keep_alive(channel: ProvenChannel) -> None:
    dial.keep_alive(channel.sock, host_patience(env.read(env.Settings).heartbeat_timeout))


def _key(typed: TypedCommand) -> bytes:
    """Return the key that proves connections; without a given secret it keeps out strays and scanners only."""
    return typed.secret or hashlib.sha256(b"multiring run").digest()
