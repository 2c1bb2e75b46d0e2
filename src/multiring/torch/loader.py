"""torch's DataLoader over one shuffle for all ranks, whose state is where training is, not where workers are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Sampler

from multiring import api
from multiring.data.batches import check_weights
from multiring.data.order import EpochOrder, Progress, Resumable
from multiring.runtime.comm import Communicator

TAKEN = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
"""Arguments of DataLoader whose place the order of samples takes."""


class Loader(Resumable, DataLoader[Any]):
    """A ``DataLoader`` that hands this rank its part of each global batch of a data set, shuffled anew in each epoch.

    ``global_batch`` is the number of samples of all ranks together, which stays the same when ranks are lost or
    admitted; ``options`` are those of ``DataLoader``. A loop runs until the epoch ends; the next loop is the next
    epoch, and one that was left, also by an exception, goes on where it was, as the rank that this process is then.
    `multiring.data.Batches` says what ``weights``, ``seed`` and ``uneven`` are.

    The world is that of ``torch.distributed`` where that is initialized, else that of ``group``, a communicator, or of
    the default one. ValueError, on all ranks alike, where some rank would have no sample in the last batch.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch: int,
        *,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        uneven: str = "keep",
        group: Communicator | None = None,
        **options: Any,
    ) -> None:
        if wrong := [name for name in TAKEN if name in options]:
            raise TypeError(f"{', '.join(wrong)}: a Loader has an order of its own; give global_batch, seed and uneven")
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError(f"a {type(dataset).__name__} has no length, by which samples are shuffled and shared")
        if not options.get("in_order", True):
            raise ValueError("in_order=False: then nobody knows which samples training has had")
        self._progress = Progress(EpochOrder(len(dataset), global_batch, seed, uneven))
        self._group = group
        self._weights = weights
        self._world()
        super().__init__(dataset, batch_sampler=_Parts(self._progress, self._world), **options)

    def _world(self) -> tuple[int, Sequence[float]]:
        """This rank, and the weights of all."""
        if self._group is None and dist.is_available() and dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        else:
            communicator = api.joined(self._group)
            rank, size = communicator.rank, communicator.size
        weights = check_weights(self._weights, size)
        order = self._progress.order
        if found := order.without_samples(self._progress.consumed, weights):
            count, empty = found
            raise ValueError(
                f"a batch of {count} of the {order.length} samples leaves rank{'s' * (len(empty) > 1)} "
                f"{', '.join(map(str, empty))} of {size} without one: choose uneven='drop' or 'pad', or another "
                f"global_batch than {order.global_batch}"
            )
        return rank, weights

    def set_weights(self, weights: Sequence[float] | None) -> None:
        """Cut batches by other weights from the next loop on; one for each rank, or None for equal ones."""
        self._weights = weights

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._progress.begin()
        self._progress.changes += 1  # ends another loop that may still run
        return self._handed(super().__iter__())

    def _handed(self, batches: Iterator[Any]) -> Iterator[Any]:
        progress = self._progress
        changes = progress.changes
        for batch in batches:
            progress.advance()
            yield batch
            if progress.changes != changes:
                raise RuntimeError(
                    "the state of this Loader was set, or another loop over it begun, within this loop, whose workers "
                    "have read on from the old state: leave it by break, and begin another"
                )
        progress.end_epoch()


class _Parts(Sampler[list[int]]):
    """This rank's parts of the batches that are left of an epoch; it runs as far ahead as workers read."""

    def __init__(self, progress: Progress, world: Any) -> None:
        self._progress = progress
        self._world = world

    def __len__(self) -> int:
        return self._progress.order.batches()

    def __iter__(self) -> Iterator[list[int]]:
        rank, weights = self._world()
        order, epoch, consumed = self._progress.order, self._progress.epoch, self._progress.consumed
        while order.batches(consumed):
            yield order.batch(epoch, consumed, rank, weights).tolist()
            consumed = order.after(consumed)
