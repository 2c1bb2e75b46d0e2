"""The methods of a ring: who sends which share to whom, step by step.

A method is a function from (number of members n, position i) to the steps of member i. Shares are numbered like the
members, 0..n-1; ``range(n)`` is all of them. Every message is sent and awaited in the same step, so the messages
between two members have the same order on both sides. Reductions name their sources in the order of summation.

Costs: S is the bytes of the ring's spans, alpha the seconds a message, beta the seconds a byte, gamma the seconds a
byte reduced. docs/algorithms.md has each method at length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Send:
    """The shares go to each of ``peers``."""

    shares: range
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """The shares become the sum over ``peers``, this member's own standing among them.

    ``completes`` marks the sum that holds every member's contribution.
    """

    shares: range
    peers: tuple[int, ...]
    completes: bool


@dataclass(frozen=True, slots=True)
class Store:
    """The shares are replaced by those of ``peer``."""

    shares: range
    peer: int

    @property
    def peers(self) -> tuple[int, ...]:
        """Members for whose message it waits."""
        return (self.peer,)


@dataclass(frozen=True, slots=True)
class Step:
    """Work of one member in one step: its sends, then its waits."""

    sends: tuple[Send, ...] = ()
    waits: tuple[Reduce | Store, ...] = ()


def steps(kind: str, method: str, size: int, position: int) -> list[Step]:
    """The steps of one member of a ring of ``size``."""
    return _METHODS[kind, method](size, position)


def _share(i: int) -> range:
    return range(i, i + 1)


def _others(n: int, i: int) -> list[int]:
    """Everybody else, each member starting with its successor, so that no member is everybody's first."""
    return [(i + k) % n for k in range(1, n)]


# Ring. Each share travels once around, gathering one contribution a step; then the sums travel around.
#
#   reduce_scatter, 4 members, share sent        all_gather
#     step 0: 0-3>1 1-0>2 2-1>3 3-2>0              step 0: 0-0>1 1-1>2 2-2>3 3-3>0
#     step 1: 0-2>1 1-3>2 2-0>3 3-1>0              step 1: 0-3>1 1-0>2 2-1>3 3-2>0
#     step 2: 0-1>1 1-2>2 2-3>3 3-0>0              step 2: 0-2>1 1-3>2 2-0>3 3-1>0
#
# Each: (n-1) alpha + (n-1)/n S beta [+ (n-1)/n S gamma]. Patarasuk and Yuan 2009.


def _ring_reduce_scatter(n: int, i: int) -> list[Step]:
    before, after = (i - 1) % n, (i + 1) % n
    return [
        Step(
            (Send(_share((i - 1 - t) % n), (after,)),),
            (Reduce(_share((i - 2 - t) % n), (before, i), completes=t == n - 2),),
        )
        for t in range(n - 1)
    ]


def _ring_all_gather(n: int, i: int) -> list[Step]:
    before, after = (i - 1) % n, (i + 1) % n
    return [
        Step((Send(_share((i - t) % n), (after,)),), (Store(_share((i - 1 - t) % n), before),)) for t in range(n - 1)
    ]


# Direct. One step: everybody sends every owner its share; every owner sends everybody its sum.
#
#   reduce_scatter, 4 members                     all_gather
#     0: 1>1 2>2 3>3, sums share 0 of 0 1 2 3       0: 0>1 0>2 0>3
#     1: 2>2 3>3 0>0, sums share 1 of 0 1 2 3       1: 1>2 1>3 1>0     ...
#
# Each: alpha + (n-1) messages + (n-1)/n S beta [+ (n-1)/n S gamma]; any shares w: member i sends 1 - w_i and receives
# (n-1) w_i in the reduce_scatter, the reverse in the all_gather. Bruck et al. 1997.


def _direct_reduce_scatter(n: int, i: int) -> list[Step]:
    sends = tuple(Send(_share(j), (j,)) for j in _others(n, i))
    return [Step(sends, (Reduce(_share(i), tuple(range(n)), completes=True),))]


