"""torch's DataLoader over one shuffle for all ranks, whose state is where training is, not where workers are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Sampler, default_collate

from multiring.data.batches import check_weights
from multiring.data.errors import BrokenSample, DataError
from multiring.data.order import EpochOrder, Progress, Resumable
from multiring.runtime.comm import Communicator
from multiring.torch.epochs import check_parts, length_of, rank_and_size

TAKEN = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
"""Arguments of DataLoader whose place the order of samples takes."""


class Loader(Resumable, DataLoader[Any]):
    """A ``DataLoader`` that hands this rank its part of each global batch of a data set, shuffled anew in each epoch.

    ``global_batch`` is the number of samples of all ranks together, which stays the same when ranks are lost or
    admitted; ``options`` are those of ``DataLoader``. A loop runs until the epoch ends; the next loop is the next
    epoch, and one that was left, also by an exception, goes on where it was, as the rank that this process is then.
    `multiring.data.Batches` says what ``weights``, ``seed`` and ``uneven`` are.

    Where all samples of a part are broken and skipped, the batch is that of any sample, cut to a length of 0; a
    ``collate_fn`` of one's own is handed an empty list.

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
        length = length_of(dataset)
        if not options.get("in_order", True):
            raise ValueError("in_order=False: then nobody knows which samples training has had")
        self._progress = Progress(EpochOrder(length, global_batch, seed, uneven))
        self._group = group
        self._weights = weights
        self._world()
        if options.get("collate_fn") is None:
            options["collate_fn"] = _Collate(dataset)
        super().__init__(dataset, batch_sampler=_Parts(self._progress, self._world), **options)

    def _world(self) -> tuple[int, Sequence[float]]:
        """This rank, and the weights of all."""
        rank, size = rank_and_size(self._group)
        weights = check_weights(self._weights, size)
        check_parts(self._progress.order, self._progress.consumed, weights)
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


class _Collate:
    """torch's way to make a batch of samples, and a batch of no samples, whose tensors have a length of 0."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._empty: Any = None

    def __call__(self, samples: list[Any]) -> Any:
        if samples:
            return default_collate(samples)
        if self._empty is None:
            self._empty = _emptied(default_collate([self._any()]))
        return self._empty

    def _any(self) -> Any:
        """A sample that is whole."""
        for sample in range(len(self._dataset)):
            try:
                return self._dataset[sample]
            except BrokenSample:
                continue
        raise DataError("no sample of the data set is whole")


def _emptied(batch: Any) -> Any:
    """A batch that `default_collate` has made, cut to a length of 0."""
    if isinstance(batch, Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {key: _emptied(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_emptied, batch))
    return [] if batch and isinstance(batch[0], (str, bytes)) else [_emptied(each) for each in batch]


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
