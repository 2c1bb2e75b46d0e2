"""All ranks begin with what one of them has."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multiring import api
from multiring.runtime.comm import Communicator, group_of
from multiring.torch.buffers import form, raw
from multiring.torch.layouts import filling, refuse_missing_memory, source, target

DIGEST_BYTES_PER_SECOND = 0.4e9
"""SHA-256 on a processor without instructions for it; with them it takes a third of the time.
Measured: benchmarks/results/2026-11-29-goodput.md."""

_DIGEST_BYTES = 16


def broadcast_parameters(
    parameters: Mapping[str, Any] | Iterable[tuple[str, Tensor]], root: int = 0, *, group: Communicator | None = None
) -> None:
    """Copy ``model.state_dict()`` or ``model.named_parameters()`` of rank ``root`` into that of all others, in place.

    What is no tensor is left alone. ValueError on all ranks if names, types, shapes, orders in memory or roots
    differ, or if elements of one to be written share memory; and for two tensors of one name.
    """
    communicator = api.joined(group)
    root = group_of(communicator).valid_rank("root", root)
    tensors = _named(parameters)
    _agree(communicator, tensors, root)
    _broadcast(communicator, _in_order(tensors), root)


def _named(parameters: Any) -> dict[str, Tensor]:
    """Return the tensors among named values."""
    tensors: dict[str, Tensor] = {}
    for name, value in named_pairs(parameters):
        if name in tensors:
            raise ValueError(f"two tensors have the name {name}: give each a name of its own")
        if isinstance(value, Tensor):
            tensors[name] = value
    return tensors


def _in_order(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return tensors in the order of their names, which ranks may have in different orders."""
    return [tensors[name] for name in sorted(tensors)]


def _agree(
    communicator: Communicator, tensors: Mapping[str, Tensor], root: int, digests: _Digests | None = None
) -> list[_Digests | None]:
    """Return the digests of all ranks; ValueError on all of them unless each can take the root's tensors."""
    mine = {name: form(tensor) for name, tensor in tensors.items()}
    refusals = {} if communicator.rank == root else _refusals(tensors)  # the root is only read
    everyone = communicator.all_gather_object((mine, refusals, root, digests))
    for rank, (theirs, _, other, _) in enumerate(everyone):
        if other != root:
            raise ValueError(f"root={root} here and {other} on rank {rank}: all ranks need the same")
        for name in [*mine, *(theirs.keys() - mine.keys())]:
            if mine.get(name) != theirs.get(name):
                raise ValueError(f"{name} is {mine.get(name)} here and {theirs.get(name)} on rank {rank}")
    for rank, (_, refused, _, _) in enumerate(everyone):
        for name, why in refused.items():
            raise ValueError(f"{name} on rank {rank}: {why}")
    return [each for _, _, _, each in everyone]


