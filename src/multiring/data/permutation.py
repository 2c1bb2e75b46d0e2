"""A shuffle of any length that takes no memory: where a sample stands follows from a key, and from its number alone.

A position of 0 to n - 1 is written as two digits, (left, right), and goes through a Feistel network over Z_a x Z_b,
with a * b >= n: each round adds to one digit a hash of the other, which can be undone, so that the network is a
permutation of a * b numbers (J. Black and P. Rogaway, Ciphers with arbitrary finite domains, 2002). What lands at n or
above goes through it again until it lands below (cycle walking), which leaves a permutation of n numbers. a and b are
next to the square root of n, so less than 2 in sqrt(n) go twice. The hash is the finalizer of splitmix64 (G. Steele,
D. Lea, C. Flood, Fast splittable pseudorandom number generators, 2014), whose stream also gives the rounds their keys.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from multiring.env import whole_number

Numbers = np.ndarray[Any, np.dtype[np.int64]]

LEAST_ROUNDS = 8
"""Rounds where digits are long: twice the four of the proof (M. Luby and C. Rackoff, 1988)."""

HASHED_BITS = 64
"""Bits that the rounds hash in all, at least: with few, samples show their neighbours.

Measured: benchmarks/results/2026-11-28-constants.md, Data."""

LONGEST = 1 << 62
"""The most samples: sums of two positions stay within 64 bits."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Permutation:
    """One shuffle of 0 to ``length`` - 1 for each ``seed`` and ``epoch``, the same on every machine; of O(1) memory.

    ``seed`` and ``epoch`` are 0 to 2**32 - 1, or ValueError.
    """

    def __init__(self, length: int, seed: int = 0, epoch: int = 0) -> None:
        self.length = whole_number("length", length)
        if not 0 <= self.length <= LONGEST:
            raise ValueError(f"length={length}: a data set has 0 to 2**62 samples")
        key = (check_seed("seed", seed) << 32) | check_seed("epoch", epoch)
        self._left = math.isqrt(max(0, self.length - 1)) + 1
        self._right = -(-self.length // self._left) or 1
        rounds = max(LEAST_ROUNDS, HASHED_BITS // max(1, (self._right - 1).bit_length()))
        self._keys = [_mixed((_mixed(key) + (i + 1) * _GOLDEN) & _MASK) for i in range(rounds)]

    def __call__(self, positions: Any) -> Numbers:
        """The samples that stand at some positions of the shuffle: int64 of the shape of ``positions``.

        IndexError for a position that is not one of 0 to ``length`` - 1.
        """
        given = np.asarray(positions, np.int64)
        if given.size and not 0 <= int(given.min()) <= int(given.max()) < self.length:
            outside = given[(given < 0) | (given >= self.length)].flat[0]
            raise IndexError(f"position {outside} of {self.length} samples")
        found = self._network(given.astype(np.uint64).ravel())
        (beyond,) = np.nonzero(found >= self.length)
        while beyond.size:
            found[beyond] = self._network(found[beyond])
            beyond = beyond[found[beyond] >= self.length]
        return found.astype(np.int64).reshape(given.shape)

    def _network(self, numbers: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        size = np.uint64(self._left), np.uint64(self._right)
        digits = [numbers // size[1], numbers % size[1]]
        for i, key in enumerate(self._keys):
            here = i % 2
            digits[here] = (digits[here] + _mix(digits[1 - here] ^ np.uint64(key)) % size[here]) % size[here]
        return digits[0] * size[1] + digits[1]


def check_seed(name: str, value: int) -> int:
    """A seed or an epoch; ValueError unless it is 0 to 2**32 - 1."""
    number = whole_number(name, value)
    if not 0 <= number < 1 << 32:
        raise ValueError(f"{name}={value}: it is 0 to 2**32 - 1")
    return number


def _mix(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The finalizer of splitmix64, of each element; products are cut to 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mixed(number: int) -> int:
    return int(_mix(np.array([number], np.uint64))[0])
