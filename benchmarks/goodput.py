"""Goodput under fire: what kills and replacements of ranks cost a training that goes on.

    python benchmarks/goodput.py --ranks 8 --every 15 --minutes 30 --json result.json --picture goodput.svg
    python benchmarks/goodput.py --ranks 4 --every 5 15 60 300 --minutes 20 --picture curve.svg    # one after another
    python benchmarks/goodput.py --lab mylab --every 15 --minutes 30                               # over emulated hosts

It starts examples/under_fire.py under `multiring run` with replacements, and kills ranks by SIGKILL: a random one of
those that are in the job at that moment, at random times (--gaps fixed: at equal ones). Slices under fire take turns
with slices without kills. A slice under fire begins with a kill and ends when the next one would come.

Goodput is the part of the seconds that was work: each second from the begin of a slice under fire to the next slice
without kills is either in a step that the same ranks took after another step, and whose result was kept, or lost: from
the last step before ranks were lost to the first one after, from the last step before replacements were admitted to
the first one after, or in a step that was taken again. Beside it stands the rate of kept steps in the slice over that
in the slices on both sides, which also tells what fewer ranks and the work for replacements cost; where the machine's
rate changes meanwhile it may be more than all. Then a job that nobody disturbs takes as many steps, and both end with
a loss. A kill that would leave too few ranks to go on waits for a replacement, and counts as held back.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from multiring import lab
from multiring.bench import curves, report
from multiring.job.survivors import is_quorum
from multiring.launch import processes

TRAINING = Path(__file__).resolve().parents[1] / "examples" / "under_fire.py"

Event = dict[str, Any]

LOOK_SECONDS = 0.02
"""Between two looks at what the ranks have told."""

START_SECONDS, WHOLE_SECONDS, END_SECONDS = 300.0, 300.0, 120.0
"""Most seconds for the job to start, to admit missing ranks, and to end."""

FIRST_STEPS = 20
"""Not measured: buffers are made and buckets are formed."""

ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals that end the job and then this program."""

FEWEST_STEPS = 3
"""Steps in a slice without kills, by which the rate under fire is divided."""

SETTLE_SECONDS = 1.0
"""After the last replacement was admitted, before a slice without kills begins."""

MOST_REPLACEMENTS = 100_000
NO_END = 10**12

STAGES = ("detection", "shrink", "who has what", "state", "DistributedDataParallel", "first step")
ADMISSION = ("grow", *STAGES[2:])
START = ("process", "imports and warm-up", "until admitted", "first step")


class Failed(Exception):
    """The job did not do what is to be measured."""


@dataclass(frozen=True)
class Kill:
    """A rank that was killed: its process, its number in the world of that generation, and when."""

    at: float
    pid: int
    rank: int
    generation: int
    slice: int
    held_back: float
    """Seconds for which it waited until enough ranks were there."""


@dataclass(frozen=True)
class Slice:
    """A time in which kills came every so many seconds; ``every`` is None where none came."""

    every: float | None
    begin: float
    end: float
    load: float
    """The mean of the machine's load at both ends."""


# --- what the ranks tell ---


