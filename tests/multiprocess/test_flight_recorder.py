"""Flight records of jobs that failed: torch's analyser reads them, and blames whom the job's own errors blame."""

from __future__ import annotations

import os
import pickle
import re
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import flight_ranks
import pytest
from flight_analysis import analysis, named
from flight_ranks import BEFORE, CULPRIT
from jobs import start
from launching import Launch, wait_until

from multiring import env
from multiring.errors import RendezvousError
from multiring.job.checks import check_settings
from multiring.net.membership import Membership
from multiring.runtime import flight_recorder

QUICK = {"MULTIRING_TIMEOUT": "2"}


def settings(directory: Path, **others: str) -> dict[str, str]:
    """Settings of a job with its records in ``directory``; its ranks give each other signs elsewhere."""
    signs = directory.parent / f"signs of {directory.name}"
    signs.mkdir()
    return {"MULTIRING_FLIGHT_RECORDER": str(directory), "SIGNS": str(signs), **others}


def record(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = pickle.loads(path.read_bytes())
    return found


def failed(how: str, directory: Path, **environment: str) -> list[str]:
    """Return the survivors' errors; AssertionError for a rank that was not killed and did not end well."""
    outcomes = start(flight_ranks.fails, 3, how, environment=settings(directory, **environment)).wait()
    for outcome in outcomes:
        assert outcome.code in (0, -signal.SIGKILL), outcome.error
    return [outcome.value for outcome in outcomes if outcome.code == 0]


def test_a_late_rank(tmp_path: Path) -> None:
    errors = failed("late", tmp_path, **QUICK)
    assert errors == [f"CollectiveTimeout {CULPRIT}"] * 3
    said = analysis(tmp_path)
    assert f"Not all ranks joining collective, sequence number: {BEFORE}\n" in said
    assert named(said) == {CULPRIT}
    assert "collective: gloo:all_reduce" in said
    assert "input sizes: [[500]]" in said
    for rank in range(3):
        found = record(tmp_path / f"multiring_{rank}")
        failure = found["failure"]
        assert (found["rank"], failure["kind"], failure["rank"]) == (rank, "CollectiveTimeout", CULPRIT)
        assert [entry["retired"] for entry in found["entries"]] == [True] * BEFORE + [False] * (rank != CULPRIT)
        assert [entry["duration_ms"] is None for entry in found["entries"]] == [False] * BEFORE + [True] * (
            rank != CULPRIT
        )
        sizes = [entry["input_sizes"] for entry in found["entries"]]
        assert sizes == [[[1000]]] * BEFORE + [[[500]]] * (rank != CULPRIT)


@pytest.mark.parametrize(
    ("how", "word", "sides"),
    [
        ("size", "SIZE_OR_SYNTAX_MISMATCH", ("[[500]]", "[[700]]")),
        ("dtype", "COLLECTIVE_DTYPE_MISMATCH", ("Float", "Int")),
        ("operation", "COLLECTIVE_TYPE_MISMATCH", ("'all_reduce'", "'broadcast'")),
        ("reduction", "COLLECTIVE_DTYPE_MISMATCH", ("op=sum", "op=max")),
        ("root", "COLLECTIVE_DTYPE_MISMATCH", ("root=0", "root=2")),
    ],
)
def test_a_rank_that_calls_something_else(how: str, word: str, sides: tuple[str, str], tmp_path: Path) -> None:
    errors = failed(how, tmp_path)
    assert errors[0] == errors[2] == f"Mismatch {CULPRIT}"
    said = analysis(tmp_path)
    assert f"Collective sequence number: {BEFORE} has errors" in said
    assert named(said) == {CULPRIT}
    assert f"Error type: {word}" in said
    assert all(side in said for side in sides)


@pytest.mark.parametrize(("odd", "late"), [(0, 1), (1, 0), (1, 3), (2, 0), (3, 1)])
def test_who_disagrees_with_most_is_named_whoever_comes_last(odd: int, late: int, tmp_path: Path) -> None:
    """Rank ``late`` hears of the mismatch before it makes its call, which is refused, and has part in the count."""
    outcomes = start(flight_ranks.disagrees, 4, [odd], late, environment=settings(tmp_path)).wait()
    assert [outcome.value.split()[0] for outcome in outcomes] == ["Mismatch"] * 4
    said = analysis(tmp_path)
    assert f"Collective sequence number: {BEFORE} has errors" in said
    assert named(said) == {odd}


@pytest.mark.parametrize("odd", [[1, 3], [0, 3]])
def test_of_two_sides_of_two_ranks_that_without_rank_0_is_named(odd: list[int], tmp_path: Path) -> None:
    start(flight_ranks.disagrees, 4, odd, -1, environment=settings(tmp_path)).wait()
    assert named(analysis(tmp_path)) == ({1, 2} if 0 in odd else set(odd))


def test_a_killed_rank_leaves_no_record(tmp_path: Path) -> None:
    assert failed("killed", tmp_path) == [f"PeerLost {CULPRIT}"] * 2
    assert sorted(path.name for path in tmp_path.glob("multiring_*")) == ["multiring_0", "multiring_2"]
    assert f"Missing dump files from ranks {{{CULPRIT}}}" in analysis(tmp_path)
    said = analysis(tmp_path, "--allow-incomplete-ranks")
    assert f"we missed FR dumps from ranks ({{{CULPRIT}}})" in said


def test_groups_are_process_groups(tmp_path: Path) -> None:
    errors = failed("group", tmp_path, **QUICK)
    assert errors[2] == f"CollectiveTimeout {CULPRIT}"
    said = analysis(tmp_path)
    report = said[said.index("collective: gloo:all_gather") :]
    assert "Not all ranks joining collective, sequence number: 0\n" in said
    assert re.match(
        r"collective: gloo:all_gather\n"
        rf"missing ranks: \{{{CULPRIT}\}}\n"
        r"input sizes: \[\[60\]\]\noutput sizes: \[\[120\]\]\nworld size: 2\nexpected ranks: \{1, 2\}\n",
        re.sub(r"^.*? - (?=\w+ - )?", "", report, flags=re.MULTILINE),
    )


def test_messages_of_two_ranks(tmp_path: Path) -> None:
    errors = failed("message", tmp_path, **QUICK)
    assert errors[0] == f"CollectiveTimeout {CULPRIT}"
    said = analysis(tmp_path)
    assert "group info: 0/1>0/5:messages of tag 5 from rank 1 to rank 0" in said
    found = [entry["profiling_name"] for entry in record(tmp_path / "multiring_0")["entries"]]
    assert found == ["gloo:all_reduce"] * BEFORE + ["gloo:recv 0<-1"] * 2
    report = said[said.index("messages of tag 5") :]
    assert f"missing ranks: {{{CULPRIT}}}" in report[: report.index("stack trace")]


@pytest.mark.parametrize(
    ("how", "culprit", "error"),
    [
        ("a size in a group", 3, "Mismatch"),
        ("further ahead", 1, "CollectiveTimeout"),
        ("messages of others", 1, "CollectiveTimeout"),
    ],
)
def test_who_waits_in_another_call_is_not_named(how: str, culprit: int, error: str, tmp_path: Path) -> None:
    """The calls that have failed for the same reason are in the records of those who made them, and blame nobody."""
    limit = {"MULTIRING_TIMEOUT": "3"}
    outcomes = start(flight_ranks.waits_elsewhere, 4, how, environment=settings(tmp_path, **limit)).wait()
    assert f"{error} {culprit}" in {outcome.value for outcome in outcomes}
    assert {outcome.value.split()[0] for outcome in outcomes} == {error}
    said = analysis(tmp_path)
    assert named(said) == {culprit}, said
    left = [
        entry
        for path in tmp_path.rglob("multiring_*")
        for entry in record(path)["entries"]
        if entry["process_group"][0].endswith(" waits")
    ]
    assert left
    assert not any(entry["retired"] for entry in left)
    assert "had not ended" in analysis(tmp_path, "-v")


@pytest.mark.parametrize("where", ["in the main thread", "in another thread", "in native code"])
def test_records_on_a_signal_while_the_job_goes_on(where: str, tmp_path: Path) -> None:
    environment = {"MULTIRING_FLIGHT_RECORDER": str(tmp_path), "MULTIRING_FLIGHT_RECORDER_SIGNAL": "usr2"}
    job = start(flight_ranks.asked, 3, where, environment={**environment, "MULTIRING_TIMEOUT": "200"})
    for rank in range(3):
        assert job.line(rank) == "ready"
    paths = [tmp_path / f"multiring_{rank}" for rank in range(3)]
    waiting = {0, 2}
    deadline = time.monotonic() + 30
    while waiting and time.monotonic() < deadline:  # until the others have come to their barrier
        for rank in range(3):
            job.signal(rank, signal.SIGUSR2)
        time.sleep(0.5)
        waiting = {rank for rank in (0, 2) if not paths[rank].exists() or len(record(paths[rank])["entries"]) < 5}
    assert not waiting
    said = analysis(tmp_path)
    assert f"missing ranks: {{{CULPRIT}}}" in said
    assert "collective: gloo:barrier" in said
    assert "failure" not in record(paths[0])
    (tmp_path / "go-on").touch()
    assert [outcome.code for outcome in job.wait()] == [0] * 3


def test_a_job_that_goes_on_is_asked_at_any_time(tmp_path: Path) -> None:
    """The signal ends nobody: not who waits for others to come, survives a loss, or waits to be admitted."""
    records = tmp_path / "records"
    environment = {"MULTIRING_FLIGHT_RECORDER": str(records), "MULTIRING_FLIGHT_RECORDER_SIGNAL": "usr2"}
    job = start(flight_ranks.goes_on_when_asked, 3, str(tmp_path), environment=environment)

    def ask(index: int, sign: str) -> None:
        time.sleep(0.5)  # it waits for this sign, or for who does
        job.signal(index, signal.SIGUSR2)
        time.sleep(0.3)
        assert job.processes[index].poll() is None, sign
        (tmp_path / sign).touch()

    assert job.line(0) == "waits"
    ask(0, "asked in init")
    assert job.processes[CULPRIT].wait(30) == -signal.SIGKILL
    assert job.line(0) == "shrinks"
    ask(0, "asked in shrink")
    newcomer = job.replace(CULPRIT)
    wait_until(lambda: job.applied == 1, "it waits to be admitted")
    ask(newcomer, "asked to be admitted")
    outcomes = job.wait()
    assert [outcomes[index].value for index in (0, 2, newcomer)] == [[3]] * 3
    assert (records / "multiring_0").exists()
    assert record(records / "generation-1" / "rank_0")["generation"] == 1
    assert record(records / "generation-2" / f"rank_{CULPRIT}")["generation"] == 2


def test_the_launcher_asks_ranks_alone_and_ends_nobody(launch: Launch) -> None:
    """The signal would end a rank that has yet to join, and what ranks have started."""
    script = launch.script(
        """
        import os, subprocess, time
        from pathlib import Path
        import numpy as np
        import multiring as mr

        def wait_for(name):
            until = time.monotonic() + 40
            while not Path(name).exists():
                assert time.monotonic() < until, name
                time.sleep(0.02)

        rank = int(os.environ["RANK"])
        if rank == 1:
            Path("imported").touch()
            wait_for("asked too early")
        mr.init()
        child = subprocess.Popen(["sleep", "1000"])
        mr.all_reduce(np.ones(7, np.float32))
        Path(f"joined-{rank}").touch()
        wait_for("asked")
        print("child of", rank, child.poll())
        mr.shutdown()
        """
    )
    records = launch.directory / "records"
    with launch.start(
        *("-n", "2", "--no-summary", script),
        MULTIRING_FLIGHT_RECORDER=str(records),
        MULTIRING_FLIGHT_RECORDER_SIGNAL="USR2",
    ) as process:
        launch.wait_for_file("imported")
        os.kill(process.pid, signal.SIGUSR2)
        time.sleep(0.5)  # until it has come to the ranks
        (launch.directory / "asked too early").touch()
        for rank in range(2):
            launch.wait_for_file(f"joined-{rank}")
        os.kill(process.pid, signal.SIGUSR2)
        wait_until(lambda: all(len(entries_of(records, rank)) == 1 for rank in range(2)), "both have written")
        (launch.directory / "asked").touch()
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert sorted(process.stdout.read().splitlines()) == ["[1] child of 1 None", "child of 0 None"]


def entries_of(records: Path, rank: int) -> list[dict[str, Any]]:
    path = records / f"multiring_{rank}"
    return record(path)["entries"] if path.exists() else []


def ask_and_fail() -> None:
    with flight_recorder.requests.held("usr2"):
        signal.raise_signal(signal.SIGUSR2)
        raise KeyError("nobody comes")


def test_the_signal_is_given_back_where_nobody_joins() -> None:
    taken: list[int] = []
    former = signal.signal(signal.SIGUSR2, lambda number, _: taken.append(number))
    try:
        with pytest.raises(KeyError, match="nobody"):
            ask_and_fail()
        assert taken == []
        signal.raise_signal(signal.SIGUSR2)
        assert taken == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, former)


