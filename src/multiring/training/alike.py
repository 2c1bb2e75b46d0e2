"""Comparison of what all ranks should share: fingerprints that travel beside sums, and facts that ranks tell.

Bits are not compared. Each rank makes the outer step itself, and another processor or another build of the framework
may round it otherwise, for thousands of exchanges. Two trainings, or two optimizers, are soon further apart than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from multiring.runtime.comm import Communicator

_TOLERANCE = 1e-4
"""Values that are closer, as a part of their norm, count as the same: about what a million roundings may add up to."""

_LEAST, _MOST = 1e-20, 1e36
"""Sums of squares between which none of float32 that counts has been too small or too large for that format."""

_LARGEST = 1e18
"""Larger values are left out, as infinity is: they would hide all else, and their squares may be infinite."""

_SMALLEST = 1e-300
"""Squares are not exact below it: what is that small does not differ."""

_ROWS = 64
"""Rows of values, each with all weights, that are looked at together."""

SUMMANDS = 4
"""Numbers of a rank that `Fingerprints.summands` adds to what an exchange sums."""

Array: TypeAlias = "np.ndarray[Any, Any]"


def _weights() -> Array:
    """4096 numbers of both signs, of 0.5 to 1.5, which look like chance and are the same with any NumPy."""
    x = np.arange(1, 4097, dtype=np.uint64)
    for factor in (2654435761, 2246822519, 3266489917):
        x = x * np.uint64(factor) % np.uint64(1 << 32)
        x ^= x >> np.uint64(15)
    part = (x >> np.uint64(1)) / (1 << 31)
    return np.where(x % np.uint64(2), 0.5 + part, -0.5 - part)


_WEIGHTS = _weights()


@dataclass(frozen=True)
class Fingerprint:
    """Sum of the values by weights like those of chance, and of their squares, without what is no number or too large.

    Two lists of values whose difference has norm d have sums that are about d apart, wherever they differ.
    """

    weighted: float
    squares: float

    def differs(self, other: Fingerprint) -> bool:
        apart = (self.weighted - other.weighted) ** 2
        return apart > _TOLERANCE**2 * max(self.squares, other.squares) + _SMALLEST

    def __str__(self) -> str:
        return f"values with fingerprint {self.weighted:.9g}"


def fingerprint(arrays: Iterable[Array]) -> Fingerprint:
    """The fingerprint of arrays of real numbers, in this order."""
    (found,) = fingerprints("", (("", array) for array in arrays)).values() or [Fingerprint(0.0, 0.0)]
    return found


def fingerprints(what: str, named: Iterable[tuple[str, Array]]) -> dict[str, Fingerprint]:
    """Fingerprints of ``what``, one for the arrays of each name: counts, say, would hide what is smaller than they."""
    found: dict[str, Fingerprint] = {}
    numbers: Counter[str] = Counter()
    for name, array in named:
        one, before = _of_array(array, numbers[name]), found.get(name, Fingerprint(0.0, 0.0))
        found[name] = Fingerprint(before.weighted + one.weighted, before.squares + one.squares)
        numbers[name] += 1
    return {f"{what}, {name}": one for name, one in found.items()}


def _of_array(array: Array, number: int) -> Fingerprint:
    """The fingerprint of the array of that number."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = _sums(array.reshape(-1), number)
        if not _LEAST < found.squares < _MOST and array.any():
            values = array.astype(np.float64).reshape(-1)
            found = _sums(np.where(np.abs(values) < _LARGEST, values, 0.0), number)
    return found


def _sums(flat: Array, number: int) -> Fingerprint:
    weights = np.roll(_WEIGHTS, number * 7)
    width, weighted, squares = len(weights), 0.0, 0.0
    for begin in range(0, len(flat), _ROWS * width):
        values = flat[begin : begin + _ROWS * width].astype(np.float64)
        whole = len(values) // width * width
        rows = np.append(values[:whole].reshape(-1, width) @ weights, values[whole:] @ weights[: len(values) - whole])
        # Rows have weights of their own: gradients of a softmax have sums of 0 over its rows.
        weighted += float(rows @ np.roll(_WEIGHTS, -(begin // width) * 3 - number)[: len(rows)])
        squares += float(values @ values)
    return Fingerprint(weighted, squares)


class Fingerprints:
    """Fingerprints of shared values after each exchange, so that a later one compares them on the way.

    An exchange takes those of the last one of the same part that all ranks have surely applied when they begin it.
    """

    def __init__(self, every: int, parts: int, delay: int) -> None:
        """``every`` and ``delay`` in steps; ``parts`` take turns."""
        self._back = parts * max(1, -(-delay // every))
        self._after: dict[int, Fingerprint] = {}

    def note(self, turn: int, arrays: Iterable[Array]) -> None:
        """Take those of a part after an exchange of it."""
        self._after[turn] = fingerprint(arrays)

    def forget(self) -> None:
        """Begin anew, with other values."""
        self._after = {}

    def summands(self, turn: int) -> list[float]:
        """This rank's part of the exchange number ``turn``; zeros where it has not seen the values to compare."""
        self._after = {number: one for number, one in self._after.items() if number >= turn - self._back}
        found = self._after.get(turn - self._back)
        return [0.0] * SUMMANDS if found is None else [1.0, found.weighted, found.weighted**2, found.squares]


def check_fingerprints(sums: Sequence[float], what: str) -> None:
    """ValueError, on all ranks alike, where ``sums`` of all ranks' summands tell that they differed."""
    ranks, weighted, weighted_squares, squares = sums
    apart = ranks * weighted_squares - weighted**2  # 0 where all are the same, and what differs cannot cancel
    if apart > _TOLERANCE**2 * squares + _SMALLEST:
        raise ValueError(
            f"ranks have different {what}, after an exchange that gave all the same (apart by about "
            f"{(apart / ranks / max(squares, 1e-300)) ** 0.5:.1g} of their size): load the states of one checkpoint, "
            "and use the same outer optimizer with the same settings, on all ranks"
        )


def check_alike(communicator: Communicator, facts: Callable[[], Mapping[str, Any]], remedy: str) -> None:
    """ValueError, on all ranks, where ``facts`` raises it on one, or two ranks differ in a fact that both know.

    All call it, so none waits for one that has raised by itself.
    """
    mine: dict[str, Any] = {}
    refusal: ValueError | None = None
    try:
        mine = dict(facts())
    except ValueError as error:
        refusal = error
    told = communicator.all_gather_object((mine, None if refusal is None else str(refusal)))
    if refusal is not None:
        raise refusal
    first: dict[str, tuple[int, Any]] = {}
    for rank, (theirs, refused) in enumerate(told):
        if refused is not None:
            raise ValueError(f"rank {rank} has raised: {refused}")
        for name, value in theirs.items():
            before, known = first.setdefault(name, (rank, value))
            both = isinstance(known, Fingerprint) and isinstance(value, Fingerprint)
            if known.differs(value) if both else known != value:
                raise ValueError(f"{name}: {known} on rank {before} and {value} on rank {rank}: {remedy}")
