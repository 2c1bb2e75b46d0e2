"""Reads and writes the files that a user names: regular files of text, in UTF-8 whatever the locale."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def read_text(path: Path) -> str:
    """The text of a file, without the byte order mark that some editors put first.

    OSError if the file cannot be read, or is a pipe, a socket or a device, which might never end. ValueError if it is
    not UTF-8.
    """
    kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    if kind is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, and a regular file is needed", str(path))
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"its byte {error.start} is no UTF-8: save the file in that encoding") from None


def write_text(path: Path, text: str) -> None:
    """Write a file; OSError, which names it, if that fails.

    A symbolic link to a file is refused, as that file would be lost. A link in /dev, such as /dev/stdout, leads to what
    is open, and is written.
    """
    if path.is_symlink() and path.resolve().is_file() and path.parent != Path("/dev"):
        raise OSError(errno.EEXIST, f"it is a symbolic link, to {path.resolve()}; name the file itself", str(path))
    try:
        path.write_text(text, "utf-8")
    except OSError as error:  # which has no name where the disk is full
        raise OSError(error.errno, error.strerror, str(path)) from None


def is_output_failure(error: OSError) -> bool:
    """True if it says why a standard stream, which has no name, cannot be written, other than that nobody reads."""
    return error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
