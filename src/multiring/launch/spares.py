"""Hosts of a job that have no ranks, until one that has some is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from multiring.launch import LaunchError
from multiring.launch.connection import AgentConnection
from multiring.launch.hosts import Assignment, HostEntry

Prepare = Callable[[Assignment, AgentConnection], Awaitable[object]]


@dataclass(frozen=True)
class Spare:
    """A host that waits, and how many ranks it has room for."""

    entry: HostEntry
    agent: AgentConnection


class Spares:
    """The spare hosts of a job, over all its attempts."""

    def __init__(self, spares: Sequence[Spare], prepare: Prepare, note: Callable[[str], None]) -> None:
        """``prepare(assignment, agent)`` lets an agent make ready for these ranks; LaunchError if it cannot."""
        self._waiting = list(spares)
        self._prepare = prepare
        self._note = note

    @property
    def agents(self) -> list[AgentConnection]:
        """Agents of the hosts that wait."""
        return [each.agent for each in self._waiting]

    async def take(self, lost: Assignment) -> tuple[Assignment, AgentConnection] | None:
        """The first host that has room for the ranks of a lost one, ready to start them; None if there is none."""
        while spare := next((each for each in self._waiting if each.entry.slots >= lost.count), None):
            self._waiting.remove(spare)
            assignment = Assignment(spare.entry.name, lost.first, lost.count)
            try:
                await self._prepare(assignment, spare.agent)
            except LaunchError as error:
                self._note(f"{error}; it cannot take the place of host {lost.host}")
                continue
            return assignment, spare.agent
        return None
