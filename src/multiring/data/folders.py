"""A folder of classes: which files in it are samples, and of which class; one rule, whoever reads or packs them."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from multiring.data.errors import DataError

IMAGES = ("jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp")
"""Endings of the names of images; the list of torchvision's ImageFolder."""


class ClassFolders:
    """A folder that has one for each class, whose label is the place of its name among all, sorted.

    Samples of a class are the files below its folder, those behind symbolic links too, whose names end in one of
    ``extensions``, in the order of their paths' parts. What is called .NAME is left out, files and folders alike.
    ValueError where there is no class, or a link leads nowhere; DataError where the name of one is not in UTF-8.
    """

    def __init__(self, folder: str | os.PathLike[str], extensions: Collection[str] = IMAGES) -> None:
        self.folder = Path(folder)
        self._endings = tuple(f".{extension.lower().lstrip('.')}" for extension in extensions)
        entries = sorted(os.listdir(self.folder))
        shown = [name for name in entries if not name.startswith(".")]
        self.classes = [name for name in shown if stat.S_ISDIR(_mode(self.folder / name))]
        if not self.classes:
            raise ValueError(f"{folder}: there is no folder in it, and each class is one")
        for name in self.classes:
            if not is_text(name):
                path = str(self.folder / name)
                raise DataError(f"{path!r}: the name of this class is not in UTF-8: rename it", file=path)
        self.left_out = len(entries) - len(self.classes)
        """Number of files and hidden folders that are no samples, of the classes that were listed so far."""

    def samples(self, label: int) -> Iterator[Path]:
        """The files of a class; ValueError where it has none, or has links that lead back up, or pipes and devices."""
        folder, empty = self.folder / self.classes[label], True
        for path in self._below(folder, ()):
            if path.name.lower().endswith(self._endings):
                empty = False
                yield path
            else:
                self.left_out += 1
        if empty:
            raise ValueError(f"{folder}: no file in this class ends in {', '.join(self._endings)}")

    def _below(self, folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
        status = folder.stat()
        here = (status.st_dev, status.st_ino)
        if here in above:
            raise ValueError(f"{folder}: it leads back to a folder above it")
        for name in sorted(os.listdir(folder)):
            path = folder / name
            if name.startswith("."):
                self.left_out += 1
                continue
            mode = _mode(path)
            if stat.S_ISDIR(mode):
                yield from self._below(path, (*above, here))
            elif stat.S_ISREG(mode):
                yield path
            else:
                raise ValueError(f"{path}: it is no file and no folder")


def _mode(path: Path) -> int:
    """The kind of what a path leads to; ValueError for a link that leads nowhere, whose samples would be missing."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        if not path.is_symlink():
            raise
        raise ValueError(f"{path}: it is a symbolic link to {os.readlink(path)}, which is not there") from None


def is_text(name: str) -> bool:
    """True if a name can be written in UTF-8, as it could not be read from a disk that has other bytes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
