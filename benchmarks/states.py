"""all_reduce on one host in states of the machine that are made on purpose, beside its peers in turns.

    python benchmarks/states.py --json result.json                    # all states, 2 and 4 ranks, some two hours
    python benchmarks/states.py --states quiet,spinner --launches 5   # two of them
    sudo python benchmarks/states.py --states "huge pages,no huge pages"

Each state is one run of `multiring bench`, in which our launches and those of the peers take turns and an in-place
pass is measured in each. A table lists every size that misses a limit, with our median and our worst launch over it,
the median of the best peer over ours, and the pass over ours.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from multiring.bench.peers import installed
from multiring.cli.options import output_file
from multiring.units import duration, size

SIZES = "4KB,64KB,1MB,16MB,64MB"

WORST_OVER_MEDIAN = 1.3
SLACK, LEAST_SLACK_SECONDS = 0.1, 1e-6
"""A peer's median is below ours where it is so by this part of it and by so many seconds, whichever is more."""
PASS_BYTES, PASS_OVER_OURS = 1 << 26, {"private": 0.6, "arena": 0.75}
"""From this size on the memory decides what a call takes."""

SPIN = "while True: pass"
COPY = "import numpy as np\na = np.ones(1 << 25)\nb = np.empty_like(a)\nwhile True: np.copyto(b, a)"

CPUS = Path("/sys/devices/system/cpu")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


class CannotBeMade(Exception):
    """This machine cannot be in the state: it says why."""


@contextmanager
def as_it_is() -> Iterator[list[int]]:
    yield []


@contextmanager
def beside(program: str) -> Iterator[list[int]]:
    """While a process of this program takes what it gets of all cores."""
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield []
    finally:
        process.kill()
        process.wait()


@contextmanager
def on_cores(share_cache: bool) -> Iterator[list[int]]:
    """On two cores that have a cache of the last level in common, or that have not."""
    allowed = sorted(os.sched_getaffinity(0))
    first, cache = allowed[0], last_cache(allowed[0])
    others = [core for core in allowed[1:] if (core in cache) is share_cache and core not in threads_of(first)]
    if not others:
        raise CannotBeMade(f"no core {'shares' if share_cache else 'is without'} the last cache of core {first}")
    yield [first, others[0]]


@contextmanager
def huge_pages(setting: str, of_shared_memory: str) -> Iterator[list[int]]:
    """With transparent huge pages as given, for private and for shared memory; the former settings come back."""
    files = {HUGE_PAGES / "enabled": setting, HUGE_PAGES / "shmem_enabled": of_shared_memory}
    with ExitStack() as stack:
        for file, word in files.items():
            try:
                former = file.read_text().partition("[")[2].partition("]")[0]
                file.write_text(word)
            except OSError as error:
                raise CannotBeMade(f"{file}: {error.strerror}") from None
            stack.callback(file.write_text, former)
        yield []


STATES: dict[str, Callable[[], AbstractContextManager[list[int]]]] = {
    "quiet": as_it_is,
    "spinner": lambda: beside(SPIN),
    "memory hog": lambda: beside(COPY),
    "near cores": lambda: on_cores(share_cache=True),
    "far cores": lambda: on_cores(share_cache=False),
    "huge pages": lambda: huge_pages("always", "always"),
    "no huge pages": lambda: huge_pages("never", "never"),
}


def cores_of(text: str) -> set[int]:
    """The cores of a list as the kernel writes it, such as 0-3,8."""
    ends = [part.split("-") for part in text.strip().split(",")]
    return {core for first, *last in ends for core in range(int(first), int((last or [first])[0]) + 1)}


def last_cache(core: int) -> set[int]:
    """The cores that share its cache of the highest level."""
    caches = sorted((CPUS / f"cpu{core}/cache").glob("index*"), key=lambda index: int((index / "level").read_text()))
    return cores_of((caches[-1] / "shared_cpu_list").read_text()) if caches else {core}


def threads_of(core: int) -> set[int]:
    """The hardware threads of the core that this one belongs to."""
    return cores_of((CPUS / f"cpu{core}/topology/thread_siblings_list").read_text())


