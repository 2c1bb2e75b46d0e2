"""A folder of classes packed, indexed, read and checked."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from multiring.data import ClassFolders, DataError, Dataset, dataset, index, pack

CLASSES = ["cat", "dog.v2", "Ähre"]
EACH = 7


def picture(label: int, number: int) -> bytes:
    return bytes((i * (label + 2) + number * 13) % 256 for i in range(200 + 97 * number + label))


def folder_of_classes(root: Path) -> Path:
    """Files are made in another order than that of their names."""
    source = root / "pictures"
    for label, name in reversed(list(enumerate(CLASSES))):
        (source / name / "deep").mkdir(parents=True)
        for number in reversed(range(EACH)):
            place = source / name / ("deep" if number == 3 else "")
            (place / f"p.{number}.{'JPG' if number % 2 else 'jpg'}").write_bytes(picture(label, number))
    return source


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    pack(folder_of_classes(tmp_path), tmp_path / "out", file_bytes=6000)
    return tmp_path / "out"


def order(number: int) -> list[int]:
    """The numbers of a class's pictures, in the order of their paths: the folder "deep" comes first."""
    return [3, *(each for each in range(number) if each != 3)]


def test_each_file_is_a_sample_with_its_label(packed: Path) -> None:
    data = Dataset(packed)
    assert len(data) == len(CLASSES) * EACH
    assert data.classes == CLASSES
    expected = [(label, number) for label in range(len(CLASSES)) for number in order(EACH)]
    for i, (label, number) in enumerate(expected):
        assert data[i] == {"jpg": picture(label, number), "cls": str(label).encode()}
        assert data.name(i) == f"{CLASSES[label]}/{i:08d}-p_{number}"
        assert data[i - len(data)] == data[i]
    assert data.members(1)[0].endswith(".jpg")
    assert data.members(2)[0].endswith(".JPG")
    for number in (len(data), -len(data) - 1):
        with pytest.raises(IndexError, match=f"sample {number} of 21"):
            data[number]
    with pytest.raises(TypeError, match=r"sample=1\.5"):
        data[1.5]  # type: ignore[index]
    assert list(data.faults()) == []


def test_the_files_are_as_large_as_was_asked_and_others_can_read_them(packed: Path) -> None:
    files = sorted(packed.glob("*.tar"))
    assert len(files) > 3
    assert [file.name for file in files] == [f"{number:06d}.tar" for number in range(len(files))]
    names = []
    for file in files:
        with tarfile.open(file) as tar:
            assert sum(512 + each.size for each in tar) <= 6000
            names += tar.getnames()
    data = Dataset(packed)
    assert names == [name for i in range(len(data)) for name in data.members(i)]


def test_the_same_folder_gives_the_same_bytes(packed: Path, tmp_path: Path) -> None:
    for file in (tmp_path / "pictures").rglob("*"):
        os.utime(file, (1, 1))
    pack(tmp_path / "pictures", tmp_path / "again", file_bytes=6000)
    names = sorted(os.listdir(packed))
    assert names == sorted(os.listdir(tmp_path / "again"))
    assert [name for name in names if (packed / name).read_bytes() != (tmp_path / "again" / name).read_bytes()] == []
    (packed / index.NAME).unlink()
    index.build(packed)
    assert (packed / index.NAME).read_bytes() == (tmp_path / "again" / index.NAME).read_bytes()


def empty_class(source: Path) -> None:
    (source / "zebra").mkdir()


def circle(source: Path) -> None:
    (source / "cat" / "up").symlink_to(source / "cat")


def no_text(source: Path) -> None:
    (source / "dog.v2" / os.fsdecode(b"\xff\xfe.jpg")).write_bytes(b"1")


def pipe(source: Path) -> None:
    os.mkfifo(source / "dog.v2" / "x.jpg")


def class_elsewhere(source: Path) -> None:
    (source / "zebra").symlink_to("gone")


