"""The first ten calls of a job, in sum, over ten times the median of later ones, and the seconds of `init`.

python benchmarks/first_calls.py                               # 2 and 4 ranks, 5 launches of each case
python benchmarks/first_calls.py --against /elsewhere/src      # and another build, in turns

A job makes calls of one size alone. Its ranks begin the first call together, by a clock: how far apart they leave
`init` does not count. Figures of a launch are those of its slowest rank; those shown are the medians of all launches,
and in brackets the best and the worst. Processor time is that of the thread that calls, and in `init` that of its
process: others who use the machine change it less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FIRST = 10

RANK = """
import json, os, statistics, sys, time
from pathlib import Path

import numpy as np
import multiring as mr

folder, nbytes, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
first, later = int(sys.argv[4]), int(sys.argv[5])
begin, worked = time.perf_counter(), time.process_time()
mr.init()
init, init_work = time.perf_counter() - begin, time.process_time() - worked
rank, size = mr.rank(), mr.world_size()
x = (mr.empty if kind == "empty" else np.empty)(nbytes // 4, np.float32)
x.fill(0)

(folder / f"new-{rank}").write_text(str(time.monotonic() + 0.05))
(folder / f"new-{rank}").rename(folder / f"ready-{rank}")
ready = [folder / f"ready-{other}" for other in range(size)]
while not all(file.exists() for file in ready):
    time.sleep(0.001)
start = max(float(file.read_text()) for file in ready)
awake = 0.01 if size <= len(os.sched_getaffinity(0)) else 0.0  # who has slept is late, and finds its caches cold
time.sleep(max(start - awake - time.monotonic(), 0))
while time.monotonic() < start:
    pass

taken, work = [], [time.thread_time()]
for calls in (first, later):
    for _ in range(calls):
        begin = time.perf_counter()
        mr.all_reduce(x)
        taken.append(time.perf_counter() - begin)
    work.append(time.thread_time())
result = {"init": init, "init_work": init_work, "first": taken[:first], "later": statistics.median(taken[first:])}
result["work_ratio"] = (work[1] - work[0]) / first / ((work[2] - work[1]) / later)
(folder / f"result-{rank}").write_text(json.dumps(result))
mr.shutdown()
"""

Launch = dict[str, float]


def launch(script: Path, source: str, ranks: int, nbytes: int, kind: str) -> Launch:
    """Seconds of one job's `init`, of its first calls in sum, of the first alone, of later ones; and what they are to
    each other."""
    later = max(30, min(2000, (64 << 20) // nbytes))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = source
    with tempfile.TemporaryDirectory() as folder:
        arguments = [folder, str(nbytes), kind, str(FIRST), str(later)]
        command = [sys.executable, "-m", "multiring", "run", "-n", str(ranks), "--no-summary", str(script), *arguments]
        subprocess.run(command, env=environment, check=True, timeout=120)
        results = [json.loads(Path(folder, f"result-{rank}").read_text()) for rank in range(ranks)]
    later_median = max(result["later"] for result in results)
    first = max(sum(result["first"]) for result in results)
    return {
        "init": max(result["init"] for result in results),
        "init_work": max(result["init_work"] for result in results),
        "one": max(result["first"][0] for result in results),
        "first": first,
        "later": later_median,
        "ratio": first / (FIRST * later_median),
        "work_ratio": max(result["work_ratio"] for result in results),
    }


def cell(launches: list[Launch], figure: str, factor: float = 1.0, digits: int = 1) -> str:
    values = [factor * each[figure] for each in launches]
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}, {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, with commas")
    parser.add_argument("--sizes", default="4,64,1024,16384", help="KB of a call, with commas")
    parser.add_argument("--kinds", default="private,empty", help="arrays: of NumPy, of `multiring.empty`")
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--against", default="", metavar="FOLDER", help="holds another build's `multiring`")
    args = parser.parse_args()
    sources = {"this": str(Path(__file__).parents[1] / "src")}
    if args.against:
        sources = {"other": args.against, **sources}
    figures = (
        "first ten / later | in processor time | first, us | first ten, us | later, us | init, ms | in processor time"
    )
    print(f"| ranks | KB | array | build | {figures} |")
    print("|" + 11 * "---|")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "rank.py")
        script.write_text(RANK)
        for source in sources.values():
            launch(script, source, 2, 4096, "private")  # writes byte code, reads files
        for ranks in map(int, args.ranks.split(",")):
            for kilobytes in map(int, args.sizes.split(",")):
                for kind in args.kinds.split(","):
                    taken: dict[str, list[Launch]] = {build: [] for build in sources}
                    for _ in range(args.launches):
                        for build, source in sources.items():
                            taken[build].append(launch(script, source, ranks, kilobytes << 10, kind))
                    for build, launches in taken.items():
                        cells = [
                            cell(launches, "ratio"),
                            cell(launches, "work_ratio"),
                            cell(launches, "one", 1e6, 0),
                            cell(launches, "first", 1e6, 0),
                            cell(launches, "later", 1e6),
                            cell(launches, "init", 1e3, 0),
                            cell(launches, "init_work", 1e3, 0),
                        ]
                        print(f"| {ranks} | {kilobytes} | {kind} | {build} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
