"""Descriptions of two calls that differ, by the engine over MPI."""

from __future__ import annotations

import pytest

from multiring._native import COLLECTIVES, DTYPES, OPS
from multiring.runtime.mpi.signature import Signature, both_sides


def called(name: str, count: int = 6, dtype: str = "float32", op: str = "sum", **other: int) -> Signature:
    fields = {"root": 0, "plan": 5 << 15, "part_of": COLLECTIVES.index(name), **other}
    return Signature(COLLECTIVES.index(name), 3, count, DTYPES.index(dtype), OPS.index(op), **fields)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (called("all_reduce"), called("all_reduce", 7), ("all_reduce(count=6)", "all_reduce(count=7)")),
        (
            called("all_reduce"),
            called("all_reduce", 7, "int32", "max"),
            ("all_reduce(dtype=float32, count=6, op=sum)", "all_reduce(dtype=int32, count=7, op=max)"),
        ),
        (called("all_reduce"), called("barrier"), ("all_reduce(dtype=float32, count=6, op=sum)", "barrier()")),
        (
            called("reduce"),
            called("broadcast", root=1),
            ("reduce(dtype=float32, count=6, op=sum, root=0)", "broadcast(dtype=float32, count=6, root=1)"),
        ),
        (called("broadcast"), called("broadcast", root=1), ("broadcast(root=0)", "broadcast(root=1)")),
        (called("all_reduce", label=0xABC), called("all_reduce"), ("all_reduce(label=000abc)", "all_reduce(no label)")),
        (
            called("all_gather"),
            called("all_gather", plan=6 << 15),
            ("all_gather(plan=000000000005)", "all_gather(plan=000000000006)"),
        ),
        (called("send", plan=4), called("send", 7, plan=4), ("send(count=6)", "send(count=7)")),
        (
            called("send", plan=-2, part_of=COLLECTIVES.index("gather")),
            called("send", 7, plan=-2, part_of=COLLECTIVES.index("gather")),
            ("gather(count=6)", "gather(count=7)"),
        ),
    ],
)
def test_only_what_differs_is_said(one: Signature, other: Signature, said: tuple[str, str]) -> None:
    assert (one.described(other), other.described(one)) == said
    assert both_sides((1, one.described(other)), (0, other.described(one)), "call number 3") == (
        f"rank 0 called {said[1]}, rank 1 called {said[0]}: ranks disagree on call number 3"
    )


def test_a_call_alone_is_described_whole() -> None:
    assert called("all_reduce", 9, "int8", "max").described() == "all_reduce(dtype=int8, count=9, op=max)"
    assert called("send", plan=4).described(receives=True) == "recv(dtype=float32, count=6, tag=4)"
    assert called("barrier").described() == "barrier()"
