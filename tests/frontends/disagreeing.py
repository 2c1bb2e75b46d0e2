"""Ranks that give different things to one call."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import multiring as mr


def all_see(action: Callable[[], object], *lines: str) -> None:
    """The call fails with what each rank gave in the message, on ranks that heard nothing the next; it has a job of its
    own, since the failure reaches whatever is in flight, also the end of a call that others have completed."""
    new_job()

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
    new_job()


def new_job() -> None:
    mr.shutdown()
    mr.init()