class Journal:
    """The events that the ranks of a job have written to their files so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.events: list[Event] = []
        self.world: Event = {"generation": -1, "pids": []}
        """The first event read about the newest world."""
        self.steps = 0

    def look(self) -> None:
        """Read what is new; a line that is being written is read by the next look."""
        for file in sorted(self._folder.glob("*.jsonl")):
            begin = self._read.get(file, 0)
            if file.stat().st_size == begin:  # most are of ranks that have been killed
                continue
            with file.open("rb") as opened:
                opened.seek(begin)
                whole = opened.read().rpartition(b"\n")
            self._read[file] = begin + len(whole[0]) + len(whole[1])
            for line in whole[0].splitlines():
                self._take(json.loads(line))

    def _take(self, event: Event) -> None:
        self.events.append(event)
        if event["event"] == "world" and event["generation"] > self.world["generation"]:
            self.world = event
        elif event["event"] == "step":
            self.steps = max(self.steps, event["step"])


# --- the job, and who is killed ---


@contextmanager
def later_signals(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Yield the signals that come in the block, where nothing is raised: in a fork that would be lost."""
    arrived: list[int] = []
    handled = [number for number in numbers if callable(signal.getsignal(number))]
    before = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in handled}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Job:
    """The training under `multiring run`; it is ended with the block that it is used in."""

    def __init__(self, args: argparse.Namespace, folder: Path, steps: int, standby: int = 0) -> None:
        self.ranks, self.min_ranks = args.ranks, args.min_ranks
        folder.mkdir()
        self.journal = Journal(folder)
        self.kills: list[Kill] = []
        self._stop = folder / "stop"
        self._log = folder / "log"
        options = ["--min-ranks", str(args.min_ranks), "--standby", str(standby)]
        options += ["--max-replacements", str(MOST_REPLACEMENTS)]
        training = [str(TRAINING), "--model", args.model, "--steps", str(steps), "--seed", str(args.seed)]
        given = ["--batch", str(args.batch), "--look", str(args.look), *(["--float64"] if args.float64 else [])]
        told = ["--events", str(folder), "--stop", str(self._stop)]
        words = [*options, *training, *given, *told]
        here = [sys.executable, "-m", "multiring", "run", "-n", str(args.ranks), *words]
        # Without byte code each replacement compiles what it imports.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        parent = os.getpid()

        with self._log.open("wb") as log, later_signals(ENDING) as arrived:
            self.process = subprocess.Popen(
                args.cluster.launch_command(*words) if args.cluster else here,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: processes.end_with(parent, signal.SIGTERM),  # however this process ends
            )
        try:
            for number in arrived:
                signal.raise_signal(number)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()  # the launcher ends its ranks
            try:
                self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def look(self) -> None:
        """See what is new. Failed if the job has ended."""
        self.journal.look()
        if self.process.poll() is not None:
            raise Failed(f"the job has ended, with exit code {self.process.returncode}:\n{self._last_lines()}")

    def until(self, met: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not met():
            if time.monotonic() > deadline:
                raise Failed(f"{what}: not within {seconds:g} s\n{self._last_lines()}")
            time.sleep(LOOK_SECONDS)
            self.look()

    def rest(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_SECONDS))
            self.look()

    def is_whole(self) -> bool:
        pids = self.journal.world["pids"]
        return len(pids) == self.ranks and self._dead().isdisjoint(pids)

    def begin(self) -> None:
        """Wait until all ranks train."""
        self.until(lambda: self.journal.steps >= FIRST_STEPS, START_SECONDS, "the first steps")

    def become_whole(self) -> None:
        """Wait until all who were lost are replaced."""
        self.until(self.is_whole, WHOLE_SECONDS, f"{self.ranks} ranks in the job again")
        steps = self.journal.steps
        self.until(lambda: self.journal.steps > steps + FIRST_STEPS, WHOLE_SECONDS, "steps of all ranks")
        self.rest(time.monotonic() + SETTLE_SECONDS)

    def end(self) -> Event:
        """Let the training end; the result that rank 0 has then."""
        self._stop.touch()
        return self.ended(END_SECONDS)

    def ended(self, seconds: float) -> Event:
        """Return the training's ``ended`` event; Failed if the job fails or does not end within ``seconds``."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"the job does not end within {seconds:g} s\n{self._last_lines()}") from None
        self.journal.look()
        results = [event for event in self.journal.events if event["event"] == "ended"]
        if code != 0 or not results:
            raise Failed(f"the job failed, with exit code {code}:\n{self._last_lines()}")
        return results[0]

    def kill(self, chance: random.Random, number: int) -> None:
        """Kill a random rank, in slice ``number``, as soon as the others can go on without it."""
        began = time.monotonic()
        self.until(lambda: bool(self._possible()), WHOLE_SECONDS, "enough ranks for a kill")
        rank = chance.choice(self._possible())
        world = self.journal.world
        pid, now = world["pids"][rank], time.monotonic()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            raise Failed(f"rank {rank}, process {pid}, has ended before it was killed\n{self._last_lines()}") from None
        self.kills.append(Kill(now, pid, rank, world["generation"], number, now - began))

    def _dead(self) -> set[int]:
        return {kill.pid for kill in self.kills}

    def _possible(self) -> list[int]:
        """Ranks of the newest world without which the others are enough to go on."""
        pids = self.journal.world["pids"]
        left = {rank for rank, pid in enumerate(pids) if pid not in self._dead()}
        return [
            rank for rank in sorted(left) if len(left) > self.min_ranks and is_quorum(left - {rank}, range(len(pids)))
        ]

    def _last_lines(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])


def expose(job: Job, args: argparse.Namespace, every: float, seconds: float, chance: random.Random) -> None:
    """Kill ranks for so many seconds, up to the time of the next kill, which is not made."""
    number = len(args.slices)
    with measured_slice(args.slices, every):
        until = time.monotonic() + seconds
        while True:
            job.kill(chance, number)
            following = job.kills[-1].at + (every if args.gaps == "fixed" else chance.expovariate(1 / every))
            job.rest(following)
            if following >= until:
                return


@contextmanager
def measured_slice(slices: list[Slice], every: float | None) -> Iterator[None]:
    begin, load = time.monotonic(), os.getloadavg()[0]
    yield
    slices.append(Slice(every, begin, time.monotonic(), (load + os.getloadavg()[0]) / 2))


# --- what it comes to ---


class Account:
    """The ranks' events, in order of time."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = sorted(events, key=lambda event: event["at"])
        self.lost_pids = {pid for event in self.of("shrunk") for pid in event["lost"]}
        """Processes without which the survivors have agreed to go on."""
        self.worlds = {event["generation"]: event["pids"] for event in self.of("world")}
        self.completed: dict[tuple[int, int], float] = {}
        """Time at which the last rank completed a step, by generation and step."""
        for event in self.of("step"):
            self.completed[event["generation"], event["step"]] = event["at"]

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def kept(self) -> dict[int, float]:
        """Time of completion of each step; of a step taken again, the last one."""
        return {step: self.completed[generation, step] for generation, step in sorted(self.completed)}

    @property
    def again(self) -> int:
        """Steps that some ranks had completed, and that were taken again."""
        return len(self.completed) - len(self.kept)

    @property
    def admitted(self) -> set[int]:
        """Processes of replacements that were in a world."""
        newcomers = {event["pid"] for event in self.of("started") if event["replacement"]}
        return newcomers & {pid for pids in self.worlds.values() for pid in pids}

    def first_step(self, generation: int) -> tuple[int, float] | None:
        """The generation, from this one on, in which a step was completed first, and when."""
        found = [(at, of) for (of, _), at in self.completed.items() if of >= generation]
        return min(found)[::-1] if found else None

    def moment(self, kind: str, generation: int, began: float, until: float) -> float | None:
        """Return when the last rank of a world wrote its first event of a kind between two times; None if none did.

        What is told later is of another kill.
        """
        found: dict[int, float] = {}
        for event in self.of(kind):
            if event.get("generation", generation) != generation:
                continue
            if began <= event["at"] <= until and event["pid"] in self.worlds.get(generation, ()):
                found.setdefault(event["pid"], event["at"])
        return max(found.values(), default=None)

    def detection(self, kill: Kill, generation: int, until: float) -> float:
        """Return when the last rank of the first world without a killed rank had failed in a call, by a time.

        Where none did, as they were meeting anyway, it is when they had agreed to go on without that rank.
        """
        failed = self.moment("failed", generation, kill.at, until)
        agreed = [event["at"] for event in self.of("shrunk") if kill.pid in event["lost"] and event["at"] <= until]
        return min(agreed, default=until) if failed is None else failed

    def stages(self, began: float, kinds: Sequence[str], generation: int) -> list[float] | None:
        """Seconds of each stage, by the last rank that ended it, up to the first step of a world.

        None where no step was completed in that world, as ranks were lost or admitted before.
        """
        first = self.first_step(generation)
        if first is None or first[0] != generation:
            return None
        moments = [self.moment(kind, generation, began, first[1]) for kind in kinds]
        if None in moments:
            return None
        # The ranks enter a stage one by one, so that the last of one may come after the first of the next.
        ends = [began]
        for moment in (*moments, first[1]):
            ends.append(max(moment, ends[-1]))
        return [end - begin for begin, end in itertools.pairwise(ends)]


