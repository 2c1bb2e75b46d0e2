"""Axes that fit their values, labels that keep their distance, titles that say the answer."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring.bench import curves
from multiring.bench.report import SizeRow
from multiring.pages.pictures import apart, best_and_worst, round_ticks

values = st.integers(-(10**9), 10**9).map(lambda number: number / 1e6)


@given(values, values)
def test_ticks_fit_the_values(one: float, other: float) -> None:
    low, high = sorted((one, other))
    ticks = round_ticks(low, high)
    step = ticks[1] - ticks[0]
    assert 2 <= len(ticks) <= 8
    assert ticks[0] - 1e-6 * step <= low <= high <= ticks[-1] + 1e-6 * step
    if high - low > 1e-5 * max(abs(low), abs(high)):
        assert high - low >= (ticks[-1] - ticks[0]) - 2.001 * step  # at most a step is wasted at each end


def test_ticks_are_round() -> None:
    assert round_ticks(86.6, 99.4) == [86, 88, 90, 92, 94, 96, 98, 100] or round_ticks(86.6, 99.4) == [85, 90, 95, 100]
    assert round_ticks(98.62, 98.97) == pytest.approx([98.6, 98.7, 98.8, 98.9, 99.0])
    assert round_ticks(50, 50)[0] < 50 < round_ticks(50, 50)[-1]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_labels_keep_their_distance(wanted: list[float]) -> None:
    found = apart(wanted, 5, 0, 100)
    assert all(after - before >= 5 - 1e-6 for before, after in pairwise(sorted(found)))
    assert min(found) >= -1e-9
    assert max(found) <= 100 + 1e-6
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    assert sorted(range(len(found)), key=found.__getitem__) == order


def test_labels_that_do_not_touch_stay() -> None:
    assert apart([10, 90, 40], 5, 0, 100) == [10, 90, 40]
    assert apart([50, 50], 10, 0, 100) == [45, 55]


def test_an_answer() -> None:
    known = {"ring": 0.866, "multiring": 0.987, "halving": None}
    assert best_and_worst("on 4 hosts", known) == "multiring reaches 98.7 % efficiency on 4 hosts, ring 86.6 %"
    assert best_and_worst("on 4 hosts", {"ring": 0.9}) == "ring reaches 90.0 % efficiency on 4 hosts"
    alike = {"ring": 0.98991, "multiring": 0.99}
    assert best_and_worst("on 1 host", alike) == "Every strategy reaches 99.0 % efficiency on 1 host"
    assert best_and_worst("at batch 8", {"halving": None}) == "No strategy has a result at batch 8"


def row(nbytes: int, buffer: str, seconds: float, **peers: float) -> SizeRow:
    theirs = {name: (1.5 * each, each) for name, each in peers.items()}
    fixed = (0.0, 1.0, 1.0, seconds / 2, 0.5, None, 0.0, (seconds,))
    return SizeRow(nbytes, buffer, "torch", seconds, *fixed, theirs, {}, {})


ROWS = [
    row(4096, "private", 8e-6, gloo=1.44e-3, openmpi=4e-6),
    row(4096, "arena", 6e-6, gloo=1.44e-3, openmpi=4e-6),
    row(1 << 26, "private", 6.6e-3, gloo=42.24e-3, openmpi=60e-3),
]


def test_the_answer_of_a_benchmark() -> None:
    assert curves.answer(ROWS) == (
        "multiring is 0.5 times as fast as openmpi at 4 KB, 6.4 times as fast as gloo at 64 MB"
    )
    gloo = [replace(each, peers={"gloo": each.peers["gloo"]}) for each in ROWS]
    assert curves.answer(gloo) == "multiring is 180 times as fast as gloo at 4 KB, 6.4 times at 64 MB"
    assert curves.answer(gloo[:2]) == "multiring is 180 times as fast as gloo at 4 KB"
    alone = [replace(each, peers={}) for each in ROWS]
    assert curves.answer(alone) == "4 KB in 8 us, 64 MB in 6.6 ms"


def test_a_benchmark_is_drawn_with_its_answer_and_its_values(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "curves.svg"
    curves.plot(file, ROWS, "all_reduce, 2 ranks on one host")
    texts = re.findall(r"<!-- (.*?) -->", file.read_text())  # matplotlib draws letters, and says which
    assert curves.answer(ROWS) in " ".join(texts)
    ends = {
        "gloo 42.2 ms",
        "openmpi 60 ms",
        "multiring, torch, private 6.6 ms",
        "multiring, torch, arena 6 us",
        "bound 3.3 ms",
    }
    assert ends <= set(texts)


def test_the_example_writes_its_values_into_its_bars(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "two_racks.py"))["draw"]
    drawn({"gloo": 0.1156, "multiring": 0.0925, "no communication": 0.0467}, tmp_path / "bars.svg")
    texts = re.findall(r"<!-- (.*?) -->", (tmp_path / "bars.svg").read_text())
    values = {
        "computing 46.7 ms",
        "waiting 68.9 ms",
        "waiting 45.8 ms",
        "115.6 ms, efficiency 40%",
        "92.5 ms, efficiency 50%",
    }
    assert values <= set(texts)
    assert "A training step takes 92.5 ms over multiring, 115.6 ms over Gloo: 1.25 times as fast" in texts
