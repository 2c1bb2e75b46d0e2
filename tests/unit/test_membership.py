"""Members of a job, generation by generation."""

from __future__ import annotations

import json

import pytest

from multiring.net.membership import Membership


def test_a_job_starts_with_all_ranks_in_their_own_places() -> None:
    assert Membership.at_start(3) == Membership(0, (0, 1, 2), (0, 0, 0))


def test_those_who_go_on_keep_the_generation_in_which_they_came() -> None:
    grown = Membership(4, (0, 2, 3, 5), (0, 3, 0, 4))
    assert grown.after(7, (2, 5)) == Membership(7, (2, 5), (3, 4))
    with pytest.raises(ValueError, match="not in tuple"):
        grown.after(7, (2, 4))


def test_newcomers_stand_where_their_ranks_stood_at_the_start() -> None:
    shrunk = Membership(3, (0, 2, 5), (0, 2, 0))
    assert shrunk.admitting([4, 1]) == Membership(4, (0, 1, 2, 4, 5), (0, 4, 2, 4, 0))


def test_what_is_carried_says_the_same() -> None:
    known = Membership(4, (0, 2, 5), (0, 3, 4))
    assert Membership.decode(json.loads(json.dumps(known.encode()))) == known