def after_kill(account: Account, kill: Kill) -> dict[str, Any]:
    """Return what followed a kill: seconds to the next completed step, and of each stage if nothing came between."""
    without = [of for of, pids in account.worlds.items() if of > kill.generation and kill.pid not in pids]
    first = account.first_step(min(without)) if without else None
    if first is None:
        raise Failed(f"no step was completed after process {kill.pid} was killed")
    stages = account.stages(kill.at, ("failed", "shrunk", "world", "synchronised", "wrapped"), min(without))
    detected = account.detection(kill, min(without), first[1])
    found = {**asdict(kill), "was_lost": kill.pid in account.lost_pids, "to_next_step": first[1] - kill.at}
    found |= {"detection": detected - kill.at, "after_detection": first[1] - detected}
    return {**found, "stages": dict(zip(STAGES, stages, strict=True)) if stages else None}


def admissions(account: Account) -> list[dict[str, Any]]:
    """Each time that replacements were admitted: for how long the others trained nothing, by stages."""
    found = []
    for generation in sorted({event["generation"] for event in account.of("grown")}):
        began = max(event["began"] for event in account.of("grown") if event["generation"] == generation)
        stages = account.stages(began, ("grown", "world", "synchronised", "wrapped"), generation)
        if stages:
            found.append({"at": began, "pause": sum(stages), "stages": dict(zip(ADMISSION, stages, strict=True))})
    return found


