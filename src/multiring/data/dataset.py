"""A data set that lies in tar files: each sample by its number, read at its offsets."""

from __future__ import annotations

import bisect
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multiring.data import index
from multiring.data.archive import open_regular
from multiring.data.broken import Skipping
from multiring.data.errors import BrokenSample, DataError
from multiring.env import whole_number
from multiring.units import count

Decode = Callable[[dict[str, bytes]], Any] | Mapping[str, Callable[[bytes], Any]]

CLASSES = "classes.json"
"""The file beside the index that names the classes, in the order of their labels."""

MOST_OPEN = 128
"""Descriptors that a process keeps of a data set; a system often allows 1024 in all."""

_log = logging.getLogger("multiring")


class Dataset:
    """The samples of a folder that `multiring data pack` or `multiring data index` has made an index of.

    ``dataset[i]`` is a dictionary of the bytes of each member by its extension in lower case, such as "jpg" and "cls".
    ``decode`` makes something else of it: a function of that dictionary, or a dictionary of a function for each
    extension, whose results are the values then. What it raises becomes a DataError, which names file, member and
    index.

    ``broken`` says what becomes of a sample that cannot be decoded, or whose bytes have changed, where several are
    asked for at once, as a batch: "raise", or "skip", which logs it and goes on. Of a tar file that was cut, the
    samples behind the cut are skipped, and the file is logged once. A tar file that is missing or longer than it was is
    an error always. A data set can be pickled, and used by threads and in forked processes.
    """

    def __init__(self, folder: str | os.PathLike[str], decode: Decode | None = None, broken: str = "raise") -> None:
        self._skipping = Skipping(broken)
        self.folder = Path(folder).absolute()
        self._decode = decode
        self.broken = broken
        self._load()

    def _load(self) -> None:
        self._index = index.load(self.folder)
        self._ends = list(itertools.accumulate(file.samples for file in self._index.files))
        self._keys = [extension.lower() for extension in self._index.extensions]
        self._open: dict[int, _Descriptor] = {}
        self._cut: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_decode": self._decode, "broken": self.broken, "length": len(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        length = state.pop("length")
        self.__dict__.update(state)
        self._skipping = Skipping(self.broken)
        self._load()
        if len(self) != length:
            raise DataError(
                f"{self.folder}: it had {length} samples when this data set was opened, and has {len(self)}"
            )

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, sample: int) -> Any:
        """A sample; IndexError if there is none of this number, DataError if it is broken."""
        return self._decoded(self._checked(sample))

    def __getitems__(self, samples: Sequence[int]) -> list[Any]:
        """Several samples, without those that are broken where these are to be skipped; torch's loader asks for this.

        DataError where the first hundred that are asked for are all broken.
        """
        return self._skipping(self.__getitem__, samples)

    @property
    def classes(self) -> list[str]:
        """The names of the classes, in the order of their labels; empty where the folder has no classes.json."""
        path = self.folder / CLASSES
        if not path.exists():
            return []
        try:
            with os.fdopen(open_regular(path), encoding="utf-8") as file:
                named = json.load(file)
        except ValueError as error:
            raise DataError(f"{path}: it is no JSON: {error}", file=str(path)) from None
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise DataError(f"{path}: a list of names is needed", file=str(path))
        return named

    def name(self, sample: int) -> str:
        """Return the name that the members of a sample share in their tar file, up to the first dot.

        DataError where the index is damaged.
        """
        number = self._checked(sample)
        try:
            return self._index.name(number)
        except ValueError as error:
            raise self._damaged(number, error) from None

    def members(self, sample: int) -> list[str]:
        """The names of the members of a sample, in their order."""
        return [member.name for member in self._members(self._checked(sample))]

    def _members(self, sample: int) -> list[index.IndexedMember]:
        """The members of a sample; DataError where the index is damaged."""
        nbytes = self._index.files[self._file(sample)].nbytes
        try:
            found = self._index.members(sample)
            if beyond := [member.name for member in found if member.offset + member.size > nbytes]:
                raise ValueError(f"{beyond[0]} is beyond the end of its file")
        except ValueError as error:
            raise self._damaged(sample, error) from None
        return found

    def _damaged(self, sample: int, error: ValueError) -> DataError:
        path = self.folder / index.NAME
        message = f"{path}: it is damaged at sample {sample}: {error}: make it anew: multiring data index {self.folder}"
        return DataError(message, file=str(path), sample=sample)

    def read(self, sample: int) -> dict[str, bytes]:
        """The bytes of each member of a sample by its extension, without decoding; DataError where it is broken."""
        number = self._checked(sample)
        descriptor, content = self._descriptor(number), {}
        for name, extension, offset, size, crc in self._members(number):
            try:
                found = descriptor.read(size, offset)
            except OSError as error:  # which names no file
                raise self._fault(number, name, f"cannot be read: {error.strerror}") from None
            if len(found) != size or index.checksum(name, found) != crc:
                fault = self._broken(number, name, _changed(found, size))
                fault.is_told = len(found) != size and self._file(number) in self._cut
                raise fault
            content[self._keys[extension]] = found
        return content

    def fault(self, sample: int, fault: str) -> BrokenSample:
        """A BrokenSample to raise, which names the file and the members of a sample and what is wrong with them."""
        number = self._checked(sample)
        return self._broken(number, ", ".join(self.members(number)), fault)

    def _checked(self, sample: int) -> int:
        number = whole_number("sample", sample)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return number % len(self)

    def faults(self) -> Iterator[DataError]:
        """Read all members, and say of each file and each member what is wrong with it."""
        end = 0
        for file in self._index.files:
            path = self.folder / file.name
            begin, end = end, end + file.samples
            try:
                descriptor = _Descriptor(path)
            except OSError as error:
                message = f"{path}: it cannot be read, and {count(file.samples, 'sample')} in it: {error.strerror}"
                yield DataError(message, file=str(path))
                continue
            if descriptor.nbytes != file.nbytes:
                yield DataError(f"{path}: {self._resized(descriptor, file)}", file=str(path))
            for sample in range(begin, end):
                try:
                    members = self._members(sample)
                except DataError as error:
                    yield error
                    continue
                for name, _, offset, size, crc in members:
                    try:
                        found = descriptor.read(size, offset)
                    except OSError as error:
                        yield self._fault(sample, name, f"cannot be read: {error.strerror}")
                        continue
                    if len(found) != size or index.checksum(name, found) != crc:
                        yield self._fault(sample, name, _changed(found, size))
        known = {file.name for file in self._index.files}
        try:
            present = index.tar_files(self.folder)
        except DataError as error:
            present = []
            yield error
        for path in present:
            if path.name not in known:
                message = f"{path}: it is not in the index: make it anew by multiring data index {self.folder}"
                yield DataError(message, file=str(path))

    def _decoded(self, sample: int) -> Any:
        content = self.read(sample)
        if self._decode is None:
            return content
        if callable(self._decode):
            try:
                return self._decode(content)
            except MemoryError:
                raise  # the sample need not be broken
            except Exception as error:
                raise self._undecoded(sample, ", ".join(self.members(sample)), error) from error
        decoded = {}
        for extension, value in content.items():
            function = self._decode.get(extension)
            try:
                decoded[extension] = function(value) if function else value
            except MemoryError:
                raise
            except Exception as error:
                member = next(name for name in self.members(sample) if index.split(name)[1].lower() == extension)
                raise self._undecoded(sample, member, error) from error
        return decoded

    def _undecoded(self, sample: int, member: str, error: Exception) -> BrokenSample:
        return self._broken(sample, member, f"cannot be decoded: {type(error).__name__}: {error}")

    def _file(self, sample: int) -> int:
        """The number of the tar file that a sample is in."""
        return bisect.bisect_right(self._ends, sample)

    def _descriptor(self, sample: int) -> _Descriptor:
        number = self._file(sample)
        descriptor = self._open.get(number)
        if descriptor is None:
            file = self._index.files[number]
            member = self.members(sample)[0]
            try:
                descriptor = _Descriptor(self.folder / file.name)
            except FileNotFoundError:
                raise self._fault(sample, member, "the file is missing") from None
            except OSError as error:
                raise self._fault(sample, member, f"the file cannot be opened: {error.strerror}") from None
            if descriptor.nbytes < file.nbytes and self._skipping.skips:
                self._tell_cut(number, descriptor, file)
            elif descriptor.nbytes != file.nbytes:
                raise self._fault(sample, member, self._resized(descriptor, file))
            if len(self._open) >= MOST_OPEN:
                self._open = {}  # others may be reading from those: they keep them until they have read
            self._open[number] = descriptor
        return descriptor

    def _tell_cut(self, number: int, descriptor: _Descriptor, file: index.IndexedFile) -> None:
        """Log that a file was cut, once, and how many samples are left out for it."""
        if number in self._cut:
            return
        self._cut.add(number)
        first = self._ends[number] - file.samples
        begin, end = int(self._index.first[first]), int(self._index.first[self._ends[number]])
        reached = self._index.offset[begin:end] + self._index.size[begin:end]
        starts = self._index.first[first : self._ends[number]] - np.uint64(begin)
        behind = int(np.count_nonzero(np.maximum.reduceat(reached, starts.astype(np.intp)) > descriptor.nbytes))
        _log.warning(
            "skipped: %s of %s in %s, behind a cut: %s",
            behind,
            count(file.samples, "sample"),
            self.folder / file.name,
            self._resized(descriptor, file),
        )

    def _resized(self, descriptor: _Descriptor, file: index.IndexedFile) -> str:
        return (
            f"the file has {descriptor.nbytes} bytes, and had {file.nbytes} when the index was made: restore it, or "
            f"make the index anew by multiring data index {self.folder}"
        )

    def _fault(self, sample: int, member: str, fault: str) -> DataError:
        return DataError(self._told(sample, member, fault), **self._where(sample, member))

    def _broken(self, sample: int, member: str, fault: str) -> BrokenSample:
        return BrokenSample(self._told(sample, member, fault), **self._where(sample, member))

    def _told(self, sample: int, member: str, fault: str) -> str:
        return f"{self._path(sample)}: {member} (sample {sample}): {' '.join(fault.split())}"

    def _where(self, sample: int, member: str) -> Any:
        return {"file": str(self._path(sample)), "member": member, "sample": sample}

    def _path(self, sample: int) -> Path:
        return self.folder / self._index.files[self._file(sample)].name


def _changed(found: bytes, size: int) -> str:
    """Return what is wrong with the bytes of a member."""
    if len(found) != size:
        return f"the file ends {size - len(found)} bytes before the end of this member: it was cut"
    return "its bytes have changed since the index was made, or the index has"


class _Descriptor:
    """An open file, which is closed when nobody reads it any more: a thread may read what another one has dropped.

    A forked process reads from the same descriptor, as each read says where.
    """

    def __init__(self, path: Path) -> None:
        self._number = -1
        self._number = open_regular(path)
        self.nbytes = os.fstat(self._number).st_size

    def __del__(self) -> None:
        if self._number >= 0:
            os.close(self._number)

    def read(self, nbytes: int, offset: int) -> bytes:
        """Bytes at an offset, fewer only where the file ends."""
        content = os.pread(self._number, nbytes, offset)
        while len(content) < nbytes:  # one call reads 2 GB at most
            more = os.pread(self._number, nbytes - len(content), offset + len(content))
            if not more:
                break
            content += more
        return content
