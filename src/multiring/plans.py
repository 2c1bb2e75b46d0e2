"""The plans of one communicator: chosen when a size is first met, proved by rank 0, and installed in the engine."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from multiring import _native, planner
from multiring.interpret import prove
from multiring.plan import Plan
from multiring.schedule import schedule

if TYPE_CHECKING:
    from multiring.rendezvous import World


class Plans:
    """Maps (collective, size, root) to the handle of an installed schedule; a size class is a power of two."""

    def __init__(self, world: World, communicator: int, members: tuple[int, ...]) -> None:
        self._world = world
        self._communicator = communicator
        self._members = members
        self._topology = world.topology.restrict(members)
        self._rank = members.index(world.rank)
        self._handles: dict[tuple[int, int, int], int] = {}
        self._installed: dict[str, int] = {}
        self._lock = threading.Lock()

    def handle(self, collective: int, nbytes: int, root: int) -> int:
        """The handle of the schedule for a buffer of ``nbytes`` (all blocks together)."""
        key = collective, nbytes.bit_length(), root
        handle = self._handles.get(key)
        if handle is None:
            with self._lock:
                handle = self._handles[key] = self._install(self._choose(collective, nbytes, root).plan)
        return handle

    def choose(self, collective: str, nbytes: int, root: int = 0) -> planner.Choice:
        """The plan that a buffer of ``nbytes`` gets: that of the power of two at or below it."""
        return planner.choose(self._topology, collective, 1 << max(nbytes.bit_length() - 1, 0), root)

    def _choose(self, collective: int, nbytes: int, root: int) -> planner.Choice:
        return self.choose(_native.COLLECTIVES[collective], nbytes, root)

    def used(self) -> list[str]:
        """The ids of the plans that have been used."""
        return list(self._installed)

    def _install(self, plan: Plan) -> int:
        if plan.id not in self._installed:
            if self._rank == 0:
                prove(plan)
            mine = schedule(plan, self._rank)
            instructions, peers = mine.table()
            needed = {self._members[peer] for step in mine.instructions for peer in step.peers}
            self._world.connect(needed - {self._world.rank})
            self._installed[plan.id] = self._world.engine.install(
                self._communicator, instructions, peers, mine.blocks, mine.segment_bytes, plan.number
            )
        return self._installed[plan.id]
