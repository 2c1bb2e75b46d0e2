"""Hosts of a job that have no ranks until one that has some is lost: spare ones, and lost ones that are back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from multiring.launch import LaunchError
from multiring.launch.connection import AgentConnection
from multiring.launch.hosts import Assignment, HostEntry
from multiring.launch.ssh import SshAgent

FIRST_PAUSE_SECONDS = 5.0
"""Seconds before a lost host is tried for the first time: one that shuts down may still let ssh in for some."""

LONGEST_PAUSE_SECONDS = 60.0
"""Seconds between two tries, once their pauses have doubled up to this: a host may be away for days."""

Prepare = Callable[[Assignment, AgentConnection], Awaitable[object]]
Reach = Callable[[HostEntry, SshAgent], Awaitable[SshAgent | None]]
Use = Callable[["Spare"], Awaitable[None]]


@dataclass(frozen=True)
class Spare:
    """A host that waits, and how many ranks it has room for."""

    entry: HostEntry
    agent: AgentConnection


class Spares:
    """The hosts of a job that have no ranks, over all its attempts."""

    def __init__(
        self, spares: Sequence[Spare], prepare: Prepare, reach: Reach, use: Use, note: Callable[[str], None]
    ) -> None:
        """``prepare(assignment, agent)`` lets an agent make ready for these ranks; LaunchError if it cannot.

        ``reach(entry, lost)`` starts another agent on the host of one that is lost, and makes it ready; None while the
        host is out of reach, LaunchError if it cannot be used as it is. ``use(spare)`` is told of a host that is back.
        """
        self._waiting = list(spares)
        self._slots = {spare.entry.name: spare.entry.slots for spare in spares}
        self._prepare = prepare
        self._reach = reach
        self._use = use
        self._note = note
        self._awaiting: set[asyncio.Task[None]] = set()

    @property
    def agents(self) -> list[AgentConnection]:
        """Agents of the hosts that wait."""
        return [each.agent for each in self._waiting]

    async def take(self, lost: Assignment) -> tuple[Assignment, Spare] | None:
        """The first host that has room for the ranks of a lost one, ready to start them; None if there is none."""
        while spare := next((each for each in self._waiting if each.entry.slots >= lost.count), None):
            self._waiting.remove(spare)
            assignment = Assignment(spare.entry.name, lost.first, lost.count)
            try:
                await self._prepare(assignment, spare.agent)
            except LaunchError as error:
                self._note(f"{error}; it cannot take the place of host {lost.host}")
                self.expect(spare.entry, spare.agent)
                continue
            return assignment, spare
        return None

    def give_back(self, spare: Spare) -> None:
        """Let a host that was taken wait again: it was not needed."""
        self._waiting.append(spare)

    def expect(self, entry: HostEntry, lost: AgentConnection) -> bool:
        """Try a lost host again and again until it is back, and waits; False if the launcher cannot get there.

        It gets where ssh leads: it starts no other agent on its own host, nor where the command was typed.
        """
        if not isinstance(lost, SshAgent):
            return False
        slots = max(entry.slots, self._slots.get(entry.name, 0))
        task = asyncio.create_task(self._await(HostEntry(entry.name, slots), lost))
        self._awaiting.add(task)
        task.add_done_callback(self._done)
        return True

    async def _await(self, entry: HostEntry, lost: SshAgent) -> None:
        await lost.close()
        pause = FIRST_PAUSE_SECONDS
        told = set[str]()
        agent = None
        while agent is None:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            try:
                agent = await self._reach(entry, lost)
            except LaunchError as error:
                if str(error) not in told:
                    told.add(str(error))
                    self._note(f"{error}; it is tried again until it can be used")
        self._note(f"host {entry.name} is back")
        spare = Spare(entry, agent)
        self._waiting.append(spare)
        await self._use(spare)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._awaiting.discard(task)
        if not task.cancelled():
            task.result()  # raises an error of this program, which the loop then shows

    async def close(self) -> None:
        """Await no host any more."""
        tasks = list(self._awaiting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
