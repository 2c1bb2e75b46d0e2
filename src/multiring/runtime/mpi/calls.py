"""The collectives of one communicator over MPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from multiring._native import COLLECTIVES, DTYPES, Call, Trials
from multiring.runtime.engine import ChoosePlan, DevicePart, Part

_BARRIER, _UINT8 = COLLECTIVES.index("barrier"), DTYPES.index("uint8")


class MpiCalls:
    """Implementation of `multiring.runtime.engine.Calls` over an engine that runs and starts the schedules of calls."""

    def __init__(
        self,
        size: int,
        choose_plan: ChoosePlan,
        run: Callable[[int, Call], None],
        start: Callable[[int, Call, object], Part],
        need_residual: bool,
    ) -> None:
        self._size = size
        self._choose_plan = choose_plan
        self._run = run
        self._start = start
        self._need_residual = need_residual

    def all_reduce_plain(self, x: Any, op: Any, timeout: float | None = None, label: int = 0) -> bool:
        """No buffer is plain here: every call takes the steps of Python."""
        return False

    def barrier(self, timeout: float) -> None:
        token = np.zeros(1, np.uint8)
        self.run(Call(_BARRIER, token.ctypes.data, 1, _UINT8, timeout))

    def run(self, call: Call) -> None:
        handle, trials, number = self._assigned_plan(call)
        if trials is None:
            self._run(handle, call)
            return
        trials.enter(number)
        self._run(handle, call)
        trials.leave(number)

    def start(self, call: Call, owner: object) -> Part:
        handle, trials, number = self._assigned_plan(call)
        if trials is None:
            return self._start(handle, call, owner)
        trials.enter(number)
        work = self._start(handle, call, owner)
        trials.go_on(number, work)
        return work

    def start_on_device(self, *_: Any) -> DevicePart:
        raise ValueError(
            "the engine over MPI moves tensors of the CPU only: set MULTIRING_ENGINE=native, or hand over tensor.cpu()"
        )

    def _assigned_plan(self, call: Call) -> tuple[int, Trials | None, int]:
        """The schedule that a call runs; if it tries a plan, the trials of which it is one, and its number there."""
        if self._need_residual:
            call.check_has_residual()
        while isinstance(
            chosen := self._choose_plan(call.collective, call.nbytes(self._size), call.root, call.timeout), Trials
        ):
            if (number := chosen.take()) is not None:
                return chosen.handle(number), chosen, number
        return chosen, None, 0
