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


@pytest.mark.parametrize(
    ("text", "renamed"),
    [
        ("rank 1 (host rank-2) died", "rank 2 (host rank-2) died"),
        (
            "rank 0 called recv(count=3), rank 2 (host b) send(count=1)",
            "rank 1 called recv(count=3), rank 5 (host b) send(count=1)",
        ),
        (
            "message 1 with tag 1 from rank 1 to rank 0 of communicator 1",
            "message 1 with tag 1 from rank 2 to rank 1 of communicator 1",
        ),
        ("waits for ranks 0, 1 and 2, for 2 s", "waits for ranks 1, 2 and 5, for 2 s"),
        (
            "rank 1 makes a group of [1, 0], rank 0 one of [0, 1]",
            "rank 2 makes a group of [2, 1], rank 1 one of [1, 2]",
        ),
        (
            "rank 1 waited; the kernel here holds 8000 bytes for rank 1 and 0 from it",
            "rank 2 waited; the kernel here holds 8000 bytes for rank 2 and 0 from it",
        ),
        (
            "rank 1 (host b) ended with ValueError: Shape must be rank 2 but is rank 1, one of [0, 1]",
            "rank 2 (host b) ended with ValueError: Shape must be rank 2 but is rank 1, one of [0, 1]",
        ),
        ("rank 0 differs\nlabel 1f is 'of rank 1'", "rank 1 differs\nlabel 1f is 'of rank 1'"),
    ],
)
def test_the_launcher_knows_members_by_their_ranks_at_the_start(text: str, renamed: str) -> None:
    assert Membership(3, (1, 2, 5), (0, 0, 0)).in_launchers_words(text) == renamed
    assert Membership.at_start(3).in_launchers_words(text) == text


def test_what_is_carried_says_the_same() -> None:
    known = Membership(4, (0, 2, 5), (0, 3, 4))
    assert Membership.decode(json.loads(json.dumps(known.encode()))) == known
