"""The simulator's predictions beside the lab's measurements: every strategy on every topology of lab/topologies.

    sudo python benchmarks/simulator_against_lab.py --json result.json            # all topologies
    sudo python benchmarks/simulator_against_lab.py lab/topologies/racks.toml     # one of them
    sudo python benchmarks/simulator_against_lab.py --nbytes 4096 65536           # other sizes

All predictions of a topology are written before its lab is made. Beside the chosen plan, these are forced: published
strategies, one rejected candidate (the next best four too if buffers are small), the chosen plan with the whole buffer
as one segment, and the chosen plan twice at once. All plans take turns in each round, with small buffers several times
in a row; a plan's time is the median over all rounds, on the slowest rank.
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
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np

import multiring as mr
from multiring import lab
from multiring.bench import report
from multiring.planning import planner, topology_file
from multiring.planning.compose import compose
from multiring.planning.plan import Plan
from multiring.planning.strategies import STRATEGIES
from multiring.planning.topology import Link, Place, Topology
from multiring.runtime.comm import Communicator, group_of
from multiring.simulate import SimulatedCall, simulate
from multiring.units import duration, size

GOODPUT = 0.96
"""Part of a nominal rate that TCP/IP and Ethernet headers leave (docs/emulation.md)."""

SLOWEST = 4.0
"""A rejected candidate is tried if it is predicted to take less than so many times what the chosen one takes."""

SMALL = 2 << 20
"""Buffers below this many bytes are summed several times in a row, up to so many bytes and ``MOST_IN_A_ROW`` calls, and
``NEXT_BEST`` rejected candidates are tried besides."""

MOST_IN_A_ROW = 100
NEXT_BEST = 4

TWICE = "multiring, twice at once"
APART = 1.1
"""Plans whose predictions differ by this factor are to be measured in that order."""


@dataclass(frozen=True)
class Case:
    """A plan with a name, and how often it is called at once."""

    name: str
    plan: Plan
    calls: int = 1


def cases(topology: Topology, nbytes: int) -> list[Case]:
    """The plans to compare; strategies that the topology does not allow are left out."""
    found = []
    for name, strategy in STRATEGIES.items():
        try:
            found.append(Case(name, strategy.plan(topology, nbytes)))
        except ValueError:
            continue
    chosen = STRATEGIES["multiring"].plan(topology, nbytes)
    candidates = planner.candidates(topology, "all_reduce", nbytes)
    limit = SLOWEST * candidates[0].prediction.seconds
    last = [candidate for candidate in candidates if candidate.prediction.seconds < limit][-1]
    composed = compose(topology, "all_reduce", last.stages, last.prediction.segment_bytes)
    found.append(Case("multiring, rejected", composed))
    for place, candidate in enumerate(candidates[1 : NEXT_BEST + 1] if nbytes < SMALL else (), start=2):
        prediction = candidate.prediction
        composed = compose(topology, "all_reduce", candidate.stages, prediction.segment_bytes, 0, prediction.window)
        found.append(Case(f"multiring, candidate {place}", composed))
    if nbytes > chosen.segment_bytes:
        found.append(Case("multiring, one segment", replace(chosen, segment_bytes=nbytes)))
    found.append(Case(TWICE, chosen, calls=2))
    return found


def predict(topology: Topology, case: Case, nbytes: int) -> float:
    """Seconds, by the simulator, at the rates that headers leave."""
    return simulate(at_goodput(topology), [SimulatedCall(case.plan, nbytes) for _ in range(case.calls)]).seconds


def at_goodput(topology: Topology) -> Topology:
    """The topology with the rates that headers leave."""
    return Topology(topology.levels, tuple(_thinned(place) for place in topology.places))


def _thinned(place: Place) -> Place:
    if not place.places:
        return place  # a rank: no network
    link = Link(GOODPUT * place.link.up, GOODPUT * place.link.down, place.link.latency)
    return replace(place, link=link, places=tuple(_thinned(inner) for inner in place.places))


def force(communicator: Communicator, plan: Plan, nbytes: int) -> None:
    """Let the communicator use this plan for all-reduces of a size."""
    group = group_of(communicator)
    handle = group.plans.install(plan, communicator.timeout)
    key = mr._native.COLLECTIVES.index("all_reduce"), nbytes.bit_length(), 0
    group.plans._handles[key] = handle
    # Calls of before know the plan of before.
    group.calls = group.engine.calls(group.rank, group.size, group.timeout, group.plans.handle)


def measure(file: Path, sizes: list[int], rounds: int) -> None:
    """Measure, on every rank of the lab, the seconds of each case in each round, by size; rank 0 writes them."""
    communicator = mr.init()
    topology = topology_file.load(Path(os.environ["MULTIRING_TOPOLOGY"]))
    spent: dict[int, dict[str, list[float]]] = {nbytes: {} for nbytes in sizes}
    for nbytes in sizes:
        buffers = [np.zeros(nbytes // 4, np.float32) for _ in range(2)]
        tried = cases(topology, nbytes)
        for round_ in range(rounds + 1):
            for case in tried:
                force(communicator, case.plan, nbytes)
                seconds = _seconds(buffers[: case.calls])
                if round_ > 0:  # the first opens connections
                    spent[nbytes].setdefault(case.name, []).append(seconds)
    if mr.rank() == 0:
        file.write_text(json.dumps(spent))
    mr.shutdown()


def _seconds(buffers: list[np.ndarray]) -> float:
    """Seconds that calls of all buffers at once take; small ones are called several times in a row."""
    in_a_row = min(max(SMALL // buffers[0].nbytes, 1), MOST_IN_A_ROW)
    mr.barrier()
    start = time.perf_counter()
    for _ in range(in_a_row):
        if len(buffers) == 1:
            mr.all_reduce(buffers[0])
        else:
            for work in [mr.all_reduce(buffer, async_op=True) for buffer in buffers]:
                work.wait()
    slowest = np.array([(time.perf_counter() - start) / in_a_row])
    mr.all_reduce(slowest, op="max")
    return float(slowest[0])


def try_topology(file: Path, sizes: list[int], rounds: int) -> list[dict[str, object]]:
    """Predict, then measure."""
    topology = topology_file.load(file)
    predicted = {
        (nbytes, case.name): predict(topology, case, nbytes) for nbytes in sizes for case in cases(topology, nbytes)
    }
    with lab.up(topology) as cluster, tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "seconds.json")
        words = [__file__, "--on-a-rank", str(result), "--rounds", str(rounds), "--nbytes", *map(str, sizes)]
        told = {**os.environ, "MULTIRING_TOPOLOGY": str(file.resolve())}
        subprocess.run(cluster.launch_command(*words), env=told, check=True)
        spent = json.loads(result.read_text())
    rows = []
    for (nbytes, name), seconds in predicted.items():
        measured = statistics.median(spent[str(nbytes)][name])
        rows.append(
            {
                "topology": file.stem,
                "nbytes": nbytes,
                "plan": name,
                "predicted": seconds,
                "measured": measured,
                "error": seconds / measured - 1,
                "rounds": spent[str(nbytes)][name],
            }
        )
        words = [file.stem, size(nbytes), name, duration(seconds), duration(measured), f"{seconds / measured - 1:+.0%}"]
        print(f"| {' | '.join(words)} |")
    return rows


def summarise(rows: list[dict[str, object]]) -> None:
    """Errors over all cases, and the pairs of plans that are measured in the order that was predicted."""
    errors = [abs(float(str(row["error"]))) for row in rows]
    worst = max(rows, key=lambda row: abs(float(str(row["error"]))))
    print(f"\n{len(rows)} cases: median error {statistics.median(errors):.0%}, worst {max(errors):.0%}", end=" ")
    print(f"({worst['plan']} on {worst['topology']})")
    right = pairs = 0
    alike: dict[object, list[dict[str, object]]] = {}
    for row in rows:
        if row["plan"] != TWICE:
            alike.setdefault((row["topology"], row["nbytes"]), []).append(row)
    for those in alike.values():
        for a, b in combinations(sorted(those, key=lambda row: float(str(row["predicted"]))), 2):
            if float(str(b["predicted"])) > APART * float(str(a["predicted"])):
                pairs += 1
                right += float(str(b["measured"])) > float(str(a["measured"]))
    print(f"{right} of {pairs} pairs of plans whose predictions differ by 10 % or more were measured in that order")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", metavar="TOPOLOGY.toml")
    parser.add_argument("--nbytes", type=int, nargs="+", default=[8 << 20], help="sizes of the buffer")
    parser.add_argument("--rounds", type=int, default=3, help="how often each plan is measured")
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--on-a-rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.on_a_rank:
        return measure(args.on_a_rank, args.nbytes, args.rounds)
    if reason := lab.obstacle():
        sys.exit(reason)
    files = args.files or sorted((Path(__file__).parents[1] / "lab" / "topologies").glob("*.toml"))
    print("| topology | size | plan | predicted | measured | error |\n|---|---|---|---|---|---|")
    rows = [row for file in files for row in try_topology(file, args.nbytes, args.rounds)]
    summarise(rows)
    if args.json:
        args.json.write_text(json.dumps(report.record(rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
