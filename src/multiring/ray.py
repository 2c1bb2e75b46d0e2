"""Ranks in the workers of Ray: a backend for Ray Train, and groups for `ray.util.collective`."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

try:
    import ray
    import ray.util.collective as collective
    from ray.exceptions import RayActorError, RayError, RayTaskError
    from ray.experimental import internal_kv
    from ray.train.backend import Backend, BackendConfig
    from ray.util.collective.backend_registry import register_collective_backend
    from ray.util.collective.collective_group.base_collective_group import BaseGroup
except ImportError as missing:
    raise ImportError(
        f"multiring.ray needs ray[train] 2.60 or later ({missing}): pip install 'multiring[ray]'"
    ) from None

from multiring import api, env
from multiring.errors import MultiringError, RendezvousError
from multiring.job import bootstrap, rendezvous, store
from multiring.job.given import given_identity
from multiring.job.store_server import StoreServer
from multiring.runtime.comm import Communicator
from multiring.runtime.group import Group
from multiring.version import __version__
from multiring.worker import RankAssignment, reason_of

POLL_SECONDS = 0.05

LEAVE_SECONDS = 30.0
"""Seconds that workers have to leave a job before Ray ends them."""

NAMESPACE = "multiring"

TWICE = "twice"
"""Key at which a rank that waits is told of another process that says it is that rank."""

OPERATIONS = {"SUM": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max"}

__all__ = ["CollectiveGroup", "MultiringConfig", "register_collectives"]

_log = logging.getLogger("multiring")

_used: dict[str, bytes] = {}  # what rank 0 told this process of each group; it stands for a moment after all have met


class MultiringConfig(BackendConfig):  # type: ignore[misc]
    """The backend of a trainer of Ray Train whose workers are ranks, in the order of Ray's world ranks.

    Every worker has joined the job when the training function begins, so that `multiring.init` returns the
    communicator that is there. ``settings`` are those of `multiring.init`, TypeError and ValueError for wrong ones; Ray
    says on which host a rank is. A worker that cannot join ends ``fit()`` with a ControllerError, whose
    ``controller_failure`` is a RendezvousError that names it.
    """

    backend = "multiring"
    """Name of the backend, for TorchTrainer, which would put "gloo" there."""

    def __init__(self, **settings: Any) -> None:
        if "host" in settings:
            raise ValueError(f"host={settings['host']!r}: Ray says on which host a rank is, so leave it out")
        env.read(env.Settings, **settings)
        self.settings = settings

    @property
    def backend_cls(self) -> type[Backend]:
        """Class of the backend that Ray makes in its controller."""
        return _Backend

    @property
    def train_func_context(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Context in which Ray runs the training function."""
        return _in_the_job

    def to_dict(self) -> dict[str, Any]:
        """The settings, for Ray's record of the run."""
        return {name: str(value) for name, value in self.settings.items()}


class _Backend(Backend):  # type: ignore[misc]
    _has_joined = False
    """True if the workers that Ray is about to end are in a job."""

    def on_start(self, worker_group: Any, backend_config: MultiringConfig) -> None:
        """Make the workers ranks of a new job; RendezvousError names one that cannot be."""
        size, settings = len(worker_group), backend_config.settings
        self._has_joined = False
        where = {name: settings[name] for name in ("interface", "ports", "encrypt") if name in settings}
        with StoreServer(**where) as server:
            joining = {}
            for rank in range(size):
                given = RankAssignment(rank, size, server.addresses, server.secret, "", settings)
                joining[worker_group.execute_single_async(rank, _join, given)] = rank
            while joining:
                (joined,), _ = ray.wait(list(joining), num_returns=1)
                rank = joining.pop(joined)
                try:
                    ray.get(joined)
                except RayError as error:  # Ray tries without end to start a group in which an actor died
                    raise _blamed(rank, size, error) from None
        self._has_joined = True

    def on_shutdown(self, worker_group: Any, backend_config: MultiringConfig) -> None:
        """Have the workers leave that are in the job yet."""
        if not self._has_joined:
            return  # those that wait for one that cannot join would not answer
        leaving = {reference: rank for rank, reference in enumerate(worker_group.execute_async(_leave))}
        done, still = ray.wait(list(leaving), num_returns=len(leaving), timeout=LEAVE_SECONDS)
        for reference in done:
            with contextlib.suppress(RayActorError):  # a lost worker has left, and Ray tells of it
                try:
                    ray.get(reference)
                except RayTaskError as error:
                    _log.warning("rank %d left with %s", leaving[reference], reason_of(error.cause))
        if still:
            ranks = sorted(leaving[reference] for reference in still)
            _log.warning("ranks %s did not leave within %g s: Ray ends their processes", ranks, LEAVE_SECONDS)