def _direct_all_gather(n: int, i: int) -> list[Step]:
    others = _others(n, i)
    return [Step((Send(_share(i), tuple(others)),), tuple(Store(_share(j), j) for j in reversed(others)))]


def _direct_all_reduce(n: int, i: int) -> list[Step]:
    everybody = tuple(range(n))
    send = Send(range(n), tuple(_others(n, i)))
    return [Step((send,), (Reduce(range(n), everybody, completes=True),))]


def _direct_all_to_all(n: int, i: int) -> list[Step]:
    others = _others(n, i)
    return [Step(tuple(Send(_share(j), (j,)) for j in others), tuple(Store(_share(j), j) for j in reversed(others)))]


def _direct_broadcast(n: int, i: int) -> list[Step]:
    if i == 0:
        return [Step((Send(range(n), tuple(range(1, n))),))]
    return [Step(waits=(Store(range(n), 0),))]


def _direct_reduce(n: int, i: int) -> list[Step]:
    if i == 0:
        return [Step(waits=(Reduce(range(n), tuple(range(n)), completes=True),))]
    return [Step((Send(range(n), (0,)),))]


# Halving. Partners exchange halves of what they are still responsible for, at half the distance each step.
#
#   reduce_scatter, 4 members                                    all_gather: the same backwards
#     step 0: 0-{2,3}>2 2-{0,1}>0   1-{2,3}>3 3-{0,1}>1             step 0: 0-0>1 1-1>0  2-2>3 3-3>2
#     step 1: 0-1>1 1-0>0           2-3>3 3-2>2                     step 1: 0-{0,1}>2 2-{2,3}>0 ...
#
# Each: log2(n) alpha + (n-1)/n S beta [+ (n-1)/n S gamma], n a power of two. Rabenseifner 2004.


def _halving_reduce_scatter(n: int, i: int) -> list[Step]:
    result = []
    distance = n // 2
    while distance:
        partner = i ^ distance
        pair = (min(i, partner), max(i, partner))
        result.append(
            Step(
                (Send(_aligned(partner, distance), (partner,)),),
                (Reduce(_aligned(i, distance), pair, completes=distance == 1),),
            )
        )
        distance //= 2
    return result


def _halving_all_gather(n: int, i: int) -> list[Step]:
    result = []
    distance = 1
    while distance < n:
        partner = i ^ distance
        result.append(Step((Send(_aligned(i, distance), (partner,)),), (Store(_aligned(partner, distance), partner),)))
        distance *= 2
    return result


def _aligned(i: int, size: int) -> range:
    start = i // size * size
    return range(start, start + size)


# Halving of a whole all_reduce is recursive doubling: in step t everybody exchanges its whole sum with the member at
# distance 2^t. When n is no power of two, the first members pair up before and after.
#
#   4 members: step 0: 0<>1 2<>3   step 1: 0<>2 1<>3
#   5 members: step 0: 1>0   steps 1, 2: doubling among 0 2 3 4   step 3: 0>1
#
# log2(n) alpha + log2(n) S (beta + gamma), two more steps off a power of two. Thakur, Rabenseifner, Gropp 2005.


def _halving_all_reduce(n: int, i: int) -> list[Step]:
    power = 1 << (n.bit_length() - 1)
    paired = 2 * (n - power)
    everything = range(n)
    if i < paired and i % 2:
        rest = [Step()] * (power.bit_length() - 1)
        return [Step((Send(everything, (i - 1,)),)), *rest, Step(waits=(Store(everything, i - 1),))]

    def member(active: int) -> int:
        return 2 * active if 2 * active < paired else active + paired // 2

    active = i // 2 if i < paired else i - paired // 2
    result = []
    distance = 1
    while distance < power:
        partner = member(active ^ distance)
        pair = (min(i, partner), max(i, partner))
        last = 2 * distance == power
        result.append(Step((Send(everything, (partner,)),), (Reduce(everything, pair, completes=last),)))
        distance *= 2
    if paired:
        fold = Step(waits=(Reduce(everything, (i, i + 1), completes=False),)) if i < paired else Step()
        unfold = Step((Send(everything, (i + 1,)),)) if i < paired else Step()
        result = [fold, *result, unfold]
    return result