def test_a_loss_before_any_call_is_written_once(tmp_path: Path) -> None:
    records = tmp_path / "records $(of) it's"
    environment = {"MULTIRING_FLIGHT_RECORDER": str(records)}
    job = start(flight_ranks.idles, 3, str(records / "failure-0.json"), environment=environment)
    outcomes = job.wait()
    assert [outcome.code for outcome in outcomes] == [0, -signal.SIGKILL, 0]
    (line,) = [line for line in outcomes[0].error.splitlines() if "flight records are in" in line]
    assert line.endswith(f"fr_trace -p multiring_ {shlex.quote(str(records))}")
    (records / "checkpoint-100").touch()
    assert "Unable to automatically determine the common prefix" in analysis(records)
    assert f"Missing dump files from ranks {{{CULPRIT}}}" in analysis(records, "-p", "multiring_")


def test_a_rank_that_is_killed_as_it_writes_is_a_missing_one(tmp_path: Path) -> None:
    outcomes = start(flight_ranks.dies_as_it_writes, 3, environment=settings(tmp_path)).wait()
    assert [outcome.code for outcome in outcomes] == [0, -signal.SIGKILL, 0]
    assert [path.name.split(".")[1] for path in tmp_path.glob(".*~")] == [f"half-{CULPRIT}"]
    assert f"Missing dump files from ranks {{{CULPRIT}}}" in analysis(tmp_path)


