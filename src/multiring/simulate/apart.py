"""Groups that train apart and average their parameters once in some steps, as `multiring.torch.Outer` does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from multiring.planning.layout import canonical
from multiring.planning.strategies import OUTER
from multiring.planning.topology import LEVELS, Topology

from .calls import Outcome
from .training import TrainingStep


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The words of ``outer:rack:50:4:5``: the level whose places are the groups, the steps from one exchange of all
    parameters to the next, the fragments that take turns in them, and the steps after which one is applied."""

    level: str
    every: int
    fragments: int = 1
    delay: int = 0


def parse_exchanges(name: str) -> Exchanges | None:
    """None for a name that begins otherwise; ValueError for numbers that `multiring.torch.Outer` would refuse.

    ValueError as well for a delay with which exchanges of a fragment overlap: that is not predicted.
    """
    base, *given = name.split(":")
    if base != OUTER:
        return None
    level, *numbers = given or [""]
    few = 1 <= len(numbers) <= 3 and all(re.fullmatch("[0-9]{1,9}", number) for number in numbers)
    if level not in LEVELS or not few:
        raise ValueError(
            f"strategy {name!r}: give a level ({', '.join(LEVELS)}) and the steps between exchanges, and if you like "
            "the fragments and the delay, as in outer:rack:50 or outer:rack:50:4:5"
        )
    found = Exchanges(level, *map(int, numbers))
    if not found.every:
        raise ValueError(f"strategy {name!r}: {found.every} steps between exchanges; 1 or more are needed")
    if not 1 <= found.fragments <= found.every:
        raise ValueError(
            f"strategy {name!r}: {found.fragments} fragments in {found.every} steps; one is sent in a step, so there "
            f"are 1 to {found.every}"
        )
    if found.delay >= found.every:
        raise ValueError(
            f"strategy {name!r}: a delay of {found.delay} steps; exchanges of a fragment that overlap are not "
            f"predicted, so it is 0 to {found.every - 1}"
        )
    return found


@dataclass(frozen=True, slots=True)
class StepApart:
    """The mean step of groups that train apart: that of the slowest group, and what all wait for an exchange."""

    step: TrainingStep
    exchange: Outcome
    """One fragment on its way, by itself."""
    exchanges: Exchanges

    @property
    def waited(self) -> float:
        """Seconds that ranks wait for a fragment that has not arrived when it is due."""
        return max(0.0, self.exchange.seconds - self.exchanges.delay * self.step.seconds)

    @property
    def seconds(self) -> float:
        """Seconds of a step, with its part of the exchanges."""
        return self.step.seconds + self.exchanges.fragments * self.waited / self.exchanges.every


def groups_of(topology: Topology, level: str) -> list[Topology]:
    """The topologies of the groups, those that are alike once; ValueError where there are no two groups."""
    if level not in topology.levels:
        raise ValueError(f"the topology has the levels {', '.join(topology.levels)}, and no {level}")
    groups = [topology.restrict(ranks) for ranks in topology.ranks_by(level)]
    if len(groups) == 1:
        raise ValueError(f"all ranks are on one {level}, so there is nobody to exchange parameters with")
    return list({canonical(group): group for group in groups}.values())


def step_apart(
    topology: Topology,
    nbytes: int,
    exchanges: Exchanges,
    step_of: Callable[[Topology], TrainingStep],
    exchange_of: Callable[[int], Outcome],
) -> StepApart:
    """A step on groups of the topology, whose parameters are as many bytes as their gradients.

    ``step_of`` simulates a step of a group by itself, ``exchange_of`` an all-reduce over all ranks. While a fragment is
    on its way it shares links with the sums within the groups: that is left out.
    """
    steps = [step_of(group) for group in groups_of(topology, exchanges.level)]
    slowest = max(steps, key=lambda step: step.seconds)
    return StepApart(slowest, exchange_of(-(-nbytes // exchanges.fragments)), exchanges)
