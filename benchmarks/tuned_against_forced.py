"""The planner's choice and the tuner's, beside every plan forced in turn: all_reduce on the topologies of the lab.

    sudo python benchmarks/tuned_against_forced.py --json result.json           # all topologies, some two minutes each
    sudo python benchmarks/tuned_against_forced.py lab/topologies/racks.toml    # one of them

A job tunes each size on the lab, without a cache. Then every candidate of the planner is forced once, as MULTIRING_PLAN
forces it; those within half as much again of the fastest take turns three times more, and the median names the best.
Last the best, the planner's choice and the tuner's take turns anew, so that the best is not the luckiest: from these
rounds are the ratios. A time is that of calls back to back on the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from simulator_against_lab import force

import multiring as mr
from multiring import lab
from multiring.bench import report
from multiring.planning import topology_file
from multiring.planning.choice import Choice
from multiring.planning.plan import Plan
from multiring.runtime.comm import Communicator, group_of
from multiring.units import duration, size

SIZES = (4 << 10, 256 << 10, 4 << 20)

WORTH_REPEATING = 1.5
"""Plans that took longer than the fastest by this factor are not tried again."""

REPEATS = 3

FINAL_SECONDS, FEWEST_ROUNDS, MOST_ROUNDS = 6.0, 9, 30
"""The last rounds take about so long: cores that are lent by a hypervisor change within seconds."""

BATCH_SECONDS, MOST_CALLS = 0.1, 200
"""Calls back to back take about so long, at least one. The first half of them is not counted: a link of the lab passes
at once what it does not pass call after call."""


class Contest:
    """Forces plans for one size and times them."""

    def __init__(self, communicator: Communicator, nbytes: int, predicted: float) -> None:
        self._communicator = communicator
        self._buffer = np.zeros(nbytes // 4, np.float32)
        self.calls = max(1, min(MOST_CALLS, round(BATCH_SECONDS / predicted)))

    def round(self, plans: Sequence[Plan]) -> dict[str, float]:
        """Seconds a call of each plan, on the slowest rank."""
        spent = np.empty(len(plans))
        for number, plan in enumerate(plans):
            force(self._communicator, plan, self._buffer.nbytes)
            mr.barrier()
            for _ in range(self.calls // 2):
                mr.all_reduce(self._buffer)
            counted = self.calls - self.calls // 2
            start = time.perf_counter()
            for _ in range(counted):
                mr.all_reduce(self._buffer)
            spent[number] = (time.perf_counter() - start) / counted
        mr.all_reduce(spent, op="max")
        return {plan.id: seconds for plan, seconds in zip(plans, spent.tolist(), strict=True)}

    def medians(self, plans: Sequence[Plan], rounds: int) -> dict[str, float]:
        """The median of rounds in which the plans take turns, every time another first."""
        turns = [turn % len(plans) for turn in range(rounds)]
        found = [self.round([*plans[turn:], *plans[:turn]]) for turn in turns]
        return {plan.id: statistics.median(each[plan.id] for each in found) for plan in plans}


def tune(communicator: Communicator, nbytes: int) -> Choice:
    """Call until the plan is settled."""
    buffer = np.zeros(nbytes // 4, np.float32)
    tuner = group_of(communicator).tuner
    assert tuner is not None
    while not tuner.is_settled(mr._native.COLLECTIVES.index("all_reduce"), nbytes):
        mr.all_reduce(buffer)
    return mr.plan(nbytes)


def measure_size(communicator: Communicator, nbytes: int) -> dict[str, Any]:
    """One row of the result."""
    before = mr.plan(nbytes)
    started = time.perf_counter()
    tuned = tune(communicator, nbytes)
    tuning_seconds = time.perf_counter() - started
    plans = {(plan := each.plan).id: plan for each in (before.chosen, *before.rejected)}
    names = {each.plan.id: each.name for each in (before.chosen, *before.rejected)}
    contest = Contest(communicator, nbytes, before.chosen.prediction.seconds)
    once = contest.round(list(plans.values()))
    limit = WORTH_REPEATING * min(once.values())
    again = contest.medians([plan for plan in plans.values() if once[plan.id] <= limit], REPEATS)
    best = min(again, key=again.__getitem__)
    contenders = dict.fromkeys([best, before.plan.id, tuned.plan.id])
    rounds = round(FINAL_SECONDS / (contest.calls * again[best] * len(contenders)))
    rounds = min(max(rounds, FEWEST_ROUNDS), MOST_ROUNDS)  # the same on all ranks, as the times are
    final = contest.medians([plans[plan] for plan in contenders], rounds)
    fastest = min(final.values())
    return {
        "nbytes": nbytes,
        "plans": len(plans),
        "best": names[best],
        "best_seconds": fastest,
        "planner": names[before.plan.id],
        "predicted_seconds": before.chosen.prediction.seconds,
        "planner_over_best": final[before.plan.id] / fastest,
        "tuner": names[tuned.plan.id],
        "tuner_over_best": final[tuned.plan.id] / fastest,
        "tuning_seconds": tuning_seconds,
        "tried": dict(tuned.tuned.seconds) if tuned.tuned else {},
        "once": once,
    }


def measure(file: Path, sizes: Sequence[int]) -> None:
    """Measure all sizes, on every rank of the lab; rank 0 writes the rows."""
    communicator = mr.init(tune=True)
    rows = [measure_size(communicator, nbytes) for nbytes in sizes]
    if mr.rank() == 0:
        file.write_text(json.dumps(rows))
    mr.shutdown()


def try_topology(file: Path, sizes: Sequence[int], cores: int | None) -> list[dict[str, Any]]:
    """Make its lab, measure there, and print what came out."""
    with lab.up(topology_file.load(file), cores=cores) as cluster, tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "rows.json")
        told = {**os.environ, "MULTIRING_TOPOLOGY": str(file.resolve()), "XDG_CACHE_HOME": directory}
        words = [__file__, "--sizes", *map(str, sizes), "--on-a-rank", str(result)]
        subprocess.run(cluster.launch_command(*words), env=told, check=True)
        rows: list[dict[str, Any]] = json.loads(result.read_text())
    for row in rows:
        best, planners, tuners = row["best_seconds"], row["planner_over_best"], row["tuner_over_best"]
        cells = file.stem, size(row["nbytes"]), str(row["plans"]), duration(best), f"{planners:.2f}", f"{tuners:.2f}"
        print(f"| {' | '.join(cells)} |", flush=True)
    return [{"topology": file.stem, **row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", metavar="TOPOLOGY.toml")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--cores", type=int, help="cores of this machine for each host")
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--on-a-rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_a_rank:
        return measure(args.on_a_rank, args.sizes)
    if reason := lab.obstacle():
        sys.exit(reason)
    files = args.files or sorted((Path(__file__).parents[1] / "lab" / "topologies").glob("*.toml"))
    print(
        "| topology | size | plans | the best | planner's choice over it | tuner's over it |\n|---|---|---|---|---|---|"
    )
    rows = [row for file in files for row in try_topology(file, args.sizes, args.cores)]
    if args.json:
        args.json.write_text(json.dumps(report.record(rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