def test_a_job_begins_without_the_records_of_earlier_ones(tmp_path: Path) -> None:
    old = [
        *("multiring_0", "failure-3.json", "culprit-1.pickle", "differs/multiring_12", ".half-1.4711~"),
        *("generation-1/rank_0", "restart-2-generation-10/differs/rank_1", "restart-1/failure-0.json"),
    ]
    kept = ["notes", "multiring_0.bak", "of-mine/multiring_0", "generation-1/rank_x"]
    kept += ["rank_0", "differs/rank_1", "generation-1/multiring_0"]  # no record of ours has that name there
    for name in (*old, *kept):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def prepared(restart: int, generation: int) -> set[str]:
        membership = Membership(generation, (0,), (0,))
        flight_recorder.prepare(str(tmp_path), 0, "here", restart, membership, goes_on=False)
        return {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}

    assert prepared(1, 0) == {*old, *kept} - {"restart-1/failure-0.json"}
    assert prepared(0, 0) == set(kept)
    (tmp_path / "multiring_5").mkdir()
    with pytest.raises(RendezvousError, match=re.escape(f"{tmp_path}/multiring_5: Is a directory: name a directory")):
        prepared(0, 0)


@pytest.mark.parametrize(("what", "words"), [("full", "File too large"), ("gone", "File exists")])
def test_a_record_that_cannot_be_written(what: str, words: str, tmp_path: Path) -> None:
    place = tmp_path / "records"
    outcomes = start(flight_ranks.lacks_room, 3, what, environment=settings(place)).wait()
    assert outcomes[0].value == outcomes[2].value == f"Mismatch {CULPRIT}"
    lost = [line for line in outcomes[0].error.splitlines() if "flight record of rank 0 is lost" in line]
    assert len(lost) == 1
    assert words in lost[0]
    if what == "full":
        assert sorted(path.name for path in place.rglob("multiring_*")) == ["multiring_1", "multiring_2"]


