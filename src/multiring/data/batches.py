"""The batches of a rank, in plain Python: samples in lists, whatever is trained with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from multiring.data.order import EpochOrder, Progress, Resumable, cuts
from multiring.env import whole_number


class Batches(Resumable):
    """The part of rank ``rank`` of ``size`` of each global batch of a data set, shuffled anew in each epoch.

    ``for samples in batches`` yields lists of ``dataset[i]`` until the epoch ends; the next loop is the next epoch, and
    a loop that was left goes on where it was. All ranks yield equally often, and together each sample exactly once: a
    list may be shorter than others, or empty, where ``global_batch`` (the samples of all ranks together) does not
    divide the length, and ``uneven`` is "keep". "pad" fills the last batch with the first samples of the epoch, "drop"
    leaves it out. Which samples a step trains on depends on ``seed``, the epoch and ``global_batch`` alone, not on the
    ranks. ``weights`` has a number for each rank, the same list on all: a rank of weight 2 takes twice as many samples
    as one of weight 1.

    ValueError and TypeError for arguments that are none of these.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch: int,
        rank: int,
        size: int,
        *,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        uneven: str = "keep",
    ) -> None:
        self._dataset = dataset
        self._progress = Progress(EpochOrder(len(dataset), global_batch, seed, uneven))
        self.set_world(rank, size, weights)

    def set_world(self, rank: int, size: int, weights: Sequence[float] | None = None) -> None:
        """Set this rank's number and the number of ranks from the next batch on, as after `multiring.shrink`."""
        rank, size = whole_number("rank", rank, "a rank"), whole_number("size", size)
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank} and size={size}: ranks are 0 to {size - 1}")
        weights = check_weights(weights, size)
        self._rank, self._weights = rank, weights

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        return self._progress.order.batches()

    def __iter__(self) -> Iterator[list[Any]]:
        progress, order = self._progress, self._progress.order
        progress.begin()
        while order.batches(progress.consumed):
            samples = order.batch(progress.epoch, progress.consumed, self._rank, self._weights).tolist()
            content = read(self._dataset, samples)
            progress.advance()
            yield content
        progress.end_epoch()


def check_weights(weights: Sequence[float] | None, size: int) -> Sequence[float]:
    """The weights of ``size`` ranks, 1 each unless given; ValueError if they are none."""
    if weights is None:
        return [1] * size
    if len(weights) != size:
        raise ValueError(f"weights={list(weights)}: there are {size} ranks, and each has a weight")
    cuts(0, weights)
    return list(weights)


def read(dataset: Any, samples: Sequence[int]) -> list[Any]:
    """Several samples, in the way in which torch's loader asks a data set for them."""
    together = getattr(dataset, "__getitems__", None)
    return list(together(samples)) if together else [dataset[sample] for sample in samples]
