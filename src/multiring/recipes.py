"""Schedules and rules for large batches: pure functions from step to value, for any framework.

A schedule is a function of the number of the step, counted from 0, that returns a factor of the base learning rate, or
any other value. It goes as it is into torch's ``LambdaLR`` and into a Keras callback; code that a framework compiles,
such as an optax schedule under ``jit``, indexes its `table`. `warm_up`, `chain` and `cycles` join schedules. Sources:

- Goyal et al. 2017, arXiv 1706.02677: `linear_scaling`, `warm_up`, `steps`, `momentum_correction`, `decays`.
- Codreanu et al. 2017, arXiv 1711.04291: `polynomial` to zero, `cycles`, and a final collapse, which is `chain` with a
  `polynomial` of power 2.
- Smith et al. 2018, arXiv 1711.00489: `batch_growth`. You et al. 2017, arXiv 1708.03888: `lars`.
- Loshchilov and Hutter 2017, arXiv 1608.03983: `cosine`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from multiring.env import whole_number

Schedule = Callable[[int], float]


def linear_scaling(rate: float, batch: int, base_batch: int = 256) -> float:
    """The learning rate for ``batch`` samples a step, all ranks together, where ``rate`` suits ``base_batch``."""
    return rate * _least("batch", batch) / _least("base_batch", base_batch)


def constant(value: float = 1.0) -> Schedule:
    """The same at every step."""
    return lambda step: value


def warm_up(schedule: Schedule, length: int, start: float = 0.0) -> Schedule:
    """``schedule``, which the first ``length`` steps approach from ``start`` in equal increments.

    The steps count from the beginning of the warm-up, as the epochs of Goyal et al. do; a start of base_batch/batch
    begins at the rate of the small batch.
    """
    length = _least("length", length, 0)

    def rising(step: int) -> float:
        step = _plain(step)
        return start + (schedule(length) - start) * step / length if step < length else schedule(step)

    return rising


def steps(boundaries: Sequence[int], factor: float = 0.1) -> Schedule:
    """1, multiplied by ``factor`` at each of the ``boundaries``."""
    ordered = _boundaries(boundaries)
    return lambda step: factor ** bisect.bisect_right(ordered, step)


def polynomial(length: int, power: float = 1.0, end: float = 0.0) -> Schedule:
    """From 1 to ``end`` within ``length`` steps, by (1 - step/length)**power; ``end`` ever after."""
    length = _least("length", length)
    _above_zero("power", power)
    return lambda step: end + (1 - end) * (1 - min(_plain(step), length) / length) ** power


def cosine(length: int, end: float = 0.0) -> Schedule:
    """From 1 to ``end`` within ``length`` steps along half a cosine; ``end`` ever after."""
    length = _least("length", length)
    return lambda step: end + (1 - end) * (1 + math.cos(math.pi * min(_plain(step), length) / length)) / 2


def chain(first: Schedule, length: int, then: Schedule) -> Schedule:
    """``first`` for ``length`` steps, then ``then``, whose steps count from 0 again."""
    length = _least("length", length, 0)
    return lambda step: first(step) if step < length else then(_plain(step) - length)


def cycles(schedule: Schedule, length: int) -> Schedule:
    """``schedule`` again and again, every ``length`` steps.

    Where it ends in a collapse, the networks at the ends of the cycles form an ensemble; average their predictions.
    """
    length = _least("length", length)
    return lambda step: schedule(_plain(step) % length)


def scaled(schedule: Schedule, factor: float) -> Schedule:
    """``schedule`` times ``factor``: a learning rate, where a framework wants that instead of a factor."""
    return lambda step: factor * schedule(step)


def table(schedule: Schedule, length: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The values at steps 0 to ``length`` - 1, for code that is compiled: it indexes them by the step."""
    return np.array([schedule(step) for step in range(_least("length", length, 0))], np.float64)


def batch_growth(batch: int, boundaries: Sequence[int], factor: float = 10.0) -> Callable[[int], int]:
    """The batch at a step, grown at each boundary instead of dividing the learning rate by ``factor``."""
    batch = _least("batch", batch)
    ordered = _boundaries(boundaries)
    _above_zero("factor", factor)
    if round(batch * factor ** len(ordered)) < 1:
        raise ValueError(f"batch={batch}, factor={factor}: no sample is left at the last boundary")
    return lambda step: round(batch * factor ** bisect.bisect_right(ordered, step))


def momentum_correction(schedule: Schedule, momentum: float) -> Schedule:
    """The momentum at a step for optimizers whose buffer holds past *updates*, learning rate included.

    They compute u = m u + rate * gradient; when the rate changes, m has to be multiplied by new over old rate, as for
    Keras' SGD. torch and optax keep the rate out of the buffer: they need none.
    """

    def corrected(step: int) -> float:
        before, now = schedule(max(_plain(step) - 1, 0)), schedule(step)
        return momentum * now / before if before else momentum

    return corrected


def decays(shape: Sequence[int]) -> bool:
    """True if weight decay applies to a parameter of this shape: not to biases, nor to scale and shift of a norm.

    These are what has one dimension or none; all weights of layers have two or more.
    """
    return len(shape) > 1


def lars(weight_norm: float, gradient_norm: float, decay: float = 0.0, trust: float = 0.001) -> float:
    """The factor of one layer's learning rate by layer-wise adaptive rate scaling; 1 where a norm is 0.

    Norms are Euclidean, the gradient's without weight decay, ``decay`` the factor of weight decay.
    """
    divisor = gradient_norm + decay * weight_norm
    return trust * weight_norm / divisor if weight_norm > 0 and divisor > 0 else 1.0


def _least(name: str, value: int, least: int = 1) -> int:
    value = whole_number(name, value)
    if value < least:
        raise ValueError(f"{name}={value}: {least} or more are needed")
    return value


def _plain(step: int) -> int:
    """The step as Python's int: NumPy's small ones go round where they are computed with."""
    return int(step) if isinstance(step, np.integer) else step


def _above_zero(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value}: a finite number above 0 is needed")


def _boundaries(steps: Sequence[int]) -> list[int]:
    return sorted(_least("boundary", step, 0) for step in steps)
