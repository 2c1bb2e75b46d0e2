"""Which plans a job tries on its own calls, in what order, and which of them wins.

The calls of one collective, size class and root go through two heats: in the first a field of plans takes turns, in the
second the fastest of them. Which plan a call tries follows from its number alone. Pure: ``tuner`` brings the times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from .planner import Candidate, Choice, Tuned

TRIED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
"""The others have one plan, or nothing to send."""

FIELD, FIELD_OF_SHORT = 16, 24
"""So many plans are tried, at most; more where a call is short: predictions know less of it, and trials cost less. Of 4
MB on unequal hosts twenty plans are predicted within 2 %; the fastest were the 13th and the 18th of them."""

SHORT_SECONDS = 3e-3
"""By prediction."""

ROUNDS_OF_SHORT, RUN_OF_SHORT, RUN_OF_FINALISTS = 2, 16, 128
"""So many short calls in a row try a plan, in so many rounds of each heat, and the second half of them counts: in the
next call ranks are still at the messages of the one before, and links pass the bytes of some calls at once that they do
not pass call after call."""

COUNTED = 3 / 4
"""The time of a plan is the mean of so many of its calls, the fastest. While the others ran something else did."""

NEAREST = 4
"""Of them so many for their prediction alone."""

FINALISTS = 5
"""Of the first heat, whose few trials tell apart no plans that differ by a few parts in a hundred."""

FEWEST_ROUNDS, MOST_ROUNDS = 3, 20
"""So many long calls try a plan in the first heat, beside those that warm it up; twice as many in the second."""

ENOUGH_SECONDS = 0.1
"""A plan is tried for that long in a heat, within the bounds above: a short time is the less certain one."""

WORTH_LEAVING = 1.02
"""The planner's choice stays unless another is faster by more than this factor: what is less is noise."""


@dataclass(frozen=True)
class Heat:
    """Plans, by id, that take turns of ``run`` calls in so many rounds.

    The first round opens connections and does not count, nor does the first half of a run. The planner's choice stands
    first. The second heat has the times of the first, the ``earlier`` ones.
    """

    plans: tuple[str, ...]
    rounds: int
    run: int = 1
    earlier: Mapping[str, float] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        """How many calls the heat takes."""
        return len(self.plans) * self.rounds * self.run

    def plan(self, call: int) -> str:
        """What a call tries. Every round starts with another plan, so that none is always the last before a pause."""
        round_, turn = divmod(call // self.run, len(self.plans))
        return self.plans[(turn + round_) % len(self.plans)]

    def times(self, seconds: Sequence[float]) -> dict[str, float]:
        """The time of each plan, from those of all calls."""
        spent: dict[str, list[float]] = {plan: [] for plan in self.plans}
        for call in range(len(self.plans) * self.run, self.calls):
            if call % self.run >= self.run // 2:
                spent[self.plan(call)].append(seconds[call])
        return {plan: fmean(sorted(times)[: max(1, int(COUNTED * len(times)))]) for plan, times in spent.items()}


def opening(plans: Sequence[str], predicted: float) -> Heat:
    """The first heat of `contestants`, by id; ``predicted`` is what its first is to take, in seconds."""
    if predicted < SHORT_SECONDS:
        return Heat(tuple(plans), 1 + ROUNDS_OF_SHORT, RUN_OF_SHORT)
    return Heat(tuple(plans), 1 + min(max(round(ENOUGH_SECONDS / predicted), FEWEST_ROUNDS), MOST_ROUNDS))


def contestants(choice: Choice) -> tuple[Candidate, ...]:
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
    wanted = [*ranked[:NEAREST], *flat[:1], *reversed(front), *ranked[NEAREST:]]
    most = FIELD_OF_SHORT if ranked[0].prediction.seconds < SHORT_SECONDS else FIELD
    return tuple(dict.fromkeys(wanted))[:most]


def after(heat: Heat, seconds: Sequence[float], day: str) -> Heat | Tuned:
    """What a heat leads to: the second, or the winner."""
    times = heat.times(seconds)
    chosen = heat.plans[0]
    if not heat.earlier:
        others = sorted((plan for plan in heat.plans if plan != chosen), key=times.__getitem__)
        rounds, run = (2 * heat.rounds - 1, 1) if heat.run == 1 else (heat.rounds, RUN_OF_FINALISTS)
        return Heat((chosen, *others[: FINALISTS - 1]), rounds, run, times)
    best = min(heat.plans, key=times.__getitem__)
    stays = times[chosen] <= WORTH_LEAVING * times[best]
    return Tuned(chosen if stays else best, {**heat.earlier, **times}, day)


def offset(mine: np.ndarray, reference: np.ndarray) -> float:
    """Seconds to add to this clock to read the reference's, from (entry, exit) of the same barriers on both, in rows.

    Nobody leaves a barrier before the other has entered. Clocks that may agree are taken to agree: they are one
    machine's.
    """
    least = float(np.max(reference[:, 0] - mine[:, 1]))
    most = float(np.min(reference[:, 1] - mine[:, 0]))
    return 0.0 if least <= 0 <= most else (least + most) / 2


def _steps(candidate: Candidate) -> int:
    return sum(phase.steps for phase in candidate.prediction.phases)
