"""Trials of plans on a job's own calls: their candidates, their order, and the choice of the winner.

The calls of one collective, size class and root go through rungs: in the first many plans take turns, in each
further one the fastest of those before, more often (Jamieson, Talwalkar 2016: successive halving). Which plan a call
tries follows from its number alone. Pure: ``tuner`` brings the times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median_low

import numpy as np

from multiring.planning.choice import Candidate, Choice, Tuned

TRIED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
"""The collectives whose plans are tried; the others have one plan, or nothing to send."""

MAX_CANDIDATES = 32
"""Number of plans that a first rung tries at most. Measured: benchmarks/results/2026-11-28-constants.md, Tuning."""

TOP_PREDICTED = 4
"""Number of candidates that are taken first, for their predicted time alone."""


@dataclass(frozen=True)
class RungSpec:
    """The number of plans and of rounds in a rung. In each round every plan is tried by calls in a row: as many as take
    ``run_seconds`` together, but at least one and at most ``longest_run``."""

    plans: int
    rounds: int
    run_seconds: float
    longest_run: int

    def run(self, seconds: float) -> int:
        """Number of calls in a row, if each takes ``seconds``."""
        return min(max(int(self.run_seconds / seconds), 1), self.longest_run) if seconds else self.longest_run


RUNGS = (RungSpec(MAX_CANDIDATES, 3, 10e-3, 16), RungSpec(10, 3, 40e-3, 64), RungSpec(4, 8, 40e-3, 64))
"""The rungs, in order. Only the second half of a run counts: in the next call ranks are still at the messages of the
one before, and links pass the bytes of some calls at once that they do not pass call after call. Many rounds of short
runs tell plans apart where few of long ones do not: what else the machines do changes within seconds."""

COUNTED = 3 / 4
"""Part of the calls that count in a run, the fastest, whose mean is the run's time. While the others ran something
else did."""

SANE_SECONDS = 1e-9, 1e6
"""Bounds to which the seconds of a call are clipped: one that raised has taken an infinity, and ratios are made of
these."""

MIN_IMPROVEMENT = 1.02
"""The planner's choice stays unless another is faster by more than this factor: what is less is noise."""


@dataclass(frozen=True)
class Rung:
    """Plans, by id, that alternate in turns of ``run`` calls, for ``rounds`` rounds.

    The planner's choice stands first. ``earlier`` are the times that the rungs before have found; in the very first the
    first round warms up and does not count.
    """

    plans: tuple[str, ...]
    rounds: int
    run: int = 1
    number: int = 0
    earlier: Mapping[str, float] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        """Number of calls of the rung."""
        return len(self.plans) * self.rounds * self.run

    def plan(self, call: int) -> str:
        """The plan that a call tries. Every round starts with another, so that none is always the last before a
        pause."""
        round_, turn = divmod(call // self.run, len(self.plans))
        return self.plans[(turn + round_) % len(self.plans)]

    def times(self, seconds: Sequence[float]) -> dict[str, float]:
        """The time of each plan, from those of all calls: the median of its runs, each beside the others of its round.
        What slows a whole round down is no plan's fault."""
        sane = np.clip(seconds, *SANE_SECONDS).tolist()
        rounds = [self._round(sane, number) for number in range(0 if self.number else 1, self.rounds)]
        usual = [median_low(runs.values()) for runs in rounds]
        level = median_low(usual)
        return {
            plan: level * median_low(runs[plan] / here for runs, here in zip(rounds, usual, strict=True))
            for plan in self.plans
        }

    def _round(self, seconds: Sequence[float], number: int) -> dict[str, float]:
        """The time of each plan in a round."""
        runs = {}
        for turn in range(len(self.plans)):
            first = (number * len(self.plans) + turn) * self.run
            counted = sorted(seconds[first + self.run // 2 : first + self.run])
            runs[self.plan(first)] = fmean(counted[: max(1, int(COUNTED * len(counted)))])
        return runs


def first_rung(plans: Sequence[str], predicted: float) -> Rung:
    """The first rung of `candidates_to_try`, by id; ``predicted`` is what its first is to take, in seconds."""
    spec = RUNGS[0]
    return Rung(tuple(plans), spec.rounds, spec.run(predicted))


def candidates_to_try(choice: Choice) -> tuple[Candidate, ...]:
    """The candidates to try: those of the shortest predictions, the best flat one, and those of fewer steps than all
    that are predicted to be faster. Where cores are busy each step waits for them, which no prediction knows."""
    ranked = (choice.chosen, *choice.rejected)
    fewest = [_steps(ranked[0])]
    front = []
    for candidate in ranked[1:]:
        if _steps(candidate) < fewest[-1]:
            fewest.append(_steps(candidate))
            front.append(candidate)
    flat = [candidate for candidate in ranked if len(candidate.stages) == 1]
    wanted = [*ranked[:TOP_PREDICTED], *flat[:1], *reversed(front), *ranked[TOP_PREDICTED:]]
    return tuple(dict.fromkeys(wanted))[:MAX_CANDIDATES]


def after(rung: Rung, seconds: Sequence[float], day: str) -> Rung | Tuned:
    """Return the step after a rung: the next rung, or the winner."""
    times = rung.times(seconds)
    found = {**rung.earlier, **times}
    chosen, *others = rung.plans
    ranked = sorted(others, key=times.__getitem__)
    if rung.number + 1 < len(RUNGS):
        number = rung.number + 1
        spec = RUNGS[number]
        best = min(times.values())
        return Rung((chosen, *ranked[: spec.plans - 1]), spec.rounds, spec.run(best), number, found)
    best_plan = min(rung.plans, key=times.__getitem__)
    stays = times[chosen] <= MIN_IMPROVEMENT * times[best_plan]
    return Tuned(chosen if stays else best_plan, found, day)


def _steps(candidate: Candidate) -> int:
    return sum(phase.steps for phase in candidate.prediction.phases)
