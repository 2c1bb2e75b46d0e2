"""A torch job that loses a rank and goes on without a restart: what is rebuilt, and from whom the state comes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import losing  # noqa: E402
import torch.distributed as dist  # noqa: E402
from forking_launcher import TORCH  # noqa: E402
from framework_jobs import job  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch_helpers import Net, caught, group, own  # noqa: E402
from torch_ranks import run  # noqa: E402

import multiring.torch  # noqa: E402
from multiring.runtime.comm import Communicator  # noqa: E402
from multiring.torch import start  # noqa: E402

ROOT = Path(__file__).parents[2]


def trained(net: Net, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """A step on samples of this rank's own, so that every rank has a model and moments of its own."""
    optimizer.zero_grad()
    net(torch.full((4, 6), rank + 1.0, dtype=torch.float64)).square().sum().backward()
    optimizer.step()


def go_on_from_rank_one() -> list[float]:
    with group() as (rank, size):
        dist.new_group([0, size - 1])
        net = Net()
        optimizer = torch.optim.Adam(net.parameters())
        trained(net, optimizer, rank)
        caught(multiring.PeerLost, lambda: losing.the_last_between(lambda: dist.all_reduce(own(rank, 100_000))))
        multiring.torch.shrink()
        assert (dist.get_rank(), dist.get_world_size()) == (rank, size - 1)
        multiring.torch.sync_state(net, optimizer, root=1)
        expected = Net()
        moments = torch.optim.Adam(expected.parameters())
        trained(expected, moments, rank=1)
        for model, state in ((net, optimizer), (expected, moments)):
            trained(model, state, rank=5)  # the moments are part of this step
        for mine, theirs in zip(net.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        optimizer.zero_grad()
        parallel = DistributedDataParallel(net)
        parallel(torch.full((4, 6), rank + 1.0, dtype=torch.float64)).sum().backward()
        gradient = net.layers[4].bias.grad
        assert gradient is not None
        return [float(value) for value in gradient]


@pytest.mark.parametrize("interface", ["", "lo"])
def test_state_comes_from_the_survivor_that_is_named(interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRING_INTERFACE", interface)
    *survivors, killed = run(go_on_from_rank_one, world_size=3)
    assert killed.exitcode == -signal.SIGKILL
    assert not survivors[0].error + survivors[1].error
    assert survivors[0].value == survivors[1].value == [4.0] * 3


def leave_after_two_losses() -> bool:
    """Return whether multiring is initialised when torch's group, made anew and made anew again, is destroyed."""
    with group() as (rank, _):
        for _ in range(2):
            caught(multiring.PeerLost, lambda: losing.the_last_between(lambda: dist.all_reduce(own(rank, 1000))))
            multiring.torch.shrink()
    return multiring.is_initialized()


def test_a_group_made_anew_shuts_down_what_the_first_one_would_have() -> None:
    outcomes = run(leave_after_two_losses, world_size=4)
    assert [outcome.exitcode for outcome in outcomes[2:]] == [-signal.SIGKILL] * 2
    assert [(survivor.error, survivor.value) for survivor in outcomes[:2]] == [("", False)] * 2


def lose_another_meanwhile(second: int, side: str) -> tuple[list[int], int, list[float]]:
    """Rank 1 is lost, then rank ``second`` in `shrink`, on one side of what makes the store of torch's group."""
    make = start._store

    def die_beside(communicator: Communicator) -> dist.Store:
        if side == "after":
            make(communicator)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("not reached")

    with group() as (rank, size):
        if rank == second:
            start._store = die_beside
        members, calls = list(range(size)), 0
        while calls < 2:
            try:
                x = own(rank, 1000)
                dist.all_reduce(x)
                if len(members) == size and rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls += len(members) < size
            except multiring.PeerLost:
                agreement = multiring.torch.shrink()
                members, calls = [members[before] for before in agreement.members], 0
        assert members[dist.get_rank()] == rank
        return members, agreement.generation, x[:20].tolist()


@pytest.mark.parametrize(("second", "side"), [(2, "before"), (0, "after"), (3, "after")])
def test_another_loss_before_the_group_is_made_is_part_of_what_is_agreed_on(second: int, side: str) -> None:
    outcomes = run(lose_another_meanwhile, second, side, world_size=5)
    left = [rank for rank in range(5) if rank not in (1, second)]
    assert [outcomes[rank].exitcode for rank in (1, second)] == [-signal.SIGKILL] * 2
    expected = sum(own(rank, 20) for rank in left)
    assert isinstance(expected, torch.Tensor)
    for rank in left:
        assert not outcomes[rank].error
        assert outcomes[rank].value == (left, 2, expected.tolist())


@pytest.mark.parametrize(
    ("options", "wait", "ranks"), [((), 0, 2), (("--max-replacements", "1"), 60, 3)], ids=["lost", "replaced"]
)
def test_the_example_loses_a_rank_and_no_accuracy(options: tuple[str, ...], wait: int, ranks: int) -> None:
    done = job(
        ROOT / "examples/surviving_digits.py",
        *("--kill", "30", "--wait", str(wait)),
        ranks=3,
        options=("--min-ranks", "2", *options),
        imports=TORCH,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 2 on host" in done.stderr
    assert "the job may go on with 2 of 3 ranks" in done.stderr
    assert re.search(r"ranks \(0, 1\) go on near step (29|30) of 132", done.stdout), done.stdout
    found = re.search(rf"Test accuracy ([\d.]+)% with {ranks} ranks", done.stdout)
    assert found, done.stdout
    assert float(found[1]) > 93


@pytest.mark.parametrize("moment", ["never", "before", "after"])
def test_a_group_that_trains_apart_is_lost_and_admitted_with_the_outer_momentum(moment: str) -> None:
    options = ("--min-ranks", "2", "--max-replacements", "2")
    done = job("far_and_admitted.py", moment, ranks=3, options=options, imports=TORCH, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank (\d) ends\n", done.stdout)) == ["0", "1", "2"], done.stdout
    assert ("replacement 2 of 2" in done.stderr) == (moment != "never"), done.stderr


def test_a_replacement_that_is_lost_when_it_was_admitted_costs_nobody_else() -> None:
    options = ("--min-ranks", "2", "--max-replacements", "2")
    done = job("admitted_and_lost.py", ranks=3, options=options, imports=TORCH, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank (\d) of 3 ends\n", done.stdout)) == ["0", "1", "2"], done.stdout
    assert "rank 0 is started again, replacement 2 of 2" in done.stderr
