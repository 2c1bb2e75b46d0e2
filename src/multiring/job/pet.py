"""The options of torchrun in the variables ``PET_*``, which Kubeflow's trainer sets in each pod of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from multiring import env

WORDS = ("auto", "cpu", "gpu", "xpu")
"""Words that may stand in the place of the number of ranks a host: as many as it has processors."""


@dataclass(frozen=True)
class TorchrunOptions:
    """Options of torchrun, from the variables; None for those that are not set."""

    hosts: int | None = None
    ranks_per_host: int | str | None = None
    """A number, or one of `WORDS`."""
    host_index: int | None = None
    address: str | None = None
    port: int | None = None


def read(environ: Mapping[str, str] | None = None) -> TorchrunOptions:
    """The options in ``environ`` (None: the environment of this process).

    ValueError names a variable, its value and what was expected. An elastic range of hosts, such as 1:4, is an error,
    since a job has a fixed number of hosts.
    """
    environ = os.environ if environ is None else environ
    return TorchrunOptions(
        _hosts(environ.get("PET_NNODES", "")),
        _ranks_per_host(environ.get("PET_NPROC_PER_NODE", "")),
        _number("PET_NODE_RANK", environ.get("PET_NODE_RANK", "")),
        environ.get("PET_MASTER_ADDR") or None,
        _number("PET_MASTER_PORT", environ.get("PET_MASTER_PORT", "")),
    )


def _hosts(text: str) -> int | None:
    least, _, most = text.partition(":")
    if most and most != least:
        raise ValueError(
            f"PET_NNODES={text!r}: a job has a fixed number of hosts, such as 4; members come and go by shrink() and "
            "grow()"
        )
    return _number("PET_NNODES", least)


def _ranks_per_host(text: str) -> int | str | None:
    return text if text in WORDS else _number("PET_NPROC_PER_NODE", text)


def _number(name: str, text: str) -> int | None:
    return env.named_number(name, text) if text else None
