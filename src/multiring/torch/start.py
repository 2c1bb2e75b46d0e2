"""``init_process_group`` for launchers that torch does not know."""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from multiring import api, env
from multiring.errors import CollectiveTimeout, PeerLost, RendezvousError
from multiring.job import bootstrap
from multiring.job.survivors import Agreement
from multiring.net import interfaces
from multiring.runtime.comm import Communicator, group_of
from multiring.torch.options import Adopted, Options
from multiring.torch.process_group import MultiringGroup

CONNECT_SECONDS = 5.0
"""Seconds that one address of rank 0 is tried."""

_log = logging.getLogger("multiring")

_owns_default = False
"""True if torch's default process group shuts multiring down when it is destroyed; kept while it is made anew."""


def init(**settings: Any) -> None:
    """``init_process_group("multiring")`` under any launcher that `multiring.init` understands; alone, a world of one.

    torch itself needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. mpirun and srun do not set them, nor does
    `multiring run` for a rank that the others are to admit by `grow`. ``settings`` are those of `multiring.init`.
    """
    if all(map(os.environ.get, ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))):
        bootstrap.master(os.environ, "torch's launcher")  # or torch tries what is no address until its time limit
        bootstrap.rank_identity()  # or it is alone where a launcher says that it is one of several
        dist.init_process_group("multiring", pg_options=Options(**settings))
        return
    global _owns_default
    _owns_default = not api.is_initialized()
    communicator = api.init(**settings)
    if env.read(env.Launch).replacement:  # those who have admitted it go on without whoever is lost now
        _made_anew(None)
    else:
        _over(communicator)


def shrink(timeout: float | None = None) -> Agreement:
    """`multiring.shrink`, and torch's default process group made anew among the survivors.

    Groups of some ranks, DistributedDataParallel, FSDP and samplers refer to the old one, and are to be made again.
    """
    agreement = _made_anew(api.shrink(timeout), timeout)
    assert agreement is not None
    return agreement


def grow(timeout: float | None = None) -> Agreement | None:
    """`multiring.grow`, and torch's default process group made anew if somebody was admitted.

    A newcomer calls `init`. What is to be made again is as for `shrink`; then `sync_state`, by all. Those that are lost
    when they have been admitted, and before this returns, are not among the ``members``.
    """
    agreement = api.grow(timeout)
    return None if agreement is None else _made_anew(agreement)


def _made_anew(agreement: Agreement | None, timeout: float | None = None) -> Agreement | None:
    """torch's default process group over the default communicator, and ``agreement``, what was agreed on before.

    Without those who are lost meanwhile: what the others agree on then is part of what is returned.
    """
    while True:
        _leave_group()
        try:
            _over(api.init())
            return agreement
        except (PeerLost, CollectiveTimeout) as error:
            _log.warning("the process group is made without another one that is lost: %s", error)
            later = api.shrink(timeout)
            agreement = agreement and agreement.then(later)


def _leave_group() -> None:
    global _owns_default
    if dist.is_initialized():  # it is not where a loss has cut off the call of `shrink` or `grow` before this one
        group = dist.group.WORLD
        _owns_default = isinstance(group, MultiringGroup) and group.owns_default
        dist.destroy_process_group()


def _over(communicator: Communicator) -> None:
    """torch's default process group over the default communicator: on all ranks, or RendezvousError on all."""
    failed: RuntimeError | None = None
    try:
        store = _store(communicator)
        adopted = Adopted(communicator, is_owner=_owns_default)
        dist.init_process_group(
            "multiring", store=store, rank=communicator.rank, world_size=communicator.size, pg_options=adopted
        )
    except RuntimeError as error:  # torch's own, of a store that is gone with rank 0, too
        failed = error
    if communicator.size > 1:
        # A rank that was lost raises PeerLost here, whatever has failed because of it.
        told = group_of(communicator).internal.all_gather_object("" if failed is None else str(failed))
        for rank, why in enumerate(told):
            if why and failed is None:
                _leave_group()
                raise RendezvousError(why, rank=rank)
    if failed is not None:
        if _owns_default:
            api.release(communicator)
        raise failed


def _store(communicator: Communicator) -> Store:
    """The store that torch wants, served by rank 0."""
    if communicator.size == 1:
        return HashStore()
    interface, group = communicator.world.settings.interface, group_of(communicator).internal
    if communicator.rank == 0:
        try:
            # It listens everywhere; the address is the one at which this process connects to it.
            store = TCPStore(interfaces.loopbacks()[0], 0, is_master=True, wait_for_workers=False)
            told = (interfaces.reachable(interface), store.port)
        except (OSError, RuntimeError) as error:  # no descriptors, say
            group.broadcast_object(str(error))
            raise RendezvousError(f"rank 0 cannot serve torch's store: {error}", rank=0) from error
        group.broadcast_object(told)
        return store
    told = group.broadcast_object(None)
    if isinstance(told, str):
        raise RendezvousError(f"rank 0 cannot serve torch's store: {told}", rank=0)
    addresses, port = told
    if communicator.hosts[communicator.rank] == communicator.hosts[0]:
        addresses = interfaces.loopbacks()
    for address in addresses:
        try:
            socket.create_connection((address, port), CONNECT_SECONDS).close()  # torch tries, and logs, for seconds
            return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS))
        except (OSError, RuntimeError):
            continue
    raise RendezvousError(
        f"rank {communicator.rank} cannot reach torch's store on rank 0, port {port} of {' or '.join(addresses)}: "
        "choose a network by MULTIRING_INTERFACE, or open the port"
    )