def picture_elsewhere(source: Path) -> None:
    (source / "cat" / "x.jpg").symlink_to("gone.jpg")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (empty_class, "zebra: no file in this class ends in .jpg"),
        (circle, "cat/up: it leads back to a folder above it"),
        (no_text, "its name is not in UTF-8: rename it"),
        (pipe, "x.jpg: it is no file and no folder"),
        (class_elsewhere, "zebra: it is a symbolic link to gone, which is not there"),
        (picture_elsewhere, "cat/x.jpg: it is a symbolic link to gone.jpg, which is not there"),
    ],
)
def test_a_folder_that_cannot_be_packed_leaves_nothing(
    spoil: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    source = folder_of_classes(tmp_path)
    spoil(source)
    (tmp_path / "there").mkdir()
    for out in (tmp_path / "new" / "out", tmp_path / "there"):
        with pytest.raises((ValueError, DataError), match=message):
            pack(source, out, 6000, ["jpg"])
    assert sorted(os.listdir(tmp_path)) == ["pictures", "there"]
    assert os.listdir(tmp_path / "there") == []


def test_a_pack_in_its_own_folder_would_be_a_class(tmp_path: Path) -> None:
    source = folder_of_classes(tmp_path)
    for out in (source / "packed", source / "cat" / "packed"):
        with pytest.raises(
            ValueError, match=f"^{out}: it is in {source}, whose folders are classes: name one elsewhere"
        ):
            pack(source, out)
    assert sorted(os.listdir(source)) == sorted(CLASSES)
    pack(source, source / ".packed")  # which is hidden
    assert ClassFolders(source).classes == CLASSES


@pytest.mark.timeout(20)  # a pipe that is opened waits for a writer
def test_pipes_in_the_place_of_files_are_refused(packed: Path) -> None:
    opened = Dataset(packed)
    uses: dict[str, Callable[[], Any]] = {
        "zz.tar": lambda: index.build(packed),
        dataset.CLASSES: lambda: opened.classes,
        index.NAME: lambda: Dataset(packed),
    }
    for name, use in uses.items():
        (packed / name).unlink(missing_ok=True)
        os.mkfifo(packed / name)
        with pytest.raises(OSError, match=f"it is no regular file: '{packed / name}'"):
            use()
    (packed / index.NAME).unlink()
    (packed / "zz.tar").unlink()
    index.build(packed)
    first = sorted(packed.glob("*.tar"))[0]
    first.unlink()
    os.mkfifo(first)
    with pytest.raises(DataError, match=f"^{first}: .*the file cannot be opened: it is no regular file"):
        Dataset(packed).read(0)
    assert str(next(Dataset(packed).faults())).endswith("samples in it: it is no regular file")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = tarfile.TarFile.close

    def full(self: tarfile.TarFile) -> None:
        close(self)
        raise OSError(errno.ENOSPC, "No space left on device")

    source = folder_of_classes(tmp_path)
    monkeypatch.setattr(tarfile.TarFile, "close", full)
    with pytest.raises(OSError, match="No space left"):
        pack(source, tmp_path / "new" / "out", 6000)
    assert os.listdir(tmp_path) == ["pictures"]


def test_links_and_hidden_names_follow_one_rule(tmp_path: Path) -> None:
    """A class and a folder in it are links; a hidden class, folder and file are left out, and so are other endings."""
    source = folder_of_classes(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "in").mkdir(parents=True)
    (elsewhere / "in" / "b.PNG").write_bytes(b"b")
    (elsewhere / "a.jpg").write_bytes(b"a")
    (source / "linked").symlink_to(elsewhere)
    (source / "cat" / "also").symlink_to(elsewhere / "in")
    for hidden in (source / ".git", source / "cat" / ".thumbs"):
        hidden.mkdir()
        (hidden / "x.jpg").write_bytes(b"x")
    (source / "cat" / "._p.jpg").write_bytes(b"x")
    (source / "README").write_bytes(b"x")
    found = ClassFolders(source)
    assert found.classes == ["cat", "dog.v2", "linked", "Ähre"]
    assert [path.relative_to(source).as_posix() for path in found.samples(2)] == ["linked/a.jpg", "linked/in/b.PNG"]
    cats = [path.relative_to(source / "cat").as_posix() for path in found.samples(0)]
    assert cats == ["also/b.PNG", "deep/p.3.JPG", *(f"p.{i}.{'JPG' if i % 2 else 'jpg'}" for i in (0, 1, 2, 4, 5, 6))]
    assert found.left_out == 4
    assert pack(source, tmp_path / "out").left_out == 4
    packed = Dataset(tmp_path / "out")
    listed = [path for label in range(4) for path in ClassFolders(source).samples(label)]
    assert [next(iter(packed[i].values())) for i in range(len(packed))] == [path.read_bytes() for path in listed]


def test_classes_may_have_odd_names_in_utf_8(tmp_path: Path) -> None:
    odd = [
        "a b",
        "-x",
        "a.b",
        "a.b.c ",
        "字",
        "𠀀",
        "\u00e9",
        "e\u0301",
        "a\nb",
        "tab\t",
        "q'\"<b>&",
        "*?[1]",
        "\\b",
        "x" * 255,
    ]
    source = tmp_path / "odd"
    for number, name in enumerate(odd):
        (source / name).mkdir(parents=True)
        for picture in range(2):
            (source / name / f"im g.{picture}\n.png").write_bytes(bytes([number, picture]))
    folders = ClassFolders(source)
    pack(source, tmp_path / "packed")
    packed = Dataset(tmp_path / "packed")
    assert packed.classes == folders.classes == sorted(odd)
    found = [(sample["png"], int(sample["cls"])) for sample in (packed[i] for i in range(len(packed)))]
    assert found == [(bytes([odd.index(name), i]), label) for label, name in enumerate(sorted(odd)) for i in (0, 1)]

    (source / os.fsdecode(b"bad\xff")).mkdir()
    with pytest.raises(DataError, match=r"odd/bad\\udcff': the name of this class is not in UTF-8: rename it$"):
        ClassFolders(source)


def test_what_is_there_is_not_overwritten(packed: Path, tmp_path: Path) -> None:
    before = {name: (packed / name).read_bytes() for name in os.listdir(packed)}
    with pytest.raises(ValueError, match=r"it has 000000.tar already: name another folder"):
        pack(tmp_path / "pictures", packed)
    assert {name: (packed / name).read_bytes() for name in os.listdir(packed)} == before


def test_what_is_not_packed_is_counted(tmp_path: Path) -> None:
    source = folder_of_classes(tmp_path)
    (source / "README").write_text("about")
    (source / "cat" / "Thumbs.db").write_text("x")
    (source / "cat" / ".hidden.jpg").write_text("x")
    assert pack(source, tmp_path / "out").left_out == 3
    assert pack(source, tmp_path / "other", extensions=[".DB", "jpg"]).left_out == 2


def test_decoding_is_the_users(packed: Path) -> None:
    each = Dataset(packed, decode={"cls": int, "npy": bytes.hex})
    assert each[20] == {"jpg": Dataset(packed)[20]["jpg"], "cls": 2}
    whole = Dataset(packed, decode=lambda sample: (len(sample["jpg"]), int(sample["cls"])))
    assert whole[20] == (len(each[20]["jpg"]), 2)


def fails_on(content: bytes) -> bytes:
    """A decoder to which the pictures of odd length are broken."""
    if len(content) % 2:
        raise OSError(f"odd: {len(content)}")
    return content


def test_what_cannot_be_decoded_is_named_or_skipped(packed: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = Dataset(packed)
    odd = [i for i in range(len(raw)) if len(raw[i]["jpg"]) % 2]
    assert 3 < len(odd) < len(raw) - 3
    data = Dataset(packed, decode={"jpg": fails_on})
    with pytest.raises(DataError) as fault:
        data.__getitems__(range(len(raw)))
    file = packed / data._index.files[0].name
    member = data.members(odd[0])[0]
    length = len(raw[odd[0]]["jpg"])
    assert str(fault.value) == f"{file}: {member} (sample {odd[0]}): cannot be decoded: OSError: odd: {length}"
    assert (fault.value.file, fault.value.member, fault.value.sample) == (str(file), member, odd[0])
    skipping = Dataset(packed, decode={"jpg": fails_on}, broken="skip")
    found = skipping.__getitems__(range(len(raw)))
    assert found == [raw[i] for i in range(len(raw)) if i not in odd]
    assert [record.message.split(")")[0][-1] for record in caplog.records] == [str(i)[-1] for i in odd]
    assert skipping.__getitems__(odd) == []
    caplog.clear()
    lost = Dataset(packed, decode={"jpg": fails_on}, broken="skip")
    with pytest.raises(DataError, match=f"the first 100 samples are all broken; no more were tried.*sample {odd[0]}"):
        lost.__getitems__(odd[:1] * 200)
    assert len(caplog.records) == 99
    assert skipping.__getitems__(odd[:1] * 200) == []  # which has seen whole ones
    with pytest.raises(ValueError, match="broken='ignore': known are raise, skip"):
        Dataset(packed, broken="ignore")


def test_bytes_that_changed_are_found(packed: Path) -> None:
    data = Dataset(packed)
    changed = 2
    offset = int(data._index.offset[data._index.first[changed]])
    path = packed / data._index.files[0].name
    content = bytearray(path.read_bytes())
    content[offset + 9] ^= 1
    path.write_bytes(content)
    expected = f"{path}: {data.members(changed)[0]} (sample {changed}): its bytes have changed since the index was made"
    expected += ", or the index has"
    assert [str(fault) for fault in data.faults()] == [expected]
    with pytest.raises(DataError) as fault:
        data[changed]
    assert str(fault.value) == expected
    assert len(Dataset(packed, broken="skip").__getitems__([1, changed, 3])) == 2


def test_files_that_changed_their_size_or_are_missing(packed: Path) -> None:
    data = Dataset(packed, broken="skip")
    first, second, *_ = data._index.files
    (packed / first.name).unlink()
    os.truncate(packed / second.name, 3000)
    with pytest.raises(DataError, match=rf"000000.tar: {data.members(0)[0]} \(sample 0\): the file is missing"):
        data.__getitems__([0, 20])
    inside = first.samples
    expected = (
        rf"000001.tar: {data.members(inside)[0]} \(sample {inside}\): the file has 3000 bytes, and had {second.nbytes}"
    )
    with pytest.raises(DataError, match=expected):
        Dataset(packed)[inside]
    faults = [str(fault) for fault in data.faults()]
    assert (
        faults[0]
        == f"{packed / first.name}: it cannot be read, and {first.samples} samples in it: No such file or directory"
    )
    assert faults[1].startswith(f"{packed / second.name}: the file has 3000 bytes")
    assert len(faults) > 3
    assert all("it was cut" in fault for fault in faults[2:])


def test_the_samples_behind_a_cut_are_skipped_and_the_file_is_named_once(
    packed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first tar file is cut in the middle of its second sample, and the second one is longer than it was."""
    data = Dataset(packed)
    first, second, *_ = data._index.files
    assert first.samples == 3
    cut = int(data._index.offset[data._index.first[1]]) + 100
    whole = [data[0]]
    os.truncate(packed / first.name, cut)
    skipping = Dataset(packed, broken="skip")
    for _ in range(2):
        assert skipping.__getitems__(range(3)) == whole
        skipping._open.clear()
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"skipped: 2 of 3 samples in {packed / first.name}, behind a cut: the file has {cut} bytes, and had "
        f"{first.nbytes} when the index was made"
    )
    with (packed / second.name).open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match=rf"{second.name}: .*has {second.nbytes + 4} bytes, and had") as fault:
        skipping.__getitems__([3])
    assert type(fault.value) is DataError


def unreadable(self: object, nbytes: int, offset: int) -> bytes:
    raise OSError(errno.EIO, "Input/output error")


def test_a_disk_that_fails_is_named(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Dataset(packed, broken="skip")
    monkeypatch.setattr(dataset._Descriptor, "read", unreadable)
    name = data.members(3)[0]
    with pytest.raises(
        DataError, match=rf"000001.tar: {name} \(sample 3\): cannot be read: Input/output error"
    ) as fault:
        data.__getitems__([3])
    assert type(fault.value) is DataError
    assert len(list(data.faults())) == 2 * len(data)


def short_of_memory(content: bytes) -> bytes:
    raise MemoryError


def test_short_memory_is_no_broken_sample(packed: Path) -> None:
    for decode in ({"jpg": short_of_memory}, lambda sample: short_of_memory(b"")):
        with pytest.raises(MemoryError):
            Dataset(packed, decode=decode, broken="skip").__getitems__([1])


def test_a_file_that_is_cut_while_it_is_open(packed: Path) -> None:
    data = Dataset(packed)
    data[0]
    os.truncate(packed / "000000.tar", 600)
    with pytest.raises(DataError, match=r"\(sample 0\): the file ends \d+ bytes before the end of this member"):
        data[0]


def test_what_lies_beside_is_told_where_all_files_are_gone(packed: Path) -> None:
    files = sorted(packed.glob("*.tar"))
    for file in files:
        file.unlink()
    told = [str(fault) for fault in Dataset(packed).faults()]
    assert [line.split(": ")[0] for line in told] == [*map(str, files), str(packed)]
    (packed / os.fsdecode(b"\xff.tar")).write_bytes(b"")
    told = [str(fault) for fault in Dataset(packed).faults()]
    assert told[-1] == f"'{packed}/\\udcff.tar': its name is not in UTF-8: rename it"


def test_a_new_file_is_not_in_the_index(packed: Path) -> None:
    (packed / "new.tar").write_bytes((packed / "000000.tar").read_bytes())
    (fault,) = Dataset(packed).faults()
    assert "new.tar: it is not in the index" in str(fault)


def spoil_version(content: bytes) -> bytes:
    return content.replace(b'"version": 2', b'"version": 7')


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda content: b"", "this is no index of a data set"),
        (lambda content: content[5:], "this is no index of a data set"),
        (lambda content: content[:-1], r"it has \d+ bytes, and not \d+"),
        (lambda content: content + b"x", r"it has \d+ bytes, and not \d+"),
        (lambda content: content[:30], "its header is damaged"),
        (lambda content: content.replace(b'"files"', b'"tiles"'), "its header is damaged"),
        (spoil_version, "its version is 7, and not 2"),
    ],
)
def test_an_index_that_is_none_is_refused(spoil: Callable[[bytes], bytes], message: str, packed: Path) -> None:
    path = packed / index.NAME
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match=f"{message}.*; make it anew: multiring data index"):
        Dataset(packed)


def test_a_damaged_index_gives_no_other_samples(packed: Path) -> None:
    """Whichever byte of it is another one, each sample is what it was or an error, of which the check tells too."""
    path = packed / index.NAME
    whole, before = path.read_bytes(), [Dataset(packed).read(sample) for sample in range(len(Dataset(packed)))]
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            damaged = Dataset(packed)
        except DataError:
            continue
        errors = 0
        for sample, content in enumerate(before):
            try:
                assert damaged.read(sample) == content, place
            except DataError:
                errors += 1
        assert bool(errors) <= bool([*damaged.faults()]), place


@pytest.mark.parametrize("damage", [b"\xff", b"\xc3"])
def test_a_damaged_name_is_told_with_its_file(damage: bytes, packed: Path) -> None:
    path = packed / index.NAME
    whole = path.read_bytes()
    at = whole.index(CLASSES[0].encode() + b"/")
    path.write_bytes(whole[:at] + damage + whole[at + 1 :])
    damaged = Dataset(packed)
    message = rf"^{path}: it is damaged at sample 0: its name b'\\x{damage.hex()}at/.*' is not in UTF-8: make it anew"
    for use in (damaged.name, damaged.members, damaged.read, lambda sample: damaged.fault(sample, "x")):
        with pytest.raises(DataError, match=message) as told:
            use(0)
        assert told.value.file == str(path)
    assert str(next(damaged.faults())).startswith(f"{path}: it is damaged at sample 0: ")


def test_names_that_end_before_they_begin_are_damage(packed: Path) -> None:
    path, ends = packed / index.NAME, index.load(packed).names_end.astype("<u8")
    whole, last = path.read_bytes(), int(ends[-1])
    for wrong in (last + 1, int(ends[0]) - 1, int(ends[0])):
        changed = ends.copy()
        changed[1] = wrong
        path.write_bytes(whole.replace(ends.tobytes(), changed.tobytes()))
        with pytest.raises(DataError, match=f"at sample 1: its name is bytes {ends[0]} to {wrong} of {last}: make"):
            Dataset(packed).name(1)


def test_a_folder_without_an_index_or_with_compressed_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"index.multiring: no such file; make it anew: multiring data index"):
        Dataset(tmp_path)
    with pytest.raises(DataError, match=r"no file in it is called NAME.tar"):
        index.build(tmp_path)
    (tmp_path / "1.tar.gz").write_bytes(b"x")
    with pytest.raises(DataError, match=r"1.tar.gz: it is compressed"):
        index.build(tmp_path)


def test_an_index_that_cannot_be_written_whole_is_not_there(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (packed / index.NAME).read_bytes()

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(index.os, "fsync", interrupted)
    names = sorted(os.listdir(packed))
    with pytest.raises(KeyboardInterrupt):
        index.build(packed)
    assert sorted(os.listdir(packed)) == names
    assert (packed / index.NAME).read_bytes() == before


def test_it_is_read_by_threads_forks_and_copies(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "MOST_OPEN", 2)
    data = Dataset(packed, decode={"cls": int})
    expected = [data[i] for i in range(len(data))]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(data.__getitem__, [*range(len(data))] * 20)) == expected * 20
    copy = pickle.loads(pickle.dumps(data))
    assert [copy[i] for i in range(len(data))] == expected
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        is_same = [data[i] for i in reversed(range(len(data)))] == expected[::-1]
        os.write(writes, b"same" if is_same else b"differs")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reads, 10) == b"same"
    os.close(reads)
    os.close(writes)
    held = pickle.dumps(data)
    index.build(packed, index.tar_files(packed)[:2])
    with pytest.raises(DataError, match="it had 21 samples when this data set was opened"):
        pickle.loads(held)


def test_the_commands(tmp_path: Path) -> None:
    source, out = folder_of_classes(tmp_path), tmp_path / "out"

    def command(*words: object) -> tuple[int, str, str]:
        told = subprocess.run(
            [sys.executable, "-m", "multiring", "data", *map(str, words)], capture_output=True, text=True, timeout=200
        )
        return told.returncode, told.stdout, told.stderr

    (source / "README").write_text("about")
    code, printed, _ = command("pack", source, out, "--file-size", "6000")
    assert code == 0
    assert printed.startswith(f"{out}: 21 samples of 3 classes in ")
    assert "left out: 1 file " in printed
    assert json.loads((out / "classes.json").read_text()) == CLASSES
    assert command("check", out) == (0, f"{out}: 21 samples as indexed\n", "")
    content = bytearray((out / "000001.tar").read_bytes())
    content[515] ^= 1
    (out / "000001.tar").write_bytes(content)
    code, printed, errors = command("check", out)
    assert (code, errors) == (1, "multiring data check: 1 fault\n")
    assert printed.startswith(f"{out / '000001.tar'}: ")
    (out / index.NAME).unlink()
    code, _, errors = command("check", out)
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith(f"multiring data check: {out / index.NAME}: no such file")
    assert command("index", out)[0] == 0
    assert command("check", out)[0] == 0
    assert command("pack", source, tmp_path / "none", "--file-size", "many")[::2] == (
        2,
        "multiring data pack: --file-size 'many' is not a size, such as 65536, 256K or 1.5GB\n",
    )
    assert command("pack", tmp_path / "nowhere", tmp_path / "none")[::2] == (
        2,
        f"multiring data pack: {tmp_path / 'nowhere'}: No such file or directory\n",
    )
