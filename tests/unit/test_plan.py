"""Plans as values: validation, identity, and rings that repeat."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from multiring.planning import plan
from multiring.planning.plan import WHOLE, Phase, Plan, Ring, Span, Tiling


def span(lo: int, hi: int, parts: int) -> Span:
    return Span(Fraction(lo, parts), Fraction(hi, parts))


def direct(*rings: Ring, kind: str = "reduce_scatter", method: str = "direct") -> Plan:
    return Plan("all_reduce", 6, (Phase(kind, "rank", method, rings),), 4096)


@pytest.mark.parametrize(
    ("ring", "fault"),
    [
        (Ring((0,), (WHOLE,)), "at least two members"),
        (Ring((0, 6), (WHOLE,)), "rank 6 is outside 0 to 5"),
        (Ring((0, 3, 0), (WHOLE,)), "rank 0 is in it twice"),
        (Ring((0, 1), ()), "no spans"),
        (Ring((0, 1), (span(1, 1, 2),)), r"span \[1/2,1/2\) is not a part"),
        (Ring((0, 1), (span(1, 3, 2),)), r"span \[1/2,3/2\) is not a part"),
        (Ring((0, 1), (span(0, 2, 3), span(1, 3, 3))), "overlap"),
        (Ring((0, 1), (WHOLE,), (1,)), "1 shares for 2 members"),
        (Ring((0, 1), (WHOLE,), (2, -1)), "not weights"),
        (Ring((0, 1), (WHOLE,), (0, 0)), "not weights"),
    ],
)
def test_bad_rings_are_named(ring, fault):
    with pytest.raises(ValueError, match=rf"phase 0 \(reduce_scatter, level rank\): ring 1 .*{fault}"):
        direct(Ring((0, 1), (WHOLE,)), ring)


def test_bad_phases():
    pair = Ring((0, 1), (WHOLE,))
    with pytest.raises(ValueError, match="unknown kind 'gather'"):
        direct(pair, kind="gather")
    with pytest.raises(ValueError, match="all_reduce has no method 'ring'"):
        direct(pair, kind="all_reduce", method="ring")
    with pytest.raises(ValueError, match="power of two members, not 3"):
        direct(Ring((0, 1, 2), (WHOLE,)), method="halving")
    with pytest.raises(ValueError, match="unequal shares need method direct, not ring"):
        direct(replace(pair, shares=(1, 2)), method="ring")
    with pytest.raises(ValueError, match="reduce has no shares"):
        direct(replace(pair, shares=(1, 2)), kind="reduce")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"collective": "gossip"}, "unknown collective 'gossip'"),
        ({"world_size": 0}, "world_size is 0"),
        ({"segment_bytes": 8}, "segment_bytes is 8"),
        ({"window": 0}, "window is 0"),
        ({"root": 6}, "root is 6; the world has ranks 0 to 5"),
    ],
)
def test_bad_plans(change, fault):
    with pytest.raises(ValueError, match=fault):
        replace(direct(Ring((0, 1), (WHOLE,))), **change)


def test_equal_shares_are_cut_where_the_spans_laid_end_to_end_are():
    ring = Ring((0, 1, 2), (span(0, 2, 10), span(6, 10, 10)))
    assert ring.pieces() == ((span(0, 2, 10),), (span(6, 8, 10),), (span(8, 10, 10),))


def test_unequal_shares():
    ring = Ring((0, 1, 2, 3), (span(0, 5, 10), span(7, 10, 10)), (2, 0, 4, 2))
    assert ring.pieces() == ((span(0, 2, 10),), (), (span(2, 5, 10), span(7, 8, 10)), (span(8, 10, 10),))


def test_a_tiling_is_the_list_of_its_rings():
    pattern = (Ring((0, 1), (span(0, 1, 2),)), Ring((1, 2), (span(1, 2, 2),)))
    tiling = Tiling([(pattern, [(5, 3, 4), (0, 1, 2)]), ((Ring((1, 0), (WHOLE,)),), [(7, 6)])])
    rings = [
        Ring((5, 3), pattern[0].spans),
        Ring((3, 4), pattern[1].spans),
        Ring((0, 1), pattern[0].spans),
        Ring((1, 2), pattern[1].spans),
        Ring((6, 7), (WHOLE,)),
    ]
    assert list(tiling) == rings
    assert len(tiling) == 5
    assert [tiling[i] for i in range(-5, 5)] == rings + rings
    assert tiling[1:3] == tuple(rings[1:3])
    with pytest.raises(IndexError):
        tiling[5]
    phase, plain = (Phase("reduce_scatter", "host", "direct", r) for r in (tiling, rings))
    assert all(phase.rings_of(rank) == plain.rings_of(rank) for rank in range(9))
    assert phase.rings_of(3) == (rings[0], rings[1])
    assert phase.rings_of(8) == ()


def test_a_tiling_is_validated():
    with pytest.raises(ValueError, match="rank 6 is outside 0 to 5"):
        Plan("reduce", 6, (Phase("reduce", "rank", "tree", Tiling([((Ring((0, 1), (WHOLE,)),), [(5, 6)])])),), 4096)


def test_the_id_follows_the_content():
    one = direct(Ring((0, 1), (WHOLE,)))
    same = direct(Ring((0, 1), (WHOLE,)))
    assert one.id == same.id
    assert one.number == same.number
    assert one.number >> 15 == int(one.id, 16)
    others = [
        replace(one, segment_bytes=8192),
        replace(one, window=7),
        replace(one, root=1),
        replace(one, world_size=7),
        replace(one, collective="barrier"),
        direct(Ring((1, 0), (WHOLE,))),
        direct(Ring((0, 1), (span(0, 1, 2),))),
        direct(Ring((0, 1), (WHOLE,), (1, 2))),
        direct(Ring((0, 1), (WHOLE,)), method="ring"),
    ]
    assert len({one.id, *(other.id for other in others)}) == len(others) + 1


def test_phases_are_checked_once_and_again_in_another_world(monkeypatch):
    looked = []
    check = plan._check_phase
    monkeypatch.setattr(plan, "_check_phase", lambda phase, size: looked.append(size) or check(phase, size))
    one = direct(Ring((4, 5), (WHOLE,)))
    replace(replace(one, segment_bytes=8192), window=7)
    assert looked == [6]
    with pytest.raises(ValueError, match="rank 5 is outside 0 to 4"):
        replace(one, world_size=5)
    replace(one, phases=(*one.phases, replace(one.phases[0])))
    assert looked == [6, 5, 6]
