"""The arguments of `init` that say who a process is: what is refused, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

import multiring as mr
from multiring.job.given import GivenIdentity, given_identity

SECRET = b"sixteen bytes..."
GOOD: dict[str, Any] = {"rank": 1, "world_size": 2, "store": "a:1", "secret": SECRET}


def given(**arguments: Any) -> GivenIdentity | None:
    names = ("rank", "world_size", "store", "secret", "job")
    return given_identity(*(arguments.get(name) for name in names))


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STORE", "SECRET_FILE", "SECRET_FD", "JOB"):
        monkeypatch.delenv(f"MULTIRING_{name}", raising=False)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"world_size": None}, ValueError, r"init\(rank=1, world_size=None\): give both, or none of them"),
        ({"rank": None}, ValueError, r"init\(rank=None, world_size=2\): give both"),
        ({"rank": None, "world_size": None}, ValueError, r"init\(store=...\) says .*: give rank= and world_size= too"),
        ({"rank": 2}, ValueError, "rank=2 and world_size=2: ranks are 0 to 1, so correct one of them"),
        ({"rank": -1}, ValueError, "rank=-1 and world_size=2: ranks are 0 to 1"),
        ({"world_size": 0}, ValueError, "world_size=0: a job has 1 to 524288 ranks"),
        ({"rank": True}, TypeError, "rank=True: expected a whole number"),
        ({"world_size": "2"}, TypeError, "world_size='2': expected a whole number"),
        ({"world_size": 1_000_000}, ValueError, "world_size=1000000: a job has 1 to 524288 ranks"),
        ({"world_size": 10**30}, ValueError, f"world_size={10**30}: a job has 1 to 524288 ranks"),
        ({"rank": 1.0}, TypeError, "rank=1.0: expected a whole number"),
        ({"store": None}, ValueError, "without a store, .*: give store=, .* or set MULTIRING_STORE"),
        ({"store": "a"}, ValueError, "store='a': expected host:port"),
        ({"store": []}, ValueError, r"store=\[\]: expected host:port"),
        ({"store": ["a:0"]}, ValueError, "a port being 1 to 65535"),
        ({"store": 5}, TypeError, "store=5: expected host:port, or a list of such addresses"),
        ({"secret": None}, ValueError, "without a secret: give secret=, .* or set MULTIRING_SECRET_FILE"),
        ({"secret": "short"}, ValueError, "secret has 5 bytes: expected 16 or more"),
        ({"secret": 5}, TypeError, "secret is a int: expected bytes or text"),
        ({"job": 5}, TypeError, "job=5: expected a name"),
        ({"job": "x" * 257}, ValueError, "expected a name of 256 bytes at most"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        given(**{**GOOD, **changed})


def test_what_is_given_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRING_STORE", "b:2")
    monkeypatch.setenv("MULTIRING_JOB", "launched")
    monkeypatch.setenv("MULTIRING_RANK", "no number")
    assert given(**GOOD, job="mine") == GivenIdentity(1, 2, ("a:1",), SECRET, "mine", "")
    assert given(**{**GOOD, "store": None}) == GivenIdentity(1, 2, ("b:2",), SECRET, "launched", "launched")
    assert given() is None


def test_the_secret_is_not_shown() -> None:
    with mr.StoreServer(SECRET) as store:
        assert "sixteen" not in repr(store) + repr(given(**GOOD))
        assert store.secret == SECRET
    store.close()
