"""The ranks that are named as slow, from what all tell of their time (``csrc/slow_ranks.hpp``)."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from compiling import compiled, said

SOURCES = ("slow_ranks", "errors", "wait", "system_files")
COMPUTES, HAS_NO_CORE, SLEEPS = 0, 1, 2
IN_TIME = (0.5, 0.4, 0.0)
"""Parts of the time in calls, on a core between calls, and ready to run without one."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("slow_ranks", SOURCES, tmp_path_factory.mktemp("slow_ranks"))


def late(ranks: Mapping[int, tuple[float, float, float]], size: int = 4) -> list[str]:
    """Lines for all ranks: those in ``ranks`` do what it says, the others are in time."""
    return [f"rank {rank} {' '.join(map(str, ranks.get(rank, IN_TIME)))}" for rank in range(size)]


def asleep(share: float) -> tuple[float, float, float]:
    """A rank for which the others wait that share of the time, as it sleeps."""
    return (round(0.5 - share, 3), 0.4, 0.0)


HOSTS = ["host a 2", "host b 2"]
WINDOWS = ["window"] * 3


def test_a_rank_is_named_after_three_windows_until_three_without_it(program: Path) -> None:
    lines = said(program, [*HOSTS, *late({2: asleep(0.3)}), *WINDOWS, "window", *late({}), *WINDOWS, "window"])
    assert lines == [
        *["none"] * 2,
        "rank 2 (host b) keeps the others waiting for 30 % of the time, for 30 steps (3 s) now: between collectives it "
        "sleeps, or waits for data, a lock or another process",
        f"slow 2 b 0.30 3.0 30 {SLEEPS}",
        f"slow 2 b 0.30 4.0 40 {SLEEPS}",
        f"slow 2 b 0.30 4.0 40 {SLEEPS}",
        f"slow 2 b 0.30 4.0 40 {SLEEPS}",
        "rank 2 (host b) no longer keeps the others waiting",
        "none",
        "none",
    ]


@pytest.mark.parametrize(
    ("steps", "window", "windows"),
    [(4, 1, 3), (2, 2, 3), (1, 4, 3), (1, 2, 5)],
    ids=["of 250 ms", "of 500 ms", "of 1 s", "of 1 s, where a step has many calls"],
)
def test_a_rank_is_named_after_ten_steps_and_before_twenty(
    program: Path, steps: int, window: int, windows: int
) -> None:
    parts = [*HOSTS, *late({2: asleep(0.3)}), f"steps {steps}", "calls 2"]
    lines = said(program, [*parts, *[f"window {window}"] * windows])
    assert lines[: windows - 1] == ["none"] * (windows - 1)
    count, seconds = steps * window * windows, window * windows
    assert 10 <= count < 20
    assert lines[-1] == f"slow 2 b 0.30 {seconds:.1f} {count} {SLEEPS}"


def without_core(share: float) -> tuple[float, float, float]:
    """The same, as others have its core."""
    return (round(0.5 - share, 3), 0.4, share)


@pytest.mark.parametrize(
    ("late_by", "share", "windows", "reason"),
    [
        (asleep, 0.11, 5, SLEEPS),
        (asleep, 0.13, 4, SLEEPS),
        (asleep, 0.15, 3, SLEEPS),
        (asleep, 0.3, 3, SLEEPS),
        (without_core, 0.15, 7, HAS_NO_CORE),
        (without_core, 0.3, 4, HAS_NO_CORE),
        (without_core, 0.4, 3, HAS_NO_CORE),
    ],
)
def test_the_less_it_is_late_the_longer_it_takes(
    program: Path, late_by: Callable[[float], tuple[float, float, float]], share: float, windows: int, reason: int
) -> None:
    lines = said(program, [*HOSTS, *late({2: late_by(share)}), *["window"] * windows])
    assert lines[: windows - 1] == ["none"] * (windows - 1)
    assert lines[-1] == f"slow 2 b {share:.2f} {windows}.0 {10 * windows} {reason}"


