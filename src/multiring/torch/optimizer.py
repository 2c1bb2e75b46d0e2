"""Data parallelism for scripts without DistributedDataParallel: an optimizer whose gradients are those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from multiring import api
from multiring.runtime.comm import Communicator
from multiring.torch.broadcast import named_pairs
from multiring.torch.feedback import Feedback
from multiring.torch.reducer import Reducer
from multiring.training.buckets import BUCKET_BYTES, check_bucket_bytes
from multiring.training.weights import average


class DistributedOptimizer(torch.optim.Optimizer, Joinable):
    """Any torch optimizer, with every ``grad`` averaged over the ranks when ``backward()`` returns.

    Gradients are fused into buckets in the arena and reduced while the backward pass goes on. Parameters have to be
    equal on all ranks at the first step: `broadcast_parameters` makes them so, and ValueError says where they are not.
    A parameter that no rank used keeps ``grad`` None; where some ranks used it, the others count as zeros. All ranks
    call ``backward()`` outside `no_sync` equally often; one without data calls `step` alone.
    """

    _step_supports_amp_scaling = False
    """Also where the optimizer inside is fused: a ``GradScaler`` would set ``grad_scale`` and ``found_inf`` on this
    wrapper, where the one inside does not look. So it unscales the gradients itself."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        *,
        weight: float | None = None,
        group: Communicator | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        wire_feedback: bool | Feedback = False,
    ) -> None:
        """``named_parameters``: names for messages, as from ``model.named_parameters()``. ``weight``: see `weight`.

        ``group`` is a communicator, None for the default one, which is made as `multiring.init` does if there is none.
        ``wire_feedback``: what gradients lose on narrow wires is sent in a later step; True makes a `Feedback`, which
        is then found as `wire_feedback`. Each rank saves that beside the optimizer's state, which has no part of it.
        """
        if isinstance(optimizer, DistributedOptimizer) or not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is no optimizer of torch, or one that averages already")
        bucket_bytes = check_bucket_bytes(bucket_bytes)
        Joinable.__init__(self)
        self._optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in named_pairs(named_parameters or ())}
        communicator = api.joined(group)
        self._communicator = communicator
        self._joined = False
        self._passes = 0
        """Number of passes that were reduced since the last step."""
        self._stepped = False
        """True if this rank has stepped since the last pass."""
        if wire_feedback is not False and wire_feedback is not True and not isinstance(wire_feedback, Feedback):
            raise TypeError(f"wire_feedback={wire_feedback!r}: True, False or a multiring.torch.Feedback is needed")
        feedback = Feedback() if wire_feedback is True else wire_feedback or None
        if feedback is not None:
            groups = enumerate(optimizer.param_groups)
            feedback.serve([pair for number, settings in groups for pair in self._named(number, settings)])
            feedback.bind(communicator)
        self.wire_feedback: Feedback | None = feedback
        """Keeps what gradients lose on narrow wires; None: nothing does."""
        self._reducer = Reducer(communicator, bucket_bytes, self._notify, feedback)
        # A step that torch compiles leaves it to Python.
        self._mean = torch.compiler.disable(self._mean_over_ranks)  # type: ignore[no-untyped-call]
        for number, settings in enumerate(optimizer.param_groups):
            self._watch(number, settings)
        self.weight = weight

    def _notify(self) -> None:
        if not self._joined:
            Join.notify_join_context(self)
            if self._join_config.enable:
                self._anybody_stepped()
        self._passes += 1

    def _anybody_stepped(self) -> bool:
        """True if a rank has made a step since the last pass; in a Join context all ask before each pass."""
        stepped = np.array([self._stepped], np.int32)
        self._communicator.all_reduce(stepped, "max")
        self._stepped = False
        return bool(stepped[0])

    def _watch(self, number: int, settings: dict[str, Any]) -> None:
        self._reducer.watch(self._named(number, settings))

    def _named(self, number: int, settings: dict[str, Any]) -> list[tuple[str, Tensor]]:
        return [
            (self._names.get(id(parameter), f"{index} of group {number}"), parameter)
            for index, parameter in enumerate(settings["params"])
        ]

    @property
    def weight(self) -> float | None:
        """The weight of this rank in the coming averages, such as its number of samples; None: all ranks count alike.

        Set on all ranks or on none, before the backward pass. A rank of weight 0 counts for nothing.
        """
        return self._reducer.weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        self._reducer.weight = weight

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes within add to this rank's gradients; the next one outside, or `step`, averages the sums."""
        return self._reducer.no_sync()

    def synchronize(self) -> None:
        """Average the gradients now; `step` does so where no backward pass outside `no_sync` has done it."""
        self._reducer.check()
        if self._reducer.pending:
            self._reducer.synchronize()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's own step, on averaged gradients. A closure calls ``backward()``, which averages them.

        The loss that a closure returns is averaged too, since optimizers go by it. All ranks give a closure or none.
        """
        if closure is None:
            self.synchronize()
        else:
            self._reducer.check()
        result = self._optimizer.step(lambda: self._mean(closure())) if closure else self._optimizer.step()
        self._reducer.pending = True
        self._passes, self._stepped = 0, True
        return result

    def _mean_over_ranks(self, loss: Any) -> Any:
        """The loss over all ranks; in a Join context, where those that have run out call no closure, this rank's."""
        if loss is None or self._join_config.enable:
            return loss
        if isinstance(loss, Tensor):
            loss = loss.detach()
        mean = average(self._communicator, float(loss), 1.0 if self.weight is None else self.weight)
        return loss.new_tensor(mean) if isinstance(loss, Tensor) else mean

    # --- all else is the optimizer's own ---

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # not there yet
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        known = {id(parameter) for settings in self.param_groups for parameter in settings["params"]}
        if any(id(parameter) not in known for settings in param_groups for parameter in settings["params"]):
            raise ValueError("param_groups has a parameter that was in none before: call add_param_group on all ranks")
        self._optimizer.param_groups = param_groups

    @property
    def state(self) -> Any:
        return self._optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self._optimizer.state = state

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a DistributedOptimizer is not copied or pickled, since other ranks take part: save its state_dict(), or "
            "make one of another optimizer on all ranks"
        )

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._optimizer!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, on all ranks between the same two steps."""
        self._optimizer.add_param_group(param_group)
        self._watch(len(self._optimizer.param_groups) - 1, self._optimizer.param_groups[-1])

    # --- torch.distributed.algorithms.Join ---

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class _Shadow(JoinHook):
    """A rank that has run out of data takes part in the others' passes and steps, and so stays equal to them."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Take part in a pass of the others; torch calls this once for each."""
        optimizer, weight = self._optimizer, self._optimizer.weight
        if optimizer._anybody_stepped():
            self._step()
            optimizer.zero_grad()
        optimizer._joined, optimizer.weight = True, None if weight is None else 0
        optimizer._reducer.synchronize()
        optimizer._joined, optimizer.weight = False, weight

    def post_hook(self, is_last_joiner: bool) -> None:
        """Make the others' last step, once all ranks have run out of data."""
        if self._optimizer._anybody_stepped():
            self._step()

    def _step(self) -> None:
        """Make the step that the others have made, unless this rank has made it."""
        if self._optimizer._passes:
            self._optimizer._optimizer.step()
            self._optimizer._passes = 0
