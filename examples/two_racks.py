"""Train examples/digits.py on an emulated cluster, two racks with a thin link between them, over Gloo and multiring.

    sudo python examples/two_racks.py [PICTURE.png]

It builds the cluster of lab/topologies/racks.toml on this machine (docs/lab.md), runs the training on all of its eight
ranks, told of the topology by that file, prints what a step takes over each, and draws it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from multiring import lab, topology_file

HERE = Path(__file__).parent
TOPOLOGY = HERE.parent / "lab" / "topologies" / "racks.toml"
BACKENDS = ("gloo", "multiring")


def train() -> dict[str, float]:
    """Seconds of a step of all ranks: over each backend, and without communication."""
    with lab.up(topology_file.load(TOPOLOGY)) as cluster, tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "seconds.json")
        program = [str(HERE / "digits.py"), "--epochs", "2", "--steps", "5", "--json", str(result)]
        told = {**os.environ, "MULTIRING_TOPOLOGY": str(TOPOLOGY)}
        subprocess.run(cluster.launch_command(*program), env=told, check=True)
        return json.loads(result.read_text())["seconds"]


def report(seconds: dict[str, float]) -> None:
    computing = seconds["no communication"]
    print("\nTwo racks of two hosts with two ranks each; cards of 400 Mbit/s, uplinks of 200 Mbit/s")
    print(f"{'':<12} {'step':>10} {'waiting':>10} {'efficiency':>11}")
    for name in BACKENDS:
        step = seconds[name]
        print(f"{name:<12} {1e3 * step:>7.1f} ms {1e3 * (step - computing):>7.1f} ms {computing / step:>11.0%}")
    waited = {name: seconds[name] - computing for name in BACKENDS}
    step, wait = seconds["gloo"] / seconds["multiring"], waited["gloo"] / waited["multiring"]
    print(f"A step over multiring is {step:.2f} times as fast as over Gloo; it waits 1/{wait:.2f} of the time.")


def draw(seconds: dict[str, float], picture: Path) -> None:
    """A bar a backend: computing, and waiting for communication."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    computing = 1e3 * seconds["no communication"]
    waiting = [max(0.0, 1e3 * seconds[name] - computing) for name in BACKENDS]
    figure, axes = pyplot.subplots(figsize=(7, 2.4), layout="constrained")
    axes.barh(BACKENDS, [computing] * len(BACKENDS), label="computing", color="0.75")
    axes.barh(BACKENDS, waiting, left=computing, label="waiting for communication", color="tab:red")
    axes.invert_yaxis()
    axes.set_xlabel("training step, ms")
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(picture)


def main() -> None:
    if reason := lab.obstacle():
        sys.exit(reason)
    seconds = train()
    report(seconds)
    if len(sys.argv) > 1:
        draw(seconds, Path(sys.argv[1]))
        print(f"drawn in {sys.argv[1]}")


if __name__ == "__main__":
    main()
