"""The engine with ranks as processes, over shared memory and over TCP."""

from __future__ import annotations

import engine_ranks
import pytest

transports = pytest.mark.parametrize("tcp", [False, True], ids=["shm", "tcp"])


@pytest.mark.parametrize("n", [2, 3, 8])
def test_all_reduce_over_shared_memory(n):
    assert engine_ranks.run(n, "all_reduce_sizes", False) == [True] * n


@pytest.mark.parametrize("n", [2, 4])
def test_all_reduce_of_arena_buffers(n):
    assert engine_ranks.run(n, "all_reduce_sizes", True) == [True] * n


@pytest.mark.parametrize("n", [2, 4])
def test_all_reduce_over_tcp(n):
    assert engine_ranks.run(n, "all_reduce_sizes", False, tcp=True) == [True] * n


@transports
def test_all_ranks_end_with_the_same_bits(tcp):
    assert len(set(engine_ranks.run(4, "same_bits", tcp=tcp))) == 1


@transports
def test_all_to_all(tcp):
    assert engine_ranks.run(3, "gather_and_exchange", tcp=tcp) == [True] * 3


@transports
def test_ten_thousand_collectives_leave_nothing_behind(tcp):
    assert engine_ranks.run(2, "random_sizes", 10000, tcp=tcp, fresh=True) == [True] * 2
