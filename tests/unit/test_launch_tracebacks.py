"""Lines that are shown of a traceback that several ranks print."""

from __future__ import annotations

from multiring.launch import tracebacks
from multiring.launch.tracebacks import BEGIN, Tracebacks

ERROR = [BEGIN, b'  File "a.py", line 1', b"    f()", b"ValueError: no"]


def test_a_traceback_that_another_rank_has_shown_is_its_last_line() -> None:
    found = Tracebacks()
    assert found.feed((1, 2), [b"before", *ERROR, b"after"]) == (
        [b"before", *ERROR, b"after"],
        [b"before", ERROR[-1], b"after"],
    )
    assert found.feed((2, 2), ERROR) == ([b"(the traceback of rank 1) ValueError: no"], [b"ValueError: no"])
    other = [*ERROR[:-1], b"ValueError: yes"]
    assert found.feed((2, 2), other) == (other, [b"ValueError: yes"])
    assert found.feed((1, 1), ERROR) == (ERROR, [b"ValueError: no"])  # a rank that prints it again


def test_lines_that_come_one_by_one() -> None:
    found = Tracebacks()
    for line in ERROR[:-1]:
        assert found.feed((3, 2), [line]) == ([], [])
        assert found.is_open((3, 2))
        assert found.feed((4, 2), [b"between"]) == ([b"between"], [b"between"])
    assert found.feed((3, 2), ERROR[-1:]) == (ERROR, [b"ValueError: no"])
    assert not found.is_open((3, 2))


def test_a_traceback_that_does_not_end_is_shown() -> None:
    found = Tracebacks()
    found.feed((1, 2), ERROR[:2])
    assert found.flush((1, 2)) == ERROR[:2]
    assert found.flush((1, 2)) == []
    assert found.feed((1, 2), ERROR[2:]) == (ERROR[2:], ERROR[2:])
    endless = [BEGIN, *[b"  line"] * tracebacks.MOST_LINES]
    assert found.feed((1, 2), endless)[0] == endless
