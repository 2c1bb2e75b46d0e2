"""Ranks that look whether they have begun the same training, before they begin it."""

from __future__ import annotations

import collections
import sys
from typing import Any, NoReturn

import torch.distributed as dist

import multiring as mr


def agree(mistake: str | None, facts: dict[str, Any], newcomer: bool = False) -> None:
    """End all ranks, with one message, if one of them cannot begin or has other facts than the others.

    A newcomer ends alone: the others lose it at their next call, and go on. If all are newcomers, all end.
    """
    everybody = mr.all_gather_object((mistake, facts, newcomer))
    settled = [rank for rank, (_, _, new) in enumerate(everybody) if not new] or list(range(len(everybody)))
    faults = {rank: found for rank, (found, _, _) in enumerate(everybody) if found is not None}
    if not faults.keys() & set(settled):
        for name in facts:
            values = [repr(each.get(name)) for _, each, _ in everybody]
            usual = collections.Counter(values[rank] for rank in settled).most_common(1)[0][0]  # the first of several
            other = values.index(usual)
            for rank, value in enumerate(values):
                if value != usual:
                    differs = f"rank {rank} has {name} {value}, and rank {other} has {usual}: all need the same"
                    faults.setdefault(rank, differs)
    for rank in settled:
        if rank in faults:
            leave(rank, faults[rank])
    if mr.rank() in faults:
        leave(mr.rank(), faults[mr.rank()])


def leave(rank: int, message: str) -> NoReturn:
    """End this rank; the one that is at fault says why."""
    speaks = rank == mr.rank()
    dist.destroy_process_group()
    sys.exit(f"train: {message}" if speaks else 1)
