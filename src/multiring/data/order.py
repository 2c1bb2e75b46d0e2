"""The samples of an epoch that a batch holds, a rank's part of them, and the progress of a job.

An epoch is a shuffle of all samples, which depends on the seed, the epoch and the number of samples. A global batch is
the next so many of it, and the ranks cut it among them by their weights. So neither the number of ranks nor their
weights change which samples a step trains on, and one number says where a job stands: the samples of the epoch that all
ranks together have taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from multiring.data.permutation import Numbers, Permutation, check_seed
from multiring.env import whole_number

UNEVEN = ("keep", "pad", "drop")


def cuts(count: int, weights: Sequence[float]) -> list[int]:
    """Cuts of ``count`` samples among ranks by weight: rank r takes the samples from cuts[r] to cuts[r + 1] - 1.

    Exact, so that all ranks cut alike; a part is its exact size, rounded up or down. ValueError for weights that are
    none, or whose sum is 0.
    """
    exact = [_weight(rank, weight) for rank, weight in enumerate(weights)]
    total = sum(exact)
    if not total:
        raise ValueError(f"weights={list(weights)}: at least one rank has a weight above 0")
    ends, reached = [0], Fraction(0)
    for weight in exact:
        reached += weight
        ends.append(math.floor(count * reached / total))
    return ends


def _weight(rank: int, weight: float) -> Fraction:
    number = math.nan if isinstance(weight, (str, bytes, bool, complex)) else float(weight)
    if not 0 <= number < math.inf:
        raise ValueError(f"weights[{rank}]={weight!r}: a weight is 0 or more, such as the samples a second of the rank")
    return Fraction(number)


class EpochOrder:
    """The batches of epochs of ``length`` samples: ``global_batch`` samples at a time, those of all ranks together.

    ``uneven`` says what becomes of the last batch where ``global_batch`` does not divide ``length``: "keep" leaves it
    smaller, "pad" fills it with the first samples of the epoch, "drop" leaves it out. ValueError for anything else.
    """

    def __init__(self, length: int, global_batch: int, seed: int = 0, uneven: str = "keep") -> None:
        self.length = Permutation(length).length
        self.global_batch = whole_number("global_batch", global_batch)
        if self.global_batch < 1:
            raise ValueError(f"global_batch={global_batch}: a batch has 1 sample or more, of all ranks together")
        if uneven not in UNEVEN:
            raise ValueError(f"uneven={uneven!r}: known are {', '.join(UNEVEN)}")
        self.seed = check_seed("seed", seed)
        self.uneven = uneven

    def batches(self, consumed: int = 0) -> int:
        """Number of batches that are left when ``consumed`` samples of an epoch have been taken."""
        whole, rest = divmod(self.length - consumed, self.global_batch)
        return whole + (rest > 0 and self.uneven != "drop")

    def after(self, consumed: int) -> int:
        """Return the number of samples that are taken after one more batch."""
        return min(consumed + self.global_batch, self.length)

    def batch(self, epoch: int, consumed: int, rank: int = 0, weights: Sequence[float] = (1,)) -> Numbers:
        """The samples of rank ``rank`` in the next batch, int64; there is one weight for each rank.

        IndexError where the epoch has no batch left.
        """
        if not self.batches(consumed):
            raise IndexError(f"{consumed} of {self.length} samples were taken: epoch {epoch} has no batch left")
        taken = self.global_batch if self.uneven == "pad" else self.after(consumed) - consumed
        ends = cuts(taken, weights)
        positions = np.arange(consumed + ends[rank], consumed + ends[rank + 1]) % self.length
        return Permutation(self.length, self.seed, epoch)(positions)

    def without_samples(self, consumed: int, weights: Sequence[float]) -> tuple[int, list[int]] | None:
        """The size of a coming batch that leaves ranks without a sample, and which; None where there is none."""
        left = self.length - consumed
        sizes = {self.global_batch} if left >= self.global_batch or self.uneven == "pad" else set()
        if left % self.global_batch and self.uneven == "keep":
            sizes.add(left % self.global_batch)
        for size in sorted(sizes if left else ()):
            ends = cuts(size, weights)
            if empty := [rank for rank in range(len(weights)) if ends[rank] == ends[rank + 1]]:
                return size, empty
        return None


class Progress:
    """Progress of a job: the epoch, and the number of samples of it that all ranks together have taken."""

    def __init__(self, order: EpochOrder) -> None:
        self.order = order
        self.epoch = 0
        self.consumed = 0
        self.changes = 0
        """Number of times that it was set from outside, which ends what runs ahead of it."""

    def begin(self) -> None:
        """Begin to take batches: after the last one of an epoch, those of the next one."""
        if self.consumed and not self.order.batches(self.consumed):
            self.end_epoch()

    def advance(self) -> None:
        """A batch was taken."""
        self.consumed = self.order.after(self.consumed)

    def end_epoch(self) -> None:
        """The next batch is the first of the next epoch."""
        self.epoch, self.consumed = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; nothing changes where it is the one that has begun."""
        epoch = check_seed("epoch", epoch)
        if epoch != self.epoch:
            self.epoch, self.consumed = epoch, 0
            self.changes += 1

    def state_dict(self) -> dict[str, int]:
        """The whole state, as integers: the same on all ranks, and good for any number of them."""
        order = self.order
        return {"seed": order.seed, "epoch": self.epoch, "consumed": self.consumed, "length": order.length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, with its seed; ValueError if it is of a data set of another length."""
        names = ("seed", "epoch", "consumed", "length")
        if missing := [name for name in names if name not in state]:
            raise ValueError(f"the state has no {', '.join(missing)}: it is not of this kind, but has {sorted(state)}")
        length, consumed = (whole_number(name, state[name]) for name in ("length", "consumed"))
        if length != self.order.length:
            raise ValueError(
                f"the state is of a data set of {length} samples, and this one has {self.order.length}: another length "
                "is another shuffle; begin an epoch by set_epoch instead"
            )
        if not 0 <= consumed <= length:
            raise ValueError(f"consumed={consumed}: the state is of 0 to {length} samples")
        seed, epoch = check_seed("seed", state["seed"]), check_seed("epoch", state["epoch"])
        self.order.seed, self.epoch, self.consumed = seed, epoch, consumed
        self.changes += 1


class Resumable:
    """A source of batches that follows a `Progress` and can go on from where another run of the job was."""

    _progress: Progress

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next batch is of, unless that has no more."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; nothing changes where it is the one that has begun."""
        self._progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the state of training: seed, epoch, its samples that loops were given on all ranks, and the length.

        What was read ahead does not count. It is the same on all ranks after the same step, and any number of ranks can
        go on from it.
        """
        return self._progress.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state in the next loop, with its seed; ValueError if it is of a data set of another length."""
        self._progress.load_state_dict(state)
