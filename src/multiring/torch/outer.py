"""Outer optimization: groups that train apart and seldom exchange how their parameters have changed."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from multiring import api
from multiring.errors import MultiringError
from multiring.job.survivors import Agreement
from multiring.runtime.buffers import writable
from multiring.runtime.comm import Communicator, group_of
from multiring.runtime.engine import Part
from multiring.torch.broadcast import broadcast_optimizer_state, broadcast_parameters
from multiring.torch.buffers import form, reducible
from multiring.torch.comparison import tensors_within
from multiring.torch.process_group import MultiringGroup
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


@dataclass(frozen=True)
class _Entry:
    """A parameter or a buffer: where this rank's own values are, and those that all ranks share."""

    name: str
    own: Callable[[], Tensor]
    shared: Tensor
    trained: bool
    """True if the outer optimizer moves it; the change of a buffer is averaged and that is all."""


_Sum: TypeAlias = "tuple[torch.dtype, bool]"
"""The kind of a piece that is sent: changes of one format, of parameters or (False) of buffers.

A buffer may hold infinities or NaN: on a wire in blocks those would be in the way of parameters beside them.
"""

_STATE = (
    "arguments",
    "groups",
    "steps",
    "turns",
    "samples",
    "counted",
    "is_apart",
    "by_samples",
    "pace",
    "shared",
    "optimizer",
    "in_flight",
    "bases",
)


@dataclass(frozen=True)
class _Standing:
    """The place at which a rank is when another is lost."""

    applied: int
    first: int
    steps: int
    origin: int
    counted: list[float]
    is_apart: bool
    pace: Any


@dataclass
class _FragmentExchange:
    """A fragment's changes on their way: sums over all ranks once the parts are done."""

    number: int
    due: int
    """The step after which the average is applied."""
    late: bool
    samples: float
    counts: np.ndarray[Any, Any]
    """Samples of all ranks, how many ranks gave their number, how many did not, and fingerprints of shared values.

    With groups of unequal speed also how many ranks are in `finish`, and what they have measured.
    """
    sums: list[Tensor]
    bases: dict[str, Tensor] = field(default_factory=dict)
    """With several exchanges of a fragment on their way: the values from which these changes were measured."""
    parts: list[Part] = field(default_factory=list)

    def wait(self) -> None:
        for part in self.parts:
            part.wait()


