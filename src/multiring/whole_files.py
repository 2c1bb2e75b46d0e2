"""Files that are whole or not there, whoever reads them meanwhile and whatever happens to who writes them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def replace(path: Path, content: Iterable[bytes], *, lasting: bool = False) -> None:
    """Write a file under another name, and give it its own once it is whole; OSError with that one if it cannot be.

    ``lasting``: it is on the disk by then, so that a machine that fails leaves the old file or the new one.
    """
    half = path.with_name(f".{path.name}.{os.getpid()}~")  # ends as nothing does that is looked for by its end
    try:
        with half.open("wb") as file:
            for part in content:
                file.write(part)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        half.replace(path)
    except BaseException as error:
        half.unlink(missing_ok=True)
        if isinstance(error, OSError):  # where the disk is full Python does not say of which file
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