def test_a_rank_that_is_late_now_and_then_is_named_after_three_long_windows(program: Path) -> None:
    saves = [*late({0: (0.0, 0.4, 0.0)}), "window", *late({}), *["window"] * 2]
    lines = said(program, [*HOSTS, *saves * 11, *late({}), *["window"] * 40, *late({0: asleep(0.3)}), *WINDOWS, "ends"])
    (named_at, named), (cleared_at, cleared), (again_at, _) = [
        (number, line) for number, line in enumerate(lines) if line.startswith("rank 0")
    ]
    assert named_at == 29
    assert named.startswith("rank 0 (host a) keeps the others waiting for 17 % of the time, for 300 steps (30 s) now: ")
    assert lines[named_at + 1] == f"slow 0 a 0.17 30.0 300 {SLEEPS}"
    assert cleared == "rank 0 (host a) no longer keeps the others waiting"
    assert cleared_at == 60  # after as many seconds, one of which has two lines
    assert lines[cleared_at + 1 : again_at] == ["none"] * (again_at - cleared_at - 1)
    assert [line.split()[-1] for line in lines if line.startswith("was")] == [str(SLEEPS)] * 2


def test_its_seconds_go_on_where_another_is_late_for_a_window(program: Path) -> None:
    slow, beside = late({2: asleep(0.3)}), late({1: asleep(0.2), 2: asleep(0.3)})
    other = late({1: asleep(0.3)})
    words = [*HOSTS, *slow, *WINDOWS, *beside, "window", *slow, *WINDOWS, *other, "window", *slow, *WINDOWS, "ends"]
    lines = said(program, words)
    assert not any("no longer" in line for line in lines)
    assert lines[-2:] == [f"slow 2 b 0.27 11.0 110 {SLEEPS}", f"was 2 b 0.27 11.0 110 {SLEEPS}"]


def test_one_that_is_late_beside_it_later_is_named_with_it(program: Path) -> None:
    """Seconds of both are told then; a window in which it is in time begins them anew."""
    one, both = late({2: asleep(0.3)}), late({1: asleep(0.25), 2: asleep(0.3)})
    words = [*HOSTS, *one, *WINDOWS, "window", *both, "window", *one, "window", *both, *WINDOWS, *one, "window", "ends"]
    lines = said(program, words)
    told = [line for line in lines if " the others waiting " in line]
    assert [line.partition(":")[0] for line in told] == [
        "rank 2 (host b) keeps the others waiting for 30 % of the time, for 30 steps (3 s) now",
        "rank 1 (host a) and rank 2 (host b) keep the others waiting for 30 % of the time, for 30 steps (3 s) now",
    ]
    assert lines[-3:] == [
        f"slow 1 2 b 0.30 4.0 40 {SLEEPS}",
        f"was 2 b 0.30 9.0 90 {SLEEPS}",
        f"was 1 2 b 0.30 4.0 40 {SLEEPS}",
    ]


def told(lines: list[str]) -> list[str]:
    """The parts of lines about ranks that keep the others waiting, without how long and why."""
    return [line.partition(" the others waiting")[0] for line in lines if " the others waiting" in line]


def test_one_that_was_named_beside_another_is_named_no_longer_when_it_is_in_time(program: Path) -> None:
    both, one = late({1: asleep(0.3), 2: asleep(0.3)}), late({2: asleep(0.3)})
    lines = said(program, [*HOSTS, *both, *WINDOWS, *one, *WINDOWS, *WINDOWS, *late({}), *WINDOWS, "ends"])
    assert told(lines) == [
        "rank 1 (host a) and rank 2 (host b) keep",
        "rank 1 (host a) no longer keeps",
        "rank 2 (host b) no longer keeps",
    ]
    assert [line.split()[1:3] for line in lines if line.startswith("slow")] == [["1", "2"]] * 3 + [["2", "b"]] * 6
    entries = [line.split() for line in lines if line.startswith("was")]
    assert [entry[:-5] for entry in entries] == [["was", "1", "2"], ["was", "2"]]
    assert [entry[-4:-1] for entry in entries] == [["0.30", "6.0", "60"], ["0.30", "3.0", "30"]]  # none of it twice


def test_one_that_is_late_where_those_that_are_named_are_in_time_is_named_beside_them(program: Path) -> None:
    """None of them vanishes without a word."""
    lines = said(program, [*HOSTS, *late({2: asleep(0.3)}), *WINDOWS, *late({1: asleep(0.3)}), *WINDOWS, "window"])
    names = told(lines)
    assert names[0] == "rank 2 (host b) keeps"
    assert sorted(names[1:]) == ["rank 1 (host a) keeps", "rank 2 (host b) no longer keeps"]
    swapped = [*late({1: asleep(0.3)}), *WINDOWS[:2], *late({1: asleep(0.3), 2: asleep(0.3)}), "window"]
    lines = said(program, [*HOSTS, *late({2: asleep(0.3)}), *WINDOWS, *swapped, *late({}), *WINDOWS])
    assert told(lines) == [
        "rank 2 (host b) keeps",
        "rank 1 (host a) and rank 2 (host b) keep",
        "rank 1 (host a) and rank 2 (host b) no longer keep",
    ]


