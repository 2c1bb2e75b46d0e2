"""The program of a rank that looks after every step whether a link is slow, until the file ``stop`` is there.

    python link_looks.py FOLDER COUNT PAUSE

A step is an all-reduce of COUNT numbers, PAUSE seconds after the one before. In ``RANK.json`` of FOLDER are the slow
links and slow ranks that were known after some step, and all links that were named.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import multiring as mr


def main() -> None:
    folder, count, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    mr.init()
    rank, size = mr.rank(), mr.world_size()
    stop, step = np.zeros(1), 0
    links: list[dict[str, Any]] = []
    ranks: list[dict[str, Any]] = []
    while not stop[0]:
        x = np.arange(count) % 1021 * (rank + 1.0) + step
        mr.all_reduce(x)
        assert (x == np.arange(count) % 1021 * (size * (size + 1) / 2) + step * size).all(), f"wrong in {step}"
        counted = mr.stats()
        links += [counted["slow_link"]] if counted["slow_link"] else []
        ranks += [counted["slowest"]] if counted["slowest"] else []
        stop[0] = (folder / "stop").exists()
        mr.all_reduce(stop, "max")
        step += 1
        if step == 2:
            print("running", flush=True)
        time.sleep(pause)
    outcome = {"links": links, "ranks": ranks, "so_far": mr.stats()["slow_links_so_far"], "steps": step}
    (folder / f"{rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
