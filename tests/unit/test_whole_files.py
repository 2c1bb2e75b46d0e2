"""Files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiring.whole_files import replace


@pytest.mark.parametrize("lasting", [False, True])
def test_a_file_is_replaced_once_the_new_one_is_whole(lasting: bool, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b"old")

    def content() -> Iterator[bytes]:
        for part in range(3):
            assert file.read_bytes() == b"old"
            yield bytes([part]) * (part + 1)

    replace(file, content(), lasting=lasting)
    assert file.read_bytes() == b"\x00\x01\x01\x02\x02\x02"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_file_that_cannot_be_made_whole_leaves_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b"old")

    def content() -> Iterator[bytes]:
        yield b"new"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        replace(file, content())
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "a.json"
    with pytest.raises(FileNotFoundError) as raised:
        replace(file, [b"new"])
    assert raised.value.filename == str(file)
