"""Ranks that look whether they have begun the same training, before they begin it."""

from __future__ import annotations

import collections
import sys
from typing import Any, NoReturn

import torch.distributed as dist

import multiring as mr


def agree(mistake: str | None, facts: dict[str, Any]) -> None:
    """End all ranks, with one message, if one of them cannot begin or has other facts than the others."""
    everybody = mr.all_gather_object((mistake, facts))
    for rank, (found, _) in enumerate(everybody):
        if found is not None:
            leave(rank, found)
    for name in facts:
        values = [repr(each.get(name)) for _, each in everybody]
        usual = collections.Counter(values).most_common(1)[0][0]  # the first of several
        for rank, value in enumerate(values):
            if value != usual:
                other = values.index(usual)
                leave(rank, f"rank {rank} has {name} {value}, and rank {other} has {usual}: all need the same")


def leave(rank: int, message: str) -> NoReturn:
    """End this rank; the one that is at fault says why."""
    speaks = rank == mr.rank()
    dist.destroy_process_group()
    sys.exit(f"train: {message}" if speaks else 1)
