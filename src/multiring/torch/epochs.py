"""The order of `multiring.data` for DataLoaders that others make: as a sampler, and as an iterable data set."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from multiring import api
from multiring.data.batches import read
from multiring.data.order import EpochOrder, Progress, cuts
from multiring.data.permutation import check_seed
from multiring.env import whole_number
from multiring.runtime.comm import Communicator

MOST_WORKERS = 1024
"""Workers of a DataLoader, at most."""

LOOPS = 16
"""Loops that are remembered: workers of more do not begin at the same time."""

KEY_BITS = 40
"""Bits that tell one loop from the others."""


def rank_and_size(group: Communicator | None) -> tuple[int, int]:
    """This rank and the number of ranks: of torch.distributed where that is initialized, else of a communicator."""
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    communicator = api.joined(group)
    return communicator.rank, communicator.size


def length_of(dataset: Any) -> int:
    """The number of samples; TypeError if the data set does not tell."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(f"a {type(dataset).__name__} has no length, by which samples are shuffled and shared")
    return len(dataset)


def check_parts(order: EpochOrder, consumed: int, weights: Sequence[float]) -> None:
    """ValueError where a batch that is to come leaves a rank without a sample."""
    if found := order.without_samples(consumed, weights):
        count, empty = found
        remedy = f"choose a larger global_batch than {order.global_batch}"
        if count < order.global_batch:
            remedy = f"choose uneven='drop' or 'pad', or another global_batch than {order.global_batch}"
        raise ValueError(
            f"a batch of {count} of the {order.length} samples leaves rank{'s' * (len(empty) > 1)} "
            f"{', '.join(map(str, empty))} of {len(weights)} without one: {remedy}"
        )


def _shared(numbers: int) -> Tensor:
    zeros: Any = torch.zeros(numbers, dtype=torch.int64)
    shared: Tensor = zeros.share_memory_()
    return shared


class _Epochs:
    """The beginning of a DataLoader's next loop, and this rank, in shared memory where workers look them up.

    Each loop is the next epoch, unless `set_epoch` or `load_state_dict` was called since the last one began. The main
    process hears nothing of a loop, so its first worker gives it a number, which the others find by the loop's key.
    """

    def __init__(self, length: int, batch_size: int, seed: int, uneven: str, group: Communicator | None) -> None:
        self._length, self._uneven, self._group = length, uneven, group
        self._batch_size = whole_number("batch_size", batch_size)
        if self._batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a batch has 1 sample or more of each rank")
        self._seed = _shared(1)
        self._seed[0] = check_seed("seed", seed)
        self._start = _shared(3)  # a loop's number, its epoch, and what all ranks have had of it; others follow it
        self._earlier = _shared(3)  # the same for loops before that one, of which workers may still begin
        self._place = _shared(2)  # rank and number of ranks
        self._loops = _shared(LOOPS).fill_(-1)  # number and key of each, in one word: all workers write the same
        self._begun = _shared(LOOPS * MOST_WORKERS).view(
            LOOPS, -1
        )  # one more than the number, where a worker has begun
        self._iterated = 0, 0  # the seed of this worker, and how often it has begun
        self._running = _shared(2).fill_(-1)  # epoch and begin of the last loop; Lightning sets the epoch in it
        self.look()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_group": None}  # a worker belongs to no world

    def look(self) -> None:
        """Learn which rank this is, in the main process."""
        rank, size = rank_and_size(self._group)
        self._place.copy_(torch.tensor([rank, size]))
        _, consumed = self._loop(self._count())
        check_parts(self.order(), consumed, [1] * size)

    def order(self) -> EpochOrder:
        """The order of epochs in the present world."""
        return EpochOrder(self._length, self._batch_size * int(self._place[1]), int(self._seed), self._uneven)

    def samples(self) -> int:
        """Number of samples of this rank in an epoch."""
        order = self.order()
        rank, size = map(int, self._place.tolist())
        whole, rest = divmod(self._length, order.global_batch)
        if rest and self._uneven == "pad":
            whole, rest = whole + 1, 0
        ends: list[int] = cuts(rest if self._uneven == "keep" else 0, [1] * size)
        return whole * self._batch_size + ends[rank + 1] - ends[rank]

    def key(self) -> int:
        """Tell the loop that begins here from all others, alike in each of its workers."""
        worker = get_worker_info()
        if worker is None:
            return secrets.randbits(KEY_BITS)
        seed = worker.seed - worker.id  # the same in all workers of a DataLoader, whose next loops may keep them
        last, times = self._iterated
        self._iterated = seed, times + 1 if last == seed else 1
        return hash(self._iterated) % (1 << KEY_BITS)

    def batches(self, key: int, worker: int = 0, workers: int = 1) -> Iterator[list[int]]:
        """This rank's parts of the batches of a loop, every one of ``workers``."""
        epoch, consumed = self._loop(self._number(key, worker))
        self._running.copy_(torch.tensor([epoch, consumed]))  # workers write the same
        order, (rank, size) = self.order(), self._place.tolist()
        for number in range(order.batches(consumed)):
            if number % workers == worker:
                yield order.batch(epoch, consumed, rank, [1] * size).tolist()
            consumed = order.after(consumed)

    def _number(self, key: int, worker: int) -> int:
        """The number of a loop, counted from 0: that of its key, or the next one if no worker has begun it."""
        loops: list[int] = self._loops.tolist()
        known = [loop >> KEY_BITS for loop in loops if loop >= 0 and loop % (1 << KEY_BITS) == key]
        number = max(known, default=-1)
        # There is none, or this worker has begun that one: torch was seeded as for it.
        if number < 0 or int(self._begun[number % LOOPS, worker]) == number + 1:
            number = (max(loops) >> KEY_BITS) + 1
            self._loops[number % LOOPS] = (number << KEY_BITS) + key
        self._begun[number % LOOPS, worker] = number + 1
        return number

    def _count(self) -> int:
        """Number of loops that have begun."""
        return (int(self._loops.max()) >> KEY_BITS) + 1

    def _loop(self, number: int) -> tuple[int, int]:
        """The epoch of a loop, and what all ranks had had of it when it began."""
        start = self._start if number >= int(self._start[0]) else self._earlier
        first, epoch, consumed = start.tolist()
        if consumed and not self.order().batches(consumed):
            epoch, consumed = epoch + 1, 0
        return epoch + number - first, 0 if number > first else consumed

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be of an epoch; from its start on, unless a state of it was loaded that no loop has had."""
        epoch = check_seed("epoch", epoch)
        coming, consumed = self._loop(self._count())
        self._go_to(epoch, consumed if epoch == coming else 0)

    def _go_to(self, epoch: int, consumed: int) -> None:
        count = self._count()
        if count > int(self._start[0]):
            self._earlier.copy_(self._start)
        self._start.copy_(torch.tensor([count, epoch, consumed]))
        self.look()

    def state_after(self, batches: int) -> dict[str, int]:
        """The state of training after so many batches of the loop that runs, as `Progress.state_dict`."""
        progress = Progress(self.order())
        progress.epoch, progress.consumed = self._running.tolist()
        if progress.epoch < 0:
            raise ValueError(f"state_after({batches}): no loop has begun")
        left = progress.order.batches(progress.consumed)
        if not 0 <= whole_number("batches", batches) <= left:
            raise ValueError(f"state_after({batches}): the loop that runs has {left} batches")
        for _ in range(batches):
            progress.advance()
        return progress.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop go on from a state, with its seed; ValueError if it is of a data set of another length."""
        progress = Progress(self.order())
        progress.load_state_dict(state)
        self._seed[0] = progress.order.seed
        self._go_to(progress.epoch, progress.consumed)


