"""Seconds of `multiring run` until all ranks have made a first call, with and without `--fork` in turns.

python benchmarks/starting.py                       # NumPy, 8 to 128 ranks
python benchmarks/starting.py --torch --ranks 2,8   # a step of DistributedDataParallel
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUMPY = """
import numpy as np
import multiring as mr

mr.init()
x = np.full(1024, mr.rank() + 1.0, np.float32)
mr.all_reduce(x)
assert x[0] == mr.world_size() * (mr.world_size() + 1) / 2
mr.shutdown()
"""

TORCH = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("multiring")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.full((4, 8), float(dist.get_rank()))).sum().backward()
optimizer.step()
dist.destroy_process_group()
"""


def start(script: Path, ranks: int, options: list[str]) -> tuple[float, float]:
    """Seconds of a whole job, and of all its processes' time on processors."""
    command = [sys.executable, "-m", "multiring", "run", "-n", str(ranks), "--no-summary", *options, str(script)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environment, check=True)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,16,32,64,128", help="numbers of ranks, with commas")
    parser.add_argument("--turns", type=int, default=3, help="jobs of each kind")
    parser.add_argument(
        "--torch", action="store_true", help="a step of training in the place of a call on NumPy arrays"
    )
    args = parser.parse_args()
    kinds: dict[str, list[str]] = {"without": [], "--fork": ["--fork"]}
    print("| ranks | " + " | ".join(f"{kind}: s (worst) | processor s" for kind in kinds) + " |")
    print("|---|" + 4 * "---|")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(TORCH if args.torch else NUMPY)
        start(script, 2, [])  # writes byte code, reads files
        for ranks in map(int, args.ranks.split(",")):
            taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
            for _ in range(args.turns):
                for kind, options in kinds.items():
                    taken[kind].append(start(script, ranks, options))
            cells = []
            for seconds, processor in (zip(*each, strict=True) for each in taken.values()):
                cells += [
                    f"{statistics.median(seconds):.1f} ({max(seconds):.1f})",
                    f"{statistics.median(processor):.1f}",
                ]
            print(f"| {ranks} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
