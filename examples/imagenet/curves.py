"""Curves of a training for TensorBoard, which one rank writes at a time."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Mapping
from pathlib import Path


class Curves:
    """Numbers by step in a folder; what is there of ``first_step`` and later counts no more."""

    def __init__(self, folder: Path, first_step: int) -> None:
        # With this module tensorboard imports no TensorFlow, which takes seconds and which no number needs.
        sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step by name, so that they are there if this process is lost."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def check(folder: Path, writes: bool) -> None:
    """ValueError where no curves can be written; only a rank that ``writes`` looks at the folder."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--tensorboard: the package tensorboard is missing: pip install tensorboard")
    if writes and (not folder.absolute().parent.is_dir() or (folder.exists() and not folder.is_dir())):
        raise ValueError(f"--tensorboard {folder}: a folder in one that is there is needed")
