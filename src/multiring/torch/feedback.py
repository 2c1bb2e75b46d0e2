"""Residuals: what gradients lose on narrow wires, kept by parameter and sent in a later step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from multiring.runtime.comm import Communicator
from multiring.torch.broadcast import named_pairs
from multiring.training.apart import check_keys


class NamedSlot(NamedTuple):
    """A parameter's place in a bucket: its name, its first element there, and how many it has."""

    name: str
    start: int
    elements: int


Layout: TypeAlias = "tuple[list[NamedSlot], int]"
"""A bucket: its slots, and the number of its elements."""


class Feedback:
    """Memory of the rounding errors of gradients that travel in a narrow format (`MULTIRING_WIRE`).

    Each rank keeps what it has lost of each gradient of float32, and adds it to that gradient in the next step, so that
    all of it arrives in the end. It takes as much memory as the gradients, and holds zeros where no wire is narrow.
    Every rank saves and loads its own; where the ranks of the job change, it starts from zeros. It serves one model:
    two would owe each other's errors. Source: error feedback (Seide et al. 2014; Karimireddy et al. 2019, arXiv
    1901.09847).
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, Tensor]] | None = None, *, group: Communicator | None = None
    ) -> None:
        """``named_parameters``: as from ``model.named_parameters()``, which `comm_hook` needs, and nobody else.

        ``group``: the communicator over which `comm_hook` averages, such as that of `Outer`; None for the default one.
        ValueError where two parameters have one name.
        """
        self.group = group
        pairs = named_pairs(named_parameters or ())
        check_names([name for name, _ in pairs])
        self._names = {id(parameter): (name, parameter) for name, parameter in pairs}
        self._serves = dict(pairs)
        self._owed: dict[str, Tensor] = {}
        self._flat: dict[tuple[NamedSlot, ...], Tensor] = {}
        self._communicator: Communicator | None = None
        self._loaded_of: tuple[int, ...] | None = None
        self._is_loaded = False
        """True if what is owed was loaded, and has not been used yet."""
        self._loaded_buckets: list[Layout] = []
        """The buckets in which what was loaded was owed, until buckets like them have been made here."""
        self._agreed_buckets: list[Layout] = []
        """Rank 0's loaded buckets, on all ranks, but for those that the pass after that has met."""
        self._units: str | None = None
        """The operation in whose units it is owed."""

    def reset(self) -> None:
        """Forget what was lost; all ranks do, after a jump of the parameters, say."""
        for owed in self._owed.values():
            owed.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which this rank goes on, bit for bit; each rank saves its own, between two steps."""
        bound = self._communicator
        of = self._loaded_of if bound is None else (bound.rank, bound.size)
        owed = {name: owed.clone() for name, owed in self._owed.items()}
        made = [(slots, flat.numel()) for slots, flat in self._flat.items()]
        buckets = [([tuple(slot) for slot in slots], count) for slots, count in made or self._loaded_buckets]
        return {"of": of, "units": self._units, "owed": owed, "buckets": buckets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank.

        ValueError if it is of another rank, of a job of another size, or of other parameters, at once or where it is
        first used. After `multiring.shutdown`, `shrink` or `grow` it is loaded into a new `Feedback`.
        """
        check_keys(state, ("of", "units", "owed"), "Feedback")
        of = None if state["of"] is None else tuple(state["of"])
        if self._communicator is not None and state["owed"]:
            _check_owner(of, self._communicator)
        for name, owed in state["owed"].items():
            if name in self._owed:
                _check_size(name, owed.numel(), self._owed[name].numel())
        self.reset()
        for name, owed in state["owed"].items():
            if name in self._owed:
                self._owed[name].copy_(owed)
            else:
                self._owed[name] = owed.clone()
        self._loaded_of, self._units, self._is_loaded = of, state["units"], True
        self._loaded_buckets = [
            ([NamedSlot(*slot) for slot in slots], count) for slots, count in state.get("buckets", [])
        ]

    # --- for those who reduce ---

    def serve(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Keep what these parameters lose; ValueError if two have one name, or others of theirs are served already."""
        check_names([name for name, _ in named])
        for name, parameter in named:
            if self._serves.setdefault(name, parameter) is not parameter:
                raise ValueError(
                    f"this Feedback keeps what another parameter called {name} loses, and would add it to this one: "
                    "make a Feedback for each model and each DistributedOptimizer, and load there what one has saved"
                )

    def bind(self, communicator: Communicator) -> bool:
        """Serve the ranks of a communicator; other ones than before have lost other things, so nothing is owed then.

        What was loaded since, if it is of this rank, is owed. Returns whether the communicator is another one.
        ValueError if this is of another group.
        """
        if self.group not in (None, communicator):
            raise ValueError(
                f"this Feedback is of the group of {self.group.size} ranks that it was made with, and gradients are "
                f"averaged over {communicator.size} others: give both the same group"
            )
        if communicator is self._communicator:
            return False
        if self._is_loaded:
            if self._owed:
                _check_owner(self._loaded_of, communicator)
        elif self._communicator is not None:
            self.reset()
        self._communicator = communicator
        return True

    def agree_on_buckets(self) -> None:
        """Go by rank 0's loaded buckets on all ranks, which call it before their first bucket."""
        assert self._communicator is not None
        self._agreed_buckets, self._loaded_buckets = self._communicator.broadcast_object(self._loaded_buckets), []

    def take_order(self, names: Sequence[str]) -> list[int]:
        """The indices among ``names`` of those in loaded buckets, in the order there; only once."""
        index = {name: number for number, name in enumerate(names)}
        order = [index[slot.name] for slots, _ in self._loaded_buckets for slot in slots if slot.name in index]
        self._loaded_buckets = []
        return order

    def take_buckets(self, slots: Sequence[NamedSlot]) -> list[Layout]:
        """The agreed buckets that together hold what these slots do, once; an empty list if there are none."""
        if not self._agreed_buckets:
            return []
        elements = {slot.name: slot.elements for slot in slots}
        found = [each for each in self._agreed_buckets if any(slot.name in elements for slot in each[0])]
        self._agreed_buckets = [each for each in self._agreed_buckets if each not in found]
        held = [(slot.name, slot.elements) for each, _ in found for slot in each]
        return found if sorted(held) == sorted(elements.items()) else []

    def in_units(self, op: str) -> None:
        """Serve sums by this operation; what is owed in units of another one is forgotten."""
        if self._units not in (None, op):
            self.reset()
        self._units, self._is_loaded = op, False

    def of_bucket(self, slots: Sequence[NamedSlot], count: int) -> Tensor:
        """The residual of a bucket of ``count`` elements; what its parameters have lost in other buckets is moved."""
        key = tuple(slots)
        if key not in self._flat:
            check_names([slot.name for slot in slots])
            for name, _, elements in slots:
                if name in self._owed:
                    _check_size(name, self._owed[name].numel(), elements)
            names = {slot.name for slot in slots}
            self._flat = {known: flat for known, flat in self._flat.items() if names.isdisjoint(p.name for p in known)}
            self._flat[key] = flat = torch.zeros(count, dtype=torch.float32, device="cpu")
            for name, start, elements in slots:
                place = flat[start : start + elements]
                if name in self._owed:
                    place.copy_(self._owed[name])
                self._owed[name] = place
        return self._flat[key]

    def slots(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], buffer: Tensor) -> list[NamedSlot]:
        """Return the slots of these parameters' gradients in a buffer; ValueError for a parameter without a name."""
        found = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if id(parameter) not in self._names:
                raise ValueError(
                    f"Feedback knows no parameter of shape {tuple(parameter.shape)} that is trained: make it with the "
                    "model's, Feedback(model.named_parameters())"
                )
            name, _ = self._names[id(parameter)]
            start = (gradient.data_ptr() - buffer.data_ptr()) // buffer.element_size()
            found.append(NamedSlot(name, start, gradient.numel()))
        return found


def check_names(names: Sequence[str]) -> None:
    """ValueError if two parameters have one name, by which what they lose is kept."""
    twice = min((name for name, times in Counter(names).items() if times > 1), default=None)
    if twice is not None:
        raise ValueError(
            f"two parameters are called {twice}: Feedback keeps what is lost by name, so give them names of their "
            "own, as from one model's named_parameters()"
        )


def _check_size(name: str, given: int, here: int) -> None:
    if given != here:
        raise ValueError(
            f"this state has {given} elements of {name}, and the parameter has {here}: it is of another model"
        )


def _check_owner(of: tuple[int, ...] | None, communicator: Communicator) -> None:
    here = (communicator.rank, communicator.size)
    if of != here:
        whose = "no job" if of is None else f"rank {of[0]} of {of[1]}"
        raise ValueError(
            f"this state of Feedback is of {whose}, and this is rank {here[0]} of {here[1]}: load what this rank has "
            "saved, or where the job has another size nothing, which costs one rounding"
        )
