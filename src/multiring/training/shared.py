"""Parameters that groups which train apart share, as NumPy arrays, and the exchanges that are on their way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from multiring.runtime.buffers import writable
from multiring.runtime.comm import Communicator, group_of
from multiring.runtime.engine import Part
from multiring.training.alike import (
    SUMMANDS,
    Fingerprints,
    check_alike,
    check_fingerprints,
    fingerprint,
    fingerprints,
)
from multiring.training.apart import (
    UnequalRounds,
    check_all_live,
    check_counted,
    check_groups,
    check_keys,
    check_same,
    is_unequal,
    kept_part,
    ranks_of_groups,
    refuse_coarse_wire,
    turns,
    weight_of,
)

Array: TypeAlias = "np.ndarray[Any, Any]"

Move: TypeAlias = Callable[[list[Array], list[Array]], list[Array]]
"""An outer step: from the shared values of trained parameters and their mean change the next shared values."""

_STATE = ("arguments", "groups", "shared", "steps", "turns", "samples", "by_samples", "pace", "in_flight", "bases")


@dataclass
class _ParameterExchange:
    """Changes on their way: sums over all ranks once the parts are done."""

    due: int
    """The step after which the average is applied."""
    late: bool
    counts: Array
    """Samples of all ranks, how many ranks gave their number, how many did not, and fingerprints of shared values.

    With groups of unequal speed also how many ranks are in `finish`, and what they have measured.
    """
    sums: list[Array]
    """One for each number format of trained parameters, then of others."""
    bases: list[Array]
    """The values from which these changes were measured, where exchanges overlap."""
    parts: list[Part] = field(default_factory=list)

    def wait(self) -> None:
        for part in self.parts:
            part.wait()


class SharedParameters:
    """The parameters that all ranks have after an exchange, as NumPy arrays, and the mean of how ranks change them.

    Formats of fewer than 32 bits are kept in float32, as small steps would be rounded away. A rank's own values come in
    with each call, and go back to the caller where an exchange has changed them. The rule is that of
    `multiring.torch.Outer` with one fragment.
    """

    def __init__(
        self,
        communicator: Communicator,
        every: Any,
        groups: Any,
        *,
        delay: Any = 0,
        keep: Any = 0.5,
        unequal: Any = False,
    ) -> None:
        """All ranks make it together. ValueError on one rank for what cannot be, on all where they differ."""
        self._communicator = communicator
        self._every, _, self._delay = turns(every, 1, delay)
        self._keep = kept_part(keep)
        apart = is_unequal(unequal)
        found = ranks_of_groups(communicator, groups)
        given = [
            ("every", self._every),
            ("delay", self._delay),
            ("keep", self._keep),
            ("unequal", apart),
            ("groups", found),
        ]
        for rank, theirs in enumerate(communicator.all_gather_object(given)):
            check_same(given, theirs, rank)
        (mine,) = (number for number, ranks in enumerate(found) if communicator.rank in ranks)
        self._groups, self._first_of_group = found, found[mine][0]
        group = communicator.new_group(found[mine])
        assert group is not None  # this rank is among them
        self.group = group
        """The communicator of this rank's group."""
        self.values: list[Array] = []
        """The shared values, in the order in which `begin` was given them; they are replaced, and never written to."""
        self.steps = 0
        """Number of counted steps."""
        self.rounds = 0
        """Number of exchanges that were begun, with those of `finish`."""
        self.samples = 0.0
        """Samples of all ranks that are in the shared values, the same on all ranks after an exchange was applied."""
        self._names: list[str] = []
        self._trained = 0
        self._begun = 0
        """The step after which the present round began, of equal groups."""
        self._ended = True
        """True if nobody has made a step since the start or the last `finish`; of equal groups."""
        self._own_samples = 0.0
        self._by_samples: bool | None = None
        self._pace = UnequalRounds(self._every, 1, len(found), mine) if apart else None
        self._in_flight: list[_ParameterExchange] = []
        self._fingerprints = Fingerprints(self._every, 1, self._delay)
        self._bases: list[Array] = []
        """The values from which this rank's next changes are measured, if not the shared ones."""

    @property
    def every(self) -> int:
        """Steps between exchanges, of the slowest of unequal groups."""
        return self._every

    @property
    def period(self) -> int:
        """Steps of this rank's group in the present round: ``every``, or of unequal groups as many or more."""
        return self._every if self._pace is None else self._pace.period

    def begin(self, names: Sequence[str], own: Sequence[Array], move: Move, trained: int | None = None) -> None:
        """Take the values of the oldest rank; all call it. ValueError on all where ranks have other parameters.

        ``move`` makes the outer step of the first ``trained`` of them (None: of all); of others the mean is shared.
        """
        forms = [(name, f"{array.dtype.name} of shape {array.shape}") for name, array in zip(names, own, strict=True)]
        for rank, theirs in enumerate(self._communicator.all_gather_object(forms)):
            if len(theirs) != len(forms):
                raise ValueError(f"{len(forms)} parameters are trained here and {len(theirs)} on rank {rank}")
            for here, there in zip(forms, theirs, strict=True):
                if here != there:
                    raise ValueError(
                        f"parameter {here[0]} is {here[1]} here; on rank {rank} {there[0]} is {there[1]}: all ranks "
                        "need the same model"
                    )
        if any(_wide(array.dtype) == np.float32 for array in own):
            refuse_coarse_wire(self._communicator)
        self._names, self._move = list(names), move
        self._trained = len(names) if trained is None else trained
        self.values = [np.array(array, _wide(array.dtype), order="C") for array in own]
        for array in self.values:
            self._communicator.broadcast(array, self._communicator.oldest)
        if self._delay >= self._every:
            self._bases = list(self.values)

    def check_optimizer(self, facts: Mapping[str, Any]) -> None:
        """ValueError, on all ranks, where their outer optimizers differ in what these facts tell; all call it."""
        check_alike(self._communicator, lambda: facts, "give all ranks the same optimizer")

    def step(self, samples: float | None, own: Callable[[], Sequence[Array]], count: int = 1) -> list[Array] | None:
        """Count a step, and this rank's ``samples`` in it; its values, if an average was applied, else None.

        ``count``: steps that were made without a call between them, at most ``every``, each with as many ``samples``.
        ``own`` is asked for the rank's values where something is due. ValueError where ``samples`` are given in some
        steps and not in others, or by some ranks and not by others. PeerLost as soon as a rank is lost.
        """
        weight = weight_of(samples, self._by_samples, self._pace is not None)
        self._by_samples = samples is not None
        if self._pace is not None:
            self._pace.step(count)
        self._ended = False
        self.steps += count
        self._own_samples += weight * count
        check_all_live(self._communicator)
        arrives = bool(self._in_flight) and self._in_flight[0].due <= self.steps
        sends = self._due() <= self.steps
        values = self._checked(own()) if arrives or sends else []
        while self._in_flight and self._in_flight[0].due <= self.steps:
            self._receive(values)
        if sends:
            self._send(values, late=self._delay > 0)
            if not self._delay:
                self._receive(values)
        if self._pace is not None:
            self._pace.go_on()
        return values if arrives or (sends and not self._delay) else None

    def finish(self, own: Sequence[Array]) -> list[Array]:
        """Apply what is on its way, and exchange all that was done since; this rank's values, which all have then.

        All ranks call it. Those of unequal groups take part in the exchanges of others until all have come.
        """
        values = self._checked(own)
        while self._in_flight:
            self._receive(values)
        if self._pace is not None:
            there = 0
            while there < self._communicator.size:
                self._send(values, late=False, at_the_end=True)
                there = self._receive(values)
            self._pace.begin(self.rounds, self.steps)
        elif self._ended:
            self._merge(values, late=False)
        else:
            self._send(values, late=False)
            self._receive(values)
        self._ended, self._begun = True, self.steps
        return values

    def state(self) -> dict[str, Any]:
        """Return the state from which `load` goes on bit for bit; what is on its way is waited for."""
        for one in self._in_flight:
            with self._waiting():
                one.wait()
        return {
            "arguments": [self._every, self._delay, self._pace is not None],
            "groups": [list(ranks) for ranks in self._groups],
            "shared": dict(zip(self._names, (array.copy() for array in self.values), strict=True)),
            "steps": self.steps,
            "turns": [self.rounds, self._begun, self._ended],
            "samples": [self._own_samples, self.samples],
            "by_samples": self._by_samples,
            "pace": None if self._pace is None else self._pace.state(),
            "in_flight": [
                (one.due, one.late, one.counts.copy(), [sum_.copy() for sum_ in one.sums], list(one.bases))
                for one in self._in_flight
            ],
            "bases": list(self._bases),
        }

    def load(self, state: dict[str, Any], optimizer: Callable[[], Iterable[tuple[str, Array]]] = tuple) -> None:
        """Go on from what `state` returned; all ranks call it.

        ``optimizer`` returns arrays of the outer optimizer's state; those of one name are compared together.
        ValueError, on all ranks, if it raises it on one, or one gives a state of other parameters, or of another
        ``every``, ``delay`` or ``unequal``, or they give states of different checkpoints. Then all is as before.
        """
        remedy = "give load_state_dict() the states of one checkpoint on all ranks"
        check_alike(self._communicator, lambda: self._facts(state, optimizer()), remedy)
        for one in self._in_flight:
            one.wait()
        self.values = [state["shared"][name].copy() for name in self._names]
        self.steps, self._by_samples = state["steps"], state["by_samples"]
        self.rounds, self._begun, self._ended = state["turns"]
        self._own_samples, self.samples = state["samples"]
        if self._pace is not None:
            self._pace.load(state["pace"])
        self._in_flight = [
            _ParameterExchange(due, late, counts.copy(), [sum_.copy() for sum_ in sums], list(bases))
            for due, late, counts, sums, bases in state["in_flight"]
        ]
        self._bases = list(state["bases"])
        self._fingerprints.forget()
        self._note()

    def _check_state(self, state: dict[str, Any]) -> None:
        """ValueError if a state is that of another Outer."""
        check_keys(state, _STATE, "Outer")
        here = [self._every, self._delay, self._pace is not None]
        for name, mine, theirs in zip(("every", "delay", "unequal"), here, state["arguments"], strict=True):
            if mine != theirs:
                raise ValueError(f"{name}={mine}, and this state is of {name}={theirs}")
        is_apart = bool(state["in_flight"] or state["samples"][0])
        check_groups(state["groups"], self._groups, is_apart=is_apart, unequal=self._pace is not None)
        if self._pace is not None:
            self._pace.check(state["pace"])
        forms = {name: array.shape for name, array in zip(self._names, self.values, strict=True)}
        given = {name: array.shape for name, array in state["shared"].items()}
        if forms != given:
            name = next(name for name in [*forms, *given] if forms.get(name) != given.get(name))
            raise ValueError(f"parameter {name} has shape {given.get(name)} in this state, here {forms.get(name)}")

    def _facts(self, state: dict[str, Any], optimizer: Iterable[tuple[str, Array]]) -> dict[str, Any]:
        """The facts that ranks must have alike in the states of one checkpoint.

        Groups of unequal speed make other steps, and may have applied fewer exchanges: these are told apart by name.
        """
        self._check_state(state)
        rounds, begun, ended = state["turns"]
        applied = rounds - len(state["in_flight"])
        place = "" if self._pace is None else f" in the group of rank {self._first_of_group}"
        after = f"after exchange {applied}"
        facts = {
            "number of exchanges sent": rounds,
            "samples given to step()": state["by_samples"],
            f"steps{place}": state["steps"],
            f"steps before the present round{place}": begun,
            f"no step since the last finish(){place}": ended,
            f"steps after which exchanges on their way are due{place}": [each[0] for each in state["in_flight"]],
            f"samples of all ranks {after}": state["samples"][1],
            f"shared values {after}": fingerprint(state["shared"][name] for name in self._names[: self._trained]),
            f"shared values that are not trained {after}": fingerprint(
                state["shared"][name] for name in self._names[self._trained :]
            ),
            **fingerprints(f"state of the outer optimizer {after}", optimizer),
        }
        for number, (_, _, counts, sums, _) in enumerate(state["in_flight"], applied + 1):
            facts[f"samples in exchange {number}"] = float(counts[0])
            facts[f"sums of exchange {number}"] = fingerprint(sums)
        return facts

    # --- exchanges ---

    def _due(self) -> int:
        return self._begun + self._every if self._pace is None else self._pace.due(self.rounds)

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._pace is None else self._pace.waiting()

    def _checked(self, own: Sequence[Array]) -> list[Array]:
        for name, shared, array in zip(self._names, self.values, own, strict=True):
            if array.shape != shared.shape:
                raise ValueError(f"parameter {name} has shape {array.shape}, and had {shared.shape} at the start")
        return list(own)

    def _send(self, own: list[Array], *, late: bool, at_the_end: bool = False) -> None:
        """Start an exchange: this rank's changes, times its samples, to be summed over all ranks."""
        weight = self._own_samples
        flat: dict[tuple[str, bool], list[Array]] = {}
        for number, array in enumerate(own):
            change = self._change(number, array)
            # What a rank that has not trained has counts for nothing, also where it is NaN.
            change = change * change.dtype.type(weight) if weight else np.zeros_like(change)
            flat.setdefault(self._kind(number), []).append(change.reshape(-1))
        sums = [np.concatenate(parts) for parts in flat.values()]
        numbers = [weight, self._by_samples is True, self._by_samples is False]
        numbers += self._fingerprints.summands(self.rounds)
        if self._pace is not None:
            numbers += [at_the_end, *self._pace.measured(self.rounds)]
        counts = np.array(numbers, np.float64)  # exact up to 2**53: 104 days of nanoseconds
        group = group_of(self._communicator)
        with self._waiting():  # `start` waits where too many calls are under way
            parts = [group.start("all_reduce", writable(x)) for x in (counts, *sums) if x.size]
        due = min(self._due(), self.steps) + self._delay
        self._in_flight.append(_ParameterExchange(due, late, counts, sums, self._bases, parts))
        if self._bases:
            self._bases = [array.astype(shared.dtype) for shared, array in zip(self.values, own, strict=True)]
        if self._pace is not None:
            self._pace.sent(self.rounds)
        self.rounds += 1
        self._begun += self._every
        self._own_samples = 0.0

    def _receive(self, own: list[Array]) -> int:
        """End the oldest exchange that is on its way; of unequal groups return how many ranks were in `finish`."""
        exchange = self._in_flight[0]
        with self._waiting():
            exchange.wait()
        del self._in_flight[0]
        samples, with_samples, without, *others = exchange.counts.tolist()
        prints, others = others[:SUMMANDS], others[SUMMANDS:]
        check_counted(with_samples, without)
        check_fingerprints(prints, "shared values")
        if samples:  # else nobody has trained, and momentum must not move the parameters
            mean = self._mean(exchange.sums, samples)
            rest = zip(self.values[self._trained :], mean[self._trained :], strict=True)
            moved = self._move(self.values[: self._trained], mean[: self._trained])
            self.values = [*moved, *(np.asarray(shared - change) for shared, change in rest)]
        self._note()
        self.samples += samples
        self._merge(own, exchange.late)
        if self._pace is None:
            return 0
        self._pace.learn([int(measured) for measured in others[1:]], self.steps)
        return int(others[0])

    def _note(self) -> None:
        """Take the fingerprint of the shared parameters after the last exchange; others may be much larger."""
        self._fingerprints.note(self.rounds - len(self._in_flight) - 1, self.values[: self._trained])

    def _mean(self, sums: list[Array], samples: float) -> list[Array]:
        """The mean change of each parameter, from the sums by kind."""
        left = dict(zip(dict.fromkeys(map(self._kind, range(len(self.values)))), sums, strict=True))
        mean = []
        for number, shared in enumerate(self.values):
            kind = self._kind(number)
            part, left[kind] = left[kind][: shared.size], left[kind][shared.size :]
            mean.append((part / shared.dtype.type(samples)).reshape(shared.shape))
        return mean

    def _merge(self, own: list[Array], late: bool) -> None:
        """This rank's own values after an exchange, in place of those in ``own``."""
        if late and self._bases:
            self._merge_beside(own)
            return
        for number, (array, shared) in enumerate(zip(own, self.values, strict=True)):
            after = self._drawn(array.astype(shared.dtype), shared) if late else shared
            own[number] = after.astype(array.dtype)
        if self._bases:
            self._bases = [array.astype(shared.dtype) for shared, array in zip(self.values, own, strict=True)]

    def _merge_beside(self, own: list[Array]) -> None:
        """The same where further changes are under way: these, and what is not sent, are kept.

        The base, from which the rank measures, is drawn to the shared values, and its own values move with it.
        """
        drawn = []
        for number, (array, base, shared) in enumerate(zip(own, self._bases, self.values, strict=True)):
            unsent = self._change(number, array)
            wanted = shared
            if self._in_flight:
                wanted = shared + self._difference(number, base, self._in_flight[0].bases[number])
            after = self._drawn(base, wanted)
            own[number] = np.asarray(after - unsent, array.dtype)
            # The rounding is no change that the rank has made.
            drawn.append(after if array.dtype == after.dtype else own[number].astype(after.dtype) + unsent)
        for exchange in self._in_flight:
            exchange.bases = [
                np.asarray(before + self._difference(number, after, base))
                for number, (before, after, base) in enumerate(zip(exchange.bases, drawn, self._bases, strict=True))
            ]
        self._bases = drawn

    def _drawn(self, values: Array, to: Array) -> Array:
        if not self._keep:
            return to  # 0 times infinity would be NaN
        keep = to.dtype.type(self._keep)
        return np.asarray(values * keep + to * (1 - keep))

    def _change(self, number: int, own: Array) -> Array:
        """The values after the last exchange, rounded as the rank was given them, less its present ones."""
        shared = self.values[number]
        base = self._bases[number] if self._bases else shared.astype(own.dtype).astype(shared.dtype)
        return self._difference(number, base, own.astype(shared.dtype))

    def _difference(self, number: int, first: Array, second: Array) -> Array:
        if number < self._trained:
            return np.asarray(first - second)
        with np.errstate(invalid="ignore"):  # infinite ones, of a mask say, have no difference, and NaN neither
            same = (first == second) | (np.isnan(first) & np.isnan(second))
            return np.where(same, first.dtype.type(0), first - second)

    def _kind(self, number: int) -> tuple[str, bool]:
        """The number format in which a change is sent, and whether it is trained.

        Others may hold infinities or NaN: on a wire in blocks those would be in the way of parameters beside them.
        """
        return self.values[number].dtype.name, number < self._trained


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype
