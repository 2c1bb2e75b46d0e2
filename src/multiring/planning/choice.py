"""A choice of the planner: the plan, the candidates beside it, and both in words, tables and data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from io import StringIO
from typing import TYPE_CHECKING, Any

from multiring.units import count, precise_duration, rate, size

from .plan import Phase, Plan
from .prediction import LinkLoad, PhaseTime, Prediction
from .speeds import NATIVE, Speeds
from .stages import Stage
from .topology import Topology

if TYPE_CHECKING:
    from rich.console import Group
    from rich.padding import Padding

TIE = 1.02
"""Predictions within this factor of the cheapest are ties: the model is not finer, and noise must not choose."""

SHOWN = 8
"""Most rejected candidates that are listed; the others are counted."""

WIDEST = 100_000
"""Columns of plain text: more than any row has, so that no row is broken."""


@dataclass(frozen=True)
class Candidate:
    """A plan that was considered: the stages that it is composed of, and what makes its prediction and the plan.

    Both are made when they are first asked for: most candidates are only compared.
    """

    stages: tuple[Stage, ...]
    predict: Callable[[], Prediction] = field(compare=False, repr=False)
    make: Callable[[Prediction], Plan] = field(compare=False, repr=False)

    @cached_property
    def prediction(self) -> Prediction:
        """The seconds of a call by the plan, and what makes them up."""
        return self.predict()

    @cached_property
    def plan(self) -> Plan:
        """The plan itself, of segments as predicted."""
        return self.make(self.prediction)

    @property
    def name(self) -> str:
        """Its phases in words, with the number of members of their rings."""
        phases = self.prediction.phases
        return ", ".join(f"{p.kind} {p.level} {p.members} {p.method}" for p in phases) or "nothing to do"


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of a plan's calls on this rank, from start to end, waits for other ranks included.

    ``nbytes`` and ``seconds`` are sums over ``calls``.
    """

    calls: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Tuned:
    """The plan that was the fastest of those tried, with the seconds of each by id; ``day`` is when, as 2026-11-21."""

    plan: str
    seconds: Mapping[str, float]
    day: str


@dataclass(frozen=True)
class Choice:
    """The plan chosen; the candidates that were not, cheapest first; the bound that no plan can beat, in seconds.

    ``measured`` is what calls by the plan have taken, once there are some. ``tuned`` is what each plan took that a job
    tried, where the choice comes from such trials. ``speeds`` are what predictions assume. A choice that is printed
    explains itself.
    """

    plan: Plan
    chosen: Candidate
    rejected: tuple[Candidate, ...]
    bound: float
    nbytes: int
    topology: Topology
    measured: Measured | None = None
    tuned: Tuned | None = None
    speeds: Speeds = NATIVE

    def is_tie(self, candidate: Candidate) -> bool:
        """True if a candidate is predicted to take as long as the one chosen, as far as the model can tell."""
        here, there = self.chosen.prediction.seconds, candidate.prediction.seconds
        return max(here, there) <= TIE * min(here, there)

    def __str__(self) -> str:
        return text(self)

    def __rich__(self) -> Group:
        return explained(self)

    def __repr__(self) -> str:
        return f"<{summary(self).splitlines()[0]}; print it to see why>"


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading for each column."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def summary(choice: Choice) -> str:
    """The chosen plan, its time, and the ratio of that to the limit."""
    plan, prediction = choice.plan, choice.chosen.prediction
    segments = f"{count(prediction.segments, 'segment')}, at most {plan.window} in flight"
    lines = [
        f"plan {plan.id}: {plan.collective} of {size(choice.nbytes)} over {count(plan.world_size, 'rank')}"
        " (for sizes up to twice that)",
        f"predicted  {precise_duration(prediction.seconds)}, in {segments}",
    ]
    if choice.speeds.ranks_per_core > 1:
        lines.append(f"cores      {choice.speeds.ranks_per_core:.3g} ranks share one, and wait for their turns on it")
    if prediction.burst_seconds:
        credit = precise_duration(prediction.burst_seconds)
        lines.append(
            f"bursts     each link between hosts passes at once, in every phase, what takes {credit} at its rate"
        )
    if choice.bound:
        reached = choice.bound / prediction.seconds
        bound = precise_duration(choice.bound)
        lines.append(f"cut bound  {bound}, the least at these rates; this plan reaches {reached:.0%} of it")
    if tuned := choice.tuned:
        lines.append(
            f"tuned      {precise_duration(tuned.seconds[tuned.plan])}, chosen on {tuned.day} from"
            f" {len(tuned.seconds)} plans that were tried"
        )
    if measured := choice.measured:
        mean = measured.seconds / measured.calls
        lines.append(
            f"measured   {precise_duration(mean)}, mean of {measured.calls} calls here"
            f" of {size(measured.nbytes // measured.calls)}, waiting included"
        )
    return "\n".join(lines)


