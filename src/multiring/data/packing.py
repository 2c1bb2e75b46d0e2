"""A folder of classes made into tar files: the same bytes from the same folder, whenever and wherever it is done."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from multiring.data import index
from multiring.data.dataset import CLASSES
from multiring.data.errors import DataError
from multiring.data.folders import IMAGES, ClassFolders
from multiring.whole_files import replace

FILE_BYTES = 256 << 20
"""Bytes of a tar file, about: so few files hold a data set, and each is read and copied in seconds."""


@dataclass(frozen=True)
class Packed:
    """Result of packing; ``left_out`` counts the files with another ending or in no class."""

    samples: int
    files: int
    nbytes: int
    classes: int
    left_out: int


def pack(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    file_bytes: int = FILE_BYTES,
    extensions: Collection[str] = IMAGES,
) -> Packed:
    """Make tar files of at most about ``file_bytes`` bytes, their index and classes.json of a folder of classes.

    `ClassFolders` says what is a class and which files are samples. A sample becomes CLASS/NUMBER-NAME with its bytes
    and a member "cls" with its label. ValueError for a class without a sample, and for a ``target`` that has tar files
    already, or would be a class itself; after any error ``target`` is as it was.
    """
    source, target = Path(source), Path(target)
    if file_bytes < 1:
        raise ValueError(f"file_bytes={file_bytes}: a tar file has 1 byte or more")
    folders = ClassFolders(source, extensions)
    within = target.resolve().parts[len(source.resolve().parts) :]
    if source.resolve() in target.resolve().parents and not within[0].startswith("."):
        raise ValueError(f"{target}: it is in {source}, whose folders are classes: name one elsewhere")
    new = [folder for folder in (target, *target.parents) if not folder.exists()]
    made = [target / CLASSES, target / index.NAME]
    writer = _SampleWriter(target, file_bytes)
    samples, is_ours = 0, False
    try:
        target.mkdir(parents=True, exist_ok=True)
        present = sorted(
            each.name for each in target.iterdir() if each.suffix == ".tar" or each.name in (index.NAME, CLASSES)
        )
        if present:
            raise ValueError(f"{target}: it has {present[0]} already: name another folder, or remove what is there")
        is_ours = True
        for label, name in enumerate(folders.classes):
            for path in folders.samples(label):
                writer.add(name, samples, path, label)
                samples += 1
        writer.close()
        listed = json.dumps(folders.classes, ensure_ascii=False, indent=0) + "\n"
        replace(target / CLASSES, [listed.encode()], lasting=True)
        index.build(target, writer.files)
    except BaseException:
        try:
            writer.close()  # which fails where the disk is full
        finally:
            for path in [*writer.files, *made] if is_ours else []:
                path.unlink(missing_ok=True)
            for folder in new:
                with contextlib.suppress(OSError):  # it was never made, or another program has put something there
                    folder.rmdir()
        raise
    nbytes = sum(path.stat().st_size for path in writer.files)
    return Packed(samples, len(writer.files), nbytes, len(folders.classes), folders.left_out)


class _SampleWriter:
    """Writes samples into one tar file after the other."""

    def __init__(self, target: Path, file_bytes: int) -> None:
        self.files: list[Path] = []
        self._target = target
        self._file_bytes = file_bytes
        self._tar: tarfile.TarFile | None = None

    def add(self, folder: str, number: int, path: Path, label: int) -> None:
        stem, _, extension = path.name.rpartition(".")
        name = f"{folder}/{number:08d}-{stem.replace('.', '_')}"
        try:
            name.encode()
        except UnicodeEncodeError:
            raise DataError(f"{str(path)!r}: its name is not in UTF-8: rename it", file=str(path)) from None
        if extension.lower() == "cls":
            raise ValueError(f"{path}: a sample's member cls is its label: choose other extensions")
        content = {extension: path.read_bytes(), "cls": str(label).encode()}
        needed = sum(tarfile.BLOCKSIZE + len(value) for value in content.values())
        if self._tar is not None and self._tar.offset and self._tar.offset + needed > self._file_bytes:
            self.close()
        if self._tar is None:
            file = self._target / f"{len(self.files):06d}.tar"
            # The mode "w" would replace what another program has put there meanwhile.
            self._tar = tarfile.open(file, "x", format=tarfile.PAX_FORMAT)  # noqa: SIM115
            self.files.append(file)
        for each, value in content.items():
            member = tarfile.TarInfo(f"{name}.{each}")
            member.size, member.mode = len(value), 0o644
            self._tar.addfile(member, io.BytesIO(value))

    def close(self) -> None:
        if self._tar is not None:
            tar, self._tar = self._tar, None
            tar.close()
