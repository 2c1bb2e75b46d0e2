"""A rank that uses 64-bit numbers in JAX while x64 is off, which is JAX's default."""

from __future__ import annotations

import numpy as np
import pytest

import multiring as mr
import multiring.jax as mrj

mr.init()
RANK, SIZE = mr.rank(), mr.world_size()
WIDE = np.array([3, 2**33 + RANK])
for call in (
    lambda: mrj.broadcast_parameters({"step": np.int64(2**40 + RANK)}),
    lambda: mrj.average({"step": WIDE}),
    lambda: mrj.average({"step": WIDE}, weight=1),
):
    with pytest.raises(ValueError, match=r"\['step'\].*jax_enable_x64"):
        call()
for collective in (mrj.all_reduce, mrj.broadcast, mrj.all_gather, mrj.reduce_scatter, mrj.all_to_all):
    with pytest.raises(ValueError, match="jax_enable_x64"):
        collective(WIDE)
np.testing.assert_array_equal(mrj.broadcast_parameters({"step": np.int64(2**31 - 1 - RANK)}, root=1)["step"], 2**31 - 2)
np.testing.assert_array_equal(mrj.all_gather(np.array([-(2**31) + RANK])), [[-(2**31) + r] for r in range(SIZE)])
