"""Random faults, for as long as one likes: ``make chaos``, or

    python tests/faults/chaos.py [--faults 500] [--seed N] [--beside 1] [--no-lab]

Each round starts a world of 3 to 8 ranks, a third of them across hosts of a lab, that run one kind of call (four
out of five without a pause, so that the fault meets one in flight). Then it does something from the tables of faults to
one of them, and compares what every rank saw with what was done. One job in ten has another one beside it, which must
not notice. It ends at the first round that differs, with what repeats it. Rounds that run beside each other make the
load: six of them some 20 on two cores.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import victims
from jobs_under_fault import START_SECONDS, Job, World, launched, started
from processes import processes_with

import faults
from faults import FAULTS, PARTINGS, SHORTAGES, Fault, Parting, Shortage
from multiring import lab
from multiring.planning.topology import LEVELS, Link, Place, Topology, ranks_in_host

MOST_HOSTS, CARD = 4, Link(up=5e7, down=5e7, latency=0.0)
LAB_SHARE, BUSY_SHARE, BESIDE_SHARE = 1 / 3, 0.8, 0.1
SLOW = ("large",)
"""Calls that a lab's links would need long for."""


@dataclass(frozen=True)
class Round:
    fault: Fault | Parting | Shortage
    hosts: tuple[str, ...]
    calls: str
    victim: int
    pause: float
    delay: float
    beside: bool
    other: str = ""
    """The host from which that of the victim is parted."""

    def __str__(self) -> str:
        rhythm = f", {self.pause} s apart" if self.pause else ""
        beside = ", another job beside" if self.beside else ""
        apart = f" from {self.other}" if self.other else ""
        return f"{self.fault.name}, rank {self.victim}{apart} of {' '.join(self.hosts)}, {self.calls}{rhythm}{beside}"


def draw(dice: random.Random, with_lab: bool) -> Round:
    """Draw the next round, by the dice alone."""
    size = dice.randint(3, 8)
    if with_lab and dice.random() < LAB_SHARE:
        count = dice.randint(2, min(MOST_HOSTS, size))
        cuts = [0, *sorted(dice.sample(range(1, size), count - 1)), size]
        hosts = tuple("abcd"[i] for i in range(count) for _ in range(cuts[i], cuts[i + 1]))
        fault: Fault | Parting | Shortage = dice.choice([*FAULTS, *(PARTINGS if count > 2 else ())])
        calls = dice.choice([name for name in victims.CALLS if name not in SLOW])
    else:
        # Hosts by name only speak TCP to each other, as across a network; what runs short does so within a host.
        hosts = dice.choice([("here",) * size, tuple(dice.choice("xyz") for _ in range(size))])
        fault = dice.choice([*(fault for fault in FAULTS if not fault.on_link), *SHORTAGES])
        calls = dice.choice(list(victims.CALLS))
    pause = 0.0 if dice.random() < BUSY_SHARE else 0.1
    if isinstance(fault, Shortage):
        hosts = ("here",) * size
    beside = dice.random() < BESIDE_SHARE
    victim, other = dice.randrange(size), ""
    if isinstance(fault, Parting):
        calls = "all_to_all"  # or the two need not reach each other
        other = dice.choice([host for host in dict.fromkeys(hosts) if host != hosts[victim]])
    return Round(fault, hosts, calls, victim, pause, dice.uniform(0, 1.0), beside, other)


def play(this: Round, world: World, folder: Path) -> None:
    """AssertionError if a rank saw something else than what was done."""
    with ExitStack() as jobs:
        others: list[Job] = []
        if this.beside:
            others.append(jobs.enter_context(started(World(("here",) * 3), folder / "other", "medium")))
        jobs.enter_context(hurt(this, world, folder / "job"))
        for other in others:
            other.write("stop")
            other.end(range(3))
            assert [other.outcome(rank)["kind"] for rank in range(3)] == ["", "", ""], "the other job noticed"
    left = processes_with(bytes(folder) + b"/")  # memory without a name ends with them
    assert not left, f"processes are left, and the memory that they share: {left}"


