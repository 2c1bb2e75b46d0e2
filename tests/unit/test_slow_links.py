"""The link between hosts that is named as slow, from what its ranks tell (``csrc/slow_links.hpp``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from compiling import compiled, said

SOURCES = ("slow_links", "errors", "wait", "system_files")
CARD, SLOW = 50e6, 4.5e6

Told = tuple[float, ...]
"""Account of a rank: the fraction of time in calls, bytes a second sent and received, and (peer, rate, busy) of its
connections."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled("slow_links", SOURCES, tmp_path_factory.mktemp("slow_links"))


def hosts(names: str, ranks: int = 1, racks: Sequence[tuple[float, str]] = ()) -> list[str]:
    """Hosts of so many ranks with a card of 50 MB/s each, in racks with an uplink."""
    on = {name: [str(ranks * i + k) for k in range(ranks)] for i, name in enumerate(names)}
    links = [f"link {CARD} {CARD} {' '.join(of)}" for of in on.values()]
    links += [f"link {up} {up} {' '.join(rank for name in rack for rank in on[name])}" for up, rack in racks]
    return [*(f"host {name} {ranks}" for name in names), *links]


def told(ranks: Sequence[Told]) -> list[str]:
    return [f"rank {rank} {' '.join(f'{value:.9g}' for value in values)}" for rank, values in enumerate(ranks)]


def ring(slow: Sequence[int], blocked: float = 0.9, size: int = 4, rate: float = SLOW) -> list[str]:
    """A ring in which the links that leave these ranks carry ``rate``; the others are busy for a tenth of the time."""
    busy = [0.75 if rank in slow else 0.1 for rank in range(size)]
    return told([(blocked, rate, rate, (rank + 1) % size, rate, busy[rank]) for rank in range(size)])


WINDOWS = ["window 0"] * 3
IN_TIME = [*["none"] * 2]


def test_the_one_link_that_is_busy_at_a_low_rate_is_named_until_it_is_not(program: Path) -> None:
    fast = told([(0.9, 45e6, 45e6, (rank + 1) % 4, 45e6, 0.95) for rank in range(4)])
    lines = said(program, [*hosts("abcd"), *fast, *WINDOWS, *ring([2]), *WINDOWS, "window 0", *fast, *WINDOWS])
    assert lines == [
        *["none"] * 5,
        "the link from host c to host d carries 6 MB/s, 12 % of the 50 MB/s that the plan counts on, for 5 s now",
        "slow c d 6000000 50000000 4.5",
        "slow c d 6000000 50000000 6.0",
        "slow c d 6000000 50000000 6.0",
        "the link from host c to host d no longer keeps the ranks waiting",
        "none",
        "none",
    ]


def test_the_time_goes_on_where_one_window_tells_another_story(program: Path) -> None:
    lines = said(program, [*hosts("abcd"), *ring([2]), *WINDOWS, *ring([0]), "window 0", *ring([2]), *WINDOWS])
    assert lines[3:] == [f"slow c d 6000000 50000000 {seconds}" for seconds in (4.5, 4.5, 6.0, 7.5, 9.0)]


@pytest.mark.parametrize(
    ("ranks", "name", "words"),
    [
        ([1, 2], "c c 4500000", "the links of host c carry 4.5 MB/s, 9 %"),
        ([0, 2], "- - 6000000", "several links between the hosts carry 6 MB/s, 12 %"),
    ],
)
def test_links_with_a_host_in_common_are_named_by_it(program: Path, ranks: list[int], name: str, words: str) -> None:
    *before, line, slow = said(program, [*hosts("abcd"), *ring(ranks), *WINDOWS])
    assert before == IN_TIME
    assert line.startswith(words)
    assert slow == (f"slow {name} 50000000 4.5")


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        (
            [(0.9, 3e6, 0, 2, 1.5e6, 0.75, 1, 1.5e6, 0.5), (0.9, 0, 1.5e6), (0.9, 0, 1.5e6)],
            "slow a - 3000000 50000000 4.5",
        ),
        (
            [(0.9, 1.5e6, 0, 2, 1.5e6, 0.75), (0.9, 1.5e6, 0, 2, 1.5e6, 0.5), (0.9, 0, 3e6)],
            "slow - c 3000000 50000000 4.5",
        ),
    ],
)
def test_links_that_all_leave_or_reach_a_host_are_named_by_it(program: Path, ranks: list[Told], name: str) -> None:
    assert said(program, [*hosts("abc"), *told(ranks), *WINDOWS])[-1] == name


