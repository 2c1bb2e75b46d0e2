"""A recording: what one training step of one rank asks of the network, and when.

The file is JSON (docs/recording.md)::

    {"name": "resnet50", "forward": 0.0547, "gradients": [[8196000, 0.0001], ...]}

``forward`` is the seconds before the first gradient is begun; each gradient has its size in bytes and the seconds of
the backward pass that end with it, in the order in which backward produces them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from multiring.files import read_text, write_text

_LARGEST = 10**12
"""Seconds of a step, or bytes of its gradients: beyond any job, and far from where sums are inexact."""

_WIDTH = 60
"""Characters of a wrong value that a message shows."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """Bytes, and the seconds of backward that produce them after the gradient before."""

    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Recording:
    """A training step of one rank: ``forward`` seconds, then the gradients in the order of backward."""

    name: str
    forward: float
    gradients: tuple[Gradient, ...]

    @property
    def seconds(self) -> float:
        """The whole step without communication."""
        return self.forward + sum(gradient.seconds for gradient in self.gradients)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(gradient.nbytes for gradient in self.gradients)


@dataclass(frozen=True, slots=True)
class RecordedBucket:
    """Gradients fused into one buffer, complete ``ready`` seconds after the step began."""

    nbytes: int
    ready: float


def buckets(recording: Recording, limits: Sequence[int]) -> list[RecordedBucket]:
    """Fuse gradients in their order: a bucket is closed when it would outgrow its limit; the last limit repeats."""
    found: list[RecordedBucket] = []
    filled, clock = 0, recording.forward
    for gradient in recording.gradients:
        limit = limits[min(len(found), len(limits) - 1)]
        if filled and filled + gradient.nbytes > limit:
            found.append(RecordedBucket(filled, clock))
            filled = 0
        filled += gradient.nbytes
        clock += gradient.seconds
    if filled:
        found.append(RecordedBucket(filled, clock))
    return found


def save(recording: Recording, path: Path) -> None:
    """Write a recording."""
    gradients = [[gradient.nbytes, gradient.seconds] for gradient in recording.gradients]
    write_text(path, json.dumps({**asdict(recording), "gradients": gradients}) + "\n")


def load(path: Path) -> Recording:
    """Read a recording; OSError if it cannot be read, ValueError with its path if it is wrong."""
    try:
        return _parse(json.loads(read_text(path)))
    except RecursionError:
        raise ValueError(f"{path}: its lists or objects are nested too deeply to be a recording") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: a recording is JSON, and this is none: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parse(file: Any) -> Recording:
    if not isinstance(file, dict) or set(file) != {"name", "forward", "gradients"}:
        found = (_cut(", ".join(map(repr, file))) or "nothing") if isinstance(file, dict) else type(file).__name__
        raise ValueError(f"a recording is an object of name, forward and gradients, not of {found}")
    if not isinstance(file["name"], str) or not file["name"] or not file["name"].isprintable():
        raise ValueError(f"name is {_shown(file['name'])}; it must be text without control characters")
    if not isinstance(file["gradients"], list) or not file["gradients"]:
        raise ValueError("gradients must be a list of pairs: bytes and seconds")
    gradients = tuple(_gradient(number, pair) for number, pair in enumerate(file["gradients"]))
    recording = Recording(file["name"], _seconds(file["forward"], "forward"), gradients)
    for what, total in (("bytes", recording.nbytes), ("seconds", recording.seconds)):
        if total > _LARGEST:
            raise ValueError(f"the whole step has {total:g} {what}; it must be at most {_LARGEST:.0e}")
    return recording


def _gradient(number: int, pair: Any) -> Gradient:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"gradient {number} is {_shown(pair)}; it must be a pair: bytes and seconds")
    nbytes, seconds = pair
    if type(nbytes) is not int or not 1 <= nbytes <= _LARGEST:
        raise ValueError(
            f"gradient {number} has {_shown(nbytes)} bytes; it must be a whole number from 1 to {_LARGEST:.0e}"
        )
    return Gradient(nbytes, _seconds(seconds, f"gradient {number}"))


def _seconds(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _LARGEST:
        raise ValueError(f"{where} takes {_shown(value)} seconds; it must be a number from 0 to {_LARGEST:.0e}")
    return float(value)


def _shown(value: Any) -> str:
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."
