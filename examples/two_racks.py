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

from multiring import lab
from multiring.planning import topology_file

HERE = Path(__file__).parent
TOPOLOGY = HERE.parent / "lab" / "topologies" / "racks.toml"
BACKENDS = ("gloo", "multiring")
ABOUT = "Two racks of two hosts with two ranks each; cards of 400 Mbit/s, uplinks of 200 Mbit/s"


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
    print(f"\n{ABOUT}")
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
    steps = [1e3 * seconds[name] for name in BACKENDS]
    waiting = [max(0.0, step - computing) for step in steps]
    figure, axes = pyplot.subplots(figsize=(9, 2.8), layout="constrained")
    parts = [
        axes.barh(BACKENDS, [computing] * len(BACKENDS), color="0.8"),
        axes.barh(BACKENDS, waiting, left=computing, color=["tab:gray", "tab:red"]),
    ]
    axes.bar_label(parts[0], [f"computing {computing:.1f} ms"] * len(BACKENDS), label_type="center")
    axes.bar_label(parts[1], [f"waiting {each:.1f} ms" for each in waiting], label_type="center", color="white")
    for row, step in enumerate(steps):
        axes.text(step + 1, row, f"{step:.1f} ms, efficiency {computing / step:.0%}", verticalalignment="center")
    axes.set_xlim(0, 1.3 * max(steps))
    axes.invert_yaxis()
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_xticks([])
    gloo, ours = steps
    figure.suptitle(
        f"A training step takes {ours:.1f} ms over multiring, {gloo:.1f} ms over Gloo: {gloo / ours:.2f} times as fast",
        x=0.01,
        horizontalalignment="left",
        fontweight="bold",
        fontsize=11,
    )
    axes.set_title(ABOUT, loc="left", fontsize=9, color="0.35")
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
