"""Starting a job: the agents first, then the launcher on top of them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from multiring.launch import processes
from multiring.launch.connect import Connection, connect_fork, connect_ssh, fork_agent, gather
from multiring.launch.hosts import Placement, is_here
from multiring.launch.launcher import Job, Launcher


def run_over_ssh(job: Job, placements: Sequence[Placement], ssh: Sequence[str], python: str) -> int:
    """Run a job on hosts that ``ssh host command...`` reaches, or here; the exit code of the job."""
    # Before there is an event loop or a thread, since they do not survive a fork.
    forked = {placement.host: fork_agent() for placement in placements if is_here(placement.host)}
    connecting = [
        connect_fork(host, *forked[host]) if host in forked else connect_ssh(host, ssh, python)
        for host in (placement.host for placement in placements)
    ]

    async def main() -> int:
        agents: list[Connection] = []
        try:
            agents += await gather(connecting)
            await gather(agent.greet() for agent in agents)
            return await Launcher(job, list(zip(placements, agents, strict=True))).run()
        finally:
            await asyncio.gather(*(agent.close() for agent in agents))

    return _run(main)


def _run(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    processes.adopt_orphans()  # should an agent be killed
    try:
        return asyncio.run(main())
    except KeyboardInterrupt:  # before the launcher took over its signals
        return 128 + signal.SIGINT
    finally:
        processes.kill_descendants()