def test_a_place_that_cannot_be_had_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "records")
    for outcome in start(flight_ranks.fails, 2, "size", environment={"MULTIRING_FLIGHT_RECORDER": place}).wait():
        assert outcome.code != 0
        assert f"MULTIRING_FLIGHT_RECORDER={place}: {place}: Not a directory: name a directory" in outcome.error


def test_a_directory_in_which_no_file_can_be_made_is_refused_whoever_asks() -> None:
    """The kernel tells root that it may write to /proc."""
    membership = Membership(0, (0,), (0,))
    refused = r"MULTIRING_FLIGHT_RECORDER=/proc: /proc: (No such file or directory|Permission denied): name a directory"
    with pytest.raises(RendezvousError, match=refused):
        flight_recorder.prepare("/proc", 0, "here", 0, membership, goes_on=False)


def test_generations_are_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "multiring_7").write_text("of an earlier job")
    job = start(flight_ranks.shrinks, 3, environment={"MULTIRING_FLIGHT_RECORDER": str(tmp_path)})
    outcomes = job.wait()
    assert outcomes[0].value == "Mismatch 1"
    assert sorted(path.name for path in tmp_path.glob("*_?")) == ["multiring_0", "multiring_2"]
    assert f"Missing dump files from ranks {{{CULPRIT}}}" in analysis(tmp_path)
    assert [record(path)["members"] for path in (tmp_path / "generation-1").rglob("rank_*")] == [[0, 2]] * 2
    said = analysis(tmp_path / "generation-1")
    assert "SIZE_OR_SYNTAX_MISMATCH" in said
    assert "[[100]]" in said
    assert "[[101]]" in said