def replacements(account: Account, kills: Sequence[Kill]) -> list[dict[str, float]]:
    """Seconds of each replacement from the kill on, by stages."""
    by_pid: dict[int, dict[str, float]] = {}
    for event in account.events:
        by_pid.setdefault(event["pid"], {}).setdefault(event["event"], event["at"])
    ranks = {event["pid"]: event["rank"] for event in account.of("started")}
    newcomers = {event["pid"] for event in account.of("started") if event["replacement"]}
    found = []
    for kill in kills:
        # A standby's process was started before the kill, and is ready after it.
        successor = next(
            (
                event["pid"]
                for event in account.of("ready")
                if event["pid"] in newcomers and event["at"] > kill.at and ranks[event["pid"]] == ranks[kill.pid]
            ),
            None,
        )
        told = {} if successor is None else by_pid[successor]
        if {"ready", "joined", "step"} <= told.keys():
            started = max(told["started"], kill.at)
            moments = [kill.at, started, *(told[kind] for kind in ("ready", "joined", "step"))]
            each = [end - begin for begin, end in itertools.pairwise(moments)]
            found.append(dict(zip(START, each, strict=True)))
    return found


LOSSES = ("shrink", "admission", "again")
"""Reasons why a second is no work: ranks were lost, others were admitted, or its step was taken again."""


def losses(account: Account, begin: float, end: float) -> dict[str, float]:
    """Seconds between two times that were no work, by reason."""
    shrunk = {event["generation"] for event in account.of("shrunk")}
    kept = account.kept
    found = dict.fromkeys(LOSSES, 0.0)
    completed = sorted((at, generation, step) for (generation, step), at in account.completed.items())
    for (before, earlier, _), (at, generation, step) in itertools.pairwise(completed):
        seconds = min(at, end) - max(before, begin)
        if seconds <= 0:
            continue
        if generation > earlier:
            found["shrink" if shrunk & set(range(earlier + 1, generation + 1)) else "admission"] += seconds
        elif at != kept[step]:
            found["again"] += seconds
    return found