def _join(given: RankAssignment) -> None:
    given.check()
    if api.is_initialized():
        raise MultiringError(
            "its process is in a job of multiring already, which code that it ran before has joined and not left: that "
            "code has to call multiring.shutdown()"
        )
    replace(given, host=_host()).join()


def _leave() -> None:
    api.shutdown()


@contextlib.contextmanager
def _in_the_job() -> Iterator[None]:
    """Leave the job when the training function returns, and tell the others why where it raises."""
    try:
        yield
    except BaseException as error:
        api.abandon(error)
        raise
    api.shutdown()


def _host() -> str:
    """A name for this node: two nodes in containers of one machine share no memory."""
    return f"{ray.util.get_node_ip_address()}/{ray.get_runtime_context().get_node_id()[:8]}"


def _blamed(rank: int, size: int, error: RayError) -> RendezvousError:
    """Return the error about the rank that could not join, which may be another one than the worker that says so."""
    if not isinstance(error, RayTaskError):
        return RendezvousError(
            f"rank {rank} of {size} could not join: its process was lost ({reason_of(error)})", rank=rank
        )
    cause = error.cause
    if isinstance(cause, RendezvousError) and cause.rank >= 0:
        return RendezvousError(str(cause), rank=cause.rank)
    remedy = f": install multiring {__version__} on every node" if isinstance(cause, ImportError) else ""
    return RendezvousError(f"rank {rank} of {size} could not join: {reason_of(cause)}{remedy}", rank=rank)


def register_collectives() -> None:
    """Make "multiring" a backend of `ray.util.collective` in this process: the driver, and each actor of a group."""
    if not collective.is_backend_available("MULTIRING"):
        register_collective_backend("MULTIRING", CollectiveGroup)


