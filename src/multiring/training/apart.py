"""Groups of ranks that train apart and seldom exchange how their parameters have changed."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from multiring.env import whole_number
from multiring.planning.strategies import EXCHANGES_ON_THE_WAY
from multiring.runtime.comm import Communicator, group_of
from multiring.training.weights import real_number, valid


def at_least(name: str, value: Any, least: int, what: str) -> int:
    """``value`` as a whole number; ValueError if it is none, or less than ``least``."""
    number = whole_number(name, value, f"a number of {what}")
    if number < least:
        raise ValueError(f"{name}={value}: a number of {what} is {least} or more")
    return number


def turns(every: Any, fragments: Any, delay: Any) -> tuple[int, int, int]:
    """The three as numbers of steps, parts and steps; ValueError unless they go together."""
    steps = at_least("every", every, 1, "steps between exchanges")
    parts = at_least("fragments", fragments, 1, "parts that take turns")
    late = at_least("delay", delay, 0, "steps")
    if parts > steps:
        raise ValueError(f"fragments={fragments}: one is sent in a step, so there are at most every={every}")
    if late >= EXCHANGES_ON_THE_WAY * steps:
        raise ValueError(
            f"delay={delay}: at most {EXCHANGES_ON_THE_WAY} exchanges of a fragment are under way, so it is less than "
            f"{EXCHANGES_ON_THE_WAY} x every={every}"
        )
    return steps, parts, late


def kept_part(keep: Any) -> float:
    """``keep`` as a number; ValueError unless it is 0 or more, and less than 1."""
    part = real_number(keep)
    if part is None or not 0 <= part < 1:
        raise ValueError(f"keep={keep!r}: the part of own values that stays is 0 or more, and less than 1")
    return part


def is_unequal(unequal: Any) -> bool:
    """``unequal``; TypeError unless it is True or False."""
    if not isinstance(unequal, bool):
        raise TypeError(f"unequal={unequal!r}: it is True where groups are to make unequal numbers of steps, or False")
    return unequal


def weight_of(samples: Any, by_samples: bool | None, unequal: bool) -> float:
    """The weight of a step, 1 without ``samples``; ``by_samples``: whether they were given before, None if no step was.

    ValueError where they are given in some steps and not in others, or not given to groups of unequal speed.
    """
    weight = 1.0 if samples is None else valid(samples, "samples")
    if unequal and samples is None:
        raise ValueError(
            "samples=None: with unequal=True groups count by their samples: give step() how many this rank has "
            "trained on in the step"
        )
    if by_samples not in (None, samples is not None):
        raise ValueError(f"samples={samples!r}: give step() samples in every step, or in none")
    return weight


def check_counted(with_samples: float, without: float) -> None:
    """ValueError, on all ranks, where some have given ``samples`` and others have not."""
    if with_samples and without:
        raise ValueError(
            f"{with_samples:.0f} ranks gave the samples of a step and {without:.0f} did not: give them on all ranks "
            "or on none"
        )


def ranks_of_groups(communicator: Communicator, groups: Any) -> list[list[int]]:
    """The ranks of each group: places of a level, given lists, or (None) places of the outermost level with several.

    ValueError unless each rank of the job is in one group.
    """
    if groups is None:
        found = [communicator.ranks_by(level) for level in reversed(communicator.levels)]
        return next((places for places in found if len(places) > 1), found[-1])
    if isinstance(groups, str):
        if groups not in communicator.levels:
            raise ValueError(
                f"groups={groups!r}: the topology has the levels {', '.join(communicator.levels)}; name one, describe "
                "the others in a topology file, or give lists of ranks"
            )
        return communicator.ranks_by(groups)
    if not _is_listing(groups) or not all(map(_is_listing, groups)):
        raise TypeError(
            f"groups={groups!r}: give the name of a level ({', '.join(communicator.levels)}), or lists of ranks, one "
            "for each group, such as [[0, 1], [2, 3]]"
        )
    lists = [[whole_number("groups", rank, "a rank") for rank in ranks] for ranks in groups]
    if sorted(rank for ranks in lists for rank in ranks) != list(range(communicator.size)) or [] in lists:
        raise ValueError(
            f"groups={lists}: lists of ranks hold each of the ranks 0 to {communicator.size - 1} once, and none is "
            "empty"
        )
    return sorted(sorted(ranks) for ranks in lists)


def _is_listing(given: Any) -> bool:
    return isinstance(given, Collection) and not isinstance(given, str | bytes | Mapping)


def check_all_live(communicator: Communicator) -> None:
    """PeerLost, or what else has failed the job: a group of one rank makes no collective of its own that says it."""
    if (failure := group_of(communicator).world.engine.failure()) is not None:
        raise failure


def refuse_coarse_wire(communicator: Communicator) -> None:
    """ValueError, on all ranks, where float32 travels in a format that loses too much of what is sent once.

    Changes travel multiplied by the samples that they count for, which may be more than float16 can hold.
    """
    group = group_of(communicator)
    if communicator.size > 1 and communicator.plan(1 << 20).plan.wire == "float16":
        raise ValueError(
            f"MULTIRING_WIRE={group.world.settings.wire}: changes of parameters are sent times their samples, which "
            "float16 makes infinite from 65,520 on: name another format, such as bfloat16 or int8"
        )
    if group.plans.need_residual:
        raise ValueError(
            f"MULTIRING_WIRE={group.world.settings.wire}: changes of parameters are sent once, without a residual, and "
            "int2 would lose most of them: name another format, such as int4"
        )


def check_keys(state: Any, keys: Iterable[str], of: str) -> None:
    """ValueError unless ``state`` is a dictionary with these keys, as the ``state_dict`` of ``of`` has."""
    missing = [key for key in keys if not isinstance(state, Mapping) or key not in state]
    if missing:
        raise ValueError(
            f"this is no state of {of}, since it has no {', '.join(missing)}: give what its state_dict() returned"
        )


def check_groups(saved: Any, groups: list[list[int]], *, is_apart: bool, unequal: bool) -> None:
    """ValueError if a state is of other groups, and their ranks would have parameters, or speeds, of several groups.

    ``is_apart``: the groups have trained since they had the same parameters.
    """
    if saved != groups and (is_apart or unequal):
        remedy = "give the same groups" if unequal else "give the same groups, or save the state after finish()"
        raise ValueError(
            f"this state is of the groups {saved}, and this Outer has {groups}: the ranks of a group have to go on "
            f"from what one group has saved, so {remedy}"
        )


def check_same(here: Iterable[tuple[str, Any]], there: Iterable[tuple[str, Any]], rank: int) -> None:
    """ValueError for an argument that this rank and ``rank`` gave different values."""
    for (name, mine), (_, theirs) in zip(here, there, strict=True):
        if mine != theirs:
            raise ValueError(f"{name} is {mine} here and {theirs} on rank {rank}: give all ranks the same")


class UnequalRounds:
    """The steps that this rank's group makes in a round, so that groups of unequal speed come to its end together.

    The slowest group makes ``every`` steps, another as many as fit into that time. Ranks add up whole nanoseconds, so
    all come to the same numbers. Until the speed of all groups is known each group makes ``every`` steps.
    """

    def __init__(self, every: int, parts: int, groups: int, mine: int) -> None:
        """``parts``: turns in a round. ``mine``: the number of this rank's group, of ``groups``."""
        self._every, self._parts, self._mine = every, parts, mine
        self.present = list(range(groups))
        """The groups that have ranks left."""
        self.speeds = [0] * groups
        """Nanoseconds that each group has taken for a step of its last round, without what it waited; 0: unknown."""
        self.first, self.begun, self.period = 0, 0, every
        """The first turn of the present round, the step after which it began, and its number of steps."""
        self.clock: Callable[[], int] = time.monotonic_ns
        self._work, self._lasted = 0, list[int]()
        self._since: int | None = None
        """Since this time work of the present step is not yet in ``_work``; None while it is not measured."""

    def due(self, turn: int) -> int:
        """The step after which a turn is sent; for one that a loss has taken back a step that is over."""
        return self.begun + (turn - self.first + 1) * self.period // self._parts

    def begin(self, turn: int, step: int) -> None:
        """Begin a round with a turn, after a step, where nothing is on its way."""
        self.first, self.begun, self.period = turn, step, self._wanted()
        self._work, self._lasted, self._since = 0, [], None

    def sent(self, turn: int) -> None:
        """Go to the next round after the last turn of the present one."""
        while turn - self.first >= self._parts - 1:
            self.first += self._parts
            self.begun += self.period
            self.period = self._wanted()

    def learn(self, measured: Sequence[int], step: int) -> None:
        """Take the sums of what ranks have `measured`; a round in which no step was made goes by them at once."""
        for group, (nanoseconds, ranks) in enumerate(zip(measured[::2], measured[1::2], strict=True)):
            if ranks:
                self.speeds[group] = max(1, nanoseconds // ranks)
        if self.begun == step:
            self.period = self._wanted()

    def survive(self, speeds: Sequence[int], present: Sequence[int], turn: int, step: int) -> None:
        """Go on after a loss with the groups that are left, from a turn, which `finish` may have brought far ahead."""
        self.speeds, self.present = list(speeds), list(present)
        if turn - self.first >= self._parts:
            self.first += (turn - self.first) // self._parts * self._parts
            self.begun = step
        if self.begun == step:
            self.period = self._wanted()

    def _wanted(self) -> int:
        speeds = [self.speeds[group] for group in self.present]
        if 0 in speeds:
            return self._every
        mine = self.speeds[self._mine]
        return max(self._every, (2 * self._every * max(speeds) + mine) // (2 * mine))

    # --- the time that this rank works ---

    def step(self, count: int = 1) -> None:
        """Count a step, or ``count`` of them, whose time was measured from the beginning."""
        if self._since is not None:
            self._lap()
            self._lasted += [self._work // count] * count
        self._work = 0

    def go_on(self) -> None:
        """Measure from here on, if it is not done."""
        if self._since is None:
            self._since = self.clock()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it no time is measured, nor after an error in it."""
        measuring = self._since is not None
        self._lap()
        self._since = None
        yield
        if measuring:
            self._since = self.clock()

    def measured(self, turn: int) -> list[int]:
        """This rank's summand: at the end of a round the nanoseconds of a step and 1 for its group, else zeros.

        It is the median step, which a pause or a busy moment does not change.
        """
        found = [0] * 2 * len(self.speeds)
        if turn - self.first >= self._parts - 1 and self._lasted:
            found[2 * self._mine : 2 * self._mine + 2] = statistics.median_low(self._lasted), 1
            self._lasted = []
        return found

    def _lap(self) -> None:
        if self._since is not None:
            now = self.clock()
            self._work += now - self._since
            self._since = now

    def state(self) -> dict[str, Any]:
        """Return the state from which `load` goes on; the step that is being made is not measured."""
        return {
            "speeds": list(self.speeds),
            "round": [self.first, self.begun, self.period],
            "measured": list(self._lasted),
        }

    def check(self, state: Any) -> None:
        """ValueError unless this is a `state`."""
        check_keys(state, ("speeds", "round", "measured"), "groups of unequal speed")

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.speeds = list(state["speeds"])
        self.first, self.begun, self.period = state["round"]
        self._work, self._lasted = 0, list(state["measured"])
        self._since = None