def goodputs(account: Account, slices: Sequence[Slice]) -> list[dict[str, Any]]:
    """The seconds of each slice under fire up to the next without kills, those lost, and its rate beside others.

    They include what its last kill costs after the slice, until all ranks are back.
    """
    steps = sorted(account.kept.values())

    def rate(of: Slice) -> float:
        return sum(of.begin <= at < of.end for at in steps) / (of.end - of.begin)

    found = []
    for before, under, after in zip(slices, slices[1:], slices[2:], strict=False):
        if under.every is not None:
            undisturbed = (rate(before) + rate(after)) / 2
            seconds, lost = after.begin - under.begin, losses(account, under.begin, after.begin)
            rates = {"rate": rate(under), "undisturbed": undisturbed, "under_fire": under.end - under.begin}
            told = {"every": under.every, "seconds": seconds, "lost": lost, **rates}
            found.append({**told, "goodput": 1 - sum(lost.values()) / seconds})
    return found


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest of the values that this part of them does not exceed."""
    return sorted(values)[max(math.ceil(part * len(values)) - 1, 0)]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99), "worst": max(values)}


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]} if rows else {}


def summary(every: float, account: Account, kills: Sequence[Kill], slices: Sequence[Slice]) -> dict[str, Any]:
    """Return the cost of the kills at one mean interval."""
    mine = [kill for kill in kills if slices[kill.slice].every == every]
    after = [after_kill(account, kill) for kill in mine]
    parts = [each for each in goodputs(account, slices) if each["every"] == every]
    seconds, under_fire = (sum(each[name] for each in parts) for name in ("seconds", "under_fire"))
    lost = {name: sum(each["lost"][name] for each in parts) for name in LOSSES}
    undisturbed = sum(each["undisturbed"] * each["under_fire"] for each in parts)
    return {
        "every": every,
        "seconds": seconds,
        "under_fire": under_fire,
        "lost": lost,
        "goodput": 1 - sum(lost.values()) / seconds,
        "rate_against_undisturbed": sum(each["rate"] * each["under_fire"] for each in parts) / undisturbed,
        "slices": parts,
        **{name: spread([each[name] for each in after]) for name in ("detection", "after_detection", "to_next_step")},
        "stages": medians([each["stages"] for each in after if each["stages"]]),
        "kills": after,
    }


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train under fire."""
    args.slices = []
    chance = random.Random(args.seed)
    before, began = processors(), time.monotonic()
    with Job(args, folder / "under-fire", NO_END, args.standby) as job:
        job.begin()
        for _ in range(args.turns):
            for every in args.every:
                quiet(job, args)
                expose(job, args, every, 60 * args.minutes / args.turns, chance)
        quiet(job, args)
        result = job.end()
    others = (processors() - before) / (time.monotonic() - began)
    account = Account(job.journal.events)
    pauses = admissions(account)
    steps = account.kept
    return {
        "ranks": args.ranks,
        "lab": args.cluster and args.cluster.name,
        "model": args.model,
        "seed": args.seed,
        "gaps": args.gaps,
        "standby": args.standby,
        "rows": [summary(every, account, job.kills, args.slices) for every in args.every],
        "killed": [kill.pid for kill in job.kills],
        "lost": sorted(account.lost_pids),
        "admitted": sorted(account.admitted),
        "steps": {"kept": len(steps), "again": account.again, "lost": max(steps) - len(steps), "last": result["step"]},
        "result": {name: result[name] for name in ("loss", "accuracy")},
        "undisturbed": None,
        "pause_to_admit": medians([{"pause": each["pause"]} for each in pauses]),
        "admission": medians([each["stages"] for each in pauses]),
        "replacement": medians(replacements(account, job.kills)),
        "load": [each.load for each in args.slices],
        "others": others,
        "slices": [asdict(each) for each in args.slices],
        "rates": rates(account, args.slices),
    }