@pytest.mark.parametrize("often", [0.3, 0.45])
def test_one_that_is_late_now_and_then_is_named_beside_one_that_always_is(program: Path, often: float) -> None:
    """Each until it is in time: by short windows the one, by long ones the other."""
    always = {2: asleep(often)}
    saves = [*late({**always, 0: (0.0, 0.4, 0.0)}), "window", *late(always), "window"]
    alone = [*late({0: (0.0, 0.4, 0.0)}), "window", *late({}), "window"]
    lines = said(program, [*HOSTS, *saves * 40, *alone * 5, *late({}), *["window"] * 50])
    assert told(lines) == [
        "rank 2 (host b) keeps",
        "rank 0 (host a) and rank 2 (host b) keep",
        "rank 2 (host b) no longer keeps",
        "rank 0 (host a) no longer keeps",
    ]
    cleared = [number for number, line in enumerate(lines) if "no longer" in line]
    assert 80 <= cleared[0] <= 88  # three short windows
    assert 110 <= cleared[1] <= 130  # three long ones
    assert lines[-1] == "none"


def test_the_lateness_of_one_that_is_named_names_no_other(program: Path) -> None:
    """Rank 1 alone has waited 0.33 s in three windows, which is too little."""
    one, both = late({2: asleep(0.2)}), late({1: asleep(0.11), 2: asleep(0.2)})
    lines = said(program, [*HOSTS, *one, *WINDOWS, *both, *WINDOWS, "ends"])
    assert [line.partition(":")[0] for line in lines if " the others waiting " in line] == [
        "rank 2 (host b) keeps the others waiting for 20 % of the time, for 30 steps (3 s) now"
    ]
    assert lines[-1] == f"was 2 b 0.20 6.0 60 {SLEEPS}"


def test_one_that_is_a_little_late_beside_it_is_not_named_with_it(program: Path) -> None:
    *_, line, slow = said(program, [*HOSTS, *late({2: asleep(0.4), 3: asleep(0.15)}), *WINDOWS])
    assert line.startswith("rank 2 (host b) keeps the others waiting for 40 %")
    assert slow == f"slow 2 b 0.40 3.0 30 {SLEEPS}"


@pytest.mark.parametrize(
    ("ranks", "name", "named"),
    [
        ([2, 3], "host b (ranks 2, 3) keeps the others waiting for 40 %", "2 3 b"),
        ([0, 3], "rank 0 (host a) and rank 3 (host b) keep the others waiting for 40 %", "0 3 b"),
        ([4, 6], "ranks 4, 6 (host c) keep the others waiting for 40 %", "4 6 c"),
    ],
    ids=["all of a host", "of two hosts", "some of a host"],
)
def test_several_that_are_late_alike_are_named_together(program: Path, ranks: list[int], name: str, named: str) -> None:
    hosts = ["host a 2", "host b 2", "host c 3"]
    parts = {ranks[0]: asleep(0.3), ranks[1]: asleep(0.4)}
    *_, line, slow = said(program, [*hosts, *late(parts, 7), *WINDOWS])
    assert line.startswith(name)
    assert slow == f"slow {named} 0.40 3.0 30 {SLEEPS}"


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((0.1, 0.8, 0.0), COMPUTES),
        ((0.1, 0.4, 0.3), HAS_NO_CORE),
        ((0.1, 0.5, 0.05), SLEEPS),
        ((0.1, 0.56, 0.13), COMPUTES),  # 0.16, 0.13 and 0.11 of 0.4
        ((0.1, 0.5, 0.16), HAS_NO_CORE),
        ((0.1, 0.5, 0.14), SLEEPS),
    ],
)
def test_the_reason_is_what_takes_most_of_the_time(
    program: Path, parts: tuple[float, float, float], reason: int
) -> None:
    assert said(program, [*HOSTS, *late({1: parts}), *WINDOWS])[-1] == f"slow 1 a 0.40 3.0 30 {reason}"


