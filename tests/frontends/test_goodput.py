"""Goodput under fire: what the benchmark counts is what its job saw, and what it trains is what nobody disturbs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

import fork_server
import forking_launcher
import pytest
import scripts
from forking_launcher import TORCH
from framework_jobs import alone, job, needs, of_forks
from processes import processes_with

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "goodput.py"
TRAINING = ROOT / "examples" / "under_fire.py"

pytestmark = needs("torch", "sklearn", seconds=600)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return scripts.loaded(SCRIPT)


def forked(command: Sequence[str], *, env: Mapping[str, str], stdout: IO[bytes], **_: Any) -> fork_server.Process:
    """The place of `subprocess.Popen` in the benchmark: each of its ranks would take seconds to import torch."""
    python, *words = command
    assert (python, words[:2]) == (sys.executable, ["-m", "multiring"])
    with open(os.devnull) as nothing:
        streams = [nothing.fileno(), stdout.fileno(), stdout.fileno()]
        return forking_launcher.start_on(
            streams, *words[2:], imports=TORCH, environment=of_forks(**env), directory=Path.cwd()
        )


def events_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]


def test_a_look_opens_only_what_has_grown(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(3):
        (tmp_path / f"{rank}.jsonl").write_text(f'{{"event": "step", "step": {rank + 1}}}\n{{"event": "st')
    journal, opened, open_file = script.Journal(tmp_path), [], Path.open

    def noted(file: Path, *mode: str) -> Any:
        opened.append(file.name)
        return open_file(file, *mode)

    monkeypatch.setattr(script.Path, "open", noted)
    journal.look()
    assert (opened, journal.steps) == (["0.jsonl", "1.jsonl", "2.jsonl"], 3)
    for rank in (0, 1):
        with open(tmp_path / f"{rank}.jsonl", "a") as file:
            file.write(f'ep", "step": {rank + 7}}}\n')
    opened.clear()
    journal.look()
    assert (opened, journal.steps) == (["0.jsonl", "1.jsonl", "2.jsonl"], 8)  # one line of rank 2 is not whole
    opened.clear()
    journal.look()
    assert opened == ["2.jsonl"]
    assert [event["step"] for event in journal.events] == [1, 2, 3, 7, 8]


def test_processes_start_by_the_clock_of_the_other_events(monkeypatch: pytest.MonkeyPatch) -> None:
    training = scripts.loaded(TRAINING)
    started = training.process_start()
    assert 0 < time.monotonic() - started < 3600
    whole, seconds = time.clock_gettime, 1000.0
    monkeypatch.setattr(time, "clock_gettime", lambda clock: whole(clock) + seconds * (clock == time.CLOCK_BOOTTIME))
    assert training.process_start() == pytest.approx(started - seconds, abs=1)


def test_the_training_goes_on_where_rank_0_cannot_look_for_newcomers(tmp_path: Path) -> None:
    words = ("--steps", "1000000", "--look", "2", "--events", str(tmp_path), "--stop", str(tmp_path / "stop"))
    options = ("--min-ranks", "2", "--max-replacements", "1")
    done = job("under_fire_unreachable.py", *words, ranks=3, options=options, imports=TORCH, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ steps: test loss .* 3 ranks", done.stdout), done.stdout
    told = [event for event in events_of(tmp_path) if event["event"] == "not grown"]
    assert len(told) == 4  # two ranks, twice
    assert {event["reason"] for event in told} == {"rank 0 cannot look who is to be admitted: no way to the store"}


def test_its_counts_are_those_of_the_job_and_no_sample_is_lost(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [
        "--every",
        "3",
        "--gaps",
        "fixed",
        "--minutes",
        "0.1",
        "--turns",
        "1",
        "--quiet",
        "1.5",
        "--min-ranks",
        "1",
        "--standby",
        "1",
    ]
    kept = ["--json", str(tmp_path / "result.json"), "--keep", str(tmp_path / "kept")]
    words = ["--ranks", "3", "--model", "digits", "--float64", "--seed", "5", *every, *kept]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    kinds = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(script, "subprocess", SimpleNamespace(Popen=forked, **kinds))
    script.main()
    told = json.loads((tmp_path / "result.json").read_text())
    events, log = events_of(tmp_path / "kept/under-fire"), (tmp_path / "kept/under-fire/log").read_text()
    kills = told["rows"][0]["kills"]
    assert len(kills) >= 2

    # Each kill was of the process that it names, which the launcher and the survivors missed, and nobody else.
    worlds = {event["generation"]: event["pids"] for event in events if event["event"] == "world"}
    assert [worlds[kill["generation"]][kill["rank"]] for kill in kills] == told["killed"]
    lost = {pid for event in events if event["event"] == "shrunk" for pid in event["lost"]}
    assert sorted(told["killed"]) == sorted(lost) == told["lost"]
    ranks = {event["pid"]: event["rank"] for event in events if event["event"] == "started"}
    missed = Counter(map(int, re.findall(r"rank (\d+) on host \S+ failed: killed by signal 9", log)))
    assert missed == Counter(ranks[kill["pid"]] for kill in kills)
    assert max(event["at"] for event in events if event["pid"] == kills[0]["pid"]) < kills[0]["at"] + 0.5
    newcomers = {event["pid"] for event in events if event["event"] == "started" and event["replacement"]}
    assert told["admitted"] == sorted(newcomers & {pid for pids in worlds.values() for pid in pids})
    assert len(worlds[max(worlds)]) == 3

    # Every step up to the last one was kept; each rank had its part of every batch.
    steps = {event["step"] for event in events if event["event"] == "step"}
    assert steps == set(range(1, told["steps"]["last"] + 1))
    assert told["steps"]["kept"] == len(steps)
    assert told["steps"]["lost"] == 0
    assert all(kill["to_next_step"] > 0 and kill["was_lost"] for kill in kills)
    for kill in kills:
        assert kill["detection"] + kill["after_detection"] == pytest.approx(kill["to_next_step"])
    (row,) = told["rows"]
    assert 0 < row["lost"]["shrink"] < row["seconds"]
    assert row["goodput"] == pytest.approx(1 - sum(row["lost"].values()) / row["seconds"])

    # In float64 a batch that was lost or had twice would show; the number of ranks does not.
    assert told["result"]["loss"] == pytest.approx(told["undisturbed"]["loss"], rel=1e-6)
    assert told["result"]["accuracy"] == told["undisturbed"]["accuracy"]


def told(event: str, at: float, pid: int, **said: Any) -> dict[str, Any]:
    return {"event": event, "at": at, "pid": pid, **said}


WORLDS = [[10, 11, 12], [11, 12], [20, 11, 12]]
KILLED_AT = 3.7


def made_up() -> list[dict[str, Any]]:
    """Rank 0 alone completes step 4, and is killed; the others take it again, and admit a replacement."""
    events = [
        told("started", 0.0 + number / 10, pid, rank=number, replacement=0) for number, pid in enumerate((10, 11, 12))
    ]
    events += [told("world", 0.5, pid, generation=0, pids=WORLDS[0]) for pid in WORLDS[0]]
    events += [
        told("step", step + number / 10, pid, step=step, generation=0)
        for number, pid in enumerate(WORLDS[0])
        for step in (1, 2, 3)
    ]
    events += [told("step", 3.6, 10, step=4, generation=0), told("started", 3.75, 20, rank=0, replacement=1)]
    for number, pid in enumerate(WORLDS[1]):
        events += [
            told("failed", 3.8 + number / 10, pid),
            told("shrunk", 4.1 + number / 10, pid, generation=1, lost=[10]),
            told("world", 4.3 + number / 10, pid, generation=1, pids=WORLDS[1]),
            told("synchronised", 4.6 - number / 10, pid),
            told("wrapped", 4.7 + number / 10, pid),
            told("step", 5.0 + number / 10, pid, step=4, generation=1),
            told("grown", 6.5 + number / 10, pid, generation=2, began=6.0 + number / 10),
        ]
    events += [told("ready", 5.5, 20), told("joined", 6.4, 20)]
    for number, pid in enumerate(WORLDS[2]):
        events += [
            told("world", 6.7 + number / 10, pid, generation=2, pids=WORLDS[2]),
            told("synchronised", 7.1 + number / 10, pid),
            told("wrapped", 7.4 + number / 10, pid),
            told("step", 7.8 + number / 10, pid, step=5, generation=2),
        ]
    # The replacement admits another one in its turn, which is no part of what came before.
    return [*events, told("grown", 9.0, 20, generation=3, began=8.5)][::-1]


def test_seconds_and_steps_of_a_job_that_is_known(script: ModuleType) -> None:
    account = script.Account(made_up())
    kill = script.Kill(KILLED_AT, 10, 0, 0, 1, 0.0)
    assert account.kept == pytest.approx({1: 1.2, 2: 2.2, 3: 3.2, 4: 5.1, 5: 8.0})
    assert (account.again, account.lost_pids, account.admitted) == (1, {10}, {20})
    after = script.after_kill(account, kill)
    assert after["was_lost"]
    assert after["to_next_step"] == pytest.approx(5.1 - KILLED_AT)
    assert list(after["stages"]) == list(script.STAGES)
    assert list(after["stages"].values()) == pytest.approx([0.2, 0.3, 0.2, 0.2, 0.2, 0.3])
    (admission,) = script.admissions(account)
    assert admission["pause"] == pytest.approx(8.0 - 6.1)
    assert list(admission["stages"].values()) == pytest.approx([0.5, 0.3, 0.4, 0.3, 0.4])
    (replacement,) = script.replacements(account, [kill])
    assert list(replacement.values()) == pytest.approx([0.05, 1.75, 0.9, 1.4])
    stood_by = [
        {**event, "at": 1.5} if (event["event"], event["pid"]) == ("started", 20) else event for event in made_up()
    ]
    (replacement,) = script.replacements(script.Account(stood_by), [kill])
    assert list(replacement.values()) == pytest.approx([0.0, 1.8, 0.9, 1.4])


def test_a_kill_that_no_call_met_is_not_given_the_detection_of_the_next_one(script: ModuleType) -> None:
    """The survivors meet when rank 0 is killed, and agree on its loss; what they fail by comes with the next kill."""
    events = [event for event in made_up() if event["event"] != "failed"]
    events += [told("failed", 9.5, pid) for pid in (11, 12)]
    after = script.after_kill(script.Account(events), script.Kill(KILLED_AT, 10, 0, 0, 1, 0.0))
    assert after["stages"] is None
    assert after["detection"] == pytest.approx(4.1 - KILLED_AT)
    assert after["after_detection"] == pytest.approx(5.1 - 4.1)


def test_each_second_is_work_or_lost(script: ModuleType) -> None:
    """The slice from 2 to 6 s has a kill; from the third step to the fourth nothing is kept, and none to the fifth."""
    account = script.Account(made_up())
    assert script.losses(account, 2.0, 6.0) == pytest.approx(
        {"shrink": 5.1 - 3.2 - 0.4, "admission": 0.9, "again": 0.4}
    )
    assert sum(script.losses(account, 2.2, 8.0).values()) == pytest.approx(8.0 - 3.2)  # all but the third step
    slices = [script.Slice(None, 0.0, 2.0, 1.0), script.Slice(9.0, 2.0, 5.5, 1.0), script.Slice(None, 7.5, 8.5, 1.0)]
    (found,) = script.goodputs(account, slices)
    assert found["seconds"] == 5.5
    assert found["goodput"] == pytest.approx(1 - (7.5 - 3.2) / 5.5)
    assert (found["rate"], found["undisturbed"]) == pytest.approx((3 / 3.5, (1 / 2 + 1) / 2))
    row = script.summary(9.0, account, [script.Kill(KILLED_AT, 10, 0, 0, 1, 0.0)], slices)
    assert row["lost"] == pytest.approx({"shrink": 1.5, "admission": 2.4, "again": 0.4})
    assert row["goodput"] == found["goodput"]
    assert row["rate_against_undisturbed"] == pytest.approx(3 / 3.5 / 0.75)
    assert row["detection"] == pytest.approx(dict.fromkeys(("p50", "p99", "worst"), 3.9 - KILLED_AT))
    assert row["after_detection"] == pytest.approx(dict.fromkeys(("p50", "p99", "worst"), 5.1 - 3.9))


def test_goodput_is_never_more_than_all(script: ModuleType) -> None:
    """4 steps a second before, 8 under fire, 2 after: the machine has become slower, and no second is lost."""
    times = [*(i / 4 for i in range(40)), *(20 + i / 8 for i in range(160)), *(50 + i / 2 for i in range(20))]
    account = script.Account([told("step", at, 7, step=i, generation=0) for i, at in enumerate(times, start=1)])
    slices = [script.Slice(None, 0, 10, 1.0), script.Slice(15.0, 20, 40, 1.0), script.Slice(None, 50, 60, 1.0)]
    (found,) = script.goodputs(account, slices)
    assert (found["rate"], found["undisturbed"], found["goodput"]) == pytest.approx((8.0, 3.0, 1.0))


def test_a_slice_without_kills_has_steps_however_short_it_is(script: ModuleType) -> None:
    """The rate under fire is divided by its rate."""
    journal = SimpleNamespace(steps=70)

    class SlowJob:
        def __init__(self) -> None:
            self.journal = journal

        def become_whole(self) -> None:
            journal.steps += 5

        def rest(self, until: float) -> None:
            assert until == pytest.approx(time.monotonic() + 1e-3, abs=1)

        def until(self, met: Any, seconds: float, what: str) -> None:
            while not met():
                time.sleep(0.01)
                journal.steps += 1

    args = SimpleNamespace(slices=[], quiet=1e-3)
    script.quiet(SlowJob(), args)
    assert journal.steps == 75 + script.FEWEST_STEPS + 1
    assert args.slices[0].end - args.slices[0].begin >= 0.04


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_job_and_leaves_no_file(number: signal.Signals, tmp_path: Path) -> None:
    words = ["--ranks", "2", "--min-ranks", "1", "--model", "digits", "--json", str(tmp_path / "result.json")]
    folders = tmp_path / "folders"
    folders.mkdir()
    environment = {**os.environ, "TMPDIR": str(folders), "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *words], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 100
        while not list(folders.glob("*/goodput/under-fire/log")):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    finally:
        process.kill()
        process.communicate()
    assert list(folders.glob("*/goodput")) == []
    assert processes_with(f"TMPDIR={folders}".encode()) == []
    assert not (tmp_path / "result.json").exists()


def test_percentiles_are_values_that_were_seen(script: ModuleType) -> None:
    values = [float(x) for x in range(100, 0, -1)]
    assert [script.percentile(values, part) for part in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert script.percentile([3.0], 0.99) == 3.0


@pytest.mark.parametrize(
    ("left", "size", "enough"),
    [({1, 2}, 3, True), ({1}, 2, False), ({0}, 2, True), ({2, 3}, 4, False), ({0, 3}, 4, True), ({2}, 3, False)],
)
def test_who_goes_on_is_who_shrink_lets_go_on(script: ModuleType, left: set[int], size: int, enough: bool) -> None:
    assert script.is_quorum(left, range(size)) is enough


@pytest.mark.parametrize(
    ("file", "words", "message"),
    [
        (SCRIPT, "--ranks 1", "argument --ranks: '1': a whole number of 2 or more is needed"),
        (SCRIPT, "--every 15 0", "argument --every: '0': a finite number above 0 is needed"),
        (SCRIPT, "--every 5 15 5", "--every 5 15 5: the same twice; --turns repeats all"),
        (SCRIPT, "--minutes inf", "argument --minutes: 'inf': a finite number above 0 is needed"),
        (SCRIPT, "--ranks 4 --min-ranks 4", "--min-ranks 4: then no rank of 4 can be killed; give less"),
        (SCRIPT, "--ranks 8 --batch 15", "--batch 15: 16 samples or more are needed, two for each rank"),
        (
            SCRIPT,
            "--json nowhere/x.json",
            "argument --json: 'nowhere/x.json': a file in a folder that is there is needed",
        ),
        (SCRIPT, f"--keep {ROOT}", f"argument --keep: '{ROOT}': a new folder in one that is there is needed"),
        (SCRIPT, "--json /proc/x", "argument --json: '/proc/x' cannot be written: No such file or directory"),
        (
            SCRIPT,
            "--picture /proc/x.svg",
            "argument --picture: '/proc/x.svg' cannot be written: No such file or directory",
        ),
        (SCRIPT, "--keep /proc/x", "argument --keep: '/proc/x' cannot be made: No such file or directory"),
        (SCRIPT, "--gaps some", "argument --gaps: invalid choice: 'some' (choose from 'exponential', 'fixed')"),
        (TRAINING, "--steps 0", "argument --steps: '0': a whole number of 1 or more is needed"),
        (TRAINING, "--steps 9 --batch 1", "--batch 1: 2 samples or more are needed, two for each rank"),
        (TRAINING, "--steps 9 --events nowhere", "argument --events: 'nowhere': a folder that is there is needed"),
    ],
)
def test_a_wrong_argument_gets_one_line(file: Path, words: str, message: str) -> None:
    done = alone(file, *words.split(), imports=TORCH)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{file.stem}: {message}\n"


def test_a_lab_that_is_not_up_is_named() -> None:
    done = alone(SCRIPT, "--lab", "nowhere", imports=TORCH)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"goodput: --lab nowhere: there is no lab 'nowhere'; .*\n", done.stderr)