def quiet(job: Job, args: argparse.Namespace) -> None:
    """A slice without kills, once all ranks are there; however short it is, some steps are completed in it."""
    job.become_whole()
    with measured_slice(args.slices, None):
        steps = job.journal.steps
        job.rest(time.monotonic() + args.quiet)
        job.until(lambda: job.journal.steps > steps + FEWEST_STEPS, WHOLE_SECONDS, "steps without a kill")


def undisturbed(args: argparse.Namespace, folder: Path, steps: int) -> dict[str, float]:
    """Return loss and accuracy after ``steps`` steps without a kill."""
    with Job(args, folder / "undisturbed", steps) as job:
        job.begin()
        spent = sum(each.end - each.begin for each in args.slices)
        result = job.ended(START_SECONDS + 10 * spent)
    return {name: result[name] for name in ("loss", "accuracy")}


def processors() -> float:
    """Seconds that the machine's processors have worked for others than the children of this process."""
    user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    worked = sum(map(int, (user, nice, system, *interrupts[:2]))) / os.sysconf("SC_CLK_TCK")
    mine = resource.getrusage(resource.RUSAGE_CHILDREN)
    return worked - mine.ru_utime - mine.ru_stime


def rates(account: Account, slices: Sequence[Slice]) -> list[tuple[float, float]]:
    """Steps kept in each second since the first slice began."""
    begin, end = slices[0].begin, slices[-1].end
    counts = [0] * math.ceil(end - begin)
    for at in account.kept.values():
        if begin <= at < end:
            counts[int(at - begin)] += 1
    return [(second, count) for second, count in enumerate(counts)]


# --- what is shown ---


def show(found: dict[str, Any]) -> None:
    steps = found["steps"]
    load = f"{min(found['load']):.1f} to {max(found['load']):.1f}"
    cores = len(os.sched_getaffinity(0))
    print(
        f"{found['ranks']} ranks{' in lab ' + found['lab'] if found['lab'] else ''}, {found['model']}, load {load} on "
        f"{cores} cores, {found['others']:.2f} of them others'"
    )
    print("\n| a kill every | kills | seconds | goodput | lost: shrink | admission | again | rate, of undisturbed |")
    print("|---|---|---|---|---|---|---|---|")
    for row in found["rows"]:
        mean = f"{row['every']:g} s ({row['under_fire'] / len(row['kills']):.1f} s)"
        lost = " | ".join(f"{row['lost'][name]:.1f} s" for name in LOSSES)
        print(
            f"| {mean} | {len(row['kills'])} | {row['seconds']:.1f} s | {row['goodput']:.1%} | {lost} | "
            f"{row['rate_against_undisturbed']:.1%} |"
        )
    print("\n| a kill every | from the kill | p50 | p99 | worst |\n|---|---|---|---|---|")
    parts = {"detection": "to its detection", "after_detection": "on to the next step", "to_next_step": "both"}
    for row in found["rows"]:
        for name, words in parts.items():
            times = " | ".join(f"{row[name][each]:.2f} s" for each in ("p50", "p99", "worst"))
            print(f"| {row['every']:g} s | {words} | {times} |")
    held = [kill["held_back"] for row in found["rows"] for kill in row["kills"] if kill["held_back"] > 2 * LOOK_SECONDS]
    print(f"\nsteps: {steps['kept']} kept, {steps['again']} taken again, {steps['lost']} lost")
    print(
        f"ranks: {len(found['killed'])} killed, {len(found['lost'])} lost, {len(found['admitted'])} admitted; "
        f"{len(held)} kills held back, for {sum(held):.1f} s"
    )
    print(f"test loss {found['result']['loss']:.4f}, accuracy {found['result']['accuracy']:.1%}")
    for row in found["rows"]:
        show_stages(f"from a kill, every {row['every']:g} s, to the next step", row["stages"])
    show_stages("to admit replacements", found["admission"])
    show_stages("from a kill to the first step of the replacement", found["replacement"])


