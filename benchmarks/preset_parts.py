"""Accuracy and loss with and without each part of the presets of `examples/imagenet`, on scikit-learn's digits.

    python benchmarks/preset_parts.py --json result.json --jobs 2

Each row is a training by `train.py` with a large batch, and the row of its preset without one part of the recipe, with
the same seed: the same weights and images. Printed for each row: accuracy and loss on 360 images held out, and by how
much they differ from those of the whole recipe, with intervals of 95 % by Student's t over the seeds. A training whose
loss is no number counts as lost, and is in no mean.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.stats import t
from sklearn.datasets import load_digits

TRAIN = Path(__file__).parents[1] / "examples" / "imagenet" / "train.py"

ANY = "model=small train_size=8 resize=8 validation_size=8 smallest_crop=0.7 flip=no epochs=12 warm_up=3"
"""Settings of all rows: the small network, images of 8x8, and 12 epochs, 3 of them of warm-up."""

LARGE = f"{ANY} batch=256 base_batch=16 rate=0.01 start_rate=0.01"
"""A batch of 256, and the rate that suits one of 16, scaled in proportion."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A row: a preset with changes, compared with the row ``beside``."""

    name: str
    beside: str
    preset: str
    changes: str


WAYS = (
    Way("facebook, batch 16", "facebook", "facebook", f"{LARGE} drops=5,8,10 batch=16"),
    Way("facebook", "", "facebook", f"{LARGE} drops=5,8,10"),
    Way("rate not scaled", "facebook", "facebook", f"{LARGE} drops=5,8,10 base_batch=256"),
    Way("no warm-up", "facebook", "facebook", f"{LARGE} drops=5,8,10 warm_up=0"),
    Way("last norms begin at 1", "facebook", "facebook", f"{LARGE} drops=5,8,10 zero_gamma=no"),
    Way("surfsara", "", "surfsara", f"{LARGE} collapse_epochs=3 collapse_rate=0.002"),
    Way("no final collapse", "surfsara", "surfsara", f"{LARGE} collapse_epochs=0"),
    Way(
        "collapse without more decay",
        "surfsara",
        "surfsara",
        f"{LARGE} collapse_epochs=3 collapse_rate=0.002 collapse_decay=1",
    ),
    Way("modern", "", "modern", f"{LARGE} average=0.9 bfloat16=no"),
    Way("no smoothing", "modern", "modern", f"{LARGE} average=0.9 bfloat16=no smoothing=0"),
    Way("no moving average", "modern", "modern", f"{LARGE} average=0 bfloat16=no"),
)

RESULT = re.compile(r"top-1 [\d.]+% \((\d+) of (\d+)\), top-5 [\d.]+%, loss ([\d.]+)")


def write_digits(folder: Path) -> None:
    """Write the digits as folders of classes: 1,437 for training, 360 held out."""
    digits = load_digits()
    for place, number in enumerate(np.random.default_rng(0).permutation(len(digits.images))):
        part = folder / ("train" if place < 1437 else "validation") / str(digits.target[number])
        part.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[number] * 15).astype(np.uint8)).save(part / f"{number}.png")


def trained(way: Way, seed: int, data: Path) -> dict[str, Any]:
    """Train once; ``top1`` and ``loss`` are None where the loss became no number. RuntimeError for another failure."""
    words = [sys.executable, str(TRAIN), "--preset", way.preset, "--data", str(data), "--seed", str(seed)]
    words += ["--workers", "0", "--report", "1000", "--set", *way.changes.split()]
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=900
    )
    row: dict[str, Any] = {"way": way.name, "seed": seed, "top1": None, "loss": None}
    if done.returncode == 0:
        right, seen, loss = RESULT.findall(done.stdout)[-1]
        return {**row, "top1": int(right) / int(seen), "loss": float(loss)}
    if "loss" in done.stderr and "lower it by --set rate=" in done.stderr:
        return row
    raise RuntimeError(f"{way.name}, seed {seed}: exit code {done.returncode}: {done.stderr.strip()}")


def mean(values: Sequence[float], scale: float, digits: int, sign: str = "") -> str:
    """The mean with half of its interval of 95 %."""
    if not values:
        return "none"
    half = math.inf
    if len(values) > 1:
        half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{scale * statistics.mean(values):{sign}.{digits}f} ± {scale * half:.{digits}f}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown, each beside the whole recipe with the same seed."""
    found = {(row["way"], row["seed"]): row for row in rows if row["top1"] is not None}
    lines = [
        "| | accuracy, % | loss | accuracy beside the whole | loss beside the whole | lost |",
        "|---|---|---|---|---|---|",
    ]
    for way in WAYS:
        seeds = [row["seed"] for row in rows if row["way"] == way.name]
        ends = [seed for seed in seeds if (way.name, seed) in found]
        cells = [mean([found[way.name, seed][key] for seed in ends], *form) for key, form in FORMS.items()]
        both = [seed for seed in ends if (way.beside, seed) in found]
        for key, (scale, digits) in FORMS.items():
            differences = [found[way.name, seed][key] - found[way.beside, seed][key] for seed in both]
            cells.append(mean(differences, scale, digits, "+") if way.beside else "")
        lines.append(f"| {way.name} | {' | '.join(cells)} | {len(seeds) - len(ends)} of {len(seeds)} |")
    return "\n".join(lines)


FORMS = {"top1": (100.0, 2), "loss": (1.0, 4)}
"""Factor and decimal places of what is shown."""


def main() -> None:
    parser = argparse.ArgumentParser(description="What each part of a recipe does on handwritten digits.")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, of a thread each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each training's result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(args.jobs) as threads:
        write_digits(Path(scratch))
        runs = [threads.submit(trained, way, seed, Path(scratch)) for seed in range(args.seeds) for way in WAYS]
        rows = []
        for run in runs:
            rows.append(run.result())
            print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