class CollectiveGroup(BaseGroup):  # type: ignore[misc]
    """Actors that call the functions of `ray.util.collective`, on contiguous arrays or tensors of torch.

    Ray makes it, by the name "multiring" of the backend after `register_collectives`. A process may be in several
    groups and in a job too. RendezvousError if the other actors do not come within MULTIRING_INIT_TIMEOUT; calls raise
    what the methods of `Communicator` raise.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._communicator = _met(world_size, rank, group_name)
        self._end = weakref.finalize(self, self._communicator.world.close)
        self._member = _member(group_name, rank)
        internal_kv._internal_kv_put(self._member, _process(), namespace=NAMESPACE)

    def destroy_group(self) -> None:
        """Leave the group."""
        if internal_kv._internal_kv_get(self._member, namespace=NAMESPACE) == _process():
            internal_kv._internal_kv_del(self._member, namespace=NAMESPACE)
        self._end()

    @classmethod
    def backend(cls) -> str:
        """Its name."""
        return "MULTIRING"

    @classmethod
    def check_backend_availability(cls) -> bool:
        """True: the backend can always be used."""
        return True

    def allreduce(self, tensor: Sequence[Any], allreduce_options: Any = collective.types.AllReduceOptions) -> None:
        """Combine the tensors of all ranks, in place."""
        self._communicator.all_reduce(tensor[0], OPERATIONS[allreduce_options.reduceOp.name])

    def barrier(self, barrier_options: Any = None) -> None:
        """Wait for all ranks."""
        self._communicator.barrier()

    def reduce(self, tensor: Sequence[Any], reduce_options: Any = collective.types.ReduceOptions) -> None:
        """Combine the tensors of all ranks in that of the root; the others' stay as they are."""
        root = reduce_options.root_rank
        mine = tensor[0] if self.rank == root else copy.deepcopy(tensor[0])
        self._communicator.reduce(mine, OPERATIONS[reduce_options.reduceOp.name], root)

    def allgather(self, tensor_list: Sequence[Any], tensor: Sequence[Any], allgather_options: Any = None) -> None:
        """Put the tensors of all ranks into a list of tensors of the same shape and type."""
        _check_alike("allgather", tensor_list[0], tensor[0])
        whole = _stacked(tensor_list[0])
        self._communicator.all_gather(tensor[0], out=whole)
        for put, found in zip(tensor_list[0], whole, strict=True):
            put[...] = found

    def broadcast(self, tensor: Sequence[Any], broadcast_options: Any = collective.types.BroadcastOptions) -> None:
        """Make all tensors that of the root."""
        self._communicator.broadcast(tensor[0], broadcast_options.root_rank)

    def reducescatter(
        self,
        tensor: Sequence[Any],
        tensor_list: Sequence[Any],
        reducescatter_options: Any = collective.types.ReduceScatterOptions,
    ) -> None:
        """Combine the lists of all ranks, and put what stands at this rank's place into the tensor."""
        _check_alike("reducescatter", tensor_list[0], tensor[0])
        operation = OPERATIONS[reducescatter_options.reduceOp.name]
        self._communicator.reduce_scatter(_stacked(tensor_list[0]), operation, out=tensor[0])

    def send(self, tensor: Sequence[Any], send_options: Any) -> None:
        """Send a tensor to another rank."""
        self._communicator.send(tensor[0], send_options.dst_rank)

    def recv(self, tensor: Sequence[Any], recv_options: Any) -> None:
        """Receive a tensor of another rank."""
        self._communicator.recv(tensor[0], recv_options.src_rank)


def _stacked(tensors: Sequence[Any]) -> Any:
    """A new array or tensor that has those of the list side by side."""
    if isinstance(tensors[0], np.ndarray):
        return np.stack(tensors)
    import torch

    return torch.stack(list(tensors))


def _check_alike(name: str, listed: Sequence[Any], tensor: Any) -> None:
    for index, each in enumerate(listed):
        if type(each) is not type(tensor) or each.shape != tensor.shape or each.dtype != tensor.dtype:
            raise ValueError(
                f"{name}: tensor {index} of the list is a {type(each).__name__} of {each.dtype} and shape "
                f"{tuple(each.shape)}, and the single one a {type(tensor).__name__} of {tensor.dtype} and shape "
                f"{tuple(tensor.shape)}: make them alike"
            )


def _met(size: int, rank: int, name: str) -> Communicator:
    """A communicator beside all others of this process; rank 0 has the store, and Ray's own store says where."""
    settings = env.read(env.Settings, host=_host())
    key = _key(name)
    try:
        if rank > 0:
            told = _told(key, size, rank, settings)
            return _joined(size, rank, told, settings)
        with _served(0, settings) as (server, secret):
            job = f"{name[:64]}-{secrets.token_hex(8)}"
            mine = {"store": server.addresses, "secret": secret.hex(), "job": job}
            with _claimed(f"{key}/0", mine, settings) as first:
                return _joined(size, 0, first, settings)  # a second one is refused where the first one waits
    except RendezvousError as error:
        before = internal_kv._internal_kv_get(_member(name, rank), namespace=NAMESPACE)
        words = f"group {name!r} of {size} actors: {error}"
        if before not in (None, _process()):
            words += f"; {before.decode()} has become rank {rank} before, and not left by destroy_collective_group"
        raise RendezvousError(words, rank=error.rank) from None


@contextlib.contextmanager
def _served(rank: int, settings: env.Settings) -> Iterator[tuple[store.Server, bytes]]:
    """A store of this rank and its secret; the others may read why the group did not come about before it closes."""
    secret = secrets.token_bytes(32)
    server = store.Server(
        secret, ports=settings.ports, interface=settings.interface, encrypt=settings.encrypt, rank=rank
    )
    try:
        yield server, secret
    finally:
        server.close(drain=bootstrap.DRAIN_SECONDS)


