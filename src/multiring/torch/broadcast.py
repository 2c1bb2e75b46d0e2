"""All ranks begin with what one of them has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from multiring import api
from multiring.runtime.comm import Communicator, group_of
from multiring.torch.buffers import form, raw
from multiring.torch.layouts import refuse_overlap, target


def broadcast_parameters(
    parameters: Mapping[str, Any] | Iterable[tuple[str, Tensor]], root: int = 0, *, group: Communicator | None = None
) -> None:
    """Copy ``model.state_dict()`` or ``model.named_parameters()`` of rank ``root`` into that of all others, in place.

    What is no tensor is left alone. ValueError on all ranks if names, types, shapes or orders in memory
    differ, or if elements of one to be written share memory; and for two tensors of one name.
    """
    communicator = api.joined(group)
    tensors: dict[str, Tensor] = {}
    for name, value in named_pairs(parameters):
        if name in tensors:
            raise ValueError(f"two tensors have the name {name}: give each a name of its own")
        if isinstance(value, Tensor):
            tensors[name] = value
    mine = {name: form(tensor) for name, tensor in tensors.items()}
    refusals = {} if communicator.rank == root else _refusals(tensors)  # the root is only read
    everyone = communicator.all_gather_object((mine, refusals))
    for rank, (theirs, _) in enumerate(everyone):
        for name in [*mine, *(theirs.keys() - mine.keys())]:
            if mine.get(name) != theirs.get(name):
                raise ValueError(f"{name} is {mine.get(name)} here and {theirs.get(name)} on rank {rank}")
    for rank, (_, refused) in enumerate(everyone):
        for name, why in refused.items():
            raise ValueError(f"{name} on rank {rank}: {why}")
    _broadcast(communicator, [tensors[name] for name in sorted(tensors)], root)


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
    tensors: list[Tensor] = []

    def taken(tensor: Tensor) -> _Form:
        tensors.append(tensor.contiguous())
        return _Form(tensor)

    def made(form: _Form) -> Tensor:
        tensors.append(torch.empty(form.shape, dtype=form.dtype))
        return tensors[-1]

    if communicator.rank == root:
        communicator.broadcast_object(_each(optimizer.state_dict(), Tensor, taken), root)
        _broadcast(communicator, tensors, root)
    else:
        state = _each(communicator.broadcast_object(root=root), _Form, made)
        _broadcast(communicator, tensors, root)
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
    `grow` newcomers have none: the root is `multiring.oldest`, unless given. ValueError on all ranks if names, types
    or shapes differ.
    """
    if root is None:
        root = api.joined(group).oldest
    broadcast_parameters(model.state_dict(), root, group=group)
    if optimizer is not None:
        broadcast_optimizer_state(optimizer, root, group=group)


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
