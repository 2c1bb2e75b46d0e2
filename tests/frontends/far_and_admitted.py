"""Groups that train apart lose one in the middle of a round, and admit another with the outer optimizer's momentum.

Each rank is a group. Parameters move by numbers that depend on the step, the rank and the index, so that what all have
at the end is known; the argument says at which moment the first replacement is killed too, if at any.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
import torch.distributed as dist
from outer_numbers import Numbers, move, nesterov
from outer_rule import SHAPES, change, weights
from torch_helpers import until_lost

import multiring as mr
import multiring.torch
from multiring.torch import Outer

MOMENT = sys.argv[1]
NUMBER, RANK = int(os.environ["MULTIRING_REPLACEMENT"]), int(os.environ["MULTIRING_RANK"])
LOOK, END = 12, 21
"""The step after which ranks wait for a third one, and the last one. The exchanges are after every fourth."""


def die_at(moment: str) -> None:
    if NUMBER == 1 and moment == MOMENT:
        os.kill(os.getpid(), signal.SIGKILL)


def expected() -> list[np.ndarray]:
    """Parameters after all steps; the lost rank's step since the exchange after step 4 is lost with it."""
    shared, speed = weights(), [np.zeros(shape) for shape in SHAPES]
    for first, last, places in ((1, 4, 3), (5, 8, 2), (9, 12, 2), (13, 16, 3), (17, 20, 3), (21, 21, 3)):
        for number, shape in enumerate(SHAPES):
            moved = [change(step, place, number, shape) for step in range(first, last + 1) for place in range(places)]
            mean = -np.sum(moved, 0) / places
            speed[number] = 0.9 * speed[number] + mean
            shared[number] = shared[number] - 0.7 * (mean + 0.9 * speed[number])
    return shared


multiring.torch.init()
net, before, met = Numbers(RANK), 0, NUMBER > 0
made = outer = state = agreement = None
while True:
    try:
        if agreement is not None and any(mr.init().all_gather_object(outer is None)):
            outer = None
        if outer is None:
            die_at("before")
            made = Outer(net, 4, groups="rank", optimizer=nesterov)
            if state is not None:
                made.optimizer.load_state_dict(state)
            die_at("after")
            multiring.torch.broadcast_optimizer_state(made.optimizer, mr.oldest())
            before = multiring.torch.broadcast_object(before, mr.oldest())
            outer = made
            mr.barrier()
        elif agreement is not None:
            outer.rebuild(agreement)
        agreement = None
        step = before + outer.steps
        if step == END:
            outer.finish()
            break
        if step == LOOK and dist.get_world_size() < 3:
            outer.finish()
            while multiring.torch.grow() is None:
                time.sleep(0.05)
            before, state, outer = step, outer.optimizer.state_dict(), None
            continue
        if step == 5 and not met:
            met = True
            mr.barrier()  # all have applied the first exchange
            if RANK == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            until_lost()  # in an exchange they would make that one a step later
        move(net, step + 1, RANK)
        outer.step()
    except RuntimeError:
        agreement = multiring.torch.shrink()
for found, wanted in zip(net.parameters(), expected(), strict=True):
    np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=0, atol=1e-11)
assert dist.get_world_size() == 3
assert dist.get_rank() == RANK
print("rank", RANK, "ends", flush=True)
dist.destroy_process_group()
