"""From what torch knows of a new group to a communicator."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from multiring import api, env
from multiring.errors import RendezvousError
from multiring.job import bootstrap, rendezvous, reports
from multiring.job.store import TorchStore
from multiring.runtime.comm import Communicator
from multiring.runtime.group import Group
from multiring.runtime.world import World
from multiring.torch.options import Adopted, Options
from multiring.torch.process_group import MultiringGroup

RETRY_SECONDS = 0.2
"""Between two tries to reach torch's store again."""

REACH_SECONDS = 5.0
"""Seconds that one try may take."""


def create(settings: Any, options: Options | Adopted | None) -> MultiringGroup:
    """The group that torch asks for in ``init_process_group`` and ``new_group``.

    ``settings`` is torch's ``_DistributedBackendOptions``: store, rank, size, time limit and the global ranks, which
    are empty for the default group. The communicator of the default group is also multiring's default one.
    """
    if isinstance(options, Adopted):
        return _over_default(options.communicator, settings, is_owner=options.is_owner)
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"pg_options is a {type(options).__name__}: multiring takes multiring.torch.Options")
    _refuse_mixture(sys._getframe())
    timeout = _time_limit(settings)
    ranks = list(settings.global_ranks_in_group)
    world = dist.group.WORLD
    if isinstance(world, MultiringGroup):
        if options is not None:
            raise ValueError("pg_options: settings are the whole job's, give them to init_process_group")
        group = world.communicator.new_group(ranks, timeout=timeout)
        assert group is not None  # torch asks members only
        return MultiringGroup(group, timeout, group.close)
    if ranks and ranks != list(range(dist.get_world_size())):
        return _apart(settings, options)
    if api.is_initialized():
        return _beside(api.init(), settings, options)
    reports.tell_stage("joins")
    communicator = Communicator(Group(_join_job(settings, options), timeout=timeout))
    api.adopt(communicator)
    return _over_default(communicator, settings, is_owner=True)


def _over_default(communicator: Communicator, settings: Any, *, is_owner: bool) -> MultiringGroup:
    """A group over the default communicator, which is released with it if ``is_owner``."""

    def close() -> None:
        if is_owner:
            api.release(communicator)

    return MultiringGroup(communicator, _time_limit(settings), close, owns_default=is_owner)


def _beside(default: Communicator, settings: Any, options: Options | None) -> MultiringGroup:
    """A group of all ranks where multiring has a default communicator: over that if it has the same ranks."""
    if options is None and (default.rank, default.size) == (settings.group_rank, settings.group_size):
        return _over_default(default, settings, is_owner=False)
    return _apart(settings, options)


def _apart(settings: Any, options: Options | None) -> MultiringGroup:
    """A group whose ranks meet by themselves: nothing is known of the others'."""
    timeout = _time_limit(settings)
    communicator = Communicator(Group(_join(settings, options, keeps_records=False), timeout=timeout))
    return MultiringGroup(communicator, timeout, communicator.world.close)


def _time_limit(settings: Any) -> float:
    """Seconds that a call may take. Torch always gives a limit, 30 minutes unless asked, so MULTIRING_TIMEOUT counts
    only where it is set, and the shorter of both holds."""
    seconds: float = settings.timeout.total_seconds()
    return min(seconds, env.read(env.Settings).timeout) if os.environ.get("MULTIRING_TIMEOUT") else seconds


def _join_job(settings: Any, options: Options | None) -> World:
    """Meet all ranks of the job: in its launcher's store where that starts lost ranks again, for it is to know."""
    launch = env.read(env.Launch)
    if (launch.rank, launch.world_size) == (settings.group_rank, settings.group_size):
        identity = bootstrap.rank_identity()
        if identity.gathers and not identity.replacement:
            own = env.read(env.Settings, **(options.settings if options else {}))
            return rendezvous.join(identity, own, partial(_reach_again, settings.store, identity, own.init_timeout))
    return _join(settings, options)


def _reach_again(
    store: Store, identity: bootstrap.RankIdentity, seconds: float, lost: int, look: Callable[[], None]
) -> None:
    """Connect to torch's store where rank 0, which serves it, is started again; RendezvousError after ``seconds``.

    It waits until as many processes have connected as there are ranks, and most were connected to the one that is gone.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if lost != 0 or identity.rank == 0 or not isinstance(store, TCPStore):
        return
    until = time.monotonic() + seconds
    while True:
        look()
        try:
            socket.create_connection((store.host, store.port), REACH_SECONDS).close()  # torch logs each try
            TCPStore(store.host, store.port, identity.world_size, timeout=timedelta(seconds=REACH_SECONDS))
            return
        except (OSError, RuntimeError) as error:
            if time.monotonic() > until:
                raise RendezvousError(
                    f"rank 0, which was started again, does not serve torch's store at {store.host}, port "
                    f"{store.port}, within {seconds:g} s (MULTIRING_INIT_TIMEOUT): {error}",
                    rank=0,
                ) from None
        time.sleep(RETRY_SECONDS)


def _join(settings: Any, options: Options | None, *, keeps_records: bool = True) -> World:
    """Meet the other ranks in torch's store; ``keeps_records``: flight records and timeline of the job are theirs."""
    launch = env.read(env.Launch)
    own = env.read(env.Settings, **(options.settings if options else {}))
    if not keeps_records:
        own = replace(own, flight_recorder="", flight_recorder_signal="", trace="")
    store = TorchStore(settings.store, served_by=_server(settings.store), patience=own.init_timeout)
    meeting = bootstrap.JobMeeting(store, bootstrap.given_secret(launch))
    identity = bootstrap.RankIdentity(
        settings.group_rank,
        settings.group_size,
        "torch.distributed",
        lambda _: contextlib.nullcontext(meeting),
        f"torch group {settings.group_id}",
        bootstrap.restarts(os.environ, launch),
    )
    return rendezvous.join(identity, own)


def _server(store: Store) -> int:
    """The rank that serves torch's store; -1 if none does, as under torchrun, or the store is of another kind."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return 0 if isinstance(store, TCPStore) and not by_launcher else -1


def _refuse_mixture(frame: FrameType | None) -> None:
    """ValueError if multiring is to serve one of several kinds of devices, and another backend the others.

    torch replaces the whole group by ours then, without a word, and what was asked for beside it is lost. What was
    asked for stands in a local variable of torch's function only.
    """
    while frame is not None:
        asked = frame.f_locals.get("backend_config")
        if isinstance(asked, dist.distributed_c10d.BackendConfig):
            served = asked.get_device_backend_map()
            if not served.keys() <= {"cpu", "cuda"} or set(served.values()) != {"multiring"}:
                raise ValueError(
                    f"backend {str(asked)!r}: multiring serves tensors of the CPU and of CUDA devices, and cannot "
                    "share a group with another backend. Use init_process_group('multiring'), and "
                    "new_group(backend=...) for another group"
                )
            return
        frame = frame.f_back