@dataclass(frozen=True)
class Case:
    """One size and buffer in one state: seconds of our median launch, and what it is beside.

    ``peers`` are the median launches of each peer over ours; ``of_pass`` is the in-place pass over ours.
    """

    state: str
    ranks: int
    nbytes: int
    buffer: str
    api: str
    seconds: float
    worst_over_median: float
    peers: dict[str, float]
    of_pass: float

    @property
    def missed(self) -> list[str]:
        """The limits that it misses."""
        least = min(1 - SLACK, 1 - LEAST_SLACK_SECONDS / self.seconds)
        found = [f"{name} is faster" for name, ratio in self.peers.items() if ratio < least]
        if self.worst_over_median > WORST_OVER_MEDIAN:
            found.append("worst launch")
        if self.nbytes >= PASS_BYTES and self.of_pass < PASS_OVER_OURS[self.buffer]:
            found.append("part of the pass")
        return found


def cases(state: str, ranks: int, rows: Sequence[Mapping[str, Any]]) -> list[Case]:
    """Return a `Case` for each row of `multiring bench --json`."""
    return [
        Case(
            state,
            ranks,
            row["nbytes"],
            row["buffer"],
            row["api"],
            row["seconds"],
            max(row["launches"]) / row["seconds"],
            {name: statistics.median(launches) / row["seconds"] for name, launches in row["peers"].items()},
            row["fraction_of_bound"],
        )
        for row in rows
    ]


def measure(ranks: int, cores: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    """The record of one run of `multiring bench`, on these cores where there are any."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "bench.json")
        words = ["bench", "-n", str(ranks), "--sizes", args.sizes, "--peers", args.peers]
        words += ["--launches", str(args.launches), "--seconds", str(args.seconds), "--json", str(file)]
        bind = (lambda: os.sched_setaffinity(0, cores)) if cores else None
        subprocess.run([sys.executable, "-m", "multiring", *words], check=True, stdout=sys.stderr, preexec_fn=bind)
        record: dict[str, Any] = json.loads(file.read_text())
        return record


def show(found: Sequence[Case]) -> None:
    """Print the cases that miss a limit."""
    missing = [case for case in found if case.missed]
    console = Console() if Console().is_terminal else Console(width=140)
    console.print(f"{len(found)} cases, of which {len(missing)} miss a limit", highlight=False)
    headings = ("state", "ranks", "size", "buffer", "median", "worst", "best peer", "pass", "missed")
    table = Table(*headings, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for case in missing:
        best = min(case.peers.items(), key=lambda each: each[1], default=None)
        table.add_row(
            case.state,
            str(case.ranks),
            size(case.nbytes),
            f"{case.api} {case.buffer}",
            duration(case.seconds),
            f"{case.worst_over_median:.2f}",
            f"{best[0]} {best[1]:.2f}" if best else "",
            f"{case.of_pass:.0%}",
            ", ".join(case.missed),
        )
    console.print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="all_reduce in states of the machine that are made on purpose.")
    parser.add_argument("--states", default=",".join(STATES), help="which, separated by commas")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks")
    parser.add_argument("--sizes", default=SIZES, help="sizes of the buffer")
    parser.add_argument("--peers", default=",".join(installed()), help="what to measure beside it")
    parser.add_argument("--launches", type=int, default=20, help="how often each is launched, in turns")
    parser.add_argument("--seconds", type=float, default=0.2, help="how long each size is measured in a launch")
    parser.add_argument("--json", type=output_file, help="also write all figures here")
    args = parser.parse_args()
    args.states = args.states.split(",")
    if unknown := [name for name in args.states if name not in STATES]:
        parser.error(f"--states: {', '.join(unknown)}: known are {', '.join(STATES)}")
    try:
        args.ranks = [int(word) for word in args.ranks.split(",")]
    except ValueError:
        parser.error(f"--ranks {args.ranks}: whole numbers, separated by commas")
    return args


def main() -> None:
    args = arguments()
    found: list[Case] = []
    records, left_out = [], {}
    for state in args.states:
        for ranks in args.ranks:
            with ExitStack() as stack:
                try:
                    cores = stack.enter_context(STATES[state]())
                except CannotBeMade as error:
                    left_out[state] = str(error)
                    break
                print(f"{state}, {ranks} ranks", file=sys.stderr)
                before = os.getloadavg()[0]
                record = measure(ranks, cores, args)
            records.append({"state": state, "ranks": ranks, "load before": before, **record})
            found += cases(state, ranks, record["rows"])
    for state, why in left_out.items():
        print(f"{state}: left out: {why}")
    if args.json:
        written = {"kernel": platform.release(), "left out": left_out, "runs": records}
        args.json.write_text(json.dumps({**written, "cases": [asdict(case) for case in found]}, indent=1) + "\n")
    if found:
        show(found)


if __name__ == "__main__":
    main()