# Tree. A binomial tree towards member 0, then away from it.
#
#   reduce, 4 members: step 0: 1>0 3>2   step 1: 2>0          broadcast: step 0: 0>2   step 1: 0>1 2>3
#
# reduce, broadcast: ceil(log2 n) alpha + as many S beta at the root; all_reduce: both. Fewest steps where only one
# member must know; large n. Thakur, Rabenseifner, Gropp 2005.


def _tree_reduce(n: int, i: int) -> list[Step]:
    result = []
    distance = 1
    while distance < n:
        if i % (2 * distance) == distance:
            result.append(Step((Send(range(n), (i - distance,)),)))
        elif i % (2 * distance) == 0 and i + distance < n:
            completes = i == 0 and 2 * distance >= n
            result.append(Step(waits=(Reduce(range(n), (i, i + distance), completes),)))
        else:
            result.append(Step())
        distance *= 2
    return result


def _tree_broadcast(n: int, i: int) -> list[Step]:
    result = []
    distance = 1 << ((n - 1).bit_length() - 1)
    while distance:
        if i % (2 * distance) == distance:
            result.append(Step(waits=(Store(range(n), i - distance),)))
        elif i % (2 * distance) == 0 and i + distance < n:
            result.append(Step((Send(range(n), (i + distance,)),)))
        else:
            result.append(Step())
        distance //= 2
    return result


def _tree_all_reduce(n: int, i: int) -> list[Step]:
    return _tree_reduce(n, i) + _tree_broadcast(n, i)


# Chain: the ring of a broadcast or a reduce. Everything passes from member to member; segments fill the chain, so that
# a big message crosses every link once.
#
#   broadcast, 4 members: step 0: 0>1   step 1: 1>2   step 2: 2>3          reduce: 3>2, 2>1, 1>0
#
# (n-1) alpha + S beta once the chain is full. Watts and van de Geijn 1995.


def _chain_broadcast(n: int, i: int) -> list[Step]:
    result = [Step()] * (n - 1)
    if i > 0:
        result[i - 1] = Step(waits=(Store(range(n), i - 1),))
    if i < n - 1:
        result[i] = Step((Send(range(n), (i + 1,)),))
    return result


def _chain_reduce(n: int, i: int) -> list[Step]:
    result = [Step()] * (n - 1)
    if i < n - 1:
        result[n - 2 - i] = Step(waits=(Reduce(range(n), (i, i + 1), completes=i == 0),))
    if i > 0:
        result[n - 1 - i] = Step((Send(range(n), (i - 1,)),))
    return result


_METHODS: dict[tuple[str, str], Callable[[int, int], list[Step]]] = {
    ("reduce_scatter", "ring"): _ring_reduce_scatter,
    ("reduce_scatter", "direct"): _direct_reduce_scatter,
    ("reduce_scatter", "halving"): _halving_reduce_scatter,
    ("all_gather", "ring"): _ring_all_gather,
    ("all_gather", "direct"): _direct_all_gather,
    ("all_gather", "halving"): _halving_all_gather,
    ("all_reduce", "direct"): _direct_all_reduce,
    ("all_reduce", "halving"): _halving_all_reduce,
    ("all_reduce", "tree"): _tree_all_reduce,
    ("broadcast", "direct"): _direct_broadcast,
    ("broadcast", "tree"): _tree_broadcast,
    ("broadcast", "ring"): _chain_broadcast,
    ("reduce", "direct"): _direct_reduce,
    ("reduce", "tree"): _tree_reduce,
    ("reduce", "ring"): _chain_reduce,
    ("all_to_all", "direct"): _direct_all_to_all,
}
