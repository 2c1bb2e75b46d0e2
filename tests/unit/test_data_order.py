"""The shuffle of an epoch: a permutation of any length, cut among any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from multiring.data.order import EpochOrder, Progress, cuts
from multiring.data.permutation import LONGEST, Permutation

WORLDS = (1, 2, 3, 5, 8)


def test_it_is_a_permutation_of_every_length() -> None:
    for length in [*range(2001), 4096, 65_537, 1_000_003]:
        shuffled = Permutation(length, seed=7, epoch=length)(np.arange(length))
        assert (np.sort(shuffled) == np.arange(length)).all(), length


@pytest.mark.parametrize("length", [(1 << 40) + 9, 3**39, LONGEST])
def test_samples_of_a_long_one_are_apart(length: int) -> None:
    positions = np.concatenate([np.arange(20_000), length - 20_000 + np.arange(20_000)])
    shuffled = Permutation(length, 1)(positions)
    assert len(np.unique(shuffled)) == len(positions)
    assert 0 <= shuffled.min() < length / 1000
    assert length - length / 1000 < shuffled.max() < length
    assert abs(shuffled.mean(dtype=float) / length - 0.5) < 0.01  # five times its deviation is 0.007


def test_where_a_sample_stands_is_fixed() -> None:
    """A state that was saved is good only as long as nobody changes these."""
    assert Permutation(10, seed=0, epoch=0)(np.arange(10)).tolist() == [8, 9, 4, 0, 6, 3, 7, 1, 2, 5]
    assert Permutation(14_197_122, seed=3, epoch=2)([0, 1, 14_197_121]).tolist() == [1097661, 14092265, 11846083]


@pytest.mark.parametrize("length", [2, 3, 5, 8, 16, 60])
def test_every_sample_is_as_often_at_every_position(length: int) -> None:
    """The chi-square of positions over many epochs, and how often neighbours stay neighbours, are those of shuffles."""
    epochs = max(300, 40 * length)
    counts = np.zeros((length, length))
    kept = 0
    for epoch in range(epochs):
        shuffled = Permutation(length, 3, epoch)(np.arange(length))
        counts[np.arange(length), shuffled] += 1
        kept += int((np.diff(shuffled) == 1).sum())
    expected = epochs / length
    freedom = (length - 1) ** 2  # as rows and columns have fixed sums, which also make the others' spread larger
    chi_square = ((counts - expected) ** 2 / expected).sum() * (length - 1) / length
    # Beyond these bounds is one shuffle in 3000, at most (B. Laurent and P. Massart, 2000, lemma 1).
    assert -2 * math.sqrt(8 * freedom) < chi_square - freedom < 2 * math.sqrt(8 * freedom) + 16
    neighbours = epochs * (length - 1) / length
    assert abs(kept - neighbours) < 4 * math.sqrt(neighbours)


def test_a_long_shuffle_is_even_and_without_trend() -> None:
    length = 200_000
    shuffled = Permutation(length, 11)(np.arange(length))
    table, *_ = np.histogram2d(np.arange(length), shuffled, bins=20)
    expected = length / 400
    assert abs(((table - expected) ** 2 / expected).sum() - 361) < 4 * math.sqrt(2 * 361)
    for lag in (1, 2, 447, 448):  # the digits of its network are 448 and 447
        correlation = np.corrcoef(shuffled[:-lag], shuffled[lag:])[0, 1]
        assert abs(correlation) < 4 / math.sqrt(length), lag
    assert (np.diff(shuffled) == 1).sum() <= 8  # 1 is expected


@pytest.mark.parametrize("other", [{"seed": 1}, {"epoch": 1}, {"seed": 1, "epoch": 1}], ids=str)
def test_seeds_and_epochs_are_unrelated(other: dict[str, int]) -> None:
    length = 100_000
    positions = np.arange(length)
    first, second = Permutation(length)(positions), Permutation(length, **other)(positions)
    assert (first == second).sum() <= 8
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / math.sqrt(length)


def test_a_position_that_is_none_is_refused() -> None:
    shuffle = Permutation(10)
    assert shuffle(np.zeros((2, 0), int)).shape == (2, 0)
    assert shuffle(3).shape == ()
    for position in (-1, 10):
        with pytest.raises(IndexError, match=f"position {position} of 10 samples"):
            shuffle([3, position])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"length": -1}, ValueError, "length=-1"),
        ({"length": LONGEST + 1}, ValueError, "2\\*\\*62"),
        ({"length": 1.5}, TypeError, "length=1.5"),
        ({"length": 3, "seed": 1 << 32}, ValueError, "seed=4294967296"),
        ({"length": 3, "epoch": -1}, ValueError, "epoch=-1"),
    ],
)
def test_wrong_arguments_of_a_permutation(arguments: dict[str, int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Permutation(**arguments)


def test_cuts_are_in_proportion_and_exact() -> None:
    assert cuts(12, [1, 2, 1]) == [0, 3, 9, 12]
    assert cuts(10, [1, 1, 1]) == [0, 3, 6, 10]
    assert cuts(7, [0, 1, 0.5]) == [0, 0, 4, 7]
    assert cuts(0, [1, 1]) == [0, 0, 0]
    thirds = [0.1] * 30  # their sum is not 3 in float64
    assert cuts(30, thirds) == list(range(31))
    for count in range(40):
        for weights in ([3, 1, 2], [1.5, 0.25, 9]):
            parts = np.diff(cuts(count, weights))
            assert parts.sum() == count
            assert (abs(parts - count * np.array(weights) / sum(weights)) < 1).all()


@pytest.mark.parametrize("weights", [[1, -1], [1, math.nan], [math.inf, 1], [True, 1], ["1", 1], [0, 0], []], ids=str)
def test_wrong_weights(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        cuts(5, weights)


def epoch_of(order: EpochOrder, worlds: Sequence[Sequence[float]], epoch: int = 0) -> list[list[int]]:
    """The batches of an epoch, the ranks' parts end to end; step i is made by the i-th of ``worlds``, in turn."""
    batches, consumed = [], 0
    while order.batches(consumed):
        weights = worlds[len(batches) % len(worlds)]
        parts = [order.batch(epoch, consumed, rank, weights).tolist() for rank in range(len(weights))]
        batches.append([sample for part in parts for sample in part])
        consumed = order.after(consumed)
    return batches


@pytest.mark.parametrize("uneven", ["keep", "pad", "drop"])
def test_the_order_is_the_same_for_every_world(uneven: str) -> None:
    order = EpochOrder(103, 10, seed=5, uneven=uneven)
    alone = epoch_of(order, [[1]], epoch=4)
    assert len(alone) == order.batches() == (10 if uneven == "drop" else 11)
    for world in WORLDS:
        assert epoch_of(order, [[1] * world], epoch=4) == alone
    assert epoch_of(order, [[2, 1, 1], [0.3, 7]], epoch=4) == alone
    assert epoch_of(order, [[1] * world for world in WORLDS], epoch=4) == alone  # a job that shrinks and grows
    flat = [sample for batch in alone for sample in batch]
    whole = Permutation(103, 5, 4)(np.arange(103)).tolist()
    assert flat == {"keep": whole, "pad": whole + whole[:7], "drop": whole[:100]}[uneven]


def test_a_rank_of_weight_2_takes_twice_as_many() -> None:
    order = EpochOrder(40, 8)
    assert [len(order.batch(0, 16, rank, [1, 2, 1])) for rank in range(3)] == [2, 4, 2]


def test_a_batch_that_is_larger_than_the_data_set() -> None:
    order = EpochOrder(3, 8, uneven="pad")
    whole = Permutation(3)(np.arange(3)).tolist()
    assert epoch_of(order, [[1, 1]]) == [[*whole, *whole, *whole[:2]]]
    assert epoch_of(EpochOrder(3, 8), [[1, 1]]) == [whole]
    assert epoch_of(EpochOrder(3, 8, uneven="drop"), [[1, 1]]) == []
    assert epoch_of(EpochOrder(0, 8, uneven="pad"), [[1, 1]]) == []


def test_batches_that_leave_ranks_without_samples_are_known_before() -> None:
    assert EpochOrder(103, 10).without_samples(0, [1] * 3) is None
    assert EpochOrder(103, 10).without_samples(0, [1] * 4) == (3, [0])
    assert EpochOrder(103, 10, uneven="drop").without_samples(0, [1] * 4) is None
    assert EpochOrder(103, 10, uneven="pad").without_samples(100, [1] * 4) is None
    assert EpochOrder(103, 10).without_samples(103, [1] * 4) is None
    assert EpochOrder(100, 10).without_samples(0, [1, 0, 1]) == (10, [1])
    assert EpochOrder(100, 10).without_samples(5, [1] * 6) == (5, [0])


def taken(progress: Progress, batches: int) -> list[int]:
    samples = []
    for _ in range(batches):
        progress.begin()
        samples += progress.order.batch(progress.epoch, progress.consumed).tolist()
        progress.advance()
    return samples


def test_a_job_goes_on_where_its_state_was_taken_with_another_batch() -> None:
    progress = Progress(EpochOrder(50, 8, seed=9))
    first = taken(progress, 3)
    state = progress.state_dict()
    assert state == {"seed": 9, "epoch": 0, "consumed": 24, "length": 50}
    other = Progress(EpochOrder(50, 13))
    other.load_state_dict(state)
    assert first + taken(other, 2) == Permutation(50, 9)(np.arange(50)).tolist()
    assert taken(other, 4)[:50] == Permutation(50, 9, 1)(np.arange(50)).tolist()
    other.set_epoch(1)
    assert other.consumed == 50
    other.set_epoch(7)
    assert (other.epoch, other.consumed) == (7, 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"length": 51}, ValueError, "of a data set of 51 samples, and this one has 50"),
        ({"consumed": 51}, ValueError, "consumed=51"),
        ({"consumed": "3"}, TypeError, "consumed='3'"),
        ({"epoch": -1}, ValueError, "epoch=-1"),
    ],
)
def test_a_wrong_state_changes_nothing(change: dict[str, int], error: type[Exception], message: str) -> None:
    progress = Progress(EpochOrder(50, 8, seed=9))
    taken(progress, 2)
    before = progress.state_dict()
    with pytest.raises(error, match=message):
        progress.load_state_dict({**before, "seed": 3, **change})
    with pytest.raises(ValueError, match="no consumed"):
        progress.load_state_dict({name: value for name, value in before.items() if name != "consumed"})
    assert progress.state_dict() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 0), "global_batch=0"),
        ((10, 2, 0, "stop"), "uneven='stop': known are keep, pad, drop"),
        ((-1, 2), "length"),
    ],
)
def test_wrong_arguments_of_an_order(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EpochOrder(*arguments)
