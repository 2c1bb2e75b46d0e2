"""The training of examples/under_fire.py; its rank 0 cannot look for newcomers twice, and it ends when one has come."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import scripts

import multiring as mr
from multiring.job import growth

training = scripts.loaded(Path(__file__).parents[2] / "examples" / "under_fire.py")
stop = Path(sys.argv[sys.argv.index("--stop") + 1])
step, admitted, look = training.Training.step, training.Training.admitted, growth._join_queue
failures = 2


def step_or_die(self: Any, *samples: Any) -> None:
    if os.environ["RANK"] == "2" and not training.NUMBER and self.steps == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    step(self, *samples)


def look_or_fail(*arguments: Any) -> contextlib.AbstractContextManager[Any]:
    global failures
    if os.environ["RANK"] == "0" and failures:
        failures -= 1
        raise mr.RendezvousError("no way to the store")
    return look(*arguments)


def admitted_and_done(self: Any) -> bool:
    found: bool = admitted(self)
    if found:
        stop.touch()
    return found


training.Training.step, training.Training.admitted = step_or_die, admitted_and_done
growth._join_queue = look_or_fail
training.main()
