"""The program of a rank that goes on without those that are lost: every sum checked to the last bit.

    python survivors.py FOLDER ...

What became of a rank is in ``RANK.json`` of FOLDER, by the rank that it had at first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import multiring as mr

COUNT = 5000


def step(number: int) -> None:
    x = np.arange(COUNT) * (mr.rank() + 1.0) + number
    mr.all_reduce(x)
    size = mr.world_size()
    assert (x == np.arange(COUNT) * (size * (size + 1) / 2) + number * size).all(), f"wrong sum in step {number}"


def until_a_loss() -> mr.PeerLost:
    number = 0
    try:
        while True:
            step(number)
            number += 1
            if number == 2:
                print("running", flush=True)
            time.sleep(0.02)
    except mr.PeerLost as error:
        return error


def main() -> None:
    path = Path(sys.argv[1]) / f"{os.environ['MULTIRING_RANK']}.json"
    mr.init()
    lost = until_a_loss()
    began = time.monotonic()
    outcome: dict[str, Any] = {"blamed": lost.host}
    try:
        agreement = mr.shrink()
        for number in range(20):
            step(number)
        outcome |= {"members": agreement.members, "hosts": mr.init().hosts}
    except mr.RendezvousError as error:
        outcome["refused"] = str(error)
    outcome["seconds"] = time.monotonic() - began
    mr.shutdown()
    path.write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