def _refusals(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return why tensors cannot be written, by name."""
    refusals = {}
    for name, tensor in tensors.items():
        try:
            filling(tensor)
            refuse_missing_memory(tensor)
        except (ValueError, TypeError) as error:
            refusals[name] = str(error)
    return refusals


def named_pairs(parameters: Any) -> list[tuple[str, Any]]:
    """Names and values of a mapping, or of pairs of these; TypeError for what is neither."""
    given = parameters.items() if isinstance(parameters, Mapping) else parameters
    pairs = list(given) if isinstance(given, Iterable) else [given]
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(f"{type(pair).__name__} is no pair of a name and a tensor: give model.named_parameters()")
    return pairs


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root: int = 0, *, group: Communicator | None = None
) -> None:
    """Copy the state of rank ``root``'s optimizer, learning rates included, to that of all others.

    They may have none yet, as when ``root`` alone has loaded a checkpoint.
    """
    communicator = api.joined(group)
    root = group_of(communicator).valid_rank("root", root)
    _give_optimizer_state(communicator, optimizer, root)


def _give_optimizer_state(
    communicator: Communicator,
    optimizer: torch.optim.Optimizer,
    root: int,
    origins: Sequence[_Origins] | None = None,
    kept: Sequence[bool] = (),
) -> None:
    """Give all ranks the root's state, each tensor from its origins; this rank has those already that are ``kept``."""
    own: list[Tensor] = []
    tensors: list[Tensor] = []

    def taken(tensor: Tensor) -> _Form:
        own.append(tensor.contiguous())
        return _Form(tensor)

    def made(form: _Form) -> Tensor:
        number = len(tensors)
        is_kept = number < len(kept) and kept[number]
        tensors.append(own[number] if is_kept else torch.empty(form.shape, dtype=form.dtype))
        return tensors[-1]

    is_root = communicator.rank == root
    mine = _each(optimizer.state_dict(), Tensor, taken) if is_root or any(kept) else None
    forms = communicator.broadcast_object(mine, root)
    if is_root:
        _spread(communicator, own, root, origins)
    else:
        state = _each(forms, _Form, made)
        _spread(communicator, tensors, root, origins)
        if not (kept and all(kept)):
            optimizer.load_state_dict(state)


def sync_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    root: int | None = None,
    *,
    group: Communicator | None = None,
) -> None:
    """Copy the state of rank ``root``'s model, its ``state_dict``, and of its optimizer to those of all others.

    After `shrink` some ranks may have taken a step that others have not: then all continue from the same one. After
    `grow` newcomers have none: the root is `multiring.oldest`, unless given. Between hosts ranks first compare SHA-256
    of each tensor, where that takes less time than to send the state. A tensor that all have is not sent. Where each
    host has a rank with the root's, it goes from there to the others of the host; else the root broadcasts it.
    ValueError on all ranks if names, types, shapes or roots differ.
    """
    communicator = api.joined(group)
    root = communicator.oldest if root is None else group_of(communicator).valid_rank("root", root)
    tensors = _named(model.state_dict())
    digests = _agree(communicator, tensors, root, _digests_if_quick(communicator, tensors, optimizer, root))
    wanted = digests[root]
    if wanted is None:
        _broadcast(communicator, _in_order(tensors), root)
        if optimizer is not None:
            _give_optimizer_state(communicator, optimizer, root)
        return
    hosts, me = communicator.hosts, communicator.rank
    of_model = _holders([each.of_model if each else [] for each in digests], root)
    _spread(communicator, _in_order(tensors), root, [_origins(hosts, holders) for holders in of_model])
    if optimizer is None:
        return
    alike = [each is not None and each.structure == wanted.structure for each in digests]
    lists = [each.of_optimizer if each and is_alike else [] for each, is_alike in zip(digests, alike, strict=True)]
    of_optimizer = _holders(lists, root)
    if not all(alike) or any(len(holders) < communicator.size for holders in of_optimizer):
        origins = [_origins(hosts, holders) for holders in of_optimizer]
        _give_optimizer_state(communicator, optimizer, root, origins, [me in holders for holders in of_optimizer])


@dataclass
class _Digests:
    """Digests of a rank's state: of each tensor of the model and of the optimizer, and of all that is no tensor."""

    of_model: list[bytes]
    of_optimizer: list[bytes]
    structure: bytes


def _digests_if_quick(
    communicator: Communicator, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None, root: int
) -> _Digests | None:
    """Return the digests of a state; None where they take longer than to broadcast the state."""
    if len(set(communicator.hosts)) == 1:
        return None
    of_optimizer: list[Tensor] = []

    def taken(tensor: Tensor) -> _Form:
        of_optimizer.append(tensor)
        return _Form(tensor)

    structure = _each({} if optimizer is None else optimizer.state_dict(), Tensor, taken)
    of_model = _in_order(tensors)
    nbytes = sum(tensor.nbytes for tensor in (*of_model, *of_optimizer))
    choice = communicator.plan(nbytes, "broadcast", root)
    if choice.nbytes / DIGEST_BYTES_PER_SECOND > choice.chosen.prediction.seconds:
        return None
    return _Digests(list(map(_digest, of_model)), list(map(_digest, of_optimizer)), _digest_of_structure(structure))


def _digest(tensor: Tensor) -> bytes:
    """Return a digest of type, shape and elements; nothing for a tensor that cannot be read, which a transfer says."""
    found = hashlib.sha256(repr((str(tensor.dtype), tuple(tensor.shape))).encode())
    try:
        if tensor.numel():
            elements = source(tensor if tensor.is_cpu else tensor.cpu()).view(torch.uint8)
            found.update(elements.numpy().data)
    except (ValueError, TypeError):
        return b""
    return found.digest()[:_DIGEST_BYTES]


