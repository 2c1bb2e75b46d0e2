"""The index of a data set: which tar files it has, and where in them the bytes of each sample lie.

The file holds a line that says what it is, a line of JSON, then arrays, little-endian:

    names_end   u64 [samples]      where the name of each sample ends in the text of all names
    first       u64 [samples + 1]  the first member of each sample; those of one sample are adjacent
    offset      u64 [members]      in the tar file
    size        u64 [members]
    extension   u32 [members]      its number in the list of extensions
    crc         u32 [members]      CRC-32 of the member's name and its bytes, and the number of members of its sample
    names       u8

As these count, a damaged index that has a member elsewhere, in another sample or in none is noticed by who reads it.
"""

from __future__ import annotations

import json
import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from multiring.data.archive import members, open_regular
from multiring.data.errors import DataError
from multiring.data.folders import is_text
from multiring.whole_files import replace

NAME = "index.multiring"
VERSION = 2

_MARK = b"multiring data index\n"
_CHUNK = 1 << 20

_COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")


@dataclass(frozen=True)
class IndexedFile:
    """A tar file of a data set."""

    name: str
    nbytes: int
    samples: int


class IndexedMember(NamedTuple):
    """A member of a sample; ``crc`` is that of `checksum`."""

    name: str
    extension: int
    offset: int
    size: int
    crc: int


@dataclass(frozen=True)
class DataIndex:
    """An index as it is read; the arrays lie in the file, and the system reads of them what is used."""

    files: tuple[IndexedFile, ...]
    extensions: tuple[str, ...]
    names_end: np.ndarray[Any, Any]
    first: np.ndarray[Any, Any]
    offset: np.ndarray[Any, Any]
    size: np.ndarray[Any, Any]
    extension: np.ndarray[Any, Any]
    crc: np.ndarray[Any, Any]
    names: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.names_end)

    def members(self, sample: int) -> list[IndexedMember]:
        """The members of a sample, in their order; ValueError where the index is damaged."""
        begin, end = self.first[sample : sample + 2].tolist()
        if not begin < end <= len(self.offset):
            raise ValueError(f"its members are those from {begin} to {end} of {len(self.offset)}")
        name, found = self.name(sample), []
        columns = (self.offset, self.size, self.extension, self.crc)
        for offset, size, extension, crc in zip(*(each[begin:end].tolist() for each in columns), strict=True):
            if extension >= len(self.extensions):
                raise ValueError(f"a member has extension {extension} of {len(self.extensions)}")
            crc = int(_counted(crc, end - begin))
            found.append(IndexedMember(f"{name}.{self.extensions[extension]}", extension, offset, size, crc))
        return found

    def name(self, sample: int) -> str:
        """The name that all members of a sample share; ValueError where the index is damaged."""
        begin, end = int(self.names_end[sample - 1]) if sample else 0, int(self.names_end[sample])
        if not begin < end <= len(self.names):
            raise ValueError(f"its name is bytes {begin} to {end} of {len(self.names)}")
        name = self.names[begin:end].tobytes()
        try:
            return name.decode()
        except UnicodeDecodeError:
            raise ValueError(f"its name {name!r} is not in UTF-8") from None


_ARRAYS = (
    ("names_end", "<u8"),
    ("first", "<u8"),
    ("offset", "<u8"),
    ("size", "<u8"),
    ("extension", "<u4"),
    ("crc", "<u4"),
)


def split(name: str) -> tuple[str, str]:
    """The sample of a member and the member's extension: what stands before and after the first dot of its base name.

    ValueError where one of them is empty.
    """
    base = name[name.rfind("/") + 1 :]
    stem, _, extension = base.partition(".")
    if not stem or not extension:
        raise ValueError("a member is called SAMPLE.EXTENSION, such as 0001.jpg; this name has no such two parts")
    return name[: len(name) - len(extension) - 1], extension


class _IndexBuilder:
    """The arrays of an index, as the members of one tar file after the other are added."""

    def __init__(self) -> None:
        self.files: list[IndexedFile] = []
        self.extensions: dict[str, int] = {}
        self.arrays = {name: array("Q" if kind == "<u8" else "I") for name, kind in _ARRAYS}
        self.names = bytearray()

    def add(self, path: Path) -> None:
        """Read a tar file; DataError says what is wrong with it."""
        before = len(self.arrays["names_end"])
        seen: set[str] = set()
        sample, extensions = "", dict[str, str]()
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            nbytes = os.fstat(file.fileno()).st_size
            for name, offset, size in members(path):
                try:
                    this, extension = split(name)
                except ValueError as error:
                    raise _fault(path, name, str(error)) from None
                if this != sample:
                    if this in seen:
                        raise _fault(path, name, f"other samples stand between this member and the first of {this}")
                    seen.add(this)
                    sample, extensions = this, {}
                    self.arrays["first"].append(len(self.arrays["offset"]))
                    self.names += this.encode()
                    self.arrays["names_end"].append(len(self.names))
                if (other := extensions.setdefault(extension.lower(), name)) is not name:
                    raise _fault(path, name, f"its sample has another member of that extension, {other}")
                values = {"offset": offset, "size": size, "crc": _crc(file.fileno(), name, offset, size)}
                values["extension"] = self.extensions.setdefault(extension, len(self.extensions))
                for key, value in values.items():
                    self.arrays[key].append(value)
        self.files.append(IndexedFile(path.name, nbytes, len(self.arrays["names_end"]) - before))

    def content(self) -> Iterator[bytes]:
        """The bytes of the index."""
        self.arrays["first"].append(len(self.arrays["offset"]))
        about = {
            "version": VERSION,
            "files": [[file.name, file.nbytes, file.samples] for file in self.files],
            "extensions": list(self.extensions),
            "samples": len(self.arrays["names_end"]),
            "members": len(self.arrays["offset"]),
            "names": len(self.names),
        }
        text = _MARK + json.dumps(about, ensure_ascii=True).encode()
        yield text + b" " * (-(len(text) + 1) % 8) + b"\n"
        first = np.array(self.arrays["first"], np.int64)
        for name, kind in _ARRAYS:
            values = np.array(self.arrays[name], kind)
            if name == "crc":
                values = _counted(values, np.repeat(np.diff(first), np.diff(first)).astype(kind))
            yield values.tobytes()
        yield bytes(self.names)


