"""Identity of a process by the arguments of `init`: for workers of cluster engines, which no launcher started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from multiring import env
from multiring.job import bootstrap
from multiring.job.bootstrap import MIN_SECRET, RankIdentity

MAX_JOB = 256
"""Most bytes of a job's name, which is part of every key in its store."""

COMPLETED_FROM = {"MULTIRING_SECRET_FILE", "MULTIRING_SECRET_FD", "MULTIRING_JOB", "MULTIRING_STORE"}
"""Variables of the environment that say what the arguments leave open."""


@dataclass(frozen=True)
class GivenIdentity:
    """The arguments after they were checked, completed from the environment."""

    rank: int
    world_size: int
    store: tuple[str, ...]
    secret: bytes | None = field(repr=False)
    job: str
    server_job: str
    """The job that the store serves, where it is a launcher's; "" for a `StoreServer`, which serves every job."""

    def identity(self) -> RankIdentity:
        """The identity that a launcher would have given this process."""
        if self.world_size == 1:
            return RankIdentity(0, 1, "init", bootstrap.no_meeting, self.job)
        assert self.secret is not None
        meet = bootstrap.at_lasting_store(
            self.rank, list(map(env.split_address, self.store)), self.secret, self.server_job
        )
        return RankIdentity(self.rank, self.world_size, "init", meet, self.job)


def given_identity(
    rank: int | None,
    world_size: int | None,
    store: str | Sequence[str] | None,
    secret: bytes | str | None,
    job: str | None,
) -> GivenIdentity | None:
    """Check the arguments of `init` and complete them from the environment; None if none is given.

    ValueError or TypeError names the argument that is wrong or missing.
    """
    if rank is None and world_size is None:
        alone = [name for name, value in (("store", store), ("secret", secret), ("job", job)) if value is not None]
        if alone:
            raise ValueError(
                f"init({alone[0]}=...) says which job this process is in, and not its rank: give rank= and world_size= "
                "too, or leave all of it to the environment of a launcher"
            )
        return None
    if rank is None or world_size is None:
        raise ValueError(f"init(rank={rank!r}, world_size={world_size!r}): give both, or none of them")
    number, size = _rank_and_size(rank, world_size)
    addresses = None if store is None else _addresses(store)
    known_secret = None if secret is None else checked_secret(secret)
    launch = env.read(env.Launch, {name: text for name, text in os.environ.items() if name in COMPLETED_FROM})
    if size > 1:
        if addresses is None and not launch.store:
            raise ValueError(
                f"init(rank={number}, world_size={size}) without a store, in which the ranks meet: give store=, the "
                "addresses of a multiring.StoreServer, or set MULTIRING_STORE"
            )
        if known_secret is None:
            known_secret = bootstrap.given_secret(launch)
        if known_secret is None:
            raise ValueError(
                f"init(rank={number}, world_size={size}) without a secret: give secret=, that of the "
                "multiring.StoreServer, or set MULTIRING_SECRET_FILE"
            )
    name = launch.job if job is None else _job(job)
    server_job = launch.job if addresses is None else ""
    return GivenIdentity(number, size, addresses or launch.store, known_secret, name, server_job)


def _rank_and_size(rank: Any, world_size: Any) -> tuple[int, int]:
    number, size = env.whole_number("rank", rank), env.whole_number("world_size", world_size)
    if not 1 <= size <= env.MOST_RANKS:
        raise ValueError(f"world_size={size}: a job has 1 to {env.MOST_RANKS} ranks")
    if not 0 <= number < size:
        raise ValueError(f"rank={number} and world_size={size}: ranks are 0 to {size - 1}, so correct one of them")
    return number, size


def checked_secret(secret: Any) -> bytes:
    """The secret as bytes; ValueError if it is too short, TypeError if it is neither bytes nor text.

    No message shows it.
    """
    if not isinstance(secret, (bytes, str)):
        raise TypeError(f"secret is a {type(secret).__name__}: expected bytes or text")
    found = secret.encode("utf-8", "surrogateescape") if isinstance(secret, str) else secret
    if len(found) < MIN_SECRET:
        raise ValueError(
            f"secret has {len(found)} bytes: expected {MIN_SECRET} or more, such as a multiring.StoreServer draws"
        )
    return found


def _addresses(store: Any) -> tuple[str, ...]:
    listed = [store] if isinstance(store, str) else store
    if not isinstance(listed, (list, tuple)) or not all(isinstance(address, str) for address in listed):
        raise TypeError(f"store={store!r}: expected host:port, or a list of such addresses")
    try:
        return env.parse_addresses(",".join(listed))
    except ValueError as error:
        raise ValueError(f"store={store!r}: expected {error}") from None


def _job(job: Any) -> str:
    if not isinstance(job, str):
        raise TypeError(f"job={job!r}: expected a name")
    if len(job.encode("utf-8", "replace")) > MAX_JOB or not job.isprintable():
        raise ValueError(f"job={job[:40]!r}: expected a name of {MAX_JOB} bytes at most, all of them to be printed")
    return job
