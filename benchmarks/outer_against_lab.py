"""Steps of `Outer` that the simulator predicts, beside those that a lab measures.

    sudo python benchmarks/outer_against_lab.py lab/topologies/sites.toml multiring outer:site:50 outer:site:50:4:5
    sudo MULTIRING_WIRE=site=int8 python benchmarks/outer_against_lab.py lab/topologies/sites.toml outer:site:50:4:5

In each step a rank sleeps where a job computes, the ranks of a group sum its gradients, and `Outer` exchanges its
parameters. All predictions are made before the lab is. Strategies take turns; each turn of `Outer` leaves out the
rounds in which the links fill. A strategy's step is the mean over a turn; printed are the median turn and the worst.
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
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from simulator_against_lab import at_goodput

import multiring as mr
from multiring import env, lab
from multiring.bench import report
from multiring.planning import topology_file
from multiring.planning.speeds import NATIVE
from multiring.simulate.apart import Exchanges, parse_exchanges
from multiring.simulate.compare import CHOSEN, Training, simulate_strategy
from multiring.simulate.recording import Gradient, Recording, buckets
from multiring.simulate.training import BUCKET_BYTES
from multiring.torch import Outer
from multiring.units import duration

GRADIENTS = 16
FORWARD = 1 / 3
"""Part of the computation before the backward pass."""


def recording_of(megabytes: float, seconds: float) -> Recording:
    """A step of ``seconds`` with gradients of equal size, ready one after another in the last two thirds of it."""
    each = Gradient(round(megabytes * 1e6 / 4 / GRADIENTS) * 4, seconds * (1 - FORWARD) / GRADIENTS)
    return Recording(f"{megabytes:g} MB", seconds * FORWARD, (each,) * GRADIENTS)


def replayed(recording: Recording, exchanges: Exchanges | None) -> tuple[Callable[[], None], Callable[[], object]]:
    """A step that sleeps for computing, sums gradients and exchanges parameters; and what ends the training."""
    parameters = [torch.nn.Parameter(torch.zeros(each.nbytes // 4)) for each in recording.gradients]
    outer = None
    if exchanges is not None:
        words = {"groups": exchanges.level, "fragments": exchanges.fragments, "delay": exchanges.delay}
        outer = Outer(parameters, exchanges.every, **words)
    fused = [(each.ready, np.zeros(each.nbytes // 4, np.float32)) for each in buckets(recording, BUCKET_BYTES)]

    def step() -> None:
        start = time.perf_counter()
        works = []
        for ready, array in fused:
            time.sleep(max(0.0, start + ready - time.perf_counter()))
            works.append(mr.all_reduce(array, group=outer and outer.group, async_op=True))
        time.sleep(max(0.0, start + recording.seconds - time.perf_counter()))
        for work in works:
            work.wait()
        if outer is not None:
            outer.step()

    return step, outer.finish if outer is not None else lambda: None


def measure(file: Path, recording: Recording, names: Sequence[str], rounds: int, turns: int) -> None:
    """Measure, on every rank of the lab, the mean step of each strategy in each turn; rank 0 writes them."""
    mr.init()
    spent: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(turns):
        for name in names:
            exchanges = parse_exchanges(name)
            step, finish = replayed(recording, exchanges)
            every, delay = (exchanges.every, exchanges.delay) if exchanges else (2, 0)
            steps = every * rounds
            mr.barrier()
            for _ in range(every * (2 + -(-delay // every))):
                step()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            slowest = np.array([(time.perf_counter() - start) / steps])
            finish()
            mr.all_reduce(slowest, op="max")
            spent[name].append(float(slowest[0]))
    if mr.rank() == 0:
        file.write_text(json.dumps(spent))
    mr.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("file", type=Path, metavar="TOPOLOGY.toml")
    parser.add_argument("strategies", nargs="+", help="as in multiring simulate: multiring, outer:site:50:4:5")
    parser.add_argument("--megabytes", type=float, default=8.0, help="of parameters")
    parser.add_argument("--seconds", type=float, default=0.05, help="that a step computes")
    parser.add_argument("--rounds", type=int, default=4, help="exchanges of all parameters in a turn of Outer")
    parser.add_argument("--turns", type=int, default=3, help="of each strategy")
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--on-a-rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    recording = recording_of(args.megabytes, args.seconds)
    if args.on_a_rank:
        return measure(args.on_a_rank, recording, args.strategies, args.rounds, args.turns)
    if reason := lab.obstacle():
        sys.exit(reason)
    topology = topology_file.load(args.file)
    training = Training(at_goodput(topology), recording, NATIVE, wire=env.parse_wire(env.read(env.Settings).wire))
    predicted = {}
    for name in args.strategies:
        if parse_exchanges(name) is None and name != CHOSEN:
            parser.error(f"{name}: no strategy of `Outer`, and not {CHOSEN}")
        result = simulate_strategy(training, name)
        if result.seconds is None:
            sys.exit(f"{name}: {result.note}")
        predicted[name] = result.seconds
    with lab.up(topology) as cluster, tempfile.TemporaryDirectory() as directory:
        seconds = Path(directory, "seconds.json")
        numbers = ("megabytes", "seconds", "rounds", "turns")
        options = [f"--{name}={getattr(args, name)}" for name in numbers]
        words = [__file__, args.file.resolve(), *args.strategies, "--on-a-rank", seconds, *options]
        told = {**os.environ, "MULTIRING_TOPOLOGY": str(args.file.resolve())}
        subprocess.run(cluster.launch_command(*map(str, words)), env=told, check=True)
        spent = json.loads(seconds.read_text())
    wire = os.environ.get("MULTIRING_WIRE", "float32")
    print(f"{recording.name}, {duration(recording.seconds)} of computation in a step, {wire}")
    print("| strategy | predicted | measured | worst turn | error |\n|---|---|---|---|---|")
    rows = []
    for name, each in spent.items():
        measured = statistics.median(each)
        error = predicted[name] / measured - 1
        words = [name, duration(predicted[name]), duration(measured), duration(max(each)), f"{error:+.0%}"]
        print(f"| {' | '.join(words)} |")
        rows.append({"strategy": name, "wire": wire, "predicted": predicted[name], "measured": measured, "turns": each})
    if args.json:
        args.json.write_text(json.dumps(report.record(rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