def show_stages(what: str, stages: dict[str, float]) -> None:
    if stages:
        print(f"\nmedians of the seconds {what}")
        for name, seconds in stages.items():
            print(f"  {name:<26}{seconds:8.3f}")


def draw(file: Path, found: dict[str, Any]) -> None:
    """Goodput over the mean time between kills; for one alone, the steps of each second."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    rows = sorted(found["rows"], key=lambda row: row["every"])
    about = f"{found['ranks']} ranks, {found['model']}, {found['others']:.1f} cores busy with others"
    if len(rows) > 1:
        axes.plot([row["every"] for row in rows], [100 * row["goodput"] for row in rows], marker="o", linewidth=2.5)
        axes.set_xscale("log")
        axes.set_xticks([row["every"] for row in rows], [f"{row['every']:g} s" for row in rows])
        axes.minorticks_off()
        axes.set_ylim(0, 105)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
        axes.set_xlabel("mean time between kills")
        first, last = rows[0], rows[-1]
        title = f"{first['goodput']:.0%} of the time is work at a kill every {first['every']:g} s, "
        title += f"{last['goodput']:.0%} at one every {last['every']:g} s"
        curves.said(axes, title, f"goodput; {about}")
    else:
        axes.plot(*zip(*found["rates"], strict=True), linewidth=1)
        begin = found["slices"][0]["begin"]
        for kill in rows[0]["kills"]:
            axes.axvline(kill["at"] - begin, color="red", linewidth=0.5)
        for each in found["slices"]:
            if each["every"] is None:
                axes.axvspan(each["begin"] - begin, each["end"] - begin, color="0.9")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("seconds; grey: without kills, red: a rank is killed")
        title = f"{rows[0]['goodput']:.1%} of the time is work at a kill every {rows[0]['every']:g} s"
        curves.said(axes, title, f"steps a second; {about}")
    axes.grid(alpha=0.3)
    curves.save(figure, file)
    pyplot.close(figure)


# --- what is asked ---


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"goodput: {message}\n")


def whole(least: int) -> Callable[[str], int]:
    def number(given: str) -> int:
        if not given.isdecimal() or int(given) < least:
            raise argparse.ArgumentTypeError(f"{given!r}: a whole number of {least} or more is needed")
        return int(given)

    return number


def above_zero(given: str) -> float:
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{given!r}: a finite number above 0 is needed")
    return number


def new_folder(given: str) -> Path:
    folder = Path(given)
    if os.path.lexists(folder) or not folder.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{given!r}: a new folder in one that is there is needed")
    try:
        folder.mkdir()
        folder.rmdir()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{given!r} cannot be made: {error.strerror}") from None
    return folder


def file_to_write(given: str) -> Path:
    file = Path(given)
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{given!r}: a file in a folder that is there is needed")
    is_new = not os.path.lexists(file)
    try:
        with file.open("ab"):  # what cannot be written is to be known before it is measured
            pass
        if is_new:
            file.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{given!r} cannot be written: {error.strerror}") from None
    return file


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--ranks", type=whole(2), help="of the job; default: 8, or those of the lab")
    parser.add_argument("--lab", metavar="NAME", help="run on the hosts of this lab, which is up (docs/lab.md)")
    parser.add_argument("--min-ranks", type=whole(1), help="kills leave so many; default: half of the ranks")
    parser.add_argument("--standby", type=whole(0), default=0, metavar="K", help="interpreters kept for replacements")
    parser.add_argument("--every", type=above_zero, nargs="+", default=[15.0], metavar="SECONDS", help="between kills")
    parser.add_argument("--gaps", choices=("exponential", "fixed"), default="exponential", help="how they vary")
    parser.add_argument("--minutes", type=above_zero, default=30.0, help="under fire, for each of --every")
    parser.add_argument("--turns", type=whole(1), default=2, help="slices into which these minutes are cut")
    parser.add_argument("--quiet", type=above_zero, default=30.0, metavar="SECONDS", help="of a slice without kills")
    parser.add_argument("--seed", type=whole(0), default=0, help="of kills, weights and the order of samples")
    parser.add_argument("--model", choices=("digits", "transformer"), default="transformer")
    parser.add_argument("--batch", type=whole(2), default=64, help="samples in a step, of all ranks together")
    parser.add_argument("--look", type=whole(1), default=10, metavar="STEPS", help="between two looks for replacements")
    parser.add_argument(
        "--float64", action="store_true", help="compute in it: losses then tell lost samples from noise"
    )
    parser.add_argument("--no-undisturbed", dest="undisturbed", action="store_false", help="leave out the second job")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="also write everything here")
    parser.add_argument("--picture", type=file_to_write, metavar="FILE.svg", help="draw it (needs matplotlib)")
    parser.add_argument("--keep", type=new_folder, metavar="DIR", help="a new folder for what the ranks told, and logs")
    args = parser.parse_args(words)
    args.cluster = None
    if args.lab is not None:
        try:
            args.cluster = lab.find(args.lab)
        except lab.LabError as error:
            parser.error(f"--lab {args.lab}: {error}")
        there = sum(host.ranks for host in args.cluster.hosts)
        if args.ranks not in (None, there):
            parser.error(f"--ranks {args.ranks}: lab {args.lab} has places for {there}; leave --ranks out")
        args.ranks = there
    args.ranks = args.ranks or 8
    if args.min_ranks is None:
        args.min_ranks = args.ranks // 2
    if args.min_ranks >= args.ranks:
        parser.error(f"--min-ranks {args.min_ranks}: then no rank of {args.ranks} can be killed; give less")
    if len(set(args.every)) < len(args.every):
        parser.error(f"--every {' '.join(f'{each:g}' for each in args.every)}: the same twice; --turns repeats all")
    if args.batch < 2 * args.ranks:
        parser.error(f"--batch {args.batch}: {2 * args.ranks} samples or more are needed, two for each rank")
    needed = {"torch": "torch", **({"sklearn": "scikit-learn"} if args.model == "digits" else {})}
    for module, package in needed.items():
        if find_spec(module) is None:
            parser.error(f"--model {args.model} needs {package}: pip install {package}")
    if args.picture:
        try:
            curves.check(args.picture, "--picture")
        except (ImportError, ValueError) as error:
            parser.error(str(error))
    return args


def end_by_signals() -> None:
    """Let a signal end this program as an error does: the job first, and no file is left behind."""
    for number in ENDING - {signal.SIGINT}:  # which Python makes a KeyboardInterrupt
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def main() -> None:
    args = arguments()
    end_by_signals()
    with tempfile.TemporaryDirectory() as directory:
        folder = args.keep or Path(directory, "goodput")
        folder.mkdir()
        try:
            found = measure(args, folder)
            tell(args, found)
            if args.undisturbed:
                alone = found["undisturbed"] = undisturbed(args, folder, found["steps"]["last"])
                print(f"\nundisturbed: test loss {alone['loss']:.4f}, accuracy {alone['accuracy']:.1%}")
                save(args, found)
        except Failed as error:
            sys.exit(f"goodput: {error}")
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)


def tell(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Show what was measured before the second job, which takes as long and may fail."""
    show(found)
    sys.stdout.flush()
    save(args, found)
    if args.picture:
        with writing("--picture", args.picture):
            draw(args.picture, found)


def save(args: argparse.Namespace, found: dict[str, Any]) -> None:
    if args.json:
        rest = {name: value for name, value in found.items() if name != "rows"}
        told = report.record(found["rows"], command=" ".join(["goodput", *sys.argv[1:]]), **rest)
        with writing("--json", args.json):
            args.json.write_text(json.dumps(told, indent=1) + "\n")


@contextmanager
def writing(option: str, file: Path) -> Iterator[None]:
    """Failed, in a line, if the file cannot be written: the disk may have become full meanwhile."""
    try:
        yield
    except OSError as error:
        raise Failed(f"{option} {file} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    main()
