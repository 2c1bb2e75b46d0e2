"""Reports of a rank to its launcher: shared memory with a record of what it does and one of how it ended.

The launcher's agent reads it when it is asked to, so a rank sends nothing, and one that is stopped still has told what
it did before.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import struct
import time
import zlib
from typing import Any

from multiring import env
from multiring.errors import system_message

NAME = "multiring-report"
"""The name of the memory behind MULTIRING_REPORT_FD."""

STATUS, REPORT = 0, 1 << 16
"""Offsets of the two records: what the rank does now, and how it ended."""

TRIES = 5
"""Looks at a record that is being written."""

_HEADER = struct.Struct("!II")

_log = logging.getLogger("multiring")

_is_untold = False
"""True once it was said that a record could not be written."""

_is_forked = False
"""True if this process was forked from the one that was started: what it does is not what that one does."""

Record = dict[str, Any]


def leave_in_child() -> None:
    """Tell nothing in this process, which was forked from a rank."""
    global _is_forked
    _is_forked = True


def tell_in_child() -> None:
    """Tell in this process after all: it was forked before it was a rank, and to the launcher it is the one."""
    global _is_forked
    _is_forked = False


def memory() -> int | None:
    """The descriptor of this process's memory; None where no launcher asks, or where it was not inherited."""
    descriptor = env.read(env.Launch).report_fd
    if descriptor is None or _is_forked:
        return None
    return descriptor if is_memory(descriptor) else None


def is_memory(descriptor: int) -> bool:
    """True if that is such a memory: a program that closes what it does not know may have given the number away."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{NAME}")
    except FileNotFoundError:
        return False


def write(descriptor: int, place: int, record: Record) -> None:
    """Put a record in the ``place`` of the one that stood there; ValueError if there is not room for it.

    The job does without it where it cannot be written, as under `ulimit -f 0`: that is a line in the log, once.
    """
    global _is_untold
    content = json.dumps(record).encode()
    if place == STATUS and _HEADER.size + len(content) > REPORT:
        raise ValueError(f"a status of {len(content)} bytes: there is room for {REPORT - _HEADER.size}")
    try:
        if not is_memory(descriptor):
            raise OSError(errno.EBADF, "the program has closed the descriptor of the memory for it")
        os.pwrite(descriptor, _HEADER.pack(len(content), zlib.crc32(content)) + content, place)
    except OSError as error:
        if not _is_untold:
            _log.warning("this rank cannot tell its launcher what it does: %s", system_message(error))
        _is_untold = True


def read(descriptor: int, place: int) -> Record | None:
    """The record that stands there; None if there is none, or if it was being written at each of some looks."""
    for _ in range(TRIES):
        end = REPORT if place == STATUS else os.fstat(descriptor).st_size
        stored = os.pread(descriptor, max(end - place, 0), place)  # at once: it may be written between two looks
        if len(stored) < _HEADER.size:
            return None
        length, checksum = _HEADER.unpack_from(stored)
        content = stored[_HEADER.size : _HEADER.size + length]
        if length and len(content) == length and zlib.crc32(content) == checksum:
            found: Record = json.loads(content)
            return found
    return None


def tell_stage(stage: str) -> None:
    """Let those who watch the job know what this rank does that is in no world: "joins", say."""
    descriptor = memory()
    if descriptor is not None:
        write(descriptor, STATUS, {"stage": stage, "at": time.monotonic()})
