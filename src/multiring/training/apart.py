"""Groups of ranks that train apart and seldom exchange how their parameters have changed."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from multiring.env import whole_number
from multiring.runtime.comm import Communicator, group_of
from multiring.training.weights import valid

Array = np.ndarray[Any, Any]


def at_least(name: str, value: Any, least: int, what: str) -> int:
    """``value`` as a whole number; ValueError if it is none, or less than ``least``."""
    number = whole_number(name, value, f"a number of {what}")
    if number < least:
        raise ValueError(f"{name}={value}: a number of {what} is {least} or more")
    return number


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


def refuse_coarse_wire(communicator: Communicator) -> None:
    """ValueError, on all ranks, where float32 travels in a format that loses too much of what is sent once."""
    group = group_of(communicator)
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

    def step(self) -> None:
        """Count a step whose time was measured from its beginning."""
        if self._since is not None:
            self._lap()
            self._lasted.append(self._work)
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
        """ValueError unless this is a `state` of as many groups."""
        check_keys(state, ("speeds", "round", "measured"), "groups of unequal speed")
        if len(state["speeds"]) != len(self.speeds):
            raise ValueError(f"this state is of {len(state['speeds'])} groups, and here are {len(self.speeds)}")

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.speeds = list(state["speeds"])
        self.first, self.begun, self.period = state["round"]
        self._work, self._lasted = 0, list(state["measured"])
        self._since = None


class SharedParameters:
    """The parameters that all ranks have after an exchange, as NumPy arrays, and the mean of how ranks change them.

    Formats of fewer than 32 bits are kept in float32, as small steps would be rounded away.
    """

    def __init__(self, communicator: Communicator, every: int, groups: Any) -> None:
        """All ranks make it together. ValueError on one rank for what cannot be, on all where they differ."""
        self._communicator = communicator
        self._every = at_least("every", every, 1, "steps between exchanges")
        found = ranks_of_groups(communicator, groups)
        given = [("every", self._every), ("groups", found)]
        for rank, theirs in enumerate(communicator.all_gather_object(given)):
            check_same(given, theirs, rank)
        (mine,) = (ranks for ranks in found if communicator.rank in ranks)
        group = communicator.new_group(mine)
        assert group is not None  # this rank is among them
        self.group = group
        """The communicator of this rank's group."""
        self.values: list[Array] = []
        """The shared values, in the order in which `begin` was given them."""
        self._names: list[str] = []
        self._steps = 0
        self._samples = 0.0
        self._by_samples: bool | None = None

    def begin(self, names: Sequence[str], own: Sequence[Array]) -> None:
        """Take the values of the oldest rank; all call it. ValueError on all where ranks have other parameters."""
        forms = [(name, f"{array.dtype.name} of shape {array.shape}") for name, array in zip(names, own, strict=True)]
        for rank, theirs in enumerate(self._communicator.all_gather_object(forms)):
            if len(theirs) != len(forms):
                raise ValueError(f"{len(forms)} parameters are trained here and {len(theirs)} on rank {rank}")
            for here, there in zip(forms, theirs, strict=True):
                if here != there:
                    raise ValueError(
                        f"parameter {here[0]} is {here[1]} here; on rank {rank} {there[0]} is {there[1]}: all ranks "
                        "need the same model"
                    )
        if any(_wide(array.dtype) == np.float32 for array in own):
            refuse_coarse_wire(self._communicator)
        self._names = list(names)
        self.values = [np.array(array, _wide(array.dtype), order="C") for array in own]
        for array in self.values:
            self._communicator.broadcast(array, self._communicator.oldest)

    def count(self, samples: float | None) -> bool:
        """Count a step, and this rank's ``samples`` in it; True if an exchange is due after it.

        ValueError where ``samples`` are given in some steps and not in others.
        """
        weight = 1.0 if samples is None else valid(samples, "samples")
        if self._by_samples not in (None, samples is not None):
            raise ValueError(f"samples={samples!r}: give samples in every step, or in none")
        self._by_samples = samples is not None
        self._steps += 1
        self._samples += weight
        return self._steps % self._every == 0

    def mean_change(self, own: Sequence[Array]) -> list[Array] | None:
        """The shared values less those of the ranks, in the mean over all samples; None if nobody has trained.

        All ranks call it; what they have done counts once. ValueError on all where some have given samples and others
        have not.
        """
        for name, shared, array in zip(self._names, self.values, own, strict=True):
            if array.shape != shared.shape:
                raise ValueError(f"parameter {name} has shape {array.shape}, and had {shared.shape} at the start")
        counts = np.array([self._samples, self._by_samples is True, self._by_samples is False], np.float64)
        self._communicator.all_reduce(counts)
        samples, with_samples, without = counts.tolist()
        if with_samples and without:
            raise ValueError(
                f"{with_samples:.0f} ranks gave samples and {without:.0f} did not: give them on all ranks or on none"
            )
        changes = []
        for shared, array in zip(self.values, own, strict=True):
            start = shared.astype(array.dtype).astype(shared.dtype)  # what the rank was given, rounded as it was
            change = np.zeros_like(shared)
            if self._samples:  # else what the rank has counts for nothing, also where it is NaN
                np.subtract(start, array.astype(shared.dtype), out=change)
                np.multiply(change, shared.dtype.type(self._samples), out=change)
            changes.append(change)
        self._samples = 0.0
        if not samples:
            return None
        for change in changes:
            self._communicator.all_reduce(change)
        for change in changes:
            np.divide(change, change.dtype.type(samples), out=change)
        return changes

    def state(self) -> dict[str, Any]:
        """Return the state from which `load` goes on bit for bit."""
        shared = dict(zip(self._names, (array.copy() for array in self.values), strict=True))
        counted = {"steps": self._steps, "samples": self._samples, "by_samples": self._by_samples}
        return {"every": self._every, "shared": shared, **counted}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned; ValueError if it is that of other parameters or another ``every``."""
        check_keys(state, ("every", "shared", "steps", "samples", "by_samples"), "Outer")
        if state["every"] != self._every:
            raise ValueError(f"every={self._every}, and this state is of every={state['every']}")
        forms = {name: array.shape for name, array in zip(self._names, self.values, strict=True)}
        given = {name: array.shape for name, array in state["shared"].items()}
        if forms != given:
            name = next(name for name in [*forms, *given] if forms.get(name) != given.get(name))
            raise ValueError(f"parameter {name} has shape {given.get(name)} in this state, here {forms.get(name)}")
        self.values = [state["shared"][name].copy() for name in self._names]
        self._steps, self._samples = state["steps"], state["samples"]
        self._by_samples = state["by_samples"]


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype
