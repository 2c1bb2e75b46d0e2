"""Ranks that train on samples of tar files: what each was handed, as numbers."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import numpy as np

import multiring as mr
from multiring.data import Batches, Dataset

GLOBAL_BATCH, SEED = 7, 3


def samples(folder: str) -> Dataset:
    return Dataset(folder, decode=lambda sample: int(sample["number"]))


def batches(folder: str, state: Mapping[str, int] | None, steps: int) -> dict[str, Any]:
    """Some steps, from a state on where one is given: the samples of each, and the state afterwards."""
    mr.init()
    mine = Batches(samples(folder), GLOBAL_BATCH, mr.rank(), mr.world_size(), seed=SEED)
    if state is not None:
        mine.load_state_dict(state)
    taken = [handed for _, handed in zip(range(steps), mine, strict=False)]
    assert mr.all_gather_object(mine.state_dict()) == [mine.state_dict()] * mr.world_size()
    mr.shutdown()
    return {"taken": taken, "state": mine.state_dict()}


def lose(folder: str, victim: int, lost_at: int) -> dict[str, Any]:
    """One rank is killed in a step; the others go on with that step, as fewer, and finish the epoch."""
    mr.init()
    mine = Batches(samples(folder), GLOBAL_BATCH, mr.rank(), mr.world_size(), seed=SEED)
    taken: list[list[int]] = []
    blamed = -1
    reduced = mine.state_dict()
    try:
        for step, handed in enumerate(mine):
            if mr.rank() == victim and step == lost_at:
                os.kill(os.getpid(), signal.SIGKILL)
            total = np.array([len(handed)])
            mr.all_reduce(total)
            taken.append(handed)
            reduced = mine.state_dict()
    except mr.PeerLost as error:
        blamed = error.rank
        mr.shrink()
        states = mr.all_gather_object(reduced)
        least = min(states, key=lambda state: state["consumed"])  # that step is made once more
        taken = taken[: least["consumed"] // GLOBAL_BATCH]
        mine.load_state_dict(least)
        mine.set_world(mr.rank(), mr.world_size())
        for handed in mine:
            total = np.array([len(handed)])
            mr.all_reduce(total)
            taken.append(handed)
    place = mr.rank()
    mr.shutdown()
    return {"taken": taken, "rank": place, "epoch": mine.epoch, "blamed": blamed}