def test_ranks_whose_records_begin_at_different_calls(tmp_path: Path) -> None:
    outcomes = start(flight_ranks.many_calls, 3, environment=settings(tmp_path)).wait(150)
    assert outcomes[0].value == outcomes[2].value == 1500
    said = analysis(tmp_path)
    assert re.findall(r"ollective,? sequence number: (\d+)", said) == ["1500"]
    assert named(said) == {CULPRIT}
    kept = [len(record(path)["entries"]) for path in tmp_path.rglob("multiring_*")]
    assert max(kept) <= 2000


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(RendezvousError, match="the native engine alone keeps its last calls"):
        check_settings(env.read(env.Settings, {}, flight_recorder="here", engine="mpi"))
    with pytest.raises(RendezvousError, match="FLIGHT_RECORDER_SIGNAL=usr1 without MULTIRING_FLIGHT_RECORDER"):
        check_settings(env.read(env.Settings, {}, flight_recorder_signal="USR1"))
    with pytest.raises(ValueError, match="MULTIRING_FLIGHT_RECORDER_SIGNAL='kill': expected one of usr1, usr2"):
        env.read(env.Settings, {"MULTIRING_FLIGHT_RECORDER_SIGNAL": "kill"})
    assert os.environ.get("MULTIRING_FLIGHT_RECORDER") is None
