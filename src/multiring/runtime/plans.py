"""The plans of one communicator: chosen when a size is first met, proved by rank 0, and installed in the engine."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from multiring import _native
from multiring.env import parse_wire
from multiring.errors import MultiringError
from multiring.planning import planner
from multiring.planning.choice import Choice, Measured, Tuned
from multiring.planning.interpret import prove
from multiring.planning.plan import NARROW, Plan, is_id
from multiring.planning.schedule import schedule
from multiring.planning.strategies import Strategy
from multiring.runtime.world import World
from multiring.simulate import forced
from multiring.units import size as size_in_words

Key = tuple[int, int, int]
"""The number of a collective, the bits of a size (a size class is a power of two), and the root."""

AHEAD_RANKS = 4
"""Most ranks of a host for which plans are made before calls ask for them: those of more ranks take longer to prove,
and their calls as well."""

AHEAD_RANKS_PER_CORE = 2.0
"""Most ranks that share a core where plans are made ahead: all make theirs at the same time."""

AHEAD_BITS = 17
"""Bits of the largest size whose plan is made ahead: that of buffers below 128 KB. Ten larger calls take longer than
their plan."""

_log = logging.getLogger("multiring")


class Plans:
    """Maps a `Key` to the handle of an installed schedule."""

    def __init__(self, world: World, communicator: int, members: tuple[int, ...]) -> None:
        self._world = world
        self._communicator = communicator
        self._members = members
        self.topology = world.topology.restrict(members)
        self._rank = members.index(world.rank)
        self._handles: dict[Key, int] = {}
        self._tuned: dict[Key, Tuned] = {}
        self._strategy = self._possible_strategy()
        self._installed: dict[str, int] = {}
        self._ahead: dict[Key, Plan] = {}
        """Plans for keys that no call has asked for."""
        self._ready: dict[str, int] = {}
        """The handles of those of them that are installed."""
        self.need_residual = self._sends_too_few_bits()
        self._words: dict[str, str] = {}
        self._lock = threading.Lock()
        if world.settings.tune and world.settings.plan and len(members) > 1 and communicator == self._rank == 0:
            _log.warning(
                "MULTIRING_PLAN=%s is given: no plans are tried, though MULTIRING_TUNE is set", world.settings.plan
            )

    def _sends_too_few_bits(self) -> bool:
        """True if sums of float32 are refused that have no residual."""
        wire = parse_wire(self._world.settings.wire)
        if not isinstance(wire, dict) or not any(NARROW[format].needs_residual for format in wire.values()):
            return False
        return planner.choose(self.topology, "all_reduce", planner.size_class(1), wire=wire).plan.wire != ""

    def handle(self, collective: int, nbytes: int, root: int, timeout: float) -> int:
        """The handle of the schedule for a buffer of ``nbytes`` (all blocks together); `install` knows ``timeout``."""
        key = collective, nbytes.bit_length(), root
        handle = self._handles.get(key)
        if handle is None:
            with self._lock:
                plan = self._ahead.pop(key, None) or self._plan(_native.COLLECTIVES[collective], nbytes, root)
                handle = self._handles[key] = self.install(plan, timeout)
        return handle

    def make_ahead(self) -> None:
        """Plan the all_reduces of a host's few ranks before they are called: a plan takes longer than many such calls.

        Between hosts a first call makes links, and a call takes longer than its plan.
        """
        few = 1 < len(self._members) <= AHEAD_RANKS and self._world.speeds.ranks_per_core <= AHEAD_RANKS_PER_CORE
        if not few or len(set(self.topology.hosts)) > 1:
            return
        collective = _native.COLLECTIVES.index("all_reduce")
        with self._lock:
            for bits in range(1, AHEAD_BITS + 1):
                plan = self._plan("all_reduce", 1 << bits - 1, 0)
                try:
                    if plan.id not in self._ready:
                        self._ready[plan.id] = self._expand(plan, self._world.settings.timeout)
                except MultiringError:
                    if self._world.engine.failure() is None:
                        raise
                    return  # a rank was lost already: the call says so
                self._ahead[collective, bits, 0] = plan

    def _plan(self, collective: str, nbytes: int, root: int) -> Plan:
        if self._strategy is not None and collective == "all_reduce":
            return self._strategy.plan(self.topology, planner.size_class(nbytes))
        choice = self.choose(collective, nbytes, root)
        self._warn_unless_forced(choice)
        return choice.plan

    def choose(self, collective: str, nbytes: int, root: int = 0) -> Choice:
        """The plan that a buffer of ``nbytes`` gets: that of its size class."""
        settings, size = self._world.settings, planner.size_class(nbytes)
        if self._strategy is not None and collective == "all_reduce":
            return forced.choose(self.topology, self._strategy, size, self._world.speeds)
        tuned = self._tuned.get((_native.COLLECTIVES.index(collective), nbytes.bit_length(), root))
        wanted = settings.plan if is_id(settings.plan) else tuned.plan if tuned else ""
        wire, ordered = parse_wire(settings.wire), settings.reproducible
        speeds = self._world.speeds
        choice = planner.choose(self.topology, collective, size, root, wire, wanted, ordered=ordered, speeds=speeds)
        return replace(choice, tuned=tuned) if tuned and choice.plan.id == tuned.plan else choice

    def settle(self, key: Key, tuned: Tuned) -> None:
        """Use what tuning found, if it is among the candidates."""
        with self._lock:
            self._tuned[key] = tuned
            self._handles.pop(key, None)
            self._ahead.pop(key, None)

    def _possible_strategy(self) -> Strategy | None:
        """The strategy to force, if any. All ranks of the job together have it; a group of them may have too few."""
        settings = self._world.settings
        strategy = forced.wanted(settings.plan, settings.wire)
        if strategy is None or len(self._members) == 1:
            return None
        try:
            strategy.plan(self.topology, 1)
        except ValueError as error:
            if self._rank == 0:
                _log.warning(
                    "MULTIRING_PLAN=%s is not for the group of ranks %s: %s", strategy.name, self._members, error
                )
            return None
        return strategy

    def _warn_unless_forced(self, choice: Choice) -> None:
        wanted, plan = self._world.settings.plan, choice.plan
        if is_id(wanted) and plan.id != wanted and plan.collective != "barrier" and self._rank == 0:
            _log.warning(
                "MULTIRING_PLAN=%s is no candidate for %s of %s over %d ranks, which has %d and uses plan %s",
                wanted,
                plan.collective,
                size_in_words(choice.nbytes),
                plan.world_size,
                1 + len(choice.rejected),
                plan.id,
            )

    def measured(self) -> dict[str, Measured]:
        """Return the measured seconds of the calls of each installed plan, by the plan's id."""
        records = {plan: self._world.engine.installed_record(handle) for plan, handle in list(self._installed.items())}
        return {plan: Measured(*record) for plan, record in records.items()}

    def in_words(self, plan: str) -> str:
        """The collective and the phases of an installed plan, by its id."""
        return self._words[plan]

    def used(self) -> list[Choice]:
        """The plans that calls were made by, each for the largest size class it served, with what they took."""
        largest: dict[int, Key] = {}
        for key, handle in self._handles.items():
            largest[handle] = max(largest.get(handle, key), key)
        found = []
        for handle, (collective, bits, root) in largest.items():
            measured = Measured(*self._world.engine.installed_record(handle))
            if not measured.calls:
                continue
            try:
                choice = self.choose(_native.COLLECTIVES[collective], (1 << bits) - 1, root)
            except ValueError as error:  # a strategy runs that was forced and cannot be predicted
                _log.warning("a plan that was used is not shown: %s", error)
                continue
            found.append(replace(choice, measured=measured))
        return found

    def install(self, plan: Plan, timeout: float) -> int:
        """The handle of a plan's schedule, which rank 0 has proved, for a call that has ``timeout`` seconds."""
        if plan.id not in self._installed:
            ready = self._ready.pop(plan.id, None)
            self._installed[plan.id] = self._expand(plan, timeout) if ready is None else ready
        return self._installed[plan.id]

    def _expand(self, plan: Plan, timeout: float) -> int:
        """Have a plan's schedule installed, and its links made."""
        if self._rank == 0:
            prove(plan)
        mine = schedule(plan, self._rank)
        instructions, peers = mine.table()
        needed = {self._members[peer] for step in mine.instructions for peer in step.peers}
        self._world.connect(needed - {self._world.rank}, timeout)
        phases = tuple(f"{p.kind} {p.level} {p.method}" for p in plan.phases)
        if self._world.timeline is not None:
            self._world.timeline.phases[plan.number] = phases
        self._words[plan.id] = f"{plan.collective} by {', '.join(phases) or 'nothing'}"
        return self._world.engine.install(
            self._communicator,
            instructions,
            peers,
            _native.PlanFacts(mine.blocks, mine.segment_bytes, plan.window, plan.number, mine.grain),
        )