def test_both_ways_between_two_hosts_are_one_name(program: Path) -> None:
    name = "the links between host a and host b"
    lines = said(program, [*hosts("ab"), *ring([0, 1], size=2), *WINDOWS, *ring([1], size=2), "window 0"])
    assert lines[-3].startswith(f"{name} carry 6 MB/s")
    assert lines[-2:] == [f"slow a b 6000000 50000000 {seconds} both ways: {name}" for seconds in (4.5, 6.0)]


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ((1.0, 0.3), "slow a b 6000000 50000000 4.5"),
        ((0.3, 1.0), "slow b a 6000000 50000000 4.5"),
        ((0.7, 0.6), "slow a b 6000000 50000000 4.5 both ways: the links between host a and host b"),
    ],
)
def test_a_way_whose_data_come_in_bursts_beside_a_slow_one_is_not_named(
    program: Path, parts: tuple[float, float], name: str
) -> None:
    """Both are busy all the time, as acknowledgements of the one wait behind the data of the other."""
    heard = [f"heard {1 - rank} {rank} {part}" for rank, part in enumerate(parts)]
    assert said(program, [*hosts("ab"), *ring([0, 1], size=2), *heard, *WINDOWS])[-1] == name


def test_a_way_on_to_a_third_host_is_not_named_for_its_late_acknowledgements(program: Path) -> None:
    """They come back to host b by the slow way to it, on which rank 0 sends."""
    heard = ["heard 1 0 0.8", "heard 2 1 0.2"]
    assert said(program, [*hosts("abcd"), *ring([0, 1]), *heard, *WINDOWS])[-1] == "slow a b 6000000 50000000 4.5"


def test_a_rank_that_hears_others_for_longer_may_hear_one_as_long(program: Path) -> None:
    """A rank tells of the two that it hears longest: rank 1 of others than rank 0, whose data it hears as long."""
    heard = ["heard 1 2 1.0", "heard 1 3 1.0", "heard 0 1 0.2"]
    ranks = [(0.9, SLOW, SLOW, peer, SLOW, busy) for peer, busy in ((1, 0.75), (0, 0.75), (3, 0.1), (2, 0.1))]
    assert said(program, [*hosts("abcd"), *told(ranks), *heard, *WINDOWS])[-1] == "slow a b 6000000 50000000 4.5"


def test_what_several_connections_carry_together_counts(program: Path) -> None:
    """Ranks of a host, and connections of a rank, share a card: each has a part of the rate, and none is slow."""
    shared: list[Told] = [
        (0.9, 24e6, 24e6, 2, 12e6, 0.95, 4, 12e6, 0.95),
        (0.9, 24e6, 24e6, 3, 12e6, 0.95, 5, 12e6, 0.95),
        *[(0.9, 16e6, 16e6, rank, 16e6, 0.95) for rank in (4, 5, 0, 1)],
    ]
    assert said(program, [*hosts("abc", 2), *told(shared), *WINDOWS]) == ["none"] * 3


@pytest.mark.parametrize(("rate", "name"), [(9e6, "none"), (1.5e6, "slow - - 2000000 20000000 4.5")])
def test_an_uplink_that_carries_what_it_can_is_no_slow_link(program: Path, rate: float, name: str) -> None:
    """Each card carries a fifth of its rate at most."""
    racks = ((20e6, "ab"), (20e6, "cd"))
    ranks = [(0.9, rate, rate, (rank + 2) % 4, rate, 0.75) for rank in range(4)]
    assert said(program, [*hosts("abcd", racks=racks), *told(ranks), *WINDOWS])[-1] == name


@pytest.mark.parametrize(
    "words",
    [
        ring([2], blocked=0.1),  # it keeps nobody
        ring([], rate=40e6),  # nobody is slow
        ring([0, 1, 2, 3], rate=30e6),  # all carry more than half
        told([(0.9, 1e5, 1e5)] * 4),  # calls that are too small for a rate
    ],
)
def test_nothing_is_named(program: Path, words: list[str]) -> None:
    assert said(program, [*hosts("abcd"), *words, *WINDOWS * 2]) == ["none"] * 6


def test_no_link_is_named_while_a_rank_is_slow(program: Path) -> None:
    lines = said(program, [*hosts("abcd"), *ring([2]), *["window 1"] * 4, "window 0"])
    assert lines[:4] == ["none"] * 4
    assert lines[-1].startswith("slow c d")


def test_a_rank_tells_of_the_connections_that_were_busy_with_much(program: Path) -> None:
    """A connection with less than 64 KB in flight at most looks waits for latency and not for the rate."""
    words = hosts("abcd")
    flows = ((1, 5e6, 0.9, 200_000, 0.4), (2, 2e5, 1.0, 4096, 0.6), (3, 40e6, 0.2, 500_000, 0.2))
    for look in range(8):
        for peer, rate, busy, held, heard in flows:
            seconds = 0.25 * look
            counts = f"{rate * seconds:.0f} {2 * rate * seconds:.0f} {busy * seconds} {held} {heard * seconds}"
            words.append(f"flow {peer} {counts}")
        words.append("look")
    lines = said(program, words)
    assert lines[:6] == ["0 0 -1 0 0.00 -1 0 0.00 -1 0.00 -1 0.00"] * 6
    assert lines[6:] == ["45200000 90400000 1 5000000 0.90 3 40000000 0.20 2 0.60 1 0.40"] * 2
