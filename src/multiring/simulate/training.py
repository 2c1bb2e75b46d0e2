"""A training step: the backward pass hands over its gradients in buckets, and their sums overlap with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from multiring.planning.plan import Plan
from multiring.planning.speeds import NATIVE, Speeds
from multiring.planning.topology import Topology

from . import simulate
from .calls import Load, Outcome, SimulatedCall
from .recording import Recording, buckets

BUCKET_BYTES = (1 << 20, 25 << 20)
"""The first bucket and the others, as DistributedDataParallel has them: the first sum starts early."""


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """Seconds of a step, of its computation on the mean rank and on the slowest, and the calls in it."""

    seconds: float
    compute: float
    slowest: float
    outcome: Outcome

    @property
    def exposed(self) -> float:
        """Seconds that the slowest rank waits for communication."""
        return self.seconds - self.slowest

    @property
    def efficiency(self) -> float:
        """Part of the step in which the mean rank computes: scaling efficiency against one rank."""
        return self.compute / self.seconds

    @property
    def busiest(self) -> Load | None:
        """The link that is busy longest."""
        return self.outcome.loads[0] if self.outcome.loads else None


def simulate_step(
    topology: Topology,
    recording: Recording,
    plan: Callable[[int], Plan],
    speeds: Speeds = NATIVE,
    *,
    overlap: bool = True,
    bucket_bytes: Sequence[int] = BUCKET_BYTES,
    stretch: float = 1.0,
) -> TrainingStep:
    """One step, in which all ranks compute as in ``recording``, ``stretch`` times as long.

    ``plan`` makes the plan for a number of bytes. Without ``overlap`` the sums begin when backward has ended.
    """
    compute = recording.seconds * stretch
    calls = [
        SimulatedCall(plan(bucket.nbytes), bucket.nbytes, bucket.ready * stretch if overlap else compute)
        for bucket in buckets(recording, bucket_bytes)
    ]
    outcome = simulate(topology, calls, speeds)
    return TrainingStep(max(compute, outcome.seconds), recording.seconds, compute, outcome)
