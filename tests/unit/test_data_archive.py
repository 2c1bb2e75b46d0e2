"""Tar files that others made, whole and broken: every member is found where tarfile finds it, or a message names it."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from multiring.data import index
from multiring.data.archive import TarMember, members
from multiring.data.errors import DataError

FORMATS = {"gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT, "ustar": tarfile.USTAR_FORMAT}


def content_of(number: int) -> bytes:
    return bytes((i * 7 + number) % 251 for i in range(number * 331 % 3000))


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
    member = tarfile.TarInfo(name)
    member.size, member.type, member.linkname = len(content), kind, link
    tar.addfile(member, io.BytesIO(content))


def made(folder: Path, fill: Callable[[tarfile.TarFile], None], kind: str = "gnu", name: str = "0.tar") -> Path:
    with tarfile.open(folder / name, "w", format=FORMATS[kind]) as tar:
        fill(tar)
    return folder / name


NAMES = [
    "a/0001.jpg",
    "a/0001.cls",
    "/absolute/0002.jpg",
    "./here/../0003.jpg",
    "Käfer/größe-√-日本.seg.png",
    f"{'long/' * 30}{'name' * 20}.jpg",
    f"{'n' * 90}.jpg",
    "empty.txt",
]


@pytest.mark.parametrize("kind", FORMATS)
def test_members_are_where_tarfile_finds_them(kind: str, tmp_path: Path) -> None:
    names = [name for name in NAMES if kind != "ustar" or len(name.encode()) < 100]

    def fill(tar: tarfile.TarFile) -> None:
        for number, name in enumerate(names):
            add(tar, f"folder{number}", kind=tarfile.DIRTYPE)
            add(tar, name, b"" if name == "empty.txt" else content_of(number + 1))

    path = made(tmp_path, fill, kind)
    with tarfile.open(path) as tar:
        expected = [TarMember(each.name, each.offset_data, each.size) for each in tar if each.isreg()]
    assert list(members(path)) == expected
    assert [each.name for each in expected] == names
    content = path.read_bytes()
    for number, member in enumerate(members(path)):
        wanted = b"" if member.name == "empty.txt" else content_of(number + 1)
        assert content[member.offset : member.offset + member.size] == wanted


def test_a_hard_link_has_the_bytes_of_what_it_links_to(tmp_path: Path) -> None:
    def fill(tar: tarfile.TarFile) -> None:
        add(tar, "1.jpg", content_of(5))
        add(tar, "2.jpg", kind=tarfile.LNKTYPE, link="1.jpg")
        add(tar, f"{'3' * 120}.jpg", kind=tarfile.LNKTYPE, link="2.jpg")

    first, *others = members(made(tmp_path, fill))
    assert [each[1:] for each in others] == [first[1:]] * 2


def test_a_size_in_binary_and_one_in_attributes_are_read(tmp_path: Path) -> None:
    """Members above 8 GB have their size in these forms."""
    header = bytearray(tarfile.TarInfo("1.jpg").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\x80" + (3).to_bytes(11, "big")
    path = tmp_path / "0.tar"
    path.write_bytes(summed(header) + b"abc".ljust(512, b"\0") + bytes(1024))
    assert list(members(path)) == [TarMember("1.jpg", 512, 3)]
    member = tarfile.TarInfo("2.jpg")
    member.pax_headers = {"size": "4"}
    headers = member.tobuf(tarfile.PAX_FORMAT)
    path.write_bytes(headers + b"abcd".ljust(512, b"\0") + bytes(1024))
    assert list(members(path)) == [TarMember("2.jpg", len(headers), 4)]


def summed(header: bytearray) -> bytes:
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def several(tar: tarfile.TarFile) -> None:
    for number in range(1, 6):
        add(tar, f"{number}.jpg", content_of(number))


@pytest.mark.parametrize("kind", ["gnu", "pax"])
def test_a_file_that_was_cut_anywhere_is_refused(kind: str, tmp_path: Path) -> None:
    """Up to the mark that ends it; what fills it up after that is nothing."""

    def fill(tar: tarfile.TarFile) -> None:
        several(tar)
        add(tar, f"{'6' * 120}.jpg", content_of(6))

    path = made(tmp_path, fill, kind)
    whole = path.read_bytes()
    last = list(members(path))[-1]
    end = last.offset + -(-last.size // 512) * 512
    for length in [*range(0, end + 512, 97), end, end + 511]:
        path.write_bytes(whole[:length])
        with pytest.raises(DataError) as refused:
            list(members(path))
        assert refused.value.file == str(path)
        assert "cut" in str(refused.value) or "damaged" in str(refused.value), str(refused.value)
    path.write_bytes(whole[: end + 512])
    assert len(list(members(path))) == 6


def test_what_was_cut_is_named(tmp_path: Path) -> None:
    path = made(tmp_path, several)
    third = list(members(path))[2]
    path.write_bytes(path.read_bytes()[: third.offset + third.size - 1])
    with pytest.raises(
        DataError, match=r"0.tar: 3\.jpg: it ends at byte \d+, before the end of this member"
    ) as refused:
        list(members(path))
    assert refused.value.member == "3.jpg"


def test_a_damaged_header_in_the_middle_is_no_end(tmp_path: Path) -> None:
    path = made(tmp_path, several)
    content = bytearray(path.read_bytes())
    at = list(members(path))[3].offset - 512
    for place in (0, 150, 156, 300):
        damaged = content.copy()
        damaged[at + place] ^= 0x11
        path.write_bytes(damaged)
        with pytest.raises(
            DataError, match=f"at byte {at} there is no header of a member: what stands there is damaged"
        ):
            list(members(path))


def test_files_that_were_joined_are_refused(tmp_path: Path) -> None:
    path = made(tmp_path, several)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(DataError, match="bytes follow its end"):
        list(members(path))


def sparse_pax(tar: tarfile.TarFile) -> None:
    member = tarfile.TarInfo("x.jpg")
    member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    tar.addfile(member)


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (lambda tar: add(tar, "x.jpg", kind=tarfile.SYMTYPE, link="y.jpg"), "x.jpg: it is a symbolic link"),
        (lambda tar: add(tar, "x.jpg", kind=tarfile.LNKTYPE, link="y.jpg"), "hard link to y.jpg, which does not stand"),
        (lambda tar: add(tar, "x.jpg", kind=tarfile.FIFOTYPE), "x.jpg: it is a pipe, and no file"),
        (lambda tar: add(tar, "x.jpg", kind=tarfile.CHRTYPE), "x.jpg: it is a device, and no file"),
        (lambda tar: add(tar, "x.jpg", kind=tarfile.GNUTYPE_SPARSE), "x.jpg: it is stored as a sparse file"),
        (lambda tar: add(tar, "x.jpg", kind=b"Q"), "x.jpg: it is of the unknown kind b'Q'"),
        (sparse_pax, "x.jpg: it is stored as a sparse file"),
    ],
)
def test_members_that_are_no_files_are_refused(
    fill: Callable[[tarfile.TarFile], None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        list(members(made(tmp_path, fill, "pax" if fill is sparse_pax else "gnu")))


def test_a_name_in_another_encoding_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0.tar", "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        add(tar, "größe.jpg")
    with pytest.raises(DataError, match=r"the name b'gr\\xf6\\xdfe.jpg' is not in UTF-8: rename the file"):
        list(members(tmp_path / "0.tar"))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (b"9999 path=x\n", "attributes of a member are damaged"),
        (b"0 path=x\n", "attributes of a member are damaged"),
        (b"no length\n", "attributes of a member are damaged"),
        (b"11 size=-4\n", "its size is '-4', and no number of bytes"),
        (b"5008 size=" + b"9" * 4997 + b"\n", "its size is '9{40}', and no number of bytes"),
        (b"11 path=y.j", "attributes of a member are damaged"),
    ],
)
def test_damaged_attributes_are_refused(attributes: bytes, message: str, tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, len(attributes)
    member = tarfile.TarInfo("1.jpg").tobuf(tarfile.USTAR_FORMAT)
    path = tmp_path / "0.tar"
    path.write_bytes(
        header.tobuf(tarfile.USTAR_FORMAT)
        + attributes.ljust(-(-len(attributes) // 512) * 512, b"\0")
        + member
        + bytes(1024)
    )
    with pytest.raises(DataError, match=message):
        list(members(path))


@pytest.mark.parametrize("kind", ["gnu", "pax"])
def test_whatever_is_damaged_is_refused_or_read(kind: str, tmp_path: Path) -> None:
    """Bytes changed at random, the checksum of their header mended so that what is behind it is looked at."""

    def fill(tar: tarfile.TarFile) -> None:
        several(tar)
        add(tar, f"{'6' * 120}.jpg", content_of(6))
        add(tar, "7.jpg", kind=tarfile.LNKTYPE, link="1.jpg")

    path = made(tmp_path, fill, kind)
    whole = path.read_bytes()
    headers = [at for at in range(0, len(whole), 512) if whole[at + 257 : at + 262] == b"ustar"]
    random = Random(5)
    refused = 0
    for _ in range(2000):
        damaged = bytearray(whole)
        at = random.choice(headers)
        for _ in range(random.randint(1, 3)):
            damaged[at + random.randrange(1024)] = random.choice(b"\0\x80\xff 019LKxgS/")
        damaged[at : at + 512] = summed(damaged[at : at + 512])
        path.write_bytes(damaged)
        try:
            found = list(members(path))
        except DataError:  # all else is a fault of the walk
            refused += 1
        else:
            assert all(0 <= each.offset <= each.offset + each.size <= len(whole) for each in found)
    assert 200 < refused < 2000


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 1 << 33
    path = tmp_path / "0.tar"
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT))
    os.truncate(path, 1 << 34)
    with pytest.raises(DataError, match="8589934592 bytes long: it is damaged"):
        list(members(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(bytes(4096)).ljust(512, b"x"), "it is compressed.* uncompress it by gunzip"),
        (b"\x28\xb5\x2f\xfd".ljust(512, b"x"), "uncompress it by unzstd"),
        (b"x" * 1024, "at byte 0 there is no header of a member: it is no tar file"),
        (b"", "it ends at byte 0 without the mark that ends a tar file"),
    ],
)
def test_what_is_no_tar_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "0.tar"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(members(path))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["1.jpg", "README"], "README: a member is called SAMPLE.EXTENSION"),
        (["1.jpg", ".DS_Store"], ".DS_Store: a member is called"),
        (["1.jpg", "a.b/README"], "a.b/README: a member is called"),
        (["1.jpg", "1."], "1.: a member is called"),
        (["1.jpg", "1.cls", "1.JPG"], "1.JPG: its sample has another member of that extension, 1.jpg"),
        (["1.jpg", "1.jpg"], "1.jpg: its sample has another member of that extension, 1.jpg"),
        (["1.jpg", "2.jpg", "1.cls"], "1.cls: other samples stand between this member and the first of 1"),
    ],
)
def test_samples_that_cannot_be_told_apart_are_refused(names: list[str], message: str, tmp_path: Path) -> None:
    def fill(tar: tarfile.TarFile) -> None:
        for number, name in enumerate(names):
            add(tar, name, content_of(number))

    path = made(tmp_path, fill)
    with pytest.raises(DataError) as refused:
        index.build(tmp_path)
    assert str(refused.value).startswith(f"{path}: {message}")
    assert sorted(os.listdir(tmp_path)) == ["0.tar"]  # and no half index
