"""``multiring bench --record FILE train.py``: write down what a training job asks of the network, and when.

Runs the program as it is; the first model that it wraps in DistributedDataParallel is watched. The recording holds the
median of its steps, without the first ones: the seconds from one gradient to the next, and before them those of the
forward pass, of the loss, and of the optimizer. Waiting for communication belongs to none of them.
"""

from __future__ import annotations

import os
import runpy
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from multiring.simulate.recording import Gradient, Recording, save
from multiring.units import duration, size

WARM_UP_STEPS = 3
FEWEST_STEPS = 5
"""Number of steps that count, without those of the warm-up."""


@dataclass
class _StepTimes:
    """Times at which forward and backward of a step began and each gradient was complete, by its place in the model."""

    forward: float
    backward: float = 0.0
    optimizer: float = 0.0
    gradients: list[tuple[int, float]] = field(default_factory=list)


class Recorder:
    """Watches the training steps of a model."""

    def __init__(self, net: nn.Module, name: str) -> None:
        self._name = name
        self._steps: list[_StepTimes] = []
        self._optimizing = 0.0
        self._sizes = [p.numel() * p.element_size() for p in net.parameters()]
        net.register_forward_pre_hook(self._begin)
        net.register_forward_hook(self._watch_outputs)
        for index, parameter in enumerate(net.parameters()):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, index=index: self._complete(index)
                )
        register_optimizer_step_pre_hook(self._begin_optimizer)
        register_optimizer_step_post_hook(self._end_optimizer)

    def recording(self) -> Recording:
        """The median step; ValueError if there were too few."""
        seen = [step for step in self._steps if step.gradients and step.backward]
        needed = WARM_UP_STEPS + FEWEST_STEPS
        if len(seen) < needed:
            raise ValueError(f"{len(seen)} training steps were seen; {needed} are needed")
        steps = seen[WARM_UP_STEPS:]
        order = [index for index, _ in steps[-1].gradients]
        alike = [step for step in steps if [index for index, _ in step.gradients] == order]
        forward = statistics.median(step.backward - step.forward + step.optimizer for step in alike)
        clocks = [[step.backward, *(clock for _, clock in step.gradients)] for step in alike]
        gradients = tuple(
            Gradient(self._sizes[index], statistics.median(clock[i + 1] - clock[i] for clock in clocks))
            for i, index in enumerate(order)
        )
        return Recording(self._name, forward, gradients)

    def _begin(self, net: nn.Module, inputs: object) -> None:
        if torch.is_grad_enabled():
            self._steps.append(_StepTimes(time.perf_counter()))

    def _watch_outputs(self, net: nn.Module, inputs: object, outputs: object) -> None:
        if torch.is_grad_enabled():
            for tensor in _tensors(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    def _begin_backward(self, gradient: object) -> None:
        if not self._steps[-1].backward:
            self._steps[-1].backward = time.perf_counter()

    def _complete(self, index: int) -> None:
        if self._steps:
            self._steps[-1].gradients.append((index, time.perf_counter()))

    def _begin_optimizer(self, *_: object) -> None:
        self._optimizing = time.perf_counter()

    def _end_optimizer(self, *_: object) -> None:
        if self._steps:
            self._steps[-1].optimizer += time.perf_counter() - self._optimizing


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in the output of a model: a tensor, or tensors in lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


@contextmanager
def watching(name: str) -> Iterator[list[Recorder]]:
    """Watch the first model that is wrapped in DistributedDataParallel meanwhile: the list's only entry."""
    watched: list[Recorder] = []
    wrap = DistributedDataParallel.__init__

    def wrap_and_watch(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        wrap(self, *args, **options)
        if not watched:
            watched.append(Recorder(self, name))

    DistributedDataParallel.__init__ = wrap_and_watch  # type: ignore[method-assign]
    try:
        yield watched
    finally:
        DistributedDataParallel.__init__ = wrap  # type: ignore[method-assign]


def main() -> None:
    """``python -m multiring.bench.recorder FILE PROGRAM ...``, on every rank."""
    file, *words = sys.argv[1:]
    is_module = words[0] == "-m"
    program = words[1] if is_module else words[0]
    sys.argv = words[is_module:]
    name = Path(program).stem
    code = 0
    with watching(name) as watched:
        try:
            if is_module:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(program).parent))
                runpy.run_path(program, run_name="__main__")
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
    if int(os.environ.get("RANK", "0")) == 0:
        code = _save(watched, Path(file), program)
    sys.exit(code)


def _save(watched: list[Recorder], file: Path, program: str) -> int:
    try:
        if not watched:
            raise ValueError("it wraps no model in DistributedDataParallel")
        recording = watched[0].recording()
        save(recording, file)
    except (ValueError, OSError) as error:
        print(f"multiring bench: nothing was recorded of {program}: {error}", file=sys.stderr)
        return 2
    computing = f"{duration(recording.seconds)} of computation"
    print(f"{file}: {len(recording.gradients)} gradients, {size(recording.nbytes)}, {computing}")
    return 0


if __name__ == "__main__":
    main()