def _digest_of_structure(value: Any) -> bytes:
    """Return a digest of dictionaries and lists, of what they hold, and of the places of tensors in them."""
    found = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, dict):
            found.update(b"dict %d " % len(value))
            for key, item in value.items():
                feed(key)
                feed(item)
        elif isinstance(value, list | tuple):
            found.update(b"%s %d " % (type(value).__name__.encode(), len(value)))
            for item in value:
                feed(item)
        else:
            packed = b"" if isinstance(value, _Form) else pickle.dumps(value)
            found.update(b"value %d " % len(packed))
            found.update(packed)

    feed(value)
    return found.digest()[:_DIGEST_BYTES]


_Origins = dict[int, int] | None
"""The ranks that a tensor is sent to, each with the rank that it comes from; None if the root broadcasts it."""


def _holders(digests: Sequence[Sequence[bytes]], root: int) -> list[set[int]]:
    """Return for each tensor of the root the ranks that have the same."""
    wanted = digests[root]
    return [
        {
            rank
            for rank, theirs in enumerate(digests)
            if rank == root or (digest and len(theirs) == len(wanted) and theirs[number] == digest)
        }
        for number, digest in enumerate(wanted)
    ]


def _origins(hosts: Sequence[str], holders: set[int]) -> _Origins:
    """Return for each rank that does not hold a tensor one of its host that does; None if a host has none."""
    origins: dict[int, int] = {}
    for rank, host in enumerate(hosts):
        if rank not in holders:
            near = [holder for holder in sorted(holders) if hosts[holder] == host]
            if not near:
                return None
            origins[rank] = near[len(origins) % len(near)]
    return origins


class _Form:
    """Placeholder of a tensor until its elements come."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


def _each(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """``value`` with everything of a kind in its dictionaries and lists changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: _each(item, kind, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_each(item, kind, change) for item in value)
    return value


def _spread(
    communicator: Communicator, tensors: Sequence[Tensor], root: int, origins: Sequence[_Origins] | None = None
) -> None:
    """Give the root's tensors to those that do not have them; to all without ``origins``."""
    if origins is None:
        _broadcast(communicator, tensors, root)
        return
    routes = list(zip(tensors, origins, strict=True))
    _broadcast(communicator, [tensor for tensor, route in routes if route is None], root)
    _hand_over(communicator, [(tensor, route) for tensor, route in routes if route])


def _broadcast(communicator: Communicator, tensors: Iterable[Tensor], root: int) -> None:
    is_root = communicator.rank == root
    given = [tensor.detach() for tensor in tensors if tensor.numel()]
    # What lies elsewhere goes through memory of the CPU: this is done once.
    on_cpu = [tensor if tensor.is_cpu else tensor.cpu() for tensor in given]
    targets = [target(tensor, read=is_root, write=not is_root) for tensor in on_cpu]
    parts = [group_of(communicator).start("broadcast", raw(x.elements), root=root) for x in targets]
    for part, x, tensor, copy in zip(parts, targets, given, on_cpu, strict=True):
        part.wait()
        if x.finish is not None:
            x.finish()
        if copy is not tensor and not is_root:
            tensor.copy_(copy)


def _hand_over(communicator: Communicator, routes: Iterable[tuple[Tensor, dict[int, int]]]) -> None:
    """Give each tensor to the ranks of its origins, by messages."""
    group, me = group_of(communicator), communicator.rank
    leaving, arriving = [], []
    for given, origins in routes:
        tensor = given.detach()
        if me in origins and tensor.numel():
            copy = tensor if tensor.is_cpu else torch.empty_like(tensor, device="cpu")
            x = target(copy)
            arriving.append((group.recv_part("broadcast", raw(x.elements), origins[me]), x, tensor, copy))
        elif me in origins.values() and tensor.numel():
            elements = raw(source(tensor if tensor.is_cpu else tensor.cpu()))
            to = [rank for rank, origin in origins.items() if origin == me]
            leaving += [group.send_part("broadcast", elements, rank) for rank in to]
    for part, x, tensor, copy in arriving:
        part.wait()
        if x.finish is not None:
            x.finish()
        if copy is not tensor:
            tensor.copy_(copy)
    for part in leaving:
        part.wait()