@contextmanager
def hurt(this: Round, world: World, folder: Path) -> Iterator[Job]:
    """The job to which it was done, and which was judged."""
    if isinstance(this.fault, Shortage):
        patience = {"MULTIRING_INIT_TIMEOUT": f"{START_SECONDS:g}"}
        with launched(world, folder, this.calls, limits={this.victim: this.fault.limit}, environment=patience) as job:
            this.fault.judge(job, this.victim)
            yield job
        return
    if isinstance(this.fault, Parting):
        with started(world, folder, this.calls, pause=this.pause) as job:
            time.sleep(this.delay)
            this.fault.judge(job, world.hosts[this.victim], this.other)
            yield job
        return
    environment = {"MULTIRING_TIMEOUT": str(this.fault.timeout), "MULTIRING_LATE_WARNING": "2"}
    with started(world, folder, this.calls, pause=this.pause, environment=environment) as job:
        time.sleep(this.delay)
        struck = faults.strike(this.fault, job, this.victim)
        faults.judge(this.fault, job, this.victim, struck)
        yield job


class Rounds:
    """Rounds left and rounds done, for players beside each other."""

    def __init__(self, count: int, seed: int, with_lab: bool, folder: Path) -> None:
        self.count, self.folder = count, folder
        self.done, self.loads = Counter[str](), [os.getloadavg()[0]]
        self.wrong: list[str] = []
        self._dice, self._with_lab = random.Random(seed), with_lab
        self._begun, self._lock = 0, threading.Lock()

    def play(self, player: int) -> None:
        """Take a round after the other, until all are taken or one went wrong."""
        with ExitStack() as undo:
            cluster = None
            if self._with_lab:
                places = tuple(Place(name, CARD, ranks_in_host([i])) for i, name in enumerate("abcd"))
                cluster = undo.enter_context(lab.up(Topology(LEVELS[:2], places), f"chaos-{os.getpid()}-{player}"))
            while taken := self._take():
                number, this, name = taken
                folder = self.folder / str(number)
                try:
                    play(this, World(this.hosts, cluster if "a" in this.hosts else None), folder)
                except AssertionError as error:
                    with self._lock:
                        self.wrong.append(f"{error}\nround {number} went wrong: {name}; its files are in {folder}")
                    return
                shutil.rmtree(folder)
                with self._lock:
                    self.done[f"{this.fault.name}{' (lab)' if 'a' in this.hosts else ''}"] += 1

    def end(self) -> None:
        """Let those end that have begun."""
        with self._lock:
            self.count = self._begun

    def _take(self) -> tuple[int, Round, str] | None:
        with self._lock:
            if self.wrong or self._begun == self.count:
                return None
            self._begun += 1
            self.loads.append(os.getloadavg()[0])
            this = draw(self._dice, self._with_lab)
            name = f"{this}{' (lab)' if 'a' in this.hosts else ''}"
            print(f"{self._begun}: {name}", flush=True)
            return self._begun, this, name


def main() -> None:
    parser = argparse.ArgumentParser(description="random faults")
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--beside", type=int, default=1, help="jobs side by side")
    parser.add_argument("--no-lab", action="store_true")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    obstacle = "as asked" if options.no_lab else lab.obstacle()
    print(f"seed {seed}, {options.faults} faults" + (f", no lab: {obstacle}" if obstacle else ""), flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # leaves nothing behind
    begun, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="chaos-"))
    rounds = Rounds(options.faults, seed, not obstacle, folder)
    with ThreadPoolExecutor(options.beside) as pool, ExitStack() as undo:
        undo.callback(rounds.end)
        for player in as_completed([pool.submit(rounds.play, player) for player in range(options.beside)]):
            player.result()
    load = f"load {min(rounds.loads):.0f} to {max(rounds.loads):.0f}"
    if rounds.wrong:
        sys.exit("\n".join([*rounds.wrong, f"{rounds.done.total()} were right before it; seed {seed}, {load}"]))
    folder.rmdir()
    print(f"{rounds.done.total()} faults in {time.monotonic() - begun:.0f} s, {load}, all named as they were done:")
    for name, count in sorted(rounds.done.items()):
        print(f"  {count:4d}  {name}")


if __name__ == "__main__":
    main()
