"""A Loader on every rank, with workers that read ahead: what the ranks are handed together, and where the state is."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset
from workers import run, worker

import multiring as mr
import multiring.torch as mrt
from multiring.data import Batches, DataError, Dataset, pack

LENGTH, SEED = 59, 5
AHEAD: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 4}

mr.init()
RANK, SIZE = mr.rank(), mr.world_size()


class Squares(TorchDataset[Any]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, sample: int) -> torch.Tensor:
        return torch.tensor([sample, sample * sample + 1])


def expected(global_batch: int, epoch: int = 0, weights: Sequence[float] | None = None) -> list[list[int]]:
    """The samples of this rank's batches."""
    alone = Batches(range(LENGTH), global_batch, RANK, SIZE, weights=weights, seed=SEED)
    alone.set_epoch(epoch)
    return list(alone)


def numbers(batch: torch.Tensor) -> list[int]:
    assert (batch[:, 1] == batch[:, 0] ** 2 + 1).all()
    return batch[:, 0].tolist()


@worker
def each_sample_once() -> None:
    loader = mrt.Loader(Squares(), 2 * SIZE + 1, seed=SEED, **AHEAD)
    for epoch in range(2):
        assert loader.epoch == epoch
        mine = [numbers(batch) for batch in loader]
        assert mine == expected(2 * SIZE + 1, epoch)
        assert len(mine) == len(loader) == -(-LENGTH // (2 * SIZE + 1))
        everybody = mr.all_gather_object(mine)
        steps = [list(chain(*parts)) for parts in zip(*everybody, strict=True)]
        assert sorted(chain(*steps)) == list(range(LENGTH))
        alone = Batches(range(LENGTH), 2 * SIZE + 1, 0, 1, seed=SEED)
        alone.set_epoch(epoch)
        assert steps == list(alone)
    loader.set_weights([2, *[1] * (SIZE - 1)])
    assert [numbers(batch) for batch in loader] == expected(2 * SIZE + 1, 2, [2, *[1] * (SIZE - 1)])


@worker
def state_is_that_of_the_loop() -> None:
    """The workers have read all of the epoch when its third batch is handed out."""
    loader = mrt.Loader(Squares(), 8, seed=SEED, num_workers=2, prefetch_factor=8)
    mine = []
    for batch in loader:
        mine.append(numbers(batch))
        assert loader.state_dict() == {"seed": SEED, "epoch": 0, "consumed": 8 * len(mine), "length": LENGTH}
        if len(mine) == 3:
            break
    state = loader.state_dict()
    assert mr.all_gather_object(state) == [state] * SIZE
    other = mrt.Loader(Squares(), 8, **AHEAD)
    other.load_state_dict(state)
    assert mine + [numbers(batch) for batch in other] == expected(8)
    assert [numbers(batch) for batch in other] == expected(8, 1)
    assert mine + [numbers(batch) for batch in loader] == expected(8)  # a loop that was left goes on
    assert loader.state_dict() == {"seed": SEED, "epoch": 1, "consumed": 0, "length": LENGTH}


@worker
def workers_that_stay() -> None:
    loader = mrt.Loader(Squares(), 8, seed=SEED, persistent_workers=True, **AHEAD)
    mine = [numbers(batch) for batch in islice(loader, 2)]
    assert mine + [numbers(batch) for batch in loader] == expected(8)
    assert [numbers(batch) for batch in loader] == expected(8, 1)
    loader.set_epoch(7)
    assert [numbers(batch) for batch in loader] == expected(8, 7)


@worker
def a_state_that_is_set_ends_the_loop() -> None:
    loader = mrt.Loader(Squares(), 8, seed=SEED, **AHEAD)
    state = loader.state_dict()
    changes: list[Callable[[], Any]] = [
        lambda: loader.load_state_dict(state),
        lambda: loader.set_epoch(loader.epoch + 1),
        lambda: next(iter(loader)),
    ]
    for change in changes:
        running = iter(loader)
        next(running)
        change()
        with pytest.raises(RuntimeError, match="leave it by break, and begin another"):
            next(running)
    loader.load_state_dict(state)
    assert [numbers(batch) for batch in loader] == expected(8)


def odd(content: bytes) -> int:
    if int(content) % 2:
        raise ValueError(f"odd: {int(content)}")
    return int(content)


@worker
def tar_files() -> None:
    """The labels of nine classes of three pictures each; those with odd labels cannot be decoded."""
    with tempfile.TemporaryDirectory() as folder:
        for name in "abcdefghi":
            (Path(folder) / "in" / name).mkdir(parents=True)
            for number in range(3):
                (Path(folder) / "in" / name / f"{number}.png").write_bytes(name.encode() * number)
        pack(Path(folder) / "in", Path(folder) / "out", file_bytes=5000)
        whole = Dataset(Path(folder) / "out", decode={"cls": int, "png": len})
        loader = mrt.Loader(whole, 9, **AHEAD)
        mine = [pair for batch in loader for pair in zip(batch["cls"].tolist(), batch["png"].tolist(), strict=True)]
        assert sorted(chain(*mr.all_gather_object(mine))) == [
            (label, number) for label in range(9) for number in range(3)
        ]

        skipping = Dataset(Path(folder) / "out", decode={"cls": odd, "png": len}, broken="skip")
        loader = mrt.Loader(skipping, 27, **AHEAD)
        mine = [pair for batch in loader for pair in zip(batch["cls"].tolist(), batch["png"].tolist(), strict=True)]
        left = [(label, number) for label in range(0, 9, 2) for number in range(3)]
        assert sorted(chain(*mr.all_gather_object(mine))) == left

        # Parts of batches whose samples are all broken are empty, and ranks loop equally often.
        loader = mrt.Loader(skipping, SIZE, seed=SEED, uneven="drop", **AHEAD)
        lengths, mine = [], []
        for batch in loader:
            assert batch["cls"].dtype == batch["png"].dtype == torch.int64
            lengths.append(len(batch["cls"]))
            mine += zip(batch["cls"].tolist(), batch["png"].tolist(), strict=True)
        assert len(lengths) == len(loader) == 27 // SIZE
        order = chain(*Batches(range(27), SIZE, 0, 1, seed=SEED, uneven="drop"))
        expected_labels = sorted((i // 3, i % 3) for i in order if i // 3 % 2 == 0)
        assert sorted(chain(*mr.all_gather_object(mine))) == expected_labels
        assert 0 in lengths

        def own(samples: list[Any]) -> list[Any]:
            return [each["cls"] for each in samples]

        mine = [label for batch in mrt.Loader(skipping, 27, collate_fn=own, **AHEAD) for label in batch]
        assert sorted(chain(*mr.all_gather_object(mine))) == [label for label, _ in left]

        fatal = Dataset(Path(folder) / "out", decode={"cls": odd})
        with pytest.raises(
            DataError, match=r"\.tar: [bdfh]/0\d+-\d\.cls \(sample \d+\): cannot be decoded: ValueError: odd"
        ):
            list(mrt.Loader(fatal, 27, **AHEAD))
        mr.barrier()


def loaders(kind: str, workers: int, batch_size: int = 3, **options: Any) -> tuple[Any, DataLoader[Any]]:
    """A DataLoader as other programs make it, and what gives it its order."""
    more: dict[str, Any] = {"persistent_workers": workers > 0} if options.pop("stay", False) else {}
    if kind == "sampler":
        sampler = mrt.EpochSampler(Squares(), batch_size, seed=SEED, **options)
        return sampler, DataLoader(Squares(), batch_size, sampler=sampler, num_workers=workers, **more)
    stream = mrt.EpochStream(Squares(), batch_size, seed=SEED, **options)
    return stream, DataLoader(stream, batch_size, num_workers=workers, **more)


KINDS = [(kind, workers) for kind in ("sampler", "stream") for workers in (0, 2)]


@worker
def dataloaders_of_others() -> None:
    """Each loop is the next epoch; together the ranks have each sample once, in the order of `Batches`."""
    for (kind, workers), stay in product(KINDS, (False, True)):
        order, loader = loaders(kind, workers, stay=stay)
        assert len(loader) == len(expected(3 * SIZE))
        for epoch in range(2):
            mine = [numbers(batch) for batch in loader]
            assert mine == expected(3 * SIZE, epoch), (kind, workers, stay)
            assert sorted(chain(*chain(*mr.all_gather_object(mine)))) == list(range(LENGTH))
        order.set_epoch(7)
        assert [numbers(batch) for batch in loader] == expected(3 * SIZE, 7)
        order.set_epoch(7)
        assert [numbers(batch) for batch in loader] == expected(3 * SIZE, 7)
        padded, loader = loaders(kind, workers, uneven="pad")
        assert len(padded) == 3 * len(loader) == sum(map(len, loader))


def late(number: int) -> None:
    if number == 1:
        time.sleep(2)  # the other one has begun by then, also on a machine with much to do


@worker
def dataloaders_of_others_whose_workers_are_late_or_others() -> None:
    """A loop is the next epoch for all of its workers, also for those that had no part in the loop before."""
    for seeds in (False, True):
        for stay in (False, True):
            stream = mrt.EpochStream(Squares(), 3, seed=SEED)
            loader = DataLoader(stream, 3, num_workers=2, worker_init_fn=late, persistent_workers=stay)
            for epoch in range(3):
                if seeds:
                    torch.manual_seed(5)
                if epoch == 1:  # left before its second worker has begun
                    assert numbers(next(iter(loader))) == expected(3 * SIZE, epoch)[0]
                else:
                    assert [numbers(batch) for batch in loader] == expected(3 * SIZE, epoch)
    stream = mrt.EpochStream(Squares(), 3, seed=SEED)
    for epoch, workers in enumerate((1, 2, 0, 2)):
        assert [numbers(batch) for batch in DataLoader(stream, 3, num_workers=workers)] == expected(3 * SIZE, epoch)
    running = iter(DataLoader(stream, 3, num_workers=2, worker_init_fn=late))
    first = numbers(next(running))
    stream.set_epoch(7)  # within the loop, as Lightning does
    assert [first, *map(numbers, running)] == expected(3 * SIZE, 4)
    assert [numbers(batch) for batch in DataLoader(stream, 3, num_workers=2)] == expected(3 * SIZE, 7)


@worker
def dataloaders_of_others_go_on_in_the_middle() -> None:
    for kind, workers in KINDS:
        order, loader = loaders(kind, workers)
        with pytest.raises(ValueError, match=re.escape("state_after(2): no loop has begun")):
            order.state_after(2)
        list(loader)
        taken = [numbers(batch) for batch in islice(loader, 2)]
        state = order.state_after(2)
        assert state == {"seed": SEED, "epoch": 1, "consumed": 6 * SIZE, "length": LENGTH}
        for stay in (False, True):
            resumed, other = loaders(kind, workers, stay=stay)
            resumed.load_state_dict(state)
            resumed.set_epoch(1)  # as frameworks do; it stays where it is
            assert taken + [numbers(batch) for batch in other] == expected(3 * SIZE, 1)
            assert resumed.state_after(0) == state
            assert [numbers(batch) for batch in other] == expected(3 * SIZE, 2)
            resumed.load_state_dict({**state, "consumed": LENGTH})
            assert [numbers(batch) for batch in other] == expected(3 * SIZE, 2)
            with pytest.raises(ValueError, match=re.escape("state_after(99): the loop that runs has")):
                resumed.state_after(99)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


@worker
def mistakes() -> None:
    for options, message in (
        ({"batch_size": 4}, "batch_size: a Loader has an order of its own"),
        ({"shuffle": True, "drop_last": True}, "shuffle, drop_last: a Loader has"),
    ):
        with pytest.raises(TypeError, match=message):
            mrt.Loader(Squares(), 8, **options)
    with pytest.raises(TypeError, match="a Stream has no length"):
        mrt.Loader(Stream(), 8)
    for kind in (mrt.EpochSampler, mrt.EpochStream):
        with pytest.raises(TypeError, match="a Stream has no length"):
            kind(Stream(), 8)
        with pytest.raises(ValueError, match="batch_size=0: a batch has 1 sample or more of each rank"):
            kind(Squares(), 0)
        if SIZE == 2:  # 59 samples of 58 at a time leave 1
            with pytest.raises(ValueError, match="a batch of 1 of the 59 samples leaves rank"):
                kind(Squares(), 29)
    with pytest.raises(ValueError, match="in_order=False"):
        mrt.Loader(Squares(), 8, in_order=False)
    with pytest.raises(ValueError, match=re.escape(f"weights=[1]: there are {SIZE} ranks")):
        mrt.Loader(Squares(), 8, weights=[1])
    short = rf"a batch of 1 of the 59 samples leaves ranks? 0.* of {SIZE} without one: choose uneven='drop' or 'pad'"
    with pytest.raises(ValueError, match=short):
        mrt.Loader(Squares(), 29)
    for uneven in ("drop", "pad"):
        assert len(mrt.Loader(Squares(), 29, uneven=uneven)) == 2 + (uneven == "pad")


@worker
def world_of_torch() -> None:
    mrt.init()
    group = dist.new_group([SIZE - 1, *range(SIZE - 1)])
    assert group is not None
    loader = mrt.Loader(Squares(), 8, seed=SEED)
    assert [numbers(batch) for batch in loader] == expected(8)
    pair = mr.new_group([SIZE - 1, 0])
    if pair is not None:
        inside = mrt.Loader(Squares(), 8, seed=SEED, group=pair)
        alone = Batches(range(LENGTH), 8, pair.rank, 2, seed=SEED)
        assert [numbers(batch) for batch in inside] == list(alone)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(sys.argv[1:])