@pytest.mark.parametrize(
    ("others", "parts", "reason"),
    [
        ((0.4, 0.3, 0.3), (0.1, 0.3, 0.3), SLEEPS),
        ((0.4, 0.3, 0.3), (0.1, 0.3, 0.58), HAS_NO_CORE),
        ((0.4, 0.6, 0.5), (0.1, 0.6, 0.3), HAS_NO_CORE),
    ],
    ids=["all lack a core alike", "one lacks it more", "the others lack it in calls alone"],
)
def test_what_counts_is_by_how_much_longer_it_lacks_a_core_than_the_others(
    program: Path, others: tuple[float, float, float], parts: tuple[float, float, float], reason: int
) -> None:
    lines = said(program, [*HOSTS, *late({0: others, 1: parts, 2: others, 3: others}), *["window"] * 4])
    assert lines[-1] == f"slow 1 a 0.30 4.0 40 {reason}"


@pytest.mark.parametrize(
    ("parts", "reason"), [((0.15, 0.2, 0.65), HAS_NO_CORE), ((0.15, 0.2, 0.2), SLEEPS)], ids=["no core", "asleep"]
)
def test_a_rank_that_never_slept_does_not_sleep_where_the_others_differ(
    program: Path, parts: tuple[float, float, float], reason: int
) -> None:
    others = {0: (0.55, 0.25, 0.2), 2: (0.35, 0.2, 0.45), 3: (0.2, 0.2, 0.6)}  # busy cores: nobody ever sleeps
    assert said(program, [*HOSTS, *late({1: parts, **others}), *["window"] * 5])[-1][-1] == str(reason)


def test_the_reason_is_the_one_for_which_the_others_waited_longest(program: Path) -> None:
    slept, computed = late({1: (0.1, 0.4, 0.0)}), late({1: (0.1, 0.8, 0.0)})
    little = late({1: (0.35, 0.55, 0.0)})
    lines = said(program, [*HOSTS, *little, "window", *slept, *WINDOWS[:2], *computed, "window", *slept, "window"])
    assert [line[-1] for line in lines if line.startswith("slow")] == [str(SLEEPS)] * 3


def test_waits_for_a_core_that_are_told_when_they_are_over_count_for_the_windows_before(program: Path) -> None:
    untold, told = late({1: (0.1, 0.4, 0.0)}), late({1: (0.1, 0.4, 0.9)})
    lines = said(program, [*HOSTS, *untold, *WINDOWS[:2], *told, "window", *untold, *WINDOWS[:2]])
    assert [line[-1] for line in lines if line.startswith("slow")] == [str(HAS_NO_CORE)] * 2 + [str(SLEEPS)]


@pytest.mark.parametrize(
    "ranks", [{}, {2: asleep(0.09)}, {0: asleep(0.3), 1: asleep(0.3), 2: asleep(0.3)}], ids=["none", "little", "most"]
)
def test_nobody_is_named(program: Path, ranks: dict[int, tuple[float, float, float]]) -> None:
    assert said(program, [*HOSTS, *late(ranks), *WINDOWS, *WINDOWS]) == ["none"] * 6


def irregular(size: int, mean: float, seconds: float, seed: int, late: Mapping[int, float]) -> list[str]:
    """Lines for steps that take each rank a time by chance, as batches of texts do; ``late`` ranks take longer."""
    draw = random.Random(seed)
    lines, passed = [f"host a {size}"], 0.0
    while passed < seconds:
        steps, window, between = 0, 0.0, [0.0] * size
        while window < 1 or steps < 4:
            times = [draw.lognormvariate(0, 0.5) * mean + late.get(rank, 0.0) for rank in range(size)]
            window += max(times)
            steps += 1
            between = [sum(pair) for pair in zip(between, times, strict=True)]
        for rank, own in enumerate(between):
            lines.append(f"rank {rank} {1 - own / window:.6f} {own / window:.6f} 0")
        lines += [f"steps {steps / window}", f"window {window:.6f}"]
        passed += window
    return lines


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("mean", [0.05, 0.25])
def test_ranks_that_are_late_by_turns_are_seldom_named(program: Path, size: int, mean: float) -> None:
    jobs = [said(program, irregular(size, mean, 300, seed, {})) for seed in range(6)]
    named = [line for lines in jobs for line in lines if " the others waiting for " in line]
    assert len(named) <= 4  # in half an hour; by three late windows alone it would be 12 to 37


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("mean", [0.05, 0.25])
def test_one_that_is_late_in_each_of_irregular_steps_is_named(program: Path, size: int, mean: float) -> None:
    steps = []
    for seed in range(5):
        lines = said(program, irregular(size, mean, 60, seed, {1: 0.2}))
        named = next(line.split() for line in lines if line.startswith("slow"))
        assert named[:3] == ["slow", "1", "a"]
        steps.append(int(named[-2]))
    assert sorted(steps)[2] <= (20 if mean == 0.05 else 40)  # which take 5 s, and 20 s