class _Followed:
    """Methods that a sampler and an iterable data set share; both run as far ahead as workers read."""

    _epochs: _Epochs

    def __len__(self) -> int:
        """Number of samples of this rank in an epoch."""
        return self._epochs.samples()

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be of an epoch; from its start on, unless a state of it was loaded that no loop has had."""
        self._epochs.set_epoch(epoch)

    def state_after(self, batches: int) -> dict[str, int]:
        """Return the state of training after so many batches of the loop that runs: the same on all ranks.

        Nobody but the loop knows how many it has had, as workers read ahead. Any number of ranks can go on from it.
        """
        return self._epochs.state_after(batches)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state in the next loop, with its seed; ValueError if it is of a data set of another length."""
        self._epochs.load_state_dict(state)


class EpochSampler(_Followed, Sampler[int]):
    """This rank's samples of each epoch, for a ``DataLoader`` of ``batch_size`` samples on each rank.

    Steps train on the samples that `multiring.data.Batches` gives to a global batch of ``batch_size`` times the number
    of ranks, and all ranks make as many. Each loop is the next epoch, unless `set_epoch` was called.
    ``uneven`` and ``group`` are as for `Loader`, which keeps the global batch where the number of ranks changes, and
    knows its own state.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int = 0,
        uneven: str = "keep",
        group: Communicator | None = None,
    ) -> None:
        self._epochs = _Epochs(length_of(dataset), batch_size, seed, uneven, group)

    def __iter__(self) -> Iterator[int]:
        self._epochs.look()
        for batch in self._epochs.batches(self._epochs.key()):
            yield from batch


class EpochStream(_Followed, IterableDataset[Any]):
    """A data set as an ``IterableDataset``, in the order of `EpochSampler`, for a ``DataLoader`` of ``batch_size``.

    Workers share the batches, and the DataLoader hands them out in their order. Give it the same ``batch_size``, and no
    sampler. Samples that are broken cannot be left out of a stream, whose steps would then be those of no other rank.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int = 0,
        uneven: str = "keep",
        group: Communicator | None = None,
    ) -> None:
        if getattr(dataset, "broken", "raise") == "skip":
            raise ValueError("broken='skip': a stream cannot leave samples out: take a Loader")
        self._dataset = dataset
        self._epochs = _Epochs(length_of(dataset), batch_size, seed, uneven, group)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is None:
            self._epochs.look()
        place = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return self._read(self._epochs.key(), *place)

    def _read(self, *loop: int) -> Iterator[Any]:
        for batch in self._epochs.batches(*loop):
            yield from read(self._dataset, batch)
