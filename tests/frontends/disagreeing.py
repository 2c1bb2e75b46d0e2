"""Ranks that give different things to one call."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import multiring as mr


def all_see(action: Callable[[], object], *lines: str) -> None:
    """The call fails with what each rank gave in the message, on ranks that heard nothing the next; then a new job
    begins."""

    def calls() -> None:
        action()
        mr.barrier()

    with pytest.raises(Exception, match="ranks disagree on call number") as caught:
        calls()
    with pytest.raises(mr.Mismatch) as named:
        mr.barrier()
    for error in caught, named:
        for line in lines:
            assert line in str(error.value), f"{line!r} is not in {error.value}"
    mr.shutdown()
    mr.init()
