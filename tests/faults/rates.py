"""The program of a rank that looks at its links after every step, until the file ``stop`` is there.

    python rates.py FOLDER ...

In ``RANK.json`` of FOLDER are, by step, the time, and the bytes sent and seconds busy of its links to other hosts.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import multiring as mr

COUNT = 1_000_000


def main() -> None:
    folder = Path(sys.argv[1])
    mr.init()
    rank, size = mr.rank(), mr.world_size()
    stop, looks = np.zeros(1), []
    while not stop[0]:
        x = np.arange(COUNT) * (rank + 1.0) + len(looks)
        mr.all_reduce(x)
        assert (x == np.arange(COUNT) * (size * (size + 1) / 2) + len(looks) * size).all(), f"wrong in {len(looks)}"
        link = mr.stats()["links"].get("host", {"bytes_sent": 0, "seconds_busy": 0.0})
        looks.append((time.time(), link["bytes_sent"], link["seconds_busy"]))
        stop[0] = (folder / "stop").exists()
        mr.all_reduce(stop, "max")
        if len(looks) == 2:
            print("running", flush=True)
    (folder / f"{rank}.json").write_text(json.dumps(looks))


if __name__ == "__main__":
    main()
