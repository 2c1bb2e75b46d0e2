"""The members of a tar file and where their bytes lie, found strictly: what is not understood is refused by its name.

Formats are those of POSIX (ustar and pax) and of GNU tar; see POSIX.1-2017, pax, and "Basic Tar Format" in GNU tar's
manual. Python's tarfile takes a broken header in the middle for the end, and so loses samples without a word.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from multiring.data.errors import DataError

BLOCK = 512

LONGEST_HEADER = 1 << 20
"""Bytes of a long name, or of the attributes of a member; no path is as long."""

_COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ\0": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"\x04\x22\x4d\x18": "unlz4",
}
"""First bytes of compressed files, and the program that unpacks them."""

_REGULAR, _HARD_LINK, _SYMBOLIC_LINK, _DIRECTORY, _SPARSE = b"0\x007", b"1", b"2", b"5", b"S"
_KINDS = {b"3": "a device", b"4": "a device", b"6": "a pipe", b"M": "a part of a member that began in another file"}


class TarMember(NamedTuple):
    name: str
    offset: int
    size: int


def open_regular(path: Path) -> int:
    """A descriptor of a regular file, for reading; OSError for others: a pipe would wait for somebody to write."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def members(path: Path) -> Iterator[TarMember]:
    """The regular members of a tar file, in their order, and hard links to them; directories are left out.

    DataError for what is no whole, uncompressed tar file, and for members that are neither; OSError if it cannot be
    read.
    """
    descriptor = open_regular(path)
    try:
        yield from _Walk(path, descriptor).members()
    finally:
        os.close(descriptor)


class _Walk:
    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._offset = 0

    def members(self) -> Iterator[TarMember]:
        known: dict[str, TarMember] = {}
        shared: dict[str, str] = {}
        while (header := self._header()) is not None:
            own: dict[str, str] = {}
            while (kind := header[156:157]) in (b"L", b"K", b"x", b"g"):
                content = self._extension(header)
                if kind == b"g":
                    shared.update(self._attributes(content))
                elif kind == b"x":
                    own.update(self._attributes(content))
                else:
                    own["path" if kind == b"L" else "linkpath"] = self._text(content.split(b"\0", 1)[0])
                following = self._header()
                if following is None:
                    self._refuse(f"it ends at byte {self._offset}, after a header that announces a member")
                header = following
            attributes = {**shared, **own}
            name = attributes.get("path") or self._name(header)
            if any(key.startswith("GNU.sparse.") for key in attributes):
                kind = _SPARSE
            if kind == _DIRECTORY or (kind in _REGULAR and name.endswith("/")):
                continue
            if kind == _HARD_LINK:
                target = attributes.get("linkpath") or self._text(header[157:257].split(b"\0", 1)[0])
                if target not in known:
                    self._refuse(f"it is a hard link to {target}, which does not stand before it", name)
                member = TarMember(name, *known[target][1:])
            else:
                member = self._regular(header, kind, name, attributes)
            known[name] = member
            yield member

    def _regular(self, header: bytes, kind: bytes, name: str, attributes: dict[str, str]) -> TarMember:
        if kind == _SYMBOLIC_LINK:
            self._refuse("it is a symbolic link: pack what it leads to (tar --dereference)", name)
        if kind == _SPARSE:
            self._refuse("it is stored as a sparse file: pack it without --sparse", name)
        if kind not in _REGULAR:
            self._refuse(f"it is {_KINDS.get(kind, f'of the unknown kind {kind!r}')}, and no file", name)
        size = self._number(header, name)
        if "size" in attributes:
            told = attributes["size"]
            if not re.fullmatch("[0-9]{1,19}", told):
                self._refuse(f"its size is {told[:40]!r}, and no number of bytes", name)
            size = int(told)
        return TarMember(name, self._skip(size, name), size)

    def _header(self) -> bytes | None:
        """The next header, whose checksum is right; None at the end."""
        header = os.pread(self._descriptor, BLOCK, self._offset)
        if len(header) < BLOCK:
            self._refuse(
                f"it ends at byte {self._offset + len(header)} without the mark that ends a tar file: it was cut"
            )
        if not any(header):
            self._check_end()
            return None
        if self._offset == 0:
            for start, remedy in _COMPRESSED.items():
                if header.startswith(start):
                    self._refuse(f"it is compressed, and samples could not be found in it: uncompress it by {remedy}")
        told = header[148:156].strip(b" \0")
        blank = header[:148] + b" " * 8 + header[156:]
        signed = sum(blank) - 256 * sum(byte > 127 for byte in blank)  # as some old programs sum
        if not told or told.strip(b"01234567") or int(told, 8) not in (sum(blank), signed):
            where = "it is no tar file" if self._offset == 0 else "what stands there is damaged"
            self._refuse(f"at byte {self._offset} there is no header of a member: {where}")
        self._offset += BLOCK
        return header

    def _check_end(self) -> None:
        at = self._offset
        while content := os.pread(self._descriptor, 1 << 20, at):
            if any(content):
                self._refuse(f"bytes follow its end at byte {self._offset}: of files that were joined, make one anew")
            at += len(content)

    def _extension(self, header: bytes) -> bytes:
        size = self._number(header, "")
        if size > LONGEST_HEADER:
            self._refuse(f"before byte {self._offset} a name or its attributes are {size} bytes long: it is damaged")
        return os.pread(self._descriptor, size, self._skip(size, ""))

    def _skip(self, size: int, name: str) -> int:
        """Skip ``size`` bytes and return the position where they begin."""
        begin = self._offset
        if begin + size > self._size:
            self._refuse(
                f"it ends at byte {self._size}, before the end of this member at {begin + size}: it was cut", name
            )
        self._offset = begin + -(-size // BLOCK) * BLOCK
        return begin

    def _number(self, header: bytes, name: str) -> int:
        """The size that a header tells: octal digits, or 11 bytes behind a mark."""
        field = header[124:136]
        if field[0] == 0x80:
            return int.from_bytes(field[1:], "big")
        digits = field.strip(b" \0")
        if digits.strip(b"01234567"):
            self._refuse(f"its size is {field!r}, and no number", name)
        return int(digits or b"0", 8)

    def _name(self, header: bytes) -> str:
        name = header[:100].split(b"\0", 1)[0]
        prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
        return self._text(prefix + b"/" + name if prefix else name)

    def _attributes(self, content: bytes) -> dict[str, str]:
        """Lines of "LENGTH KEY=VALUE", the length in bytes being that of the whole line."""
        found = {}
        while content:
            length, space, _ = content[:20].partition(b" ")
            end = int(length) if length.isdigit() else 0
            key, equals, value = content[len(length) + 1 : max(0, end - 1)].partition(b"=")
            if not space or not equals or content[end - 1 : end] != b"\n":
                self._refuse(f"before byte {self._offset} the attributes of a member are damaged")
            found[self._text(key)] = self._text(value)
            content = content[end:]
        return found

    def _text(self, name: bytes) -> str:
        try:
            return name.decode()
        except UnicodeDecodeError:
            self._refuse(f"before byte {self._offset} the name {name!r} is not in UTF-8: rename the file")

    def _refuse(self, fault: str, name: str = "") -> NoReturn:
        where = f"{self._path}: {name}" if name else str(self._path)
        raise DataError(f"{where}: {fault}", file=str(self._path), member=name)
