"""Multiring: topology-aware multi-ring all-reduce for synchronous data-parallel training."""

import importlib
from typing import TYPE_CHECKING, Any

from multiring.version import __version__

if TYPE_CHECKING:
    from multiring.api import (
        all_gather,
        all_gather_object,
        all_reduce,
        all_to_all,
        average,
        barrier,
        broadcast,
        broadcast_object,
        empty,
        gather,
        grow,
        init,
        is_initialized,
        local_rank,
        local_world_size,
        new_group,
        oldest,
        plan,
        rank,
        recv,
        reduce,
        reduce_scatter,
        report,
        scatter,
        send,
        shard,
        shrink,
        shutdown,
        stats,
        world_size,
    )
    from multiring.errors import CollectiveTimeout, Mismatch, MultiringError, PeerLost, RendezvousError, ResourceError
    from multiring.job.store_server import StoreServer
    from multiring.runtime.comm import Communicator
    from multiring.runtime.work import Work


__all__ = [
    "CollectiveTimeout",
    "Communicator",
    "Mismatch",
    "MultiringError",
    "PeerLost",
    "RendezvousError",
    "ResourceError",
    "StoreServer",
    "Work",
    "__version__",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "average",
    "barrier",
    "broadcast",
    "broadcast_object",
    "empty",
    "gather",
    "grow",
    "init",
    "is_initialized",
    "local_rank",
    "local_world_size",
    "new_group",
    "oldest",
    "plan",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "report",
    "scatter",
    "send",
    "shard",
    "shrink",
    "shutdown",
    "stats",
    "world_size",
]


def __getattr__(name: str) -> Any:
    """Load the interface when it is first used: the command line and torch's entry point do without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "StoreServer":  # a rank does without it
        globals()[name] = importlib.import_module("multiring.job.store_server").StoreServer
        return globals()[name]
    homes = [importlib.import_module(f"multiring.{home}") for home in ("api", "errors", "runtime.comm", "runtime.work")]
    for public in set(__all__) - {"__version__", "StoreServer"}:
        globals()[public] = next(getattr(home, public) for home in homes if hasattr(home, public))
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