def _fault(path: Path, member: str, fault: str) -> DataError:
    return DataError(f"{path}: {member}: {fault}", file=str(path), member=member)


def checksum(name: str, content: bytes = b"") -> int:
    """CRC-32 of a member's name and its bytes."""
    return zlib.crc32(content, zlib.crc32(name.encode()))


def _counted(crc: Any, members: Any) -> Any:
    """A checksum with the number of members of its sample, and without it if that was there."""
    return crc ^ (members & 0xFFFFFF) * 0x9D  # odd, so that each number is another one


def _crc(descriptor: int, name: str, offset: int, size: int) -> int:
    crc, end = checksum(name), offset + size
    while offset < end:
        content = os.pread(descriptor, min(_CHUNK, end - offset), offset)
        if not content:
            break  # the walk has seen more of it: the next header will be missing, and it says so
        crc, offset = zlib.crc32(content, crc), offset + len(content)
    return crc


def tar_files(folder: Path) -> list[Path]:
    """The tar files of a folder, by their names; DataError for none, compressed ones and names not in UTF-8."""
    names = sorted(entry.name for entry in os.scandir(folder))
    for name in names:
        if name.lower().endswith(_COMPRESSED_SUFFIXES):
            raise DataError(
                f"{folder / name}: it is compressed, and samples could not be found in it: uncompress it, or take it "
                "out of the folder",
                file=str(folder / name),
            )
    files = [folder / name for name in names if name.endswith(".tar") and not name.startswith(".")]
    if not files:
        raise DataError(f"{folder}: no file in it is called NAME.tar", file=str(folder))
    for path in files:
        if not is_text(path.name):
            raise DataError(f"{str(path)!r}: its name is not in UTF-8: rename it", file=str(path))
    return files


def build(folder: Path, files: Sequence[Path] | None = None) -> DataIndex:
    """Read the tar files of a folder, all of them unless given, and write its index, whole or not at all.

    DataError for what is wrong with a tar file.
    """
    builder = _IndexBuilder()
    for path in tar_files(folder) if files is None else files:
        builder.add(path)
    replace(folder / NAME, builder.content(), lasting=True)
    return load(folder)


def load(folder: Path) -> DataIndex:
    """The index of a folder, in a time that does not depend on its length.

    DataError if there is none, or if it is cut, damaged or of another version.
    """
    path = folder / NAME
    remedy = f"make it anew: multiring data index {folder}"
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {remedy}", file=str(path)) from None
    with os.fdopen(descriptor, "rb") as file:
        if file.read(len(_MARK)) != _MARK:
            raise DataError(f"{path}: this is no index of a data set; {remedy}", file=str(path))
        line = file.readline()
        content = np.asarray(np.memmap(file, np.uint8, "r"))  # slices of a memmap take longer to make
    try:
        about = json.loads(line)
        if about["version"] != VERSION:
            raise DataError(f"{path}: its version is {about['version']}, and not {VERSION}; {remedy}", file=str(path))
        files = tuple(IndexedFile(str(name), int(nbytes), int(samples)) for name, nbytes, samples in about["files"])
        counts = [int(about[name]) for name in ("samples", "members", "names")]
        extensions = tuple(map(str, about["extensions"]))
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: its header is damaged ({error!r}); {remedy}", file=str(path)) from None
    samples, count, names = counts
    lengths = {"names_end": samples, "first": samples + 1}
    at, arrays = len(_MARK) + len(line), dict[str, Any]()
    whole = at + sum(lengths.get(name, count) * int(kind[2]) for name, kind in _ARRAYS) + names
    if len(content) != whole or sum(file.samples for file in files) != samples:
        raise DataError(f"{path}: it has {len(content)} bytes, and not {whole}; {remedy}", file=str(path))
    for name, kind in _ARRAYS:
        end = at + lengths.get(name, count) * int(kind[2])
        arrays[name] = content[at:end].view(kind)
        at = end
    if int(arrays["first"][-1]) != count:
        raise DataError(f"{path}: its samples have {arrays['first'][-1]} members of {count}; {remedy}", file=str(path))
    return DataIndex(files, extensions, **arrays, names=content[at:])
