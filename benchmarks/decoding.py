"""Images that a Loader's workers read from tar files, decode, cut and scale in a second, beside Pillow alone.

    python examples/imagenet/glyphs.py glyphs --classes 20 --samples 100 --size 256 --format jpg
    python benchmarks/decoding.py glyphs/train --processes 2

Both have as many processes. Those of Pillow alone have their part of the files, and hand nothing on. The order of both
is the same, and each is timed in turns, from when its processes have begun to work until the last image.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import statistics
import sys
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "imagenet"))

import numpy as np
import torch
from images import Images, random_box
from PIL import Image
from presets import PRESETS, Preset

import multiring as mr
from multiring.data import ClassFolders, Permutation, pack
from multiring.torch import Loader


def bare(files: list[str], size: int, begin: Barrier) -> None:
    """Decode, cut and scale each file as a training does, with random boxes."""
    dice = np.random.default_rng(0)
    begin.wait()
    for file in files:
        with Image.open(file) as image:
            wide, high = image.size
            box = random_box(wide, high, 0.08, dice)
            image.draft("RGB", (int(wide * size / (box[2] - box[0])), int(high * size / (box[3] - box[1]))))
            scale = image.size[0] / wide
            box = tuple(min(scale * each, max(image.size)) for each in box)
            pixels = np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box))
        torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def rate_of_pillow(files: list[str], size: int, processes: int) -> float:
    begin = multiprocessing.Barrier(processes + 1)
    workers = [multiprocessing.Process(target=bare, args=(files[i::processes], size, begin)) for i in range(processes)]
    for worker in workers:
        worker.start()
    begin.wait()
    started = time.perf_counter()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        sys.exit("decoding: a process of Pillow alone failed")
    return len(files) / (time.perf_counter() - started)


def rate_of_loader(folder: Path, preset: Preset, batch: int, processes: int) -> float:
    images = Images(folder, preset, 0, True, "raise")
    batches = iter(Loader(images, batch, num_workers=processes, prefetch_factor=4))
    started, taken = time.perf_counter(), 0
    for pixels, _ in batches:
        taken += len(pixels)
    return taken / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time decoding by a Loader beside Pillow alone.")
    parser.add_argument("folder", type=Path, help="a folder of classes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--size", type=int, default=224, help="pixels of what is cut out")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    mr.init()
    torch.set_num_threads(1)
    preset = dataclasses.replace(PRESETS["facebook"], train_size=args.size)
    found = ClassFolders(args.folder)
    listed = [str(file) for label in range(len(found.classes)) for file in found.samples(label)]
    files = [listed[i] for i in Permutation(len(listed))(range(len(listed)))]
    with tempfile.TemporaryDirectory() as scratch:
        pack(args.folder, Path(scratch, "packed"))
        rates: dict[str, list[float]] = {"Pillow alone": [], "Loader": []}
        for _ in range(args.rounds):
            rates["Pillow alone"].append(rate_of_pillow(files, args.size, args.processes))
            rates["Loader"].append(rate_of_loader(Path(scratch, "packed"), preset, args.batch, args.processes))
    print(f"{len(files)} images, {args.processes} processes, median and all of {args.rounds} rounds in images/s:")
    for name, each in rates.items():
        print(f"{name:14} {statistics.median(each):7.0f}  {' '.join(f'{rate:.0f}' for rate in each)}")
    ratios = [ours / theirs for ours, theirs in zip(rates["Loader"], rates["Pillow alone"], strict=True)]
    print(f"Loader beside Pillow alone: {statistics.median(ratios):.1%}, {min(ratios):.1%} to {max(ratios):.1%}")
    mr.shutdown()


if __name__ == "__main__":
    main()
