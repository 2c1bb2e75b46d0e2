"""Comparison of ranks' states by digests, so that only what a rank lacks is sent over slow links."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multiring.runtime.comm import Communicator
from multiring.torch.layouts import source

DIGEST_BYTES_PER_SECOND = 0.4e9
"""SHA-256 on a processor without instructions for it; with them it takes a third of the time.
Measured: benchmarks/results/2026-11-29-goodput.md."""

_DIGEST_BYTES = 16


@dataclass
class StateDigests:
    """Digests of a rank's state: of each tensor of the model and of the optimizer, and of all that is no tensor."""

    of_model: list[bytes]
    of_optimizer: list[bytes]
    structure: bytes


Origins = dict[int, int] | None
"""The ranks that a tensor is sent to, each with the rank that it comes from; None if the root broadcasts it."""


@dataclass
class Routes:
    """The way of each of the root's tensors to the ranks that do not have it."""

    of_model: list[Origins]
    of_optimizer: list[Origins]
    kept: list[bool]
    """The tensors of the root's optimizer that this rank has."""
    is_optimizer_shared: bool
    """True if all ranks have all of the optimizer's state."""


def digests_if_quick(
    communicator: Communicator, model: Sequence[Tensor], optimizer: Any, root: int
) -> StateDigests | None:
    """Return the digests of a model's tensors and an optimizer's ``state_dict``.

    None where they take longer than to broadcast the state.
    """
    if len(set(communicator.hosts)) == 1:
        return None
    of_optimizer = list(tensors_within(optimizer))
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in (*model, *of_optimizer))
    choice = communicator.plan(nbytes, "broadcast", root)
    if choice.nbytes / DIGEST_BYTES_PER_SECOND > choice.chosen.prediction.seconds:
        return None
    return StateDigests(list(map(_digest, model)), list(map(_digest, of_optimizer)), _digest_of_structure(optimizer))


def find_routes(communicator: Communicator, digests: Sequence[StateDigests | None], root: int) -> Routes | None:
    """Return the ways by the digests of all ranks; None if the root has none, as it then broadcasts all."""
    wanted = digests[root]
    if wanted is None:
        return None
    hosts, size = communicator.hosts, communicator.size
    of_model = _holders([each.of_model if each else [] for each in digests], root)
    alike = [each is not None and each.structure == wanted.structure for each in digests]
    lists = [each.of_optimizer if each and is_alike else [] for each, is_alike in zip(digests, alike, strict=True)]
    of_optimizer = _holders(lists, root)
    return Routes(
        [_origins(hosts, holders) for holders in of_model],
        [_origins(hosts, holders) for holders in of_optimizer],
        [communicator.rank in holders for holders in of_optimizer],
        all(alike) and all(len(holders) == size for holders in of_optimizer),
    )


def tensors_within(value: Any) -> Iterator[Tensor]:
    """The tensors in dictionaries and lists, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_within(item)


def _digest(tensor: Tensor) -> bytes:
    """Return a digest of type, shape and elements; nothing for a tensor that cannot be read, which a transfer says."""
    try:
        found = hashlib.sha256(repr((str(tensor.dtype), tuple(tensor.shape))).encode())
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
            packed = b"" if isinstance(value, Tensor) else pickle.dumps(value)
            found.update(b"value %d " % len(packed))
            found.update(packed)

    feed(value)
    return found.digest()[:_DIGEST_BYTES]


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


def _origins(hosts: Sequence[str], holders: set[int]) -> Origins:
    """Return for each rank that does not hold a tensor one of its host that does; None if a host has none."""
    origins: dict[int, int] = {}
    for rank, host in enumerate(hosts):
        if rank not in holders:
            near = [holder for holder in sorted(holders) if hosts[holder] == host]
            if not near:
                return None
            origins[rank] = near[len(origins) % len(near)]
    return origins