def tables(choice: Choice) -> list[Table]:
    """Phases, links, and candidates that were rejected."""
    prediction = choice.chosen.prediction
    phases = [_phase_row(phase, time) for phase, time in zip(choice.plan.phases, prediction.phases, strict=True)]
    busiest = sorted(prediction.links, key=lambda load: -load.seconds)
    found = [
        Table("phases", ("kind", "level", "method", "rings", "shares", "steps", "alone"), tuple(phases)),
        Table("links", ("link of", "alike", "sends", "receives", "rate", "busy"), tuple(map(_link_row, busiest))),
    ]
    if choice.tuned:
        found.append(Table("tried", ("plan", "stages", "predicted", "took"), tuple(_tried_rows(choice, choice.tuned))))
    if choice.rejected:
        found.append(Table("rejected", ("plan", "stages", "predicted", "longer by"), tuple(_rejected_rows(choice))))
    return found


def explained(choice: Choice) -> Group:
    """The summary and all tables, for a console of rich."""
    from rich.console import Group  # here and below: `import multiring` does without
    from rich.text import Text

    parts = [(Text(f"\n{table.title}:", "bold"), _columns(table)) for table in tables(choice)]
    return Group(Text(summary(choice)), *(each for part in parts for each in part))


def text(choice: Choice) -> str:
    """The same as plain text, whatever the terminal or notebook that it is printed in."""
    from rich.console import Console

    shown = StringIO()
    Console(file=shown, width=WIDEST, color_system=None, force_jupyter=False).print(explained(choice))
    return "\n".join(line.rstrip() for line in shown.getvalue().splitlines())


def record(choice: Choice) -> dict[str, Any]:
    """The same as data: bytes and seconds."""
    prediction = choice.chosen.prediction
    return {
        "plan": choice.plan.id,
        "collective": choice.plan.collective,
        "world_size": choice.plan.world_size,
        "nbytes": choice.nbytes,
        "predicted_seconds": prediction.seconds,
        "ranks_per_core": choice.speeds.ranks_per_core,
        "bound_seconds": choice.bound,
        "measured": asdict(choice.measured) if choice.measured else None,
        "tuned": asdict(choice.tuned) if choice.tuned else None,
        "segments": prediction.segments,
        "segment_bytes": prediction.segment_bytes,
        "window": prediction.window,
        "phases": [
            {
                "kind": phase.kind,
                "level": phase.level,
                "method": phase.method,
                "wire": phase.wire or None,
                "rings": len(phase.rings),
                "members": time.members,
                "shares": phase.rings[0].shares,
                "steps": time.steps,
                "seconds": time.seconds,
            }
            for phase, time in zip(choice.plan.phases, prediction.phases, strict=True)
        ],
        "links": [
            {
                "level": load.level,
                "rank": load.rank,
                "alike": load.count,
                "bytes_up": load.up,
                "bytes_down": load.down,
                "bandwidth_up": load.link.up,
                "bandwidth_down": load.link.down,
                "seconds": load.seconds,
            }
            for load in prediction.links
        ],
        "rejected": [
            {
                "plan": candidate.plan.id,
                "stages": _stages(candidate),
                "predicted_seconds": candidate.prediction.seconds,
            }
            for candidate in choice.rejected
        ],
    }


def _phase_row(phase: Phase, time: PhaseTime) -> tuple[str, ...]:
    shares = phase.rings[0].shares
    shown = "equal" if shares is None else ":".join(map(str, shares))
    rings = f"{len(phase.rings)} of {time.members}"
    method = f"{phase.method} {phase.wire}".strip()
    return phase.kind, phase.level, method, rings, shown, str(time.steps), precise_duration(time.seconds)


def _link_row(load: LinkLoad) -> tuple[str, ...]:
    place = f"rank {load.rank}" if load.level == "rank" else f"{load.level} of rank {load.rank}"
    narrow = min(load.link.up, load.link.down)
    return place, str(load.count), size(load.up), size(load.down), rate(narrow), precise_duration(load.seconds)


def _rejected_rows(choice: Choice) -> Iterator[tuple[str, ...]]:
    best = choice.chosen.prediction.seconds
    for candidate in choice.rejected[:SHOWN]:
        seconds = candidate.prediction.seconds
        longer = round(seconds / best - 1, 3) if best else 0.0
        is_riskier = longer < 0 and choice.is_tie(candidate)
        yield (
            candidate.plan.id,
            _stages(candidate),
            precise_duration(seconds),
            "a tie, riskier" if is_riskier else f"{longer + 0.0:.1%}",
        )
    if len(choice.rejected) > SHOWN:
        yield f"and {len(choice.rejected) - SHOWN} more", "", "", ""


def _tried_rows(choice: Choice, tuned: Tuned) -> Iterator[tuple[str, ...]]:
    candidates = {candidate.plan.id: candidate for candidate in (choice.chosen, *choice.rejected)}
    for plan in sorted(tuned.seconds.keys() & candidates.keys(), key=tuned.seconds.__getitem__):
        found = candidates[plan]
        yield plan, _stages(found), precise_duration(found.prediction.seconds), precise_duration(tuned.seconds[plan])


def _stages(candidate: Candidate) -> str:
    levels = {phase.level for phase in candidate.prediction.phases}  # others have nobody to exchange with
    return ", ".join(str(stage) for stage in candidate.stages if stage.dimension.level in levels)


def _columns(table: Table) -> Padding:
    from rich.padding import Padding
    from rich.table import Table as Columns
    from rich.text import Text

    columns = Columns(*table.headings, box=None, pad_edge=False, header_style="bold")
    for row in table.rows:
        columns.add_row(*map(Text, row))  # a string could hold markup
    return Padding.indent(columns, 2)
