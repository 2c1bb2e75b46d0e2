"""The picture of a job that is watched, in 80 columns: values depend on the rank."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from multiring.cli import standing


def status(rank: int, host: str, **others: Any) -> dict[str, Any]:
    """Status of a rank: rank r makes r + 1 calls a second and waits for rank 3."""
    level = {"rank": {"sent": 1e6 * rank, "received": 2e6}, "host": {"sent": 1e7 + 1e6 * rank, "received": 2e7}}
    rates = {
        "calls": rank + 1.0,
        "in_calls": 0.1 * rank,
        "waiting": 0.05 * rank,
        "waits_for": [[3, 0.04 * rank], [0, 0.01]],
        "links": level,
    }
    told = {"stage": "runs", "rank": rank, "host": host, "generation": 1, "size": 4, "failure": "", "where": ""}
    link = {"up": 1e8, "down": 5e7}
    plan = {"id": f"plan{rank}", "words": "all_reduce by reduce_scatter rank direct, all_reduce host ring, " * 2}
    return {
        **told,
        "slowest": None,
        "slow_link": None,
        "calls": 10 * rank,
        "rates": rates,
        "link": link,
        "plan": plan,
        "in_flight": [],
        **others,
    }


def a_rank(rank: int, host: str, state: str = "runs", age: float | None = 0.5, **others: Any) -> dict[str, Any]:
    said = None if age is None else status(rank, host, **others)
    return {"rank": rank, "host": "agent", "process": 100 + rank, "state": state, "replacement": 0, "age": age} | {
        "status": said
    }


def a_look(ranks: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
    told = {"kind": "look", "process": 4711, "job": "x", "program": ["/a/train.py", "--lr=3"], "version": "0"}
    return {
        **told,
        "seconds": 3723.4,
        "restart": 0,
        "max_restarts": 0,
        "failure": None,
        "ranks": ranks,
        "output": [],
        **others,
    }


def shown(look: dict[str, Any], width: int = 80, rows: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=rows, markup=False, emoji=False)
    console.print(standing.picture(standing.described(look), console if rows else None))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize(("width", "fits"), [(20, False), (39, False), (40, True)])
def test_a_terminal_that_is_too_narrow_for_the_table_is_told(width: int, fits: bool) -> None:
    lines = shown(a_look([a_rank(r, "aabb"[r]) for r in range(4)], output=[[0, "step 3"]]), width)
    told = f"the table of ranks needs 40 columns, and there are {width}"
    assert (told in " ".join(lines)) == (not fits)
    assert any(line.split()[:3] == ["b", "2", "runs"] for line in lines) == fits
    assert any(line.split()[:3] == ["3", "runs", "4"] for line in lines) == fits
    assert lines[-1] == "[0] step 3"
    assert all(len(line) <= width for line in lines)


def test_a_picture_in_80_columns() -> None:
    slow = {"ranks": [3], "share": 0.42, "reason": "sleeps"}
    ranks = [a_rank(r, "aabb"[r], slowest=slow) for r in range(4)]
    ranks[3]["status"]["where"] = "train.py:7 in load: time.sleep(1)"
    output: list[list[Any]] = [[r, f"\x1b[31mline\t{7 * r}\x1b[0m\0" + " long" * 30 * (r == 1)] for r in range(3)]
    output += [[3, "\x1bcline 21\x9b2J"], [None, "restart 1"]]
    lines = shown(a_look(ranks, output=output, restart=1, max_restarts=3))
    assert lines == [
        "job 4711 (train.py): 4 ranks on 2 hosts, for 1 h 2 min, restart 1 of 3",
        "plan plan0: all_reduce by reduce_scatter rank direct, all_reduce host ring,",
        "all_reduce by reduce_scatter rank direct, all_reduce host ring,",
        "rank 3 (host b) keeps the others waiting for 42% of the time: between",
        "collectives it sleeps, or waits for data, a lock or another process; at",
        "train.py:7 in load: time.sleep(1)",
        "link of host a: 21 of 100 MB/s out, 40 of 50 in",
        "link of host b: 25 of 100 MB/s out, 40 of 50 in",
        "",
        "host  rank  state  calls/s  in calls  waits for  sent MB/s",
        "a     0     runs         1        0%  0 (1%)            10",
        "      1     runs         2       10%  3 (4%)            12",
        "b     2     runs         3       20%  3 (8%)            14",
        "      3     runs         4       30%  3 (12%)           16",
        "",
        "[0] line 0",
        "[1] line 7" + (" long" * 30)[:70],
        "[2] line 14",
        "[3] cline 212J",
        "multiring: restart 1",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "the link from host b to host a",
            "the link from host b to host a: 4.5 MB/s while all wait, 9% of the 50 that the",
        ),
        (
            "the links between host a and host b",
            "the links between host a and host b: 4.5 MB/s while all wait, 9% of the 50 that",
        ),
    ],
)
def test_the_link_that_most_ranks_say_is_slow_is_shown(name: str, words: str) -> None:
    slow = {"from": "b", "to": "a", "name": name, "bytes_per_second": 4.5e6, "expected": 5e7}
    others = {**slow, "name": "the links of host b"}
    ranks = [a_rank(rank, "aabb"[rank], slow_link=[slow, others, slow, None][rank]) for rank in range(4)]
    look = a_look(ranks)
    assert standing.described(look)["slow_link"] == slow
    assert words in shown(look)
    for rank in ranks:
        rank["status"]["rates"] |= {"calls": 0.0, "in_calls": 0.0}
    assert standing.described(look)["slow_link"] is None


def test_what_was_said_long_ago_is_marked_and_counts_no_more() -> None:
    slow = {"ranks": [0], "share": 0.9, "reason": "computes"}
    ranks = [a_rank(0, "a"), a_rank(1, "a", "stopped", 75.0, slowest=slow), a_rank(2, "b", "lost")]
    ranks += [a_rank(3, "b", "starts", None), a_rank(4, "b", "replaced"), a_rank(5, "b", "joins", None)]
    ranks[4]["replacement"] = 2
    look = standing.described(a_look(ranks))
    assert look["slowest"] is None
    assert [(link["host"], link["sent"]) for link in look["links"]] == [("a", 1e7), ("b", 1.4e7)]
    assert [rank["old"] for rank in look["ranks"]] == [False, True, False, False, False, False]
    lines = shown(a_look(ranks))
    assert "1 runs, 1 stopped, 1 lost, 1 starts, 1 replaced, 1 joins" in lines
    table = [line.split() for line in lines[lines.index("") + 1 :]]
    assert table[2] == ["1", "stopped,", "1", "min", "15", "s", "old", "2", "10%", "3", "(4%)", "12"]
    assert table[3] == ["b", "2", "lost"]
    assert table[4] == ["4", "replaced", "(replacement", "2)", "5", "40%", "3", "(16%)", "18"]
    assert table[5:] == [["agent", "3", "starts"], ["5", "joins"]]
    assert max(map(len, lines)) <= 80


def test_ranks_that_do_not_fit_are_shown_by_host() -> None:
    ranks = [a_rank(r, f"host{r // 8:02}") for r in range(160)]
    ranks[9]["state"] = "stopped"
    lines = shown(a_look(ranks, output=[[0, f"line {n}"] for n in range(20)]), rows=50)
    assert len(lines) <= 50
    (second,) = [line for line in lines if line.startswith("host01")]
    assert second.split() == ["host01", "8-15", "7", "runs,", "1", "stopped", "12.5", "115%", "3", "(46%)", "264"]
    busiest = [line.split()[3] for line in lines if line.startswith("link of host ")]
    assert busiest == [f"host{number}:" for number in (19, 18, 17, 16)]
    low = shown(a_look(ranks), rows=10)
    assert low[-1].split() == ["...", "18", "hosts", "more"]


def test_calls_that_do_not_end() -> None:
    def call(seconds: float, *waits_for: int) -> list[dict[str, Any]]:
        return [{"collective": "all_reduce", "seconds": seconds, "is_blocked": True, "waits_for": list(waits_for)}]

    ranks = [a_rank(r, "a", in_flight=call(4.0 + r, 3)) for r in (0, 1, 2)]
    ranks += [a_rank(3, "a", "stopped", 9.0, in_flight=call(70.0, 0)), a_rank(4, "b", in_flight=call(7.0, 1, 2, 3))]
    ranks.append(a_rank(5, "b", in_flight=call(1.0)))
    lines = [line for line in shown(a_look(ranks)) if " in all_reduce" in line]
    assert lines == [
        "rank 4 waits for ranks 1-3 in all_reduce, for 7 s now",
        "ranks 0-2 wait for rank 3 in all_reduce, for 6 s now",
        "rank 5 waits for what is on its way in all_reduce, for 1 s now",
    ]


def test_a_failure_and_a_link_whose_rate_nobody_knows() -> None:
    ranks = [a_rank(0, "a", link=None, failure="PeerLost: rank 1 (host b) is lost"), a_rank(1, "b", link=None)]
    lines = shown(a_look(ranks))
    assert "rank 0: PeerLost: rank 1 (host b) is lost" in lines
    assert "link of host b: 11 MB/s out, 20 in; its rate is not known" in lines


def test_a_narrow_terminal_folds() -> None:
    look = a_look([a_rank(r, "ab"[r]) for r in range(2)], output=[[1, "x" * 100]])
    for width in (20, 50):
        assert max(map(len, shown(look, width))) <= width
    assert shown(look, 50)[-1] == "[1] " + "x" * 46
    assert shown(look, 50)[-3].split() == ["b", "1", "runs", "2", "10%", "3", "(4%)", "12"]


def test_several_slow_ranks_are_told_with_their_hosts_and_places() -> None:
    for slow, name in (([1, 3], "rank 1 (host a) and rank 3 (host b)"), ([2, 3], "ranks 2-3 (host b)")):
        said = {"ranks": slow, "share": 0.42, "reason": "computes"}
        ranks = [a_rank(r, "aabb"[r], slowest=said) for r in range(4)]
        ranks[3]["status"]["where"] = "train.py:7"
        look = a_look(ranks)
        assert standing.described(look)["slowest"]["where"] == ["", "train.py:7"]
        told = "keep the others waiting for 42% of the time: between collectives the latest of them computes"
        assert f"{name} {told}; rank 3 at train.py:7" in shown(look, 200)


def test_ranks_that_have_told_little_or_nothing() -> None:
    """One was stopped before it joined, and the slow one has left while another one goes on."""
    slow = {"ranks": [2], "share": 0.42, "reason": "sleeps"}
    ranks = [a_rank(0, "a", slowest=slow), a_rank(1, "a", "stopped", None), a_rank(2, "a", "left")]
    ranks[2]["status"] = {"stage": "left", "at": 1.0}
    lines = shown(a_look(ranks))
    assert "rank 2 (host agent) keeps the others waiting for 42% of the time: between" in lines
    assert any("1     stopped" in line for line in lines), lines


def test_nobody_is_slow_where_nobody_calls() -> None:
    """A status keeps the last slow rank until calls go on."""
    slow = {"ranks": [1], "share": 0.42, "reason": "sleeps"}
    ranks = [a_rank(rank, "a", slowest=slow) for rank in range(2)]
    for rank in ranks:
        rank["status"]["rates"] |= {"calls": 0.0, "in_calls": 0.0}
    assert not any("keeps the others waiting" in line for line in shown(a_look(ranks)))


def test_a_failure_is_one_line_that_moves_no_cursor() -> None:
    ranks = [a_rank(rank, "a", failure=f"PeerLost: rank {7 * rank}\x1b[2J\x07 has\nmore") for rank in range(2)]
    lines = shown(a_look(ranks))
    assert [line for line in lines if line.startswith("rank 1: ")] == ["rank 1: PeerLost: rank 7 has"]
    assert not any("\x1b" in line or "more" in line for line in lines)


def test_what_the_launcher_knows_of_a_failure_is_shown_once() -> None:
    """Ranks that live on with a Mismatch know two sides of it alone; one has lost a rank before it could hear."""
    text = "rank 1 called barrier() where ranks 0, 2 and 3 called A: call number 7 of communicator 0"
    said = ["Mismatch: rank 0 called A", "", "PeerLost: rank 1 (host a) is lost", "Mismatch: rank 0 called A"]
    ranks = [a_rank(rank, "a", failure=said[rank]) for rank in range(4)]
    look = a_look(ranks, failure={"kind": "Mismatch", "ranks": [1], "text": text})
    lines = shown(look, 120)
    assert [line for line in lines if "rank 1" in line] == [
        f"Mismatch: {text}",
        "rank 2: PeerLost: rank 1 (host a) is lost",
    ]
    assert not any("rank 0 called A" in line for line in lines)
    failed = {"kind": "", "ranks": [1], "text": "rank 1 on host a failed: exit code 3, after 2.0 s\x07; more"}
    lines = shown(a_look(ranks[:2], failure=failed), 120)
    assert "rank 1 on host a failed: exit code 3, after 2.0 s; more" in lines
    assert "rank 0: Mismatch: rank 0 called A" in lines
