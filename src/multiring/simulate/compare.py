"""The same training on the same cluster by several strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from multiring import units
from multiring.planning import planner
from multiring.planning.plan import NARROW, Plan
from multiring.planning.speeds import Speeds
from multiring.planning.strategies import ASYNCHRONOUS, GROUPS, STRATEGIES, Strategy, strategy
from multiring.planning.topology import Topology

from . import simulate, with_fastest_segments
from .apart import Exchanges, parse_exchanges, step_apart
from .asynchronous import check_hosts, simulate_servers
from .calls import Load, Outcome, SimulatedCall
from .recording import Recording
from .spread import slowest, slowness
from .training import TrainingStep, simulate_step

CHOSEN = "multiring"
"""The strategy whose plans the planner chooses."""

NAMES = (*STRATEGIES, *ASYNCHRONOUS)


@dataclass(frozen=True, slots=True)
class Training:
    """A training step of one rank, the cluster, the speeds of its ranks, and the spread of their speeds."""

    topology: Topology
    recording: Recording
    speeds: Speeds
    spread: float = 0.0
    overlap: bool = True
    wire: planner.Wire = ""
    """The format of float32 by level, as in MULTIRING_WIRE, for plans that the planner chooses."""


@dataclass(frozen=True, slots=True)
class Result:
    """A strategy's step: its seconds, those of exposed communication in it, and its busiest link. ``note`` says more,
    or why there is no step.

    ``exposed`` is None where ranks do not wait for each other; then a step is the mean cycle of one. ``approximate`` if
    ranks differ and are too many to be simulated one by one."""

    strategy: str
    seconds: float | None = None
    exposed: float | None = None
    efficiency: float = 0.0
    busiest: Load | None = None
    note: str = ""
    approximate: bool = False


def check_name(name: str) -> None:
    """ValueError for what names no strategy."""
    if name not in ASYNCHRONOUS and parse_exchanges(name) is None:
        strategy(name)


def simulate_strategy(training: Training, name: str) -> Result:
    """One strategy; where the cluster does not allow it, the result says why. ValueError for a name that is none."""
    exchanges = parse_exchanges(name)
    if name in ASYNCHRONOUS or exchanges is not None:
        try:
            return _asynchronous(name, training) if exchanges is None else _apart(name, exchanges, training)
        except ValueError as error:
            return Result(name, note=str(error))
    plans = _Plans(training, strategy(name))
    try:
        plans(training.recording.nbytes)
        step = _step(training, plans)
    except ValueError as error:
        return Result(name, note=str(error))
    return Result(name, step.seconds, step.exposed, step.efficiency, step.busiest, approximate=step.outcome.approximate)


class _Plans:
    """The plan of a strategy for each size class, a power of two, with its fastest segments."""

    def __init__(self, training: Training, how: Strategy):
        self._training = training
        self._how = how
        self._known: dict[int, Plan] = {}
        self._made: Plan | None = None

    def __call__(self, nbytes: int) -> Plan:
        size_class = nbytes.bit_length()
        if size_class not in self._known:
            topology, speeds = self._training.topology, self._training.speeds
            if self._how.name == CHOSEN:
                self._made = planner.plan(topology, "all_reduce", nbytes, wire=self._training.wire, speeds=speeds)
            elif self._made is None or self._how.by_size:
                self._made = self._how.plan(topology, nbytes, speeds)
            self._known[size_class] = with_fastest_segments(topology, self._made, nbytes, speeds)
        return self._known[size_class]


def _step(training: Training, plans: Callable[[int], Plan], stretch: float | None = None) -> TrainingStep:
    """A step in which ranks compute ``stretch`` times as long as the mean one; None: as long as the slowest of them."""
    if stretch is None:
        stretch = slowest(training.topology.world_size, training.spread)
    return simulate_step(
        training.topology, training.recording, plans, training.speeds, overlap=training.overlap, stretch=stretch
    )


def _apart(name: str, exchanges: Exchanges, training: Training) -> Result:
    formats = training.wire.values() if isinstance(training.wire, Mapping) else ()
    if poor := [format for format in formats if NARROW[format].needs_residual]:
        raise ValueError(f"no exchange travels in {poor[0]}, which loses too much of what is sent once")
    plans = _Plans(training, STRATEGIES[CHOSEN])
    stretch = slowest(training.topology.world_size, training.spread)  # all wait for the group of that rank

    def step_of(group: Topology) -> TrainingStep:
        alone = replace(training, topology=group)
        return _step(alone, _Plans(alone, STRATEGIES[CHOSEN]), stretch)

    def exchanges_of(nbytes: int, count: int) -> Outcome:
        return simulate(training.topology, [SimulatedCall(plans(nbytes), nbytes)] * count, training.speeds)

    found = step_apart(training.topology, training.recording.nbytes, exchanges, step_of, exchanges_of)
    step = found.step
    return Result(
        name,
        found.seconds,
        found.seconds - step.slowest,
        step.compute / found.seconds,
        step.busiest,
        f"an exchange takes {units.precise_duration(found.exchange.seconds)}",
        step.outcome.approximate or found.exchange.approximate,
    )


def _asynchronous(name: str, training: Training) -> Result:
    check_hosts(training.topology)
    paces = _every_group(training) if name == "groups" else _every_rank(training)
    pace = simulate_servers(training.topology, paces, training.recording.nbytes, training.speeds)
    note = f"misses {pace.staleness:.3g} updates a step"
    return Result(name, pace.seconds, None, training.recording.seconds / pace.seconds, None, note)


def _every_rank(training: Training) -> list[float]:
    """Seconds of computation of each rank."""
    ranks, seconds = training.topology.world_size, training.recording.seconds
    return [seconds * slowness(rank, ranks, training.spread) for rank in range(ranks)]


def _every_group(training: Training) -> list[float]:
    """Seconds of a step within each group of hosts; some groups have a host more than others."""
    hosts = len(set(training.topology.hosts))
    count = min(GROUPS, hosts)
    size, larger = divmod(hosts, count)
    seconds = [_seconds_of_group(training, size)] * (count - larger)
    return [_seconds_of_group(training, size + 1)] * larger + seconds if larger else seconds


def _seconds_of_group(training: Training, hosts: int) -> float:
    """Seconds of a step within a group of the first ``hosts`` hosts."""
    topology = training.topology
    first = set(list(dict.fromkeys(topology.hosts))[:hosts])
    group = replace(training, topology=topology.restrict([r for r, host in enumerate(topology.hosts) if host in first]))
    return _step(group, _Plans(group, STRATEGIES[CHOSEN])).seconds
