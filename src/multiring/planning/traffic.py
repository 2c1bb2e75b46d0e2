"""Traffic of a ring on the links around runs of its members: the numbers in the table of docs/algorithms.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from .methods import steps

LONGEST_RING = 64
"""Members of the longest ring that is considered. It takes 63 steps, or 63 messages in one step; two dimensions of 8
take 14."""

LARGEST_TREE = 256
"""Members of the largest ring by tree or halving that is considered."""


def crossing(kind: str, method: str, shares: Sequence[float], first: int, last: int) -> tuple[float, float]:
    """Return the bytes that leave and enter the members [first, last) of a ring, as parts of the bytes of its spans.

    ``shares`` are the members' shares, with sum 1.
    """
    size, inside = len(shares), last - first
    outside = size - inside
    if inside == 0 or outside == 0:
        return 0.0, 0.0
    if method == "direct" and kind in ("reduce_scatter", "all_gather", "all_to_all"):
        owned = sum(shares[first:last])
        towards_owners = inside * (1 - owned), outside * owned
        return towards_owners[::-1] if kind == "all_gather" else towards_owners
    if method == "direct" and kind == "all_reduce":
        return float(inside * outside), float(inside * outside)
    if method == "ring" and kind in ("reduce_scatter", "all_gather"):
        return (size - 1) / size, (size - 1) / size
    sent, received = _flows(kind, method, size)
    out = sum(part for i in range(first, last) for peer, part in sent[i] if not first <= peer < last)
    in_ = sum(part for i in range(first, last) for peer, part in received[i] if not first <= peer < last)
    return out, in_


_Flows = list[list[tuple[int, float]]]


@lru_cache(maxsize=256)
def _flows(kind: str, method: str, size: int) -> tuple[_Flows, _Flows]:
    """Return the sends and receives of each member of a ring with equal shares: pairs (peer, part of the bytes)."""
    sent: _Flows = [[] for _ in range(size)]
    received: _Flows = [[] for _ in range(size)]
    for source in range(size):
        for step in steps(kind, method, size, source):
            for send in step.sends:
                for target in send.peers:
                    sent[source].append((target, len(send.shares) / size))
                    received[target].append((source, len(send.shares) / size))
    return sent, received


@lru_cache(maxsize=1024)
def messages(kind: str, method: str, size: int, shares_are_blocks: bool) -> tuple[int, ...]:
    """The number of messages that the busiest member sends or awaits in each step.

    Several shares that adjoin in the buffer are one message. ``shares_are_blocks``: a share is a set of blocks, which
    do not adjoin, and each share is a message of its own.
    """
    busiest = [1] * len(steps(kind, method, size, 0))
    for position in {0, 1, size - 1}:
        for number, step in enumerate(steps(kind, method, size, position)):
            sent = sum(len(send.peers) * (len(send.shares) if shares_are_blocks else 1) for send in step.sends)
            awaited = sum(
                len({*w.peers} - {position}) * (len(w.shares) if shares_are_blocks else 1) for w in step.waits
            )
            busiest[number] = max(busiest[number], sent, awaited)
    return tuple(busiest)


def meets_all(kind: str, method: str) -> bool:
    """True if every member sends a message to every other."""
    return method == "direct" and kind not in ("reduce", "broadcast")


def partners(kind: str, method: str, size: int, position: int, shares_are_blocks: bool) -> Counter[int]:
    """The number of messages that a member sends to and receives from each other, by position.

    ``shares_are_blocks`` as in `messages`.
    """
    found: Counter[int] = Counter()
    if method == "ring" and kind not in ("reduce", "broadcast"):
        for neighbour in ((position - 1) % size, (position + 1) % size):
            found[neighbour] += size - 1
    else:
        sent, received = _flows(kind, method, size)
        for peer, part in sent[position] + received[position]:
            found[peer] += round(part * size) if shares_are_blocks else 1
    return found


def mean_messages(kind: str, method: str, size: int, shares_are_blocks: bool) -> float:
    """The number of messages that a member sends: the mean over all members, or somewhat more.

    ``shares_are_blocks`` as in `messages`.
    """
    if kind in ("reduce", "broadcast"):
        return (size - 1) / size
    if method == "tree":  # a reduce and a broadcast
        return 2 * (size - 1) / size
    return float(sum(messages(kind, method, size, shares_are_blocks)))


def hands_on(kind: str, method: str) -> bool:
    """True if members pass on all that they receive, so that a segment crosses one link after another."""
    return method == "tree" or (method == "ring" and kind in ("broadcast", "reduce"))


@lru_cache(maxsize=256)
def pairs(kind: str, method: str, size: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The pairs of members between which messages pass in each step, (lower, higher)."""
    found: list[dict[tuple[int, int], None]] = [{} for _ in steps(kind, method, size, 0)]
    for position in range(size):
        for met, step in zip(found, steps(kind, method, size, position), strict=True):
            met.update({(min(position, to), max(position, to)): None for send in step.sends for to in send.peers})
    return tuple(map(tuple, found))
