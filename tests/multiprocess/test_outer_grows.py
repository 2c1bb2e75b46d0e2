"""One in the place of a lost rank goes on with the outer state, and with residuals that are those of nobody yet."""

from __future__ import annotations

import re

import pytest
from launching import Launch

SCRIPT = """
    import os, signal, time
    import torch
    import multiring as mr
    import multiring.torch
    from multiring.torch import Outer, broadcast_optimizer_state

    def nesterov(parameters):
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.5, nesterov=True)

    def step(number):
        with torch.no_grad():
            weight.sub_(2.0 ** -number * (mr.rank() + 1))
        return outer.step()

    multiring.torch.init()
    newcomer = os.environ["MULTIRING_REPLACEMENT"] != "0"
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    if not newcomer:
        outer = Outer([weight], every=2, groups="rank", optimizer=nesterov)
        step(0), step(1)
        if mr.rank() == 1:
            step(2)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            step(2)
            step(3)
        except mr.PeerLost:
            agreement = multiring.torch.shrink()
            assert agreement.members == (0, 2)
            outer.rebuild(agreement)
        assert mr.world_size() == 2
        outer.finish()  # makes up for the exchange that was broken off
        state = outer.optimizer.state_dict()
        before = weight.tolist()
        while multiring.torch.grow() is None:
            time.sleep(0.05)
    outer = Outer([weight], every=2, groups="rank", optimizer=nesterov)
    if not newcomer:
        assert weight.tolist() == before
        outer.optimizer.load_state_dict(state)
    broadcast_optimizer_state(outer.optimizer, mr.oldest())
    step(4)
    assert step(5)
    print("rank", mr.rank(), *weight.tolist())
"""


def test_a_newcomer_goes_on_with_the_outer_momentum(launch: Launch) -> None:
    pytest.importorskip("torch")
    result = launch.run("-n", "3", "--min-ranks", "2", "--max-replacements", "1", launch.script(SCRIPT), seconds=240)
    assert result.returncode == 0, result.stdout + result.stderr
    velocity = weight = 0.0
    # All three ranks, then ranks 0 and 1 of the two that are left, which were 0 and 2, then all three again.
    for change in (1.5 * 2, (1 + 3) / 2 * 0.25 + (1 + 3) / 2 * 0.125, (2**-4 + 2**-5) * 2):
        velocity = 0.5 * velocity + change
        weight -= 0.5 * (change + 0.5 * velocity)
    ends = re.findall(r"rank \d .*", result.stdout)
    assert sorted(ends) == [f"rank {rank} {weight} {weight} {weight}" for rank in range(3)]


RESIDUALS = """
    import os, signal, time
    import torch
    os.environ["MULTIRING_HOST"] = f"host{os.environ['MULTIRING_RANK']}"
    os.environ["MULTIRING_WIRE"] = "host=int8"
    import multiring as mr
    import multiring.torch
    from multiring.torch import DistributedOptimizer, Feedback, sync_state

    def train(optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            index = torch.arange(300)
            (weight * torch.sin(index * (mr.rank() + 1.0)) * (1 + index % 13)).sum().backward()
            optimizer.step()

    multiring.torch.init()
    newcomer = os.environ["MULTIRING_REPLACEMENT"] != "0"
    weight = torch.nn.Parameter(torch.zeros(300))
    plain = torch.optim.SGD([weight], 1.0)
    kept = Feedback()
    if not newcomer:
        optimizer = DistributedOptimizer(plain, wire_feedback=kept)
        train(optimizer, 3)
        if mr.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            train(optimizer, 2)
            raise AssertionError("no rank was lost")
        except mr.PeerLost:
            multiring.torch.shrink()
        assert any(owed.any() for owed in kept.state_dict()["owed"].values())
        while multiring.torch.grow() is None:
            time.sleep(0.05)
    sync_state(torch.nn.ParameterList([weight]), plain)
    optimizer = DistributedOptimizer(plain, wire_feedback=kept)
    assert not any(owed.any() for owed in kept.state_dict()["owed"].values())
    start = weight.detach().double()
    train(optimizer, 40)
    index = torch.arange(300)
    each = [torch.sin(index * (rank + 1.0)) * (1 + index % 13) for rank in range(3)]
    exact = sum(one.double() for one in each) / 3
    step = max(float(one.abs().max()) for one in each) / 127
    off = float((start - weight.detach().double() - 40 * exact).abs().max())
    print("rank", mr.rank(), mr.world_size(), off < 3 * step, hash(tuple(weight.tolist())))
"""


def test_residuals_start_from_zeros_on_all_ranks_when_one_is_admitted(launch: Launch) -> None:
    pytest.importorskip("torch")
    result = launch.run("-n", "3", "--min-ranks", "2", "--max-replacements", "1", launch.script(RESIDUALS), seconds=240)
    assert result.returncode == 0, result.stdout + result.stderr
    ends = re.findall(r"rank (\d) (\d) (\w+) (\S+)", result.stdout)
    assert sorted(end[:3] for end in ends) == [(str(rank), "3", "True") for rank in range(3)]
    assert len({end[3] for end in ends}) == 1
