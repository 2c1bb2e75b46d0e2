"""Writes files such that a reader finds the whole file or the old one, whatever becomes of the writer."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def replace(path: Path, content: Iterable[bytes], *, lasting: bool = False, half: str = "") -> None:
    """Write a file under another name, ``half`` or a like one, and rename it to ``path`` once it is whole.

    ``lasting``: it is on the disk before it is renamed, so that a machine that fails leaves the old file or the new
    one. OSError names ``path``.
    """
    other = path.with_name(half or f".{path.name}.{os.getpid()}~")  # nobody looks for files with this ending
    try:
        with other.open("wb") as file:
            for part in content:
                file.write(part)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        other.replace(path)
    except BaseException as error:
        other.unlink(missing_ok=True)
        if isinstance(error, OSError):  # which names that one, or nothing where the disk is full
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
