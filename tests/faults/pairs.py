"""Every pair of 3 to 8 hosts of a lab parted, both ways and one way: ``make pairs``, or

    python tests/faults/pairs.py [--hosts 3 4 5 6 7 8] [--calls ring planned all_to_all] [--beside 4]

A job on each set of hosts makes collectives in a ring (which needs neighbours), by the plan that is chosen (any pair),
or that need every pair. Where the two need each other all ranks must raise alike, and else go on with the right sums.
The list of pairs that went wrong comes last.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from jobs_under_fault import World, started

from faults import PARTINGS, Parting
from multiring import lab
from multiring.job.hosts import control_edges
from multiring.planning.topology import LEVELS, Link, Place, Topology, ranks_in_host

CARD = Link(up=5e7, down=5e7, latency=0.0)
NAMES = "abcdefgh"
CALLS = {"ring": ("medium", "ring"), "planned": ("medium", ""), "all_to_all": ("all_to_all", "")}
"""Calls of the ranks (victims.py) and value of MULTIRING_PLAN, by name."""


@dataclass(frozen=True)
class Case:
    """A pair of hosts, by number; the first is that whose packets are lost where only one way is."""

    parting: Parting
    count: int
    pair: tuple[int, int]
    calls: str

    def __str__(self) -> str:
        return f"{self.parting.name}: hosts {self.pair[0]} and {self.pair[1]} of {self.count}, {self.calls}"

    @property
    def needed(self) -> bool | None:
        """True if the two send to each other; None if the chosen plan decides it."""
        first, second = self.pair
        if second in control_edges(list(NAMES[: self.count]), first):
            return True
        if self.calls == "ring":
            return (second - first) % self.count in (1, self.count - 1)
        return True if self.calls == "all_to_all" else None


def cases(counts: list[int], calls: list[str]) -> Iterator[Case]:
    both, one_way = (
        next(parting for parting in PARTINGS if parting.name == name) for name in ("parted", "parted one way")
    )
    for count in counts:
        for first, second in combinations(range(count), 2):
            for name in calls:
                yield Case(both, count, (first, second), name)
                yield Case(one_way, count, (first, second), name)
                yield Case(one_way, count, (second, first), name)


def play(case: Case, folder: Path) -> str:
    """Play a case; return its error, "" if there was none."""
    calls, plan = CALLS[case.calls]
    names = tuple(NAMES[: case.count])
    places = tuple(Place(name, CARD, ranks_in_host([rank])) for rank, name in enumerate(names))
    environment = {"MULTIRING_PROBE": "off", **({"MULTIRING_PLAN": plan} if plan else {})}
    with lab.up(Topology(LEVELS[:2], places), f"pairs-{os.getpid()}-{folder.name}") as cluster:
        try:
            with started(World(names, cluster), folder, calls, environment=environment) as job:
                case.parting.judge(job, *(names[host] for host in case.pair), needed=case.needed)
        except AssertionError as error:
            return str(error)
    shutil.rmtree(folder)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description="every pair of hosts parted")
    parser.add_argument("--hosts", type=int, nargs="+", default=list(range(3, 9)))
    parser.add_argument("--calls", nargs="+", choices=list(CALLS), default=list(CALLS))
    parser.add_argument("--beside", type=int, default=4, help="jobs side by side")
    options = parser.parse_args()
    obstacle = lab.obstacle()
    if obstacle:
        sys.exit(f"no lab: {obstacle}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # leaves nothing behind
    folder, begun = Path(tempfile.mkdtemp(prefix="pairs-")), time.monotonic()
    todo = list(cases(options.hosts, options.calls))
    done, wrong = Counter[str](), []
    with ThreadPoolExecutor(options.beside) as pool, ExitStack() as undo:
        undo.callback(pool.shutdown, wait=False, cancel_futures=True)  # those that have begun are waited for
        outcomes = pool.map(play, todo, [folder / str(number) for number in range(len(todo))])
        for number, (case, outcome) in enumerate(zip(todo, outcomes, strict=True), 1):
            print(f"{number} of {len(todo)}: {case}{': ' + outcome if outcome else ''}", flush=True)
            done[f"{case.parting.name}, {case.calls}"] += not outcome
            if outcome:
                wrong.append(str(case))
    print(f"{done.total()} of {len(todo)} pairs in {time.monotonic() - begun:.0f} s were named as they were parted:")
    for name, count in sorted(done.items()):
        print(f"  {count:4d}  {name}")
    if wrong:
        sys.exit("\n".join([f"{len(wrong)} went wrong; their files are in {folder}:", *wrong]))
    folder.rmdir()


if __name__ == "__main__":
    main()
