"""Starting a job: the agents first, then the launcher on top of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from multiring import env
from multiring.job import bootstrap
from multiring.launch import LaunchError, processes
from multiring.launch.agent import Agent, TypedCommand
from multiring.launch.attempt import Agents
from multiring.launch.connection import END_SECONDS, AgentConnection, gather
from multiring.launch.forked import ForkedAgent, fork_agent
from multiring.launch.hosts import Assignment, HostEntry, is_here, own_name, spread, together
from multiring.launch.join import HostMeeting, accept, reach
from multiring.launch.launcher import Job, Launcher
from multiring.launch.spares import Spare
from multiring.launch.ssh import SshAgent, SshTarget
from multiring.net.loop import check_room
from multiring.net.relay import Relay


def run_over_ssh(
    job: Job,
    assignments: Sequence[Assignment],
    spares: Sequence[HostEntry],
    ssh: Sequence[str],
    python: str,
    note: Callable[[str], None],
) -> int:
    """Run a job on hosts that ``ssh host command...`` reaches, or here; the exit code of the job.

    ``spares`` take the places of hosts that are lost.
    """
    secret = given_secret()
    hosts = [assignment.host for assignment in assignments]
    for spare in spares:
        if spare.name in hosts:
            raise LaunchError(_not_apart(spare.name, spare.name))
    names = [*hosts, *(spare.name for spare in spares)]
    # Before there is an event loop or a thread, since they do not survive a fork.
    forked = {name: fork_agent() for name in names if is_here(name)}

    async def main() -> int:
        agents: dict[int, AgentConnection] = {}

        async def connect(index: int, host: str) -> None:
            agents[index] = await (
                ForkedAgent.connect(host, *forked[host])
                if host in forked
                else SshAgent.connect(SshTarget(host, ssh, python))
            )
            await agents[index].greet()

        try:
            await gather(connect(index, name) for index, name in enumerate(names))
            waiting = [Spare(spare, agents[i]) for i, spare in enumerate(spares, len(assignments))]
            placed = await _one_each_machine([(p, agents[i]) for i, p in enumerate(assignments)], note)
            _check_spares(placed, waiting)
            return await Launcher(job, placed, secret, waiting).run()
        finally:
            await asyncio.gather(*(agent.close() for agent in agents.values()))

    return _run(main)


async def _one_each_machine(
    placed: Sequence[tuple[Assignment, AgentConnection]], note: Callable[[str], None]
) -> list[tuple[Assignment, AgentConnection]]:
    """One agent for each machine, of those that several names have led to: each would give its ranks all cores."""
    chosen: dict[str, tuple[str, AgentConnection]] = {}
    for assignment, agent in placed:
        first, other = chosen.setdefault(agent.machine, (assignment.host, agent))
        if other is agent:
            continue
        note(f"{assignment.host} and {first} are one machine: the ranks of both are placed there together")
        if isinstance(agent, ForkedAgent) and not isinstance(other, ForkedAgent):
            chosen[agent.machine] = first, agent
            agent = other
        await agent.close()
    assignments = together([assignment for assignment, _ in placed], [agent.machine for _, agent in placed])
    return [(assignment, agent) for assignment, (_, agent) in zip(assignments, chosen.values(), strict=True)]


def _check_spares(placed: Agents, spares: Sequence[Spare]) -> None:
    """LaunchError for a spare host that is a machine of the job already, or has room for the ranks of no host."""
    known = {agent.machine: assignment.host for assignment, agent in placed}
    fewest = min(assignment.count for assignment, _ in placed)
    for spare in spares:
        name, slots = spare.entry.name, spare.entry.slots
        other = known.setdefault(spare.agent.machine, name)
        if other != name:
            raise LaunchError(_not_apart(name, other))
        if slots < fewest:
            raise LaunchError(
                f"--spares {name}:{slots}: it could take the place of no host, as each has {fewest} ranks or more: "
                f"give it {fewest} slots at least"
            )


def _not_apart(spare: str, other: str) -> str:
    return f"--spares {spare}: it is the machine of host {other}, and would be lost with it"


def run_as_typed(job: Job, ranks: int, meeting: HostMeeting, note: Callable[[str], None]) -> int:
    """This host's part of a job that was typed on each of its hosts; the exit code of the job."""
    typed = TypedCommand(job.program, ranks, meeting.hosts, given_secret())
    bootstrap.check_secret(env.read(env.Settings), typed.secret, "the hosts have to know each other by one")
    if meeting.index == 0:
        return _lead(job, typed, meeting, note)
    channel = reach(meeting, typed)
    note(f"host {meeting.index} of {meeting.hosts}: the output is shown on host 0, {meeting}")
    relay = Relay(channel, f"host 0, {meeting},") if channel.is_encrypted else None
    sock = relay.inner if relay else channel.sock
    output = os.dup(sock.fileno())
    agent = Agent(sock.fileno(), output, typed=typed)
    code = agent.serve()
    sock.detach()
    os.close(output)
    if relay is not None:
        relay.end(END_SECONDS)
    if agent.reason:
        note(agent.reason)
    if code is None:
        raise LaunchError(f"the connection to host 0, {meeting}, is lost: all ranks here have been ended")
    return code


def _lead(job: Job, typed: TypedCommand, meeting: HostMeeting, note: Callable[[str], None]) -> int:
    forked = fork_agent()

    async def main() -> int:
        agents: list[AgentConnection] = [await ForkedAgent.connect(own_name(), *forked)]
        try:
            await agents[0].greet()
            agents += await accept(meeting, typed, note)
            assignments = spread([agent.host for agent in agents], typed.ranks)
            return await Launcher(job, list(zip(assignments, agents, strict=True)), typed.secret).run()
        finally:
            await asyncio.gather(*(agent.close() for agent in agents))

    return _run(main)


def _run(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    processes.adopt_orphans()  # should an agent be killed
    try:
        check_room()
        return asyncio.run(main())
    except KeyboardInterrupt:  # before the launcher took over its signals
        return 128 + signal.SIGINT
    finally:
        processes.kill_descendants()


def given_secret() -> bytes | None:
    """The secret in MULTIRING_SECRET_FILE, if set."""
    path = os.environ.get("MULTIRING_SECRET_FILE", "")
    return bootstrap.given_secret(env.Launch(secret_file=path))
