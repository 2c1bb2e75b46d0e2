"""All ranks begin with what one of them has."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from multiring import api
from multiring.runtime.comm import Communicator, group_of
from multiring.torch.buffers import form, raw
from multiring.torch.layouts import refuse_overlap, source, target

DIGEST_BYTES_PER_SECOND = 0.4e9
"""SHA-256 on a processor without instructions for it; with them it was 1.15e9.

Measured: benchmarks/results/2026-11-29-goodput.md.
"""


def broadcast_parameters(
    parameters: Mapping[str, Any] | Iterable[tuple[str, Tensor]], root: int = 0, *, group: Communicator | None = None
) -> None:
    """Copy ``model.state_dict()`` or ``model.named_parameters()`` of rank ``root`` into that of all others, in place.

    What is no tensor is left alone. ValueError on all ranks if names, types, shapes or orders in memory
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


def _agree(communicator: Communicator, tensors: Mapping[str, Tensor], root: int, digest: bytes = b"") -> list[bytes]:
    """Return the digests of all ranks; ValueError on all of them unless each can take the root's tensors."""
    mine = {name: form(tensor) for name, tensor in tensors.items()}
    refusals = {} if communicator.rank == root else _refusals(tensors)  # the root is only read
    everyone = communicator.all_gather_object((mine, refusals, digest))
    for rank, (theirs, _, _) in enumerate(everyone):
        for name in [*mine, *(theirs.keys() - mine.keys())]:
            if mine.get(name) != theirs.get(name):
                raise ValueError(f"{name} is {mine.get(name)} here and {theirs.get(name)} on rank {rank}")
    for rank, (_, refused, _) in enumerate(everyone):
        for name, why in refused.items():
            raise ValueError(f"{name} on rank {rank}: {why}")
    return [each for _, _, each in everyone]


def _refusals(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return why tensors cannot be written, by name."""
    refusals = {}
    for name, tensor in tensors.items():
        try:
            refuse_overlap(tensor)
        except ValueError as error:
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
    _give_optimizer_state(communicator, optimizer, root, lambda tensors: _broadcast(communicator, tensors, root))


def _give_optimizer_state(
    communicator: Communicator,
    optimizer: torch.optim.Optimizer,
    root: int,
    move: Callable[[list[Tensor]], None],
    *,
    keep: bool = False,
) -> None:
    """Give all ranks the root's state by ``move``; with ``keep`` this one has it, and is not written."""
    tensors: list[Tensor] = []

    def taken(tensor: Tensor) -> _Form:
        tensors.append(tensor.contiguous())
        return _Form(tensor)

    def made(form: _Form) -> Tensor:
        tensors.append(torch.empty(form.shape, dtype=form.dtype))
        return tensors[-1]

    forms = _each(optimizer.state_dict(), Tensor, taken) if communicator.rank == root or keep else None
    forms = communicator.broadcast_object(forms, root)
    if communicator.rank == root or keep:
        move(tensors)
    else:
        state = _each(forms, _Form, made)
        move(tensors)
        optimizer.load_state_dict(state)


def sync_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    root: int | None = None,
    *,
    group: Communicator | None = None,
) -> None:
    """Copy the state of rank ``root``'s model, buffers included, and of its optimizer to those of all others.

    After `shrink` some ranks may have taken a step that others have not: then all continue from the same one. After
    `grow` newcomers have none: the root is `multiring.oldest`, unless given. Between hosts, where that takes less time
    than to send the state, ranks compare SHA-256 of what they have: those that have it already are not sent it, and
    those that do not get it from a rank of their host that does. ValueError on all ranks if names, types or shapes
    differ.
    """
    communicator = api.joined(group)
    root = communicator.oldest if root is None else group_of(communicator).valid_rank("root", root)
    tensors = _named(model.state_dict())
    digests = _agree(communicator, tensors, root, _digest_if_quick(communicator, tensors, optimizer, root))
    holders = {rank for rank, digest in enumerate(digests) if rank == root or (digest and digest == digests[root])}
    if len(holders) == communicator.size:
        return
    origins = _origins(communicator.hosts, holders) if digests[root] else None

    def move(tensors: list[Tensor]) -> None:
        if origins is None:
            _broadcast(communicator, tensors, root)
        else:
            _hand_over(communicator, tensors, origins)

    move(_in_order(tensors))
    if optimizer is not None:
        keep = origins is not None and communicator.rank in holders
        _give_optimizer_state(communicator, optimizer, root, move, keep=keep)


def _origins(hosts: Sequence[str], holders: set[int]) -> dict[int, int] | None:
    """Return for each rank without the state one of its host that has it; None if a host has none."""
    origins: dict[int, int] = {}
    for rank, host in enumerate(hosts):
        if rank not in holders:
            near = [holder for holder in sorted(holders) if hosts[holder] == host]
            if not near:
                return None
            origins[rank] = near[len(origins) % len(near)]
    return origins


def _digest_if_quick(
    communicator: Communicator, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer | None, root: int
) -> bytes:
    """Return the digest of a state; nothing where it takes longer than to broadcast the state."""
    if len(set(communicator.hosts)) == 1:
        return b""
    state = [dict(sorted(tensors.items())), {} if optimizer is None else optimizer.state_dict()]
    nbytes = 0

    def count(tensor: Tensor) -> None:
        nonlocal nbytes
        nbytes += tensor.nbytes

    _each(state, Tensor, count)
    if nbytes / DIGEST_BYTES_PER_SECOND > communicator.plan(nbytes, "broadcast", root).chosen.prediction.seconds:
        return b""
    digest = hashlib.sha256()
    _feed(digest.update, state)
    return digest.digest()


def _feed(update: Callable[[Any], None], value: Any) -> None:
    """Hand over a state to a digest, so that states which differ are different bytes."""
    if isinstance(value, Tensor):
        tensor = value.detach()
        _feed(update, form(tensor))
        if tensor.numel():
            update(source(tensor if tensor.is_cpu else tensor.cpu()).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        update(b"dict %d " % len(value))
        for key, item in value.items():
            _feed(update, key)
            _feed(update, item)
    elif isinstance(value, list | tuple):
        update(b"%s %d " % (type(value).__name__.encode(), len(value)))
        for item in value:
            _feed(update, item)
    else:
        packed = pickle.dumps(value)
        update(b"%d " % len(packed))
        update(packed)


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


def _hand_over(communicator: Communicator, tensors: Iterable[Tensor], origins: Mapping[int, int]) -> None:
    """Give tensors to each rank of ``origins`` from the rank that stands there."""
    group, me = group_of(communicator), communicator.rank
    given = [tensor.detach() for tensor in tensors if tensor.numel()]
    if me not in origins:
        to = [rank for rank, origin in origins.items() if origin == me]
        on_cpu = [source(tensor if tensor.is_cpu else tensor.cpu()) for tensor in given] if to else []
        parts = [group.send_part("scatter", raw(elements), rank) for elements in on_cpu for rank in to]
        for part in parts:
            part.wait()
        return
    copies = [tensor if tensor.is_cpu else torch.empty_like(tensor, device="cpu") for tensor in given]
    targets = [target(copy) for copy in copies]
    arriving = [group.recv_part("scatter", raw(x.elements), origins[me]) for x in targets]
    for part, x, tensor, copy in zip(arriving, targets, given, copies, strict=True):
        part.wait()
        if x.finish is not None:
            x.finish()
        if copy is not tensor:
            tensor.copy_(copy)
