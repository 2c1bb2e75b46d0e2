"""The timeline: from the engine's records to a file that is whole after every rank, and clocks that agree."""

from __future__ import annotations

import json
import resource
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import all_reduce_plan, in_threads, world

from multiring import _native
from multiring.errors import RendezvousError
from multiring.runtime import trace


def record(kind: int, begin: int, end: int, **fields: int) -> bytes:
    row = np.zeros(1, trace.EVENT)
    row["kind"], row["begin"], row["end"], row["peer"], row["finished"] = kind, begin, end, -1, 1
    for name, value in fields.items():
        row[name] = value
    return row.tobytes()


def intervals(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def assert_nested(events: list[dict[str, Any]]) -> None:
    """Intervals of one track follow or contain each other, as the format asks."""
    tracks = defaultdict(list)
    for event in intervals(events):
        begin = round(1000 * event["ts"])
        tracks[event["pid"], event["tid"]].append((begin, -(begin + round(1000 * event["dur"]))))
    for found in tracks.values():
        around: list[int] = []
        for begin, minus_end in sorted(found):
            while around and around[-1] <= begin:
                around.pop()
            assert not around or -minus_end <= around[-1]
            around.append(-minus_end)


def test_what_the_engine_recorded_in_the_words_of_the_plan(tmp_path: Path) -> None:
    timeline = trace.prepare(str(tmp_path / "t.json"), 2, "b", 0)
    plan = 0xABCDEF123456 << 15
    timeline.phases[plan] = ("reduce_scatter rank direct", "all_gather rank direct")
    timeline.offset = 1_000_000
    of = {"number": 7, "plan": plan, "lane": 3}
    packed = (
        record(trace.PHASE, 5000, 8000, row=1, segment=4, phase=1, **of)
        + record(trace.HELD_UP, 5500, 7000, row=1, segment=4, phase=1, peer=0, **of)
        + record(trace.SEGMENT, 4000, 8000, row=1, segment=4, **of)
        + record(trace.CALL, 3000, 9000, bytes=64, finished=0, **of)
        + record(trace.IDLE, 3500, 4500, peer=1)
    )
    found = intervals(list(timeline.events([(timeline.process, False, 0, packed)])))
    told = {(e["cat"], e["name"]): e for e in found}
    assert set(told) == {
        ("call", "all_reduce 7"),
        ("segment", "segment 4"),
        ("phase", "all_gather rank direct"),
        ("wait", "waits for rank 0"),
        ("wait", "waits for rank 1"),
    }
    call = told["call", "all_reduce 7"]
    assert (call["ts"], call["dur"], call["pid"]) == (1003.0, 6.0, 3)
    assert call["args"] == {"bytes": 64, "dtype": "float32", "plan": "abcdef123456", "unfinished": True}
    row = {told[key]["tid"] for key in told if key[0] in ("segment", "phase")}
    assert row == {told["wait", "waits for rank 0"]["tid"]}
    assert len(row | {call["tid"], told["wait", "waits for rank 1"]["tid"]}) == 3


def test_a_file_is_whole_after_each_rank(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for rank in range(3):
        trace.prepare(str(path), rank, "a", 0)
    assert json.loads(path.read_text()) == []
    for rank in (1, 0, 2):
        timeline = trace.Timeline(path, rank, "a")
        thread = (timeline.process, False, 5, record(trace.CALL, 100 * rank, 100 * rank + 50, number=rank))
        timeline.write([thread])
        timeline.write([thread])  # once is enough
        names = [e["name"] for e in intervals(json.loads(path.read_text()))]
        assert names[-1] == f"all_reduce {rank}"
    assert len(names) == 3
    threads = [e["args"]["name"] for e in json.loads(path.read_text()) if e["name"] == "thread_name"]
    assert threads.count("main thread (5 earlier events lost)") == 3


def test_a_slow_rank_has_a_track_of_when_it_kept_the_others_waiting(tmp_path: Path) -> None:
    slow = [
        {"ranks": [1], "host": "b", "began": 3.0, "seconds": 1.5, "share": 0.25, "reason": "sleeps"},
        {"ranks": [0, 2], "host": "a", "began": 4.0, "seconds": 1.0, "share": 0.5, "reason": "computes"},
    ]
    thread = (7, False, 0, record(trace.CALL, 0, 50))
    of_rank = {}
    for rank in range(3):
        timeline = trace.Timeline(tmp_path / "t.json", rank, "a", offset=2_000_000)
        of_rank[rank] = [e for e in timeline.events([thread], slow) if e.get("cat") == "slow"]
    (event,) = of_rank[1]
    assert (event["name"], event["ts"], event["dur"], event["args"]) == (
        "sleeps",
        3_002_000,
        1_500_000,
        {"share": 0.25},
    )
    assert [e["name"] for rank in (0, 2) for e in of_rank[rank]] == ["computes", "computes"]
    assert event["tid"] not in [e["tid"] for e in intervals(list(timeline.events([thread])))]


def test_slow_ranks_are_read_from_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    slow = [
        {"ranks": [1], "host": "b", "began": 3.0, "seconds": 1.5, "share": 0.25, "reason": "sleeps"},
        {"ranks": [0, 2], "host": "a", "began": 4.0, "seconds": 1.0, "share": 0.5, "reason": "computes"},
    ]
    thread = (7, False, 0, record(trace.CALL, 0, 50))
    for rank, host in enumerate(("a", "b (x)", "a")):
        places = {"sleeps": f"train.py:{7 * rank} in load"}
        trace.prepare(str(path), rank, host, 0).write([thread], slow, places)
    assert trace.slow_spans(path) == [
        trace.SlowSpan(0, "a", "computes", 1.0, 0.5, ""),
        trace.SlowSpan(1, "b (x)", "sleeps", 1.5, 0.25, "train.py:7 in load"),
        trace.SlowSpan(2, "a", "computes", 1.0, 0.5, ""),
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[", "Expecting value"),
        ("7", "'int' object is not iterable"),
        ('[{"ph": "X"}]', "an event lacks 'name'"),
        ("[]", "none of its processes is a rank"),
        ('[{"name": "process_name", "pid": 1, "args": {"name": "chrome"}}]', "none of its processes is a rank"),
    ],
)
def test_what_is_no_timeline_is_named(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match="it is no timeline that MULTIRING_TRACE has written: ") as error:
        trace.slow_spans(tmp_path / "t.json")
    assert str(error.value).startswith(f"{tmp_path}/t.json: ")
    assert fault in str(error.value)


def test_later_generations_and_restarts_add_processes_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for restart in (0, 1):
        for generation in (0, 1, 2):
            timeline = trace.resume(str(path), 0, "a", restart, generation)
            if generation == 0:
                timeline = trace.prepare(str(path), 0, "a", restart)
            timeline.write([(timeline.process, False, 0, record(trace.CALL, 0, 1))])
    events = json.loads(path.read_text())
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    places = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert [names[pid] for pid in sorted(names, key=lambda pid: places[pid])] == [
        "rank 0 (host a)",
        "rank 0 (host a), generation 1",
        "rank 0 (host a), generation 2",
        "rank 0 (host a), restart 1",
        "rank 0 (host a), restart 1, generation 1",
        "rank 0 (host a), restart 1, generation 2",
    ]
    assert len({e["pid"] for e in intervals(events)}) == 6


def test_no_two_processes_have_one_number() -> None:
    found = {trace._pair(restart, generation) for restart in range(100) for generation in range(100)}
    assert len(found) == 100**2
    assert trace.PIDS * max(found) < 1 << 32


def test_an_earlier_job_is_replaced_but_not_what_this_process_wrote(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('[\n{"ph":"X","name":"of an earlier job"}\n]\n')
    for _ in range(2):  # init, shutdown, and again
        timeline = trace.prepare(str(path), 0, "a", 0)
        timeline.write([(timeline.process, False, 0, record(trace.CALL, 0, 1))])
    assert [e["name"] for e in intervals(json.loads(path.read_text()))] == ["all_reduce 0"] * 2


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import multiring\n")
    with pytest.raises(RendezvousError, match=r"train.py exists and is no timeline: name another"):
        trace.prepare(str(path), 0, "a", 0)
    assert path.read_text() == "import multiring\n"
    with pytest.raises(RendezvousError, match=r"MULTIRING_TRACE=.*missing/t.json: No such file"):
        trace.prepare(str(tmp_path / "missing" / "t.json"), 0, "a", 0)


def test_a_file_that_is_full_stays_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.json"
    first, second = (trace.prepare(str(path), rank, "a", 0) for rank in (0, 1))
    first.write([(first.process, False, 0, record(trace.CALL, 0, 1))])
    before = path.read_bytes()
    many = b"".join(record(trace.CALL, i, i + 1, number=i) for i in range(100))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 1000, limits[1]))  # takes a part, as a full disk does
    try:
        second.write([(second.process, False, 0, many)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert "the timeline lacks events of rank 1" in caplog.text
    assert f"MULTIRING_TRACE={path}: File too large" in caplog.text
    third = trace.Timeline(path, 2, "a")
    third.write([(third.process, False, 0, many)])
    assert len(intervals(json.loads(path.read_text()))) == 101


def test_a_job_that_goes_on_has_the_path_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace.prepare("t.json", 0, "a", 0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    later = trace.resume("t.json", 0, "a", 0, 1)
    later.write([(later.process, False, 0, record(trace.CALL, 0, 1))])
    assert len(intervals(json.loads((tmp_path / "t.json").read_text()))) == 1
    assert not (elsewhere / "t.json").exists()
    assert trace.prepare("t.json", 0, "a", 0).path == elsewhere / "t.json"  # another job's file stays


@pytest.mark.parametrize("method", ["direct", "ring", "halving"])
def test_segments_and_phases_of_every_rank(tmp_path: Path, method: str) -> None:
    plan = all_reduce_plan(4, method, segment_bytes=1 << 12)
    with world(4, hosts=[0, 0, 1, 1], trace=True) as ranks:
        in_threads(ranks, lambda rank: rank.run(plan, np.full(5000, rank.rank + 1, np.float32)))
        for rank in ranks:
            rank.engine.shutdown()
        threads = [rank.engine.traced() for rank in ranks]
    for rank, own in enumerate(threads):
        events = intervals(list(trace.Timeline(tmp_path / "t.json", rank, "a").events(own)))
        assert_nested(events)
        assert sorted(e["name"] for e in events if e["cat"] == "segment") == sorted(f"segment {i}" for i in range(5))
        assert [e["args"]["bytes"] for e in events if e["cat"] == "call"] == [20000]
        assert {e["name"] for e in events if e["cat"] == "phase"} == {"phase 0", "phase 1"}
        waits = {e["args"]["rank"] for e in events if e["cat"] == "wait"}
        assert waits <= {-1, 0, 1, 2, 3} - {rank}
        (call,) = (e for e in events if e["cat"] == "call")
        for event in events:
            if event["cat"] in ("segment", "phase"):
                assert call["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= call["ts"] + call["dur"] + 0.001


def test_an_engine_that_does_not_trace_has_nothing(tmp_path: Path) -> None:
    with world(2) as ranks:
        in_threads(ranks, lambda rank: rank.run(all_reduce_plan(2, "direct"), np.ones(8, np.float32)))
        for rank in ranks:
            rank.engine.shutdown()
            assert rank.engine.traced() == []


def test_a_running_engine_does_not_hand_out_what_it_records() -> None:
    engine = _native.Engine(0, 1, inproc=True, trace=True)
    with pytest.raises(RuntimeError, match="still records"):
        engine.traced()
    engine.shutdown()
    assert engine.traced() == []