def _key(name: str) -> str:
    return f"{ray.get_runtime_context().get_job_id()}/{name}"


def _member(name: str, rank: int) -> str:
    """The key at which stands which process is a rank of the group since all have met."""
    return f"{_key(name)}/{rank}/member"


def _process() -> bytes:
    return f"process {os.getpid()} on host {_host()}".encode()


@contextlib.contextmanager
def _claimed(key: str, mine: dict[str, Any], settings: env.Settings) -> Iterator[dict[str, Any]]:
    """Say at ``key`` that this process waits as a rank: ``mine``, or what another process says there that waits too."""
    text = json.dumps(mine).encode()
    while internal_kv._internal_kv_put(key, text, overwrite=False, namespace=NAMESPACE):
        said = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
        if said is None:
            continue  # it waits no longer
        other: dict[str, Any] = json.loads(said)
        if _answers(other, settings):
            yield other
            return
        if internal_kv._internal_kv_get(key, namespace=NAMESPACE) == said:  # it was killed as it waited
            internal_kv._internal_kv_del(key, namespace=NAMESPACE)
    try:
        yield mine
    finally:
        internal_kv._internal_kv_del(key, namespace=NAMESPACE)


def _answers(told: dict[str, Any], settings: env.Settings) -> bool:
    try:
        _client(told, 0, settings).close()
    except RendezvousError:
        return False
    return True


def _client(told: dict[str, Any], seconds: float, settings: env.Settings) -> store.Client:
    addresses = list(map(env.split_address, told["store"]))
    return store.Client(addresses, bytes.fromhex(told["secret"]), timeout=seconds, encrypt=settings.encrypt)


def _told(key: str, size: int, rank: int, settings: env.Settings) -> dict[str, Any]:
    """Return the word of rank 0; RendezvousError where two processes wait for it as the same rank."""
    with _served(rank, settings) as (server, secret):
        process = _process().decode()
        mine = {"store": server.addresses, "secret": secret.hex(), "process": process}
        with _claimed(f"{key}/{rank}", mine, settings) as first:
            if first is mine or _is_rank_zero_there(f"{key}/0", settings):  # who then names the two to all
                return _word_of_rank_zero(f"{key}/0", rank, server, settings)
            words = (
                f"two actors say that they are rank {rank} of {size}, {first['process']} and {process}: give each a "
                "rank of its own"
            )
            with contextlib.closing(_client(first, settings.init_timeout, settings)) as client:
                client.set(TWICE, words.encode())
            raise RendezvousError(words, rank=rank)


def _is_rank_zero_there(key: str, settings: env.Settings) -> bool:
    said = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
    return said not in (None, _used.get(key)) and _answers(json.loads(said), settings)


def _word_of_rank_zero(key: str, rank: int, server: store.Server, settings: env.Settings) -> dict[str, Any]:
    """Return it once its store answers: one that was killed as it waited leaves its own behind."""
    until = time.monotonic() + settings.init_timeout
    unanswered = ""
    while time.monotonic() < until:
        if (twice := server.peek(TWICE)) is not None:
            raise RendezvousError(twice.decode(), rank=rank)
        said = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
        if said is not None and said != _used.get(key):
            told: dict[str, Any] = json.loads(said)
            if _answers(told, settings):
                _used[key] = said
                return told
            unanswered = f", whose store was last said to be at {', '.join(told['store'])}, where nothing answers"
        time.sleep(POLL_SECONDS)
    raise RendezvousError(
        f"rank 0 did not make it within {settings.init_timeout:g} s{unanswered}: call init_collective_group, or the "
        "first collective, in all its actors, and see that no firewall parts them",
        rank=0,
    )


def _joined(size: int, rank: int, told: dict[str, Any], settings: env.Settings) -> Communicator:
    given = given_identity(rank, size, list(told["store"]), bytes.fromhex(told["secret"]), told["job"])
    assert given is not None
    return Communicator(Group(rendezvous.join(given.identity(), settings)))
