"""``init_process_group`` for launchers that torch does not know."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from multiring import api
from multiring.errors import RendezvousError
from multiring.job.survivors import Agreement
from multiring.net import interfaces
from multiring.runtime.comm import Communicator
from multiring.torch.options import Options

CONNECT_SECONDS = 5.0
"""How long one address of rank 0 is tried."""


def init(**settings: Any) -> None:
    """``init_process_group("multiring")`` under any launcher that `multiring.init` understands; alone, a world of one.

    torch itself needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. mpirun and srun do not set them, nor does
    `multiring run` for a rank that the others are to admit by `grow`. ``settings`` are those of `multiring.init`.
    """
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        dist.init_process_group("multiring", pg_options=Options(**settings))
        return
    _over(api.init(**settings))


def shrink(timeout: float | None = None) -> Agreement:
    """`multiring.shrink`, and torch's default process group made anew among the survivors.

    Groups of some ranks, DistributedDataParallel, FSDP and samplers refer to the old one, and are to be made again.
    """
    agreement = api.shrink(timeout)
    _leave_group()
    _over(api.init())
    return agreement


def grow(timeout: float | None = None) -> Agreement | None:
    """`multiring.grow`, and torch's default process group made anew if somebody was admitted.

    A newcomer calls `init`. What is to be made again is as for `shrink`; then `sync_state`, by all.
    """
    agreement = api.grow(timeout)
    if agreement is not None:
        _leave_group()
        _over(api.init())
    return agreement


def _leave_group() -> None:
    if dist.is_initialized():  # it is not where a loss has cut off the call of `shrink` or `grow` before this one
        dist.destroy_process_group()


def _over(communicator: Communicator) -> None:
    """torch's default process group over the default communicator."""
    store = _store(communicator)
    dist.init_process_group("multiring", store=store, rank=communicator.rank, world_size=communicator.size)


def _store(communicator: Communicator) -> Store:
    """The store that torch wants, served by rank 0."""
    if communicator.size == 1:
        return HashStore()
    interface = communicator.world.settings.interface
    if communicator.rank == 0:
        # It listens everywhere; the address is the one at which this process connects to it.
        store = TCPStore(interfaces.loopbacks()[0], 0, is_master=True, wait_for_workers=False)
        communicator.broadcast_object((interfaces.addresses(interface), store.port))
        return store
    addresses, port = communicator.broadcast_object()
    if communicator.hosts[communicator.rank] == communicator.hosts[0]:
        addresses = interfaces.loopbacks()
    for address in addresses:
        try:
            return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS))
        except RuntimeError:
            continue
    raise RendezvousError(
        f"rank {communicator.rank} cannot reach torch's store on rank 0, port {port} of {' or '.join(addresses)}: "
        "choose a network by MULTIRING_INTERFACE, or open the port"
    )
