"""The batches of ranks, played one after the other in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from multiring.data import Batches

WORLDS = (1, 2, 3, 5, 8)


class Squares:
    """A data set whose sample i is (i, i * i + 1); the numbers in ``broken`` cannot be read."""

    def __init__(self, length: int, broken: Sequence[int] = ()) -> None:
        self._length = length
        self.broken = set(broken)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, sample: int) -> tuple[int, int]:
        if sample in self.broken:
            raise OSError(f"sample {sample}")
        return sample, sample * sample + 1


def world(dataset: Any, global_batch: int, size: int, **options: Any) -> list[Batches]:
    return [Batches(dataset, global_batch, rank, size, **options) for rank in range(size)]


def epoch_of(ranks: list[Batches]) -> list[list[Any]]:
    """The global batches of an epoch."""
    return [[sample for part in parts for sample in part] for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("uneven", ["keep", "pad", "drop"])
def test_every_world_takes_the_same_samples_in_the_same_steps(uneven: str) -> None:
    (alone,) = world(Squares(53), 6, 1, seed=4, uneven=uneven)
    epochs = [list(alone), list(alone)]
    assert epochs[0] != epochs[1]
    assert len(epochs[0]) == len(alone) == (8 if uneven == "drop" else 9)
    flat = [sample for batch in epochs[0] for sample in batch]
    assert all(square == i * i + 1 for i, square in flat)
    assert sorted(set(flat)) == sorted(flat) or uneven == "pad"
    assert len(set(flat)) == (48 if uneven == "drop" else 53)
    for size in WORLDS:
        ranks = world(Squares(53), 6, size, seed=4, uneven=uneven)
        assert [epoch_of(ranks), epoch_of(ranks)] == epochs
        assert all(rank.state_dict() == ranks[0].state_dict() for rank in ranks)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 8), (5, 2)])
def test_others_go_on_in_the_middle_of_an_epoch(before: int, after: int) -> None:
    (alone,) = world(Squares(60), 7, 1, seed=8)
    expected = [sample for batch in alone for sample in batch]
    first, had = world(Squares(60), 7, before, seed=8), []
    loops = [iter(rank) for rank in first]
    for _ in range(4):
        had += [sample for loop in loops for sample in next(loop)]
    state = first[-1].state_dict()
    assert state == {"seed": 8, "epoch": 0, "consumed": 28, "length": 60}
    second = world(Squares(60), 5, after)
    for rank in second:
        rank.load_state_dict(state)
    rest = epoch_of(second)
    assert [len(batch) for batch in rest] == [5] * 6 + [2]
    assert had + [sample for batch in rest for sample in batch] == expected
    assert {rank.epoch for rank in second} == {1}


def test_a_world_that_changes_within_a_loop() -> None:
    (alone,) = world(Squares(40), 8, 1)
    expected = list(alone)
    ranks = world(Squares(40), 8, 3)
    loops = [iter(rank) for rank in ranks]
    seen = [[sample for loop in loops for sample in next(loop)] for _ in range(2)]
    ranks[0].set_world(1, 2)  # rank 1 was lost, and the others have other numbers
    ranks[2].set_world(0, 2, [1, 1])
    seen += [[*next(loops[2]), *next(loops[0])] for _ in range(3)]
    assert seen == expected


def test_unequal_ranks() -> None:
    ranks = world(Squares(80), 8, 3, weights=[1, 2, 1])
    assert [len(next(iter(rank))) for rank in ranks] == [2, 4, 2]
    (alone,) = world(Squares(80), 8, 1)
    assert epoch_of(world(Squares(80), 8, 3, weights=[0, 2.5, 1])) == list(alone)


def test_a_loop_that_was_left_goes_on() -> None:
    dataset = Squares(20)
    (alone,) = world(dataset, 4, 1)
    expected = [sample for batch in alone for sample in batch]
    (rank,) = world(dataset, 4, 1)
    for batch in rank:
        seen = batch
        break
    dataset.broken = {expected[9][0]}  # a sample of the third batch
    loop = iter(rank)
    seen += next(loop)
    with pytest.raises(OSError, match=f"sample {expected[9][0]}"):
        next(loop)
    dataset.broken = set()
    for batch in rank:
        seen += batch
    assert seen == expected
    last = list(rank)
    assert (rank.epoch, len(last)) == (2, 5)


def test_a_state_at_the_end_of_an_epoch_begins_the_next_one() -> None:
    (first, second) = (world(Squares(20), 4, 1)[0] for _ in range(2))
    for _, number in zip(first, range(5), strict=False):
        if number == 4:
            second.load_state_dict(first.state_dict())
            break
    assert second.state_dict()["consumed"] == 20
    assert len(list(second)) == 5
    assert second.epoch == 2


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((8, 3, 3), {}, "rank=3 and size=3: ranks are 0 to 2"),
        ((8, 0, 3), {"weights": [1, 2]}, r"weights=\[1, 2\]: there are 3 ranks"),
        ((8, 0, 2), {"weights": [0, 0]}, "at least one rank has a weight above 0"),
        ((0, 0, 1), {}, "global_batch=0"),
    ],
)
def test_wrong_arguments(arguments: tuple[int, int, int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batches(Squares(10), *arguments, **options)


def test_an_empty_data_set_has_empty_epochs() -> None:
    (rank,) = world(Squares(0), 4, 1)
    assert list(rank) == list(rank) == []
    assert rank.epoch == 2