class Outer:
    """Exchanges parameters between groups of ranks every some steps, through an outer optimizer.

    Within a group gradients are averaged in each step, as ever: by DistributedDataParallel over `process_group`, or by
    `DistributedOptimizer` over `group`. After each step of the inner optimizer all ranks call `step`; every ``every``
    steps the change of the parameters since the last exchange is averaged over all samples of all ranks, and the outer
    optimizer takes it for its gradient. Then all ranks have the same parameters, bit for bit where they have the same
    torch and the same kind of processor: each rank makes the outer step itself. Source: DiLoCo (Douillard et al. 2023,
    arXiv 2311.08105); with fragments and delay Streaming DiLoCo (arXiv 2501.18512).

    With ``unequal`` groups make unequal numbers of steps in the same time. Then a training goes on ``while
    outer.rounds < number`` or ``outer.samples < number``, which all groups reach at the same exchange.

    The sum goes over all ranks by the plan for the topology, so each byte crosses the links between groups as seldom as
    in any all-reduce. Shared values and the outer optimizer's state lie in the CPU's memory: twice the parameters with
    momentum. Buffers of floating point, such as a batch norm's, are averaged with the last fragment; others stay.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[Tensor],
        every: int,
        *,
        groups: str | Sequence[Sequence[int]] | None = None,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        fragments: int = 1,
        delay: int = 0,
        keep: float = 0.5,
        wire: str | None = None,
        unequal: bool = False,
    ) -> None:
        """All ranks make it together, before DistributedDataParallel; they get what the oldest rank has.

        ``model`` may be its parameters, and then there are no buffers; frozen ones take no part. ``groups``: a level of
        the topology (rank, host, rack, site), whose places are the groups; lists of ranks, each rank in one; None: the
        outermost level that has several places. ``optimizer`` makes the outer one of the shared parameters; None: SGD
        at 1 without momentum, which averages the parameters.

        ``fragments``: parts of about equal bytes that take turns, each every ``every`` steps. ``delay``: steps between
        sending a fragment's changes and applying their average, during which training goes on. The rank's own values
        then count with weight ``keep``: own = keep x own + (1 - keep) x shared. With delay 0 ranks wait, and nothing is
        kept. From ``every`` steps on, up to 4 times as many, further exchanges begin before the average has come, and
        shared stands for the shared values with this rank's own changes that are not yet in them. ``wire="bfloat16"``:
        changes travel in that format.

        ``unequal``: the slowest group makes ``every`` steps between exchanges, and a faster one as many as it can in
        that time, from what all have measured in the round before; ``samples`` are given in every step then.

        ValueError on the rank that gives invalid numbers, groups or parameters; the others wait until it ends.
        ValueError on all ranks where they differ in models, arguments or outer optimizers.
        """
        self._every, self._parts, self._delay = turns(every, fragments, delay)
        self._keep = kept_part(keep)
        if optimizer is not None and not callable(optimizer):
            given = repr(optimizer) if isinstance(optimizer, str) else f"of type {type(optimizer).__name__}"
            raise TypeError(
                f"optimizer is {given}: give a function that makes the outer one of the shared parameters, such as "
                "lambda parameters: torch.optim.SGD(parameters, lr=1.0)"
            )
        if wire not in (None, "bfloat16"):
            raise ValueError(f"wire={wire!r}: changes travel as they are (None) or as 'bfloat16'")
        unequal = is_unequal(unequal)
        self._wire = None if wire is None else torch.bfloat16
        self._arguments = [self._every, self._parts, self._delay, wire]
        self._parameters = _parameters(model)
        named, frozen, buffers = _tensors(model, self._parameters())
        if self._parts > len(named):
            raise ValueError(f"fragments={fragments}: the model has {len(named)} parameters to train")
        self._communicator = api.joined(None)
        found = ranks_of_groups(self._communicator, groups)
        members = self._communicator.world.membership.members
        self._groups = [[members[rank] for rank in ranks] for ranks in found]
        """The ranks that each group had at the job's start, which no loss changes."""

        arguments = [self._every, self._parts, self._delay, self._keep, wire, unequal, found]
        _compare_arguments(self._communicator, arguments, named)
        start = dict([*named, *frozen, *buffers])
        broadcast_parameters(start, self._communicator.oldest, group=self._communicator)

        self._fragments = _cut_in_fragments(model, named, buffers, self._parts)
        everything = [entry for fragment in self._fragments for entry in fragment]
        if any(self._kind(entry) == torch.float32 for entry in everything):
            refuse_coarse_wire(self._communicator)
        entries = [entry for entry in everything if entry.trained]
        parameters = [nn.Parameter(entry.shared, requires_grad=False) for entry in entries]
        self._gradients = {entry.name: parameter for entry, parameter in zip(entries, parameters, strict=True)}
        self.optimizer = _outer_optimizer(optimizer, parameters)
        """The outer optimizer, for schedules of its learning rate; the same on all ranks."""
        facts = {"the outer optimizer's class": _full_name(self.optimizer), **_settings(self.optimizer.state_dict())}
        check_alike(self._communicator, lambda: facts, "give all ranks the same optimizer")

        self._steps = 0
        self._first, self._origin = 0, 0
        """Number of the first turn since the start or the last `finish`, and the step after which it began."""
        self._turn = 0
        """The number of the next fragment to be sent; fragments take turns."""
        self._applied = 0
        """Number of turns that have ended."""
        self._samples = [0.0] * self._parts
        self._bases: dict[str, Tensor] = {}
        """The values from which this rank's next changes are measured, if not the shared ones."""
        if self._delay >= self._every:
            self._bases = {entry.name: entry.shared.clone() for entry in everything}
        self._counted = [0.0] * self._parts
        """Samples of all ranks in the exchanges that were applied."""
        self._by_samples: bool | None = None
        (mine,) = (number for number, ranks in enumerate(found) if self._communicator.rank in ranks)
        self._pace = UnequalRounds(self._every, self._parts, len(found), mine) if unequal else None
        self._through = False
        """True if a loss has met some ranks after `finish`, which all call again then, and no step was made since."""
        self._is_apart = False
        """True if a loss has met groups at different steps, which they keep: some make a step more to an exchange."""
        self._in_flight: list[_FragmentExchange] = []
        self._fingerprints = Fingerprints(self._every, self._parts, self._delay)
        self._group, self._process_group = _make_group(self._communicator, self._ranks_of_group(self._communicator))

    @property
    def group(self) -> Communicator:
        """The communicator of this rank's group, as `DistributedOptimizer` and `sync_state` take it."""
        return self._group

    @property
    def process_group(self) -> dist.ProcessGroup:
        """This rank's group in torch, as DistributedDataParallel takes it.

        ValueError where torch.distributed was not initialized, with the same ranks, when this was made.
        """
        if self._process_group is None:
            raise ValueError(
                "torch.distributed was not initialized, with the ranks of multiring, when Outer was made: call "
                "init_process_group before, or use DistributedOptimizer(..., group=outer.group)"
            )
        return self._process_group

    @property
    def steps(self) -> int:
        """Number of counted steps: a training goes on from it after `rebuild`, the same on all ranks of a group."""
        return self._steps

    @property
    def rounds(self) -> int:
        """Number of times that all parameters were sent, with `finish`; all ranks come to it at the same exchange."""
        return self._turn // self._parts

    @property
    def samples(self) -> float:
        """Samples of all ranks that are in the shared values, the same on all ranks after an exchange was applied."""
        return min(self._counted)

    @property
    def period(self) -> int:
        """Steps of this rank's group in the present round: ``every``, or with ``unequal`` as many or more."""
        return self._every if self._pace is None else self._pace.period

    def step(self, samples: float | None = None) -> bool:
        """Count a step of the inner optimizer, and exchange what is due; whether an average was applied.

        ``samples``: how many this rank has trained on in the step, by which its changes count; on all ranks or on none,
        where each step of each rank counts the same; with ``unequal`` they have to be given. ValueError where some give
        them and others do not. A step in which PeerLost is raised was counted.
        """
        self._check()
        weight = weight_of(samples, self._by_samples, self._pace is not None)
        self._by_samples = samples is not None
        self._through = False
        if self._pace is not None:
            self._pace.step()
        self._steps += 1
        self._samples = [sum_so_far + weight for sum_so_far in self._samples]
        before = self._applied
        while self._in_flight and self._in_flight[0].due <= self._steps:
            self._receive()
        check_all_live(self._communicator)  # an exchange that has ended is applied first, for it has all ranks' changes
        while self._due(self._turn) <= self._steps:
            while len(self._under_way(self._turn % self._parts)) >= max(1, -(-self._delay // self._every)):
                self._receive()  # after a loss turns may be late
            turn = self._turn
            self._send(late=self._delay > 0)
            if self._pace is not None:
                self._pace.sent(turn)
            if not self._delay:
                self._receive()
        if self._pace is not None:
            self._pace.go_on()
        return self._applied > before

    def finish(self) -> None:
        """Exchange now: apply what is on its way, and exchange all that was done since; all ranks call it.

        Afterwards all have the same parameters, as at the end of training they should. It counts as a round, unless
        nobody has made a step since the last `finish`: then nothing changes. After a loss in it, and `rebuild`, all
        call it again, even those that are through.

        With ``unequal`` a group may come to it while others still train: it takes part in their exchanges, without
        samples, until all have come.
        """
        self._check()
        self._check_parameters()
        ended = (self._first, self._origin) == (self._turn, self._steps)  # also where others were through before a loss
        if ended and (self._pace is None or self._through):
            for number in range(self._parts):
                self._merge(number, late=False)
            return
        while self._in_flight:
            self._receive()
        if self._pace is not None:
            together = 0
            while together < self._parts:
                self._send(late=False, at_the_end=True)
                together = together + 1 if self._receive() == self._communicator.size else 0
            self._communicator.barrier()
            self._end_round(self._turn, self._steps)
            return
        while self._due(self._turn) <= self._steps:  # broken off by a loss; a group that is behind makes it in a step
            self._send(late=self._delay > 0)
            self._receive()
        for _ in range(self._parts):
            self._send(late=False)
            self._receive()
        self._communicator.barrier()  # nobody leaves before all have applied it: after a loss they would lack a rank
        self._end_round(self._turn, self._steps)

    def _end_round(self, turn: int, step: int) -> None:
        """All have the same parameters before this turn, after this step."""
        self._first, self._origin = turn, step
        if self._pace is not None:
            self._pace.begin(turn, step)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Within it the model has the values that all ranks share, those after the last exchanges; then its own again.

        This rank alone can do it, such as to validate or to save a model: nothing is sent.
        """
        entries = [entry for fragment in self._fragments for entry in fragment]
        with torch.no_grad():
            own = [entry.own().detach().clone() for entry in entries]
        try:
            with torch.no_grad():
                for entry in entries:
                    entry.own().copy_(entry.shared)
            yield
        finally:
            with torch.no_grad():
                for entry, values in zip(entries, own, strict=True):
                    entry.own().copy_(values)

    def rebuild(self, agreement: Agreement) -> None:
        """Go on without ranks that were lost: all survivors call it with what `shrink` returned.

        Groups are made anew without the lost ranks. What those have done since the last exchange is lost, and nothing
        else: an exchange that was under way and reached some ranks reaches all, another is made when its turn comes
        again. Within a group some may be a step ahead: then ``sync_state(model, optimizer, group=outer.group)``, by
        which all go on from the group's oldest rank, after step number `steps`. A DistributedOptimizer over `group` is
        made anew. Where it raises PeerLost itself, values are as before: `shrink`, and call it again.
        ValueError after `grow`: newcomers have no shared values; call `finish` before it and make a new `Outer` after.
        """
        if not isinstance(agreement, Agreement):
            raise TypeError(f"agreement={agreement!r}: give rebuild() what multiring.torch.shrink() has returned")
        communicator = api.joined(None)
        if communicator is self._communicator or len(agreement.members) != communicator.size:
            raise ValueError(
                f"this agreement is of {len(agreement.members)} ranks, the job has {communicator.size}, and Outer was "
                f"made for {self._communicator.size}: call rebuild() once, with what multiring.torch.shrink() returned"
            )
        generation, entered = self._communicator.world.membership.generation, communicator.world.membership.entered
        for rank, before in enumerate(agreement.members):
            if before == -1 or entered[rank] > generation:
                raise ValueError(
                    f"rank {rank} was admitted by grow(), and has no shared values: call finish() before grow(), and "
                    "make a new Outer on all ranks after it"
                )
        mine = self._ranks_of_group(communicator)
        group, process_group = _make_group(communicator, mine)
        told = communicator.all_gather_object(
            _Standing(
                self._applied,
                self._first,
                self._steps,
                self._origin,
                list(self._counted),
                self._is_apart,
                None if self._pace is None else self._pace.state(),
            )
        )
        most = max(one.applied for one in told)
        root = [one.applied for one in told].index(most)
        shared = {entry.name: entry.shared for fragment in self._fragments for entry in fragment}
        if any(one.applied < most for one in told):
            # Another rank may be lost meanwhile, even the root: what has come in part is not to be gone on from.
            shared = {name: tensor.clone() for name, tensor in shared.items()}
            broadcast_parameters(shared, root, group=communicator)
            broadcast_optimizer_state(self.optimizer, root, group=communicator)  # loads it when all has come

        # From here on nothing is sent, and so nothing fails half-way.
        self._communicator, self._group, self._process_group = communicator, group, process_group
        self._catch_up(most, shared)
        # A group's ranks send at the same step, which is that of the model that they go on with.
        oldest = told[mine[group.oldest]]
        self._first, self._steps, self._origin = oldest.first, oldest.steps, oldest.origin
        self._counted = list(told[root].counted)
        self._is_apart = any(one.is_apart or one.steps != told[0].steps for one in told)
        if self._pace is not None:
            self._pace.load(oldest.pace)
            members = set(communicator.world.membership.members)
            present = [number for number, ranks in enumerate(self._groups) if members & set(ranks)]
            self._pace.survive(told[root].pace["speeds"], present, most, self._steps)
        first = max(one.first for one in told)
        self._through = any(one.first < first for one in told)
        if first > self._first:  # others have called `finish`
            self._end_round(first, self._steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which `load_state_dict` goes on bit for bit, besides model and inner optimizer.

        Nothing is sent; what is on its way is waited for. The shared part is the same on all ranks, and each rank, or
        one of each group, saves its own model.
        """
        with self._waiting():
            for turn in self._in_flight:
                turn.wait()
        return {
            "arguments": list(self._arguments),
            "groups": self._present_groups(),
            "steps": self._steps,
            "turns": [self._turn, self._applied, self._first, self._origin],
            "samples": list(self._samples),
            "counted": list(self._counted),
            "is_apart": self._is_apart,
            "pace": None if self._pace is None else self._pace.state(),
            "by_samples": self._by_samples,
            "shared": {entry.name: entry.shared.clone() for fragment in self._fragments for entry in fragment},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "in_flight": [
                (
                    one.number,
                    one.due,
                    one.late,
                    one.samples,
                    one.counts.tolist(),
                    [sum_.clone() for sum_ in one.sums],
                    dict(one.bases),
                )
                for one in self._in_flight
            ],
            "bases": dict(self._bases),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; all ranks call it, and load their models and inner optimizers too.

        With ``unequal`` they do so before the loop, as they come to its steps at different times. ValueError, on all
        ranks, if one gives a state of other parameters, or of another ``every``, ``fragments``, ``delay``, ``wire`` or
        ``unequal``, or they give states of different checkpoints. So is a state of other groups, unless it is from
        after `finish`, without ``unequal``. Then all is as before.
        """
        remedy = "give load_state_dict() the states of one checkpoint on all ranks"
        check_alike(self._communicator, lambda: self._facts(state), remedy)
        entries = {entry.name: entry for fragment in self._fragments for entry in fragment}
        for turn in self._in_flight:
            turn.wait()
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # it may refuse, and keeps what it is given
        for name, tensor in state["shared"].items():
            entries[name].shared.copy_(tensor)
        self._steps = state["steps"]
        self._turn, self._applied, self._first, self._origin = state["turns"]
        self._samples = list(state["samples"])
        self._counted = list(state["counted"])
        self._is_apart = state["is_apart"]
        self._through = False
        if self._pace is not None:
            self._pace.load(state["pace"])
        self._by_samples = state["by_samples"]
        self._in_flight = [
            _FragmentExchange(
                number, due, late, samples, np.array(counts), [sum_.clone() for sum_ in sums], dict(bases)
            )
            for number, due, late, samples, counts, sums, bases in state["in_flight"]
        ]
        self._bases = dict(state["bases"])
        self._note_all()

    def _check_state(self, state: dict[str, Any]) -> None:
        """ValueError if a state is that of another Outer."""
        check_keys(state, _STATE, "multiring.torch.Outer")
        if list(state["arguments"]) != self._arguments:
            raise ValueError(
                f"this state is of every, fragments, delay, wire = {state['arguments']}, and this Outer has "
                f"{self._arguments}"
            )
        if (state["pace"] is None) != (self._pace is None):
            raise ValueError(
                f"this state is of unequal={state['pace'] is not None}, and this Outer has unequal="
                f"{self._pace is not None}"
            )
        is_apart = bool(state["in_flight"] or any(state["samples"]))
        check_groups(state["groups"], self._present_groups(), is_apart=is_apart, unequal=self._pace is not None)
        if self._pace is not None:
            self._pace.check(state["pace"])
        ours = {entry.name: form(entry.shared) for fragment in self._fragments for entry in fragment}
        theirs = {name: form(tensor) for name, tensor in state["shared"].items()}
        for name in [*ours, *(theirs.keys() - ours.keys())]:
            if ours.get(name) != theirs.get(name):
                raise ValueError(f"{name} is {theirs.get(name)} in this state, and {ours.get(name)} in the model")

    def _facts(self, state: dict[str, Any]) -> dict[str, Any]:
        """The facts that ranks must have alike in the states of one checkpoint.

        Groups of unequal speed, or that a loss has met at different steps, make other steps, and may have applied fewer
        exchanges: these are told apart by name.
        """
        self._check_state(state)
        turn, applied, first, origin = state["turns"]
        member = self._communicator.world.membership.members[self._communicator.rank]
        mine = next(ranks for ranks in self._groups if member in ranks)
        place = "" if self._pace is None and not state["is_apart"] else f" in the group of rank {mine[0]}"
        after = f"after exchange {applied}"
        shared = dict(sorted(state["shared"].items()))
        facts = {
            "number of exchanges sent": turn,
            "exchanges sent before the last finish()": first,
            "samples given to step()": state["by_samples"],
            f"steps{place}": state["steps"],
            f"steps before the last finish(){place}": origin,
            f"exchanges on their way and when they are due{place}": [each[:2] for each in state["in_flight"]],
            f"samples of all ranks {after}": state["counted"],
            f"shared values {after}": fingerprint(shared[name].numpy() for name in shared if name in self._gradients),
            f"shared buffers {after}": fingerprint(
                shared[name].numpy() for name in shared if name not in self._gradients
            ),
            **fingerprints(f"state of the outer optimizer {after}", _numbers(state["optimizer"]["state"])),
            **_settings(state["optimizer"], f" {after}"),
        }
        for number, _, _, _, counts, sums, _ in state["in_flight"]:
            facts[f"samples in exchange {number + 1}"] = counts[0]
            facts[f"sums of exchange {number + 1}"] = fingerprint(sum_.to(torch.float32).numpy() for sum_ in sums)
        return facts

    # --- turns ---

    def _due(self, turn: int) -> int:
        """The step after which a fragment is sent: each once in a round, all evenly spread."""
        if self._pace is not None:
            return self._pace.due(turn)
        return self._origin + (turn - self._first + 1) * self._every // self._parts

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._pace is None else self._pace.waiting()

    def _check(self) -> None:
        if api.is_initialized() and api.joined(None) is not self._communicator:
            raise MultiringError(
                "ranks were lost or admitted since Outer was made: call rebuild() with what shrink() has returned"
            )

    def _check_parameters(self) -> None:
        """ValueError unless the parameters to train are those of the start, as on all other ranks they should be."""
        now = dict(self._parameters())
        trained = {entry.name: entry.shared for part in self._fragments for entry in part if entry.trained}
        for name in [*trained, *(name for name in now if name not in trained)]:
            here, start = now.get(name), trained.get(name)
            if start is None:
                words = "is trained now and was frozen when Outer was made: freeze it"
                wrong = here is not None and here.requires_grad
            elif here is None:
                words, wrong = "is gone, and was trained when Outer was made: keep it", True
            elif here.shape != start.shape:
                words = f"has shape {tuple(here.shape)}, and had {tuple(start.shape)} when Outer was made: keep it"
                wrong = True
            else:
                words = "is frozen now and was trained when Outer was made: set its requires_grad"
                wrong = not here.requires_grad
            if wrong:
                raise ValueError(
                    f"parameter {name} {words} until finish() has returned, and make a new Outer on all ranks"
                )

    def _kind(self, entry: _Entry) -> torch.dtype:
        """The format in which the change of an entry is sent."""
        return self._wire if self._wire is not None and entry.trained else entry.shared.dtype

    def _send(self, *, late: bool, at_the_end: bool = False) -> None:
        """Start the next turn: this rank's changes, times its samples, to be summed over all ranks."""
        self._check()
        self._check_parameters()
        number = self._turn % self._parts
        samples = self._samples[number]
        changes: dict[_Sum, list[Tensor]] = {}
        bases = {entry.name: self._bases[entry.name] for entry in self._fragments[number] if self._bases}
        with torch.no_grad():
            for entry in self._fragments[number]:
                change = _change(entry, bases.get(entry.name))
                change = change.mul_(samples) if samples else change.zero_()  # also where it is NaN
                kind = self._kind(entry)
                changes.setdefault((kind, entry.trained), []).append(change.reshape(-1).to(kind))
            sums = [torch.cat(parts) for parts in changes.values()]
        numbers = [samples, self._by_samples is True, self._by_samples is False]
        numbers += self._fingerprints.summands(self._turn)
        if self._pace is not None:
            numbers += [at_the_end, *self._pace.measured(self._turn)]
        counts = np.array(numbers, np.float64)  # exact up to 2**53: 104 days of nanoseconds
        group = group_of(self._communicator)
        pieces = [writable(counts), *(reducible(sum_) for sum_ in sums if sum_.numel())]
        with self._waiting():  # `start` waits where too many calls are under way
            parts = [group.start("all_reduce", piece) for piece in pieces]
        self._in_flight.append(
            _FragmentExchange(self._turn, self._steps + self._delay, late, samples, counts, sums, bases, parts)
        )
        if bases:
            self._bases.update((entry.name, _own(entry)) for entry in self._fragments[number])
        self._turn += 1
        self._samples[number] = 0.0

    def _receive(self) -> int:
        """End the oldest turn that is under way; with ``unequal`` return how many ranks were in `finish`."""
        self._check()
        turn = self._in_flight[0]
        with self._waiting():
            turn.wait()
        del self._in_flight[0]
        self._applied += 1
        samples, with_samples, without, *others = turn.counts.tolist()
        prints, others = others[:SUMMANDS], others[SUMMANDS:]
        check_counted(with_samples, without)
        check_fingerprints(prints, "shared values")
        number = turn.number % self._parts
        if samples:  # else nobody has trained, and momentum must not move the parameters
            self._move(self._fragments[number], turn.sums, samples)
        self._note(turn.number)
        self._counted[number] += samples
        self._merge(number, turn.late)
        if self._pace is None:
            return 0
        self._pace.learn([int(measured) for measured in others[1:]], self._steps)
        return int(others[0])

    def _note(self, turn: int) -> None:
        """Take the fingerprint of the shared parameters that a turn has moved last; buffers may be much larger."""
        entries = self._fragments[turn % self._parts]
        self._fingerprints.note(turn, (entry.shared.numpy() for entry in entries if entry.trained))

    def _note_all(self) -> None:
        """The same of all fragments, whose values are new."""
        self._fingerprints.forget()
        for turn in range(self._applied - self._parts, self._applied):
            self._note(turn)

    def _move(self, fragment: list[_Entry], sums: list[Tensor], samples: float) -> None:
        """The outer step: the mean change is the gradient of the shared values."""
        kinds = dict.fromkeys((self._kind(entry), entry.trained) for entry in fragment)
        left: dict[_Sum, Tensor] = dict(zip(kinds, sums, strict=True))
        with torch.no_grad():
            for entry in fragment:
                shared = entry.shared
                kind = self._kind(entry), entry.trained
                part, left[kind] = left[kind][: shared.numel()], left[kind][shared.numel() :]
                mean = part.to(shared.dtype).div(samples).view(shared.shape)
                if entry.trained:
                    self._gradients[entry.name].grad = mean
                else:
                    shared.sub_(mean)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _merge(self, number: int, late: bool) -> None:
        """This rank's own values of a fragment after an exchange."""
        under_way = self._under_way(number)
        with torch.no_grad():
            for entry in self._fragments[number]:
                own, shared = entry.own(), entry.shared
                if late and self._bases:
                    self._merge_beside(entry, [turn.bases for turn in under_way])
                elif late and self._keep:
                    here = own.detach().to("cpu", shared.dtype)
                    own.copy_(here.mul(self._keep).add_(shared, alpha=1 - self._keep))
                else:
                    own.copy_(shared)
                    if self._bases:
                        self._bases[entry.name] = _own(entry)

    def _merge_beside(self, entry: _Entry, under_way: list[dict[str, Tensor]]) -> None:
        """The same where further changes of the fragment are under way: these, and what is not sent, are kept.

        The base and not the own values are drawn to the shared ones, so that ranks of a group have the same bits in it
        though a loss may meet them a step apart; with 16-bit parameters it is the same but for their rounding.
        """
        name, base = entry.name, self._bases[entry.name]
        unsent = _change(entry, base)
        sent = _difference(entry, base, under_way[0][name]) if under_way else torch.zeros_like(base)
        after = entry.shared + sent
        if self._keep:  # 0 times an infinite value would be NaN
            after = base.mul(self._keep).add_(after, alpha=1 - self._keep)
        own = entry.own()
        own.copy_(after - unsent)
        if own.dtype != after.dtype:  # rounded, which is no change that the rank has made
            after = own.detach().to("cpu", after.dtype) + unsent
        shift = _difference(entry, after, base)
        for bases in under_way:
            bases[name] = bases[name] + shift
        self._bases[name] = after

    def _under_way(self, number: int) -> list[_FragmentExchange]:
        """The exchanges of a fragment that have not ended, oldest first."""
        return [turn for turn in self._in_flight if turn.number % self._parts == number]

    # --- groups, and the loss of ranks ---

    def _ranks_of_group(self, communicator: Communicator) -> list[int]:
        """This rank's group, by the ranks of ``communicator``, which may lack some of those at the start."""
        members = communicator.world.membership.members
        index = {member: rank for rank, member in enumerate(members)}
        (mine,) = (ranks for ranks in self._groups if members[communicator.rank] in ranks)
        return [index[member] for member in mine if member in index]

    def _present_groups(self) -> list[list[int]]:
        """The groups that have ranks left, by the ranks that these have now."""
        index = {member: rank for rank, member in enumerate(self._communicator.world.membership.members)}
        found = [[index[member] for member in ranks if member in index] for ranks in self._groups]
        return sorted(ranks for ranks in found if ranks)

    def _catch_up(self, most: int, shared: dict[str, Tensor]) -> None:
        """End, or take back, the turns that were under way when ranks were lost; ``shared`` is after ``most`` turns.

        One that ended on some rank had the changes of all, so the others take what came of it; one that ended nowhere
        is taken back, and its changes are still in everybody's parameters.
        """
        for fragment in self._fragments:
            for entry in fragment:
                entry.shared.copy_(shared[entry.name])
        behind = self._applied < most
        ended = [turn for turn in self._in_flight if behind and turn.number < most]
        for turn in reversed(self._in_flight[len(ended) :]):
            self._samples[turn.number % self._parts] += turn.samples
            self._bases.update(turn.bases)
        self._in_flight = []
        for turn in ended:
            self._merge(turn.number % self._parts, turn.late)
        self._turn = self._applied = most
        self._note_all()


def _make_group(communicator: Communicator, mine: list[int]) -> tuple[Communicator, dist.ProcessGroup | None]:
    """A group of the ranks ``mine``, which lists this one, and the same in torch where torch has these ranks."""
    process_group = None
    here = (communicator.rank, communicator.size)
    if dist.is_available() and dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == here:
        process_group = dist.new_group(mine, use_local_synchronization=True)
    if isinstance(process_group, MultiringGroup):
        return process_group.communicator, process_group
    group = communicator.new_group(mine)
    assert group is not None  # this rank is among them
    return group, process_group


def _getter(model: Any, name: str, parameter: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns the present parameter: that of a module may be replaced."""
    return partial(model.get_parameter, name) if isinstance(model, nn.Module) else lambda: parameter


_Named: TypeAlias = "list[tuple[str, Tensor]]"


def _parameters(model: Any) -> Callable[[], _Named]:
    """Return a function that lists the present parameters with their names."""
    if isinstance(model, nn.Module):
        return lambda: list(model.named_parameters())
    listed = list(model) if isinstance(model, Iterable) else [model]
    named = [(str(number), parameter) for number, parameter in enumerate(listed)]
    return lambda: named


def _tensors(model: Any, given: _Named) -> tuple[_Named, _Named, _Named]:
    """Parameters to train, frozen ones, and buffers, with names; TypeError or ValueError for what cannot be served."""
    buffers: _Named = []
    if isinstance(model, nn.Module):
        saved = model.state_dict().keys()
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    first: dict[int, str] = {}
    for name, parameter in given:
        if (same := first.setdefault(id(parameter), name)) != name:
            raise ValueError(f"parameter {name} is parameter {same} again: give each once")
        if type(parameter) not in (Tensor, nn.Parameter):
            raise TypeError(
                f"parameter {name} is a {type(parameter).__name__}: Outer takes a model, or parameters that lie whole "
                "on each rank"
            )
    trained = [(name, parameter) for name, parameter in given if parameter.requires_grad]
    for name, parameter in trained:
        if not parameter.is_floating_point():
            raise ValueError(f"parameter {name} is {form(parameter)}: only real numbers are averaged")
    if not trained:
        raise ValueError(f"of {len(given)} parameters none is to be trained: give a model whose requires_grad is set")
    return trained, [(name, parameter) for name, parameter in given if not parameter.requires_grad], buffers


def _entry(name: str, own: Callable[[], Tensor], *, trained: bool) -> _Entry:
    values = own().detach()
    kind = torch.float32 if values.dtype.itemsize < 4 else values.dtype  # small outer steps would be rounded away
    return _Entry(name, own, values.to("cpu", kind, copy=True), trained)


def _cut_in_fragments(model: Any, trained: _Named, buffers: _Named, parts: int) -> list[list[_Entry]]:
    """The parameters in so many parts of about equal bytes; buffers of floating point are in the last one."""
    entries = [_entry(name, _getter(model, name, parameter), trained=True) for name, parameter in trained]
    cuts = _cuts([entry.shared.nbytes for entry in entries], parts)
    fragments = [entries[first:end] for first, end in itertools.pairwise(cuts)]
    fragments[-1] += [
        _entry(name, partial(model.get_buffer, name), trained=False)
        for name, buffer in buffers
        if buffer.is_floating_point()
    ]
    return fragments


def _own(entry: _Entry) -> Tensor:
    """Return a copy of the rank's present values in the shared values' format."""
    return entry.own().detach().to("cpu", entry.shared.dtype, copy=True)


def _change(entry: _Entry, base: Tensor | None) -> Tensor:
    """Return ``base``, or the values after the last exchange, less the rank's present ones, as the shared ones are."""
    own = entry.own().detach()
    if base is None:
        base = entry.shared.to(own.dtype).to(entry.shared.dtype)  # what the rank was given, rounded as it was
    return _difference(entry, base, own.to("cpu", entry.shared.dtype))


def _difference(entry: _Entry, first: Tensor, second: Tensor) -> Tensor:
    found = first - second
    if not entry.trained:  # infinite ones, of a mask say, have no difference, and NaN neither
        found.masked_fill_((first == second) | (first.isnan() & second.isnan()), 0)
    return found


def _outer_optimizer(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    if make is None:
        return torch.optim.SGD(parameters, lr=1.0)
    made = make(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"optimizer makes a {type(made).__name__}, and has to make an optimizer of torch")
    held = {id(parameter) for settings in made.param_groups for parameter in settings["params"]}
    if held != {id(parameter) for parameter in parameters}:
        raise ValueError(
            f"the outer optimizer has {len(held)} other parameters than the {len(parameters)} that optimizer was "
            "called with: make it of these, as in lambda params: torch.optim.SGD(params, lr=1.0)"
        )
    return made


def _full_name(given: Any) -> str:
    return f"{type(given).__module__}.{type(given).__qualname__}"


def _settings(state: dict[str, Any], when: str = "") -> dict[str, Any]:
    """The settings of the groups of an optimizer's state that are plain values, and which parameters each group has."""
    groups = state["param_groups"]
    found: dict[str, Any] = {f"groups of the outer optimizer{when}": len(groups)}
    for number, group in enumerate(groups):
        for name, value in group.items():
            plain = value.tolist() if isinstance(value, Tensor) else value
            if name == "params" or _is_plain(plain):
                found[f"{name} of the outer optimizer's group {number}{when}"] = plain
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _numbers(state: dict[Any, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The real numbers of an optimizer's state by their names, in an order that all ranks have."""
    for of, held in sorted(state.items(), key=lambda item: str(item[0])):
        named = held if isinstance(held, dict) else {of: held}
        for name, value in sorted(named.items(), key=lambda item: str(item[0])):
            for each in tensors_within(torch.as_tensor(value) if isinstance(value, float | int) else value):
                if not each.is_complex():
                    yield str(name), each.detach().to("cpu", torch.float64).numpy()


def _compare_arguments(communicator: Communicator, arguments: list[Any], trained: _Named) -> None:
    """ValueError unless all ranks have given the same; all call it."""
    mine = [*arguments, [(name, form(parameter)) for name, parameter in trained]]
    for rank, theirs in enumerate(communicator.all_gather_object(mine)):
        _compare_with(mine, theirs, rank)


def _compare_with(mine: list[Any], theirs: list[Any], rank: int) -> None:
    names = ("every", "fragments", "delay", "keep", "wire", "unequal", "groups")
    check_same(zip(names, mine, strict=False), zip(names, theirs, strict=False), rank)
    ours, others = mine[-1], theirs[-1]
    if len(ours) != len(others):
        raise ValueError(f"{len(ours)} parameters are trained here and {len(others)} on rank {rank}")
    for number, (here, there) in enumerate(zip(ours, others, strict=True)):
        if here != there:
            raise ValueError(
                f"parameter {number} is {here[0]} ({here[1]}) here and {there[0]} ({there[1]}) on rank {rank}: all "
                "ranks need the same model"
            )


def _cuts(sizes: Sequence[int], parts: int) -> list[int]:
    """Return cuts of a list of sizes into parts that have at least one each, and about as many bytes as the others."""
    ends = np.cumsum(sizes)
    cuts = [0]
    for part in range(1, parts):
        wanted = ends[-1] * part / parts
        choices = range(cuts[-1] + 1, len(sizes) - (parts - part) + 1)
        cuts.append(min(choices, key=lambda cut: abs(ends[cut - 1] - wanted)))
    return [*cuts, len(sizes)]
