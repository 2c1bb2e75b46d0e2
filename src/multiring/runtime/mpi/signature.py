"""What all members must agree on when they make the same call; it travels before the first bytes of the call."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from multiring._native import COLLECTIVES, DTYPES, OPS

NBYTES = 72
_ALL_REDUCE, _REDUCE_SCATTER, _BROADCAST = map(COLLECTIVES.index, ("all_reduce", "reduce_scatter", "broadcast"))
_REDUCE, _BARRIER, _SEND = map(COLLECTIVES.index, ("reduce", "barrier", "send"))


class Signature(NamedTuple):
    """What one member calls. If it is a message, ``plan`` is its tag and ``part_of`` the collective that the message
    belongs to, or send.
    """

    collective: int
    number: int
    elements: int
    dtype: int
    op: int
    root: int
    plan: int
    part_of: int
    label: int = 0

    def packed(self) -> NDArray[np.int64]:
        """The signature as it travels, in `NBYTES` bytes."""
        return np.array(self, np.int64)

    def __str__(self) -> str:
        name = COLLECTIVES[self.part_of if self.collective == _SEND else self.collective]
        if self.collective == _BARRIER:
            return "barrier()"
        said = f"{name}(count={self.elements}, dtype={DTYPES[self.dtype]}"
        if self.collective in (_ALL_REDUCE, _REDUCE_SCATTER, _REDUCE):
            said += f", op={OPS[self.op]}"
        if self.collective in (_BROADCAST, _REDUCE):
            said += f", root={self.root}"
        if self.collective != _SEND:
            said += f", plan={self.plan >> 15 & 0xFFFFFFFFFFFF:012x}"
            return said + (f", label={self.label:06x})" if self.label else ")")
        return said + (f", tag={self.plan})" if self.part_of == _SEND else ")")


def unpacked(header: NDArray[np.int64]) -> Signature:
    """The signature in a header that arrived."""
    return Signature(*header.tolist())
