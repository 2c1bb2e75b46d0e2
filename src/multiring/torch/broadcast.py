"""All ranks begin with what one of them has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from multiring import api
from multiring.runtime.comm import Communicator, group_of
from multiring.torch.buffers import form, raw
from multiring.torch.comparison import Origins, StateDigests, digests_if_quick, find_routes, tensors_within
from multiring.torch.layouts import refuse_unreadable, refuse_unwritable, source, target


def broadcast_parameters(
    parameters: Mapping[str, Any] | Iterable[tuple[str, Tensor]], root: int = 0, *, group: Communicator | None = None
) -> None:
    """Copy ``model.state_dict()`` or ``model.named_parameters()`` of rank ``root`` into that of all others, in place.

    What is no tensor is left alone. ValueError on all ranks if names, types, shapes, layouts, orders in memory or roots
    differ, for sparse tensors, or if elements of one to be written share memory; and for two tensors of one name.
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
    communicator: Communicator,
    tensors: Mapping[str, Tensor],
    root: int,
    state: Any = None,
    digests: StateDigests | None = None,
) -> list[StateDigests | None]:
    """Return the digests of all ranks; ValueError on all of them unless each can take the root's tensors.

    ``state`` is that of an optimizer, whose tensors are sent as well.
    """
    mine = {name: form(tensor) for name, tensor in tensors.items()}
    if communicator.rank == root:
        refusals = {**_refusals(tensors, refuse_unreadable), **_refusals_of_optimizer(tensors_within(state))}
    else:
        refusals = _refusals(tensors, refuse_unwritable)
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


def _refusals(tensors: Mapping[str, Tensor], refuse: Callable[[Tensor], None]) -> dict[str, str]:
    """Return why tensors cannot be moved, by name."""
    refusals = {}
    for name, tensor in tensors.items():
        try:
            refuse(tensor)
        except (ValueError, TypeError) as error:
            refusals[name] = str(error)
    return refusals


def _refusals_of_optimizer(tensors: Iterable[Tensor]) -> dict[str, str]:
    """Return why the state of the root's optimizer cannot be sent, if it has a tensor that cannot."""
    for why in _refusals({str(number): tensor for number, tensor in enumerate(tensors)}, refuse_unreadable).values():
        return {"the optimizer's state": why}
    return {}


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

    They may have none yet, as when ``root`` alone has loaded a checkpoint. ValueError on all ranks if a tensor of the
    root's state is sparse, or otherwise none whose elements can be sent.
    """
    communicator = api.joined(group)
    root = group_of(communicator).valid_rank("root", root)
    _give_optimizer_state(communicator, optimizer, root)


def _give_optimizer_state(
    communicator: Communicator,
    optimizer: torch.optim.Optimizer,
    root: int,
    origins: Sequence[Origins] | None = None,
    kept: Sequence[bool] = (),
) -> None:
    """Give all ranks the root's state, each tensor from its origins; this rank has those already that are ``kept``."""
    own: list[Tensor] = []
    tensors: list[Tensor] = []

    def taken(tensor: Tensor) -> _Form:
        own.append(tensor)
        return _Form(tensor)

    def made(form: _Form) -> Tensor:
        number = len(tensors)
        is_kept = number < len(kept) and kept[number]
        tensors.append(own[number].contiguous() if is_kept else torch.empty(form.shape, dtype=form.dtype))
        return tensors[-1]

    is_root = communicator.rank == root
    mine = _each(optimizer.state_dict(), Tensor, taken) if is_root or any(kept) else None
    refusals = _refusals_of_optimizer(own) if is_root else {}
    forms, refusals = communicator.broadcast_object((mine, refusals), root)
    for what, why in refusals.items():
        raise ValueError(f"{what} on rank {root}: {why}")
    if is_root:
        _spread(communicator, [tensor.contiguous() for tensor in own], root, origins)
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
    ValueError on all ranks if names, types, shapes, layouts or roots differ, and for sparse tensors.
    """
    communicator = api.joined(group)
    root = communicator.oldest if root is None else group_of(communicator).valid_rank("root", root)
    tensors = _named(model.state_dict())
    ordered = _in_order(tensors)
    state = {} if optimizer is None else optimizer.state_dict()
    digests = _agree(communicator, tensors, root, state, digests_if_quick(communicator, ordered, state, root))
    found = find_routes(communicator, digests, root)
    if found is None:
        _broadcast(communicator, ordered, root)
        if optimizer is not None:
            _give_optimizer_state(communicator, optimizer, root)
        return
    _spread(communicator, ordered, root, found.of_model)
    if optimizer is not None and not found.is_optimizer_shared:
        _give_optimizer_state(communicator, optimizer, root, found.of_optimizer, found.kept)


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
    communicator: Communicator, tensors: Sequence[Tensor], root: int, origins: Sequence[Origins] | None = None
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
