"""Checkpoints that are whole, and of the training that takes them up."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

MAY_DIFFER = ("--every", "--report", "--wait", "a --page", "a --tensorboard")


def save(path: Path, whole: dict[str, Any]) -> None:
    """Write a checkpoint; who is killed meanwhile leaves the old one or the new one. ValueError if it fails."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            torch.save(whole, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, RuntimeError) as error:
        # What torch says where the disk is full tells of neither disk nor file.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        with contextlib.suppress(OSError):
            part.unlink()
        raise ValueError(f"{path}: it cannot be written: {reason.strerror}") from None


def of_cycle(path: Path, number: int) -> Path:
    """The file of the network at the end of a cycle, counted from 1, beside the checkpoint."""
    return path.with_name(f"{path.stem}-cycle{number}{path.suffix}")


def load(path: Path, facts: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A checkpoint; ValueError where it is none, or one of a training with other ``facts``."""
    try:
        whole = torch.load(path, map_location=device, weights_only=True)
        before = whole["facts"]
    except Exception as error:  # there is no telling what unpickling a damaged file raises
        # torch's advice for unpickling is to trust the file.
        reason = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
        raise ValueError(
            f"{path}: it is no checkpoint of this program that can be read{reason}: remove it, or give another "
            "--checkpoint"
        ) from None
    for name, value in facts.items():
        if before.get(name) != value and name not in MAY_DIFFER:
            raise ValueError(
                f"{path}: {name} was {before.get(name)!r} and is {value!r}: give the options of the run that wrote "
                "it, or another --checkpoint"
            )
    return whole
