"""Records that a rank writes for its launcher: they are read whole, or not at all."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest

from multiring.job import reports


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create(reports.NAME)
    yield descriptor
    os.close(descriptor)


def test_both_records_stand_beside_each_other(memory: int) -> None:
    assert reports.read(memory, reports.STATUS) is None
    assert reports.read(memory, reports.REPORT) is None
    reports.write(memory, reports.REPORT, {"blames": 3, "account": {"calls": 10**6, "text": "x" * 200_000}})
    assert reports.read(memory, reports.STATUS) is None
    reports.write(memory, reports.STATUS, {"stage": "runs", "at": 1.5, "long": "y" * 1000})
    reports.write(memory, reports.STATUS, {"stage": "left", "at": 2.5})
    assert reports.read(memory, reports.STATUS) == {"stage": "left", "at": 2.5}
    found = reports.read(memory, reports.REPORT)
    assert found is not None
    assert (found["blames"], len(found["account"]["text"])) == (3, 200_000)


def test_a_status_for_which_there_is_no_room(memory: int) -> None:
    with pytest.raises(ValueError, match=r"a status of \d+ bytes: there is room for 65528"):
        reports.write(memory, reports.STATUS, {"text": "x" * (1 << 16)})
    assert reports.read(memory, reports.STATUS) is None


def test_what_is_half_written_is_not_read(memory: int) -> None:
    reports.write(memory, reports.STATUS, {"stage": "runs", "at": 1.5})
    os.pwrite(memory, b"{", 12)
    assert reports.read(memory, reports.STATUS) is None


def test_a_record_is_read_whole_while_another_is_written(memory: int) -> None:
    stopping = threading.Event()

    def write() -> None:
        number = 0
        while not stopping.wait(0.0002):
            number += 1
            reports.write(memory, reports.STATUS, {"numbers": [number] * (1 + number % 3000)})

    writer = threading.Thread(target=write)
    writer.start()
    found = set[int]()
    until = time.monotonic() + 30
    try:
        while len(found) < 50 and time.monotonic() < until:
            record = reports.read(memory, reports.STATUS)
            if record is not None:
                first = record["numbers"][0]
                found.add(first)
                assert record["numbers"] == [first] * (1 + first % 3000)
    finally:
        stopping.set()
        writer.join()
    assert len(found) >= 50


def test_the_number_of_a_descriptor_that_is_something_else_by_now(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRING_REPORT_FD", str(memory))
    assert reports.memory() == memory
    reports.tell_stage("joins")
    told = reports.read(memory, reports.STATUS)
    assert told is not None
    assert told["stage"] == "joins"
    other = os.memfd_create("of the user")
    monkeypatch.setenv("MULTIRING_REPORT_FD", str(other))
    assert reports.memory() is None
    reports.tell_stage("joins")
    assert os.fstat(other).st_size == 0
    os.close(other)
    assert reports.memory() is None


def test_what_cannot_be_written_is_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may have closed the memory, and the number may be another file's by then."""
    monkeypatch.setattr(reports, "_is_untold", False)
    with tempfile.TemporaryFile() as own:
        reports.write(own.fileno(), reports.STATUS, {"stage": "runs"})
        reports.write(own.fileno(), reports.REPORT, {"blames": 1})
        assert os.fstat(own.fileno()).st_size == 0
    assert [record.getMessage() for record in caplog.records] == [
        "this rank cannot tell its launcher what it does: "
        "[Errno 9] the program has closed the descriptor of the memory for it"
    ]
