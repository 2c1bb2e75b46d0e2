"""State that ranks share after a loss or an admission: who is sent it, and that all end with the root's bits."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch_helpers import caught, group, same  # noqa: E402
from torch_ranks import values  # noqa: E402

import multiring as mr  # noqa: E402
import multiring.torch  # noqa: E402

THIN = """
links.host = { rate = "200 Mbit/s", latency = "30 us", burst = "70 kB" }
host = [{ name = "a", ranks = 2 }, { name = "b", ranks = 2 }]
"""
FAST = THIN.replace("200 Mbit/s", "100 Gbit/s")


class Odd(nn.Module):
    """Weights and buffers of several formats, some of which lie oddly in memory."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.weight = nn.Parameter(drawn(128, 256))
        self.image = nn.Parameter(drawn(4, 3, 5, 5).to(memory_format=torch.channels_last))
        self.scale = nn.Parameter(drawn(1)[0])
        self.register_buffer("narrow", drawn(33).to(torch.bfloat16))
        self.register_buffer("wrong", torch.tensor([math.nan, math.inf, float(seed)]))
        self.register_buffer("column", drawn(6, 4)[:, 1])
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("count", torch.tensor(seed, dtype=torch.int64))


def trained(seed: int, steps: int, lr: float = 0.01) -> tuple[Odd, torch.optim.Optimizer]:
    """A model and its optimizer after so many steps, of which a seed says all."""
    net = Odd(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr)
    for step in range(steps):
        optimizer.zero_grad()
        sum(((step + 1) * parameter).square().sum() for parameter in net.parameters()).backward()
        optimizer.step()
    return net, optimizer


def is_as(found: tuple[Odd, torch.optim.Optimizer], expected: tuple[Odd, torch.optim.Optimizer]) -> None:
    (net, optimizer), (wanted, reference) = found, expected
    for (name, mine), (other, theirs) in zip(net.state_dict().items(), wanted.state_dict().items(), strict=True):
        assert name == other
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    for mine, theirs in zip(net.parameters(), wanted.parameters(), strict=True):
        assert optimizer.state[mine].keys() == reference.state[theirs].keys()
        for key, value in reference.state[theirs].items():
            same(optimizer.state[mine][key], value)


CASES: dict[str, tuple[Callable[[int], tuple[int, int, float]], int | None]] = {
    "all have it": (lambda rank: (7, 3, 0.01), None),
    "one has none": (lambda rank: (7, 3, 0.01) if rank != 3 else (5, 0, 0.01), None),
    "one of each host has none": (lambda rank: (7, 3, 0.01) if rank in (1, 2) else (rank, 0, 0.01), 1),
    "a host has none": (lambda rank: (7, 3, 0.01) if rank < 2 else (rank, 0, 0.01), None),
    "each has another": (lambda rank: (rank, rank, 0.01), 2),
    "one has another learning rate": (lambda rank: (7, 3, 0.02 if rank == 1 else 0.01), 0),
    "one is a step ahead": (lambda rank: (7, 4 if rank == 2 else 3, 0.01), 2),
}
"""Seed, steps and learning rate of each rank, and the root."""

CROSSES = {"a host has none", "each has another", "one is a step ahead"}
"""Cases in which the state has to cross the link between the hosts."""


def put_on_host(hosts: str, topology: str) -> None:
    """Have this rank join on its host of ``hosts``, whose links are measured or those of ``topology``."""
    rank = int(os.environ["RANK"])
    os.environ["MULTIRING_HOST"] = hosts[rank]
    if topology:
        file = Path(os.environ["FOLDER"], f"topology-{rank}.toml")
        file.write_text(topology)
        os.environ["MULTIRING_TOPOLOGY"] = str(file)


def all_cases(hosts: str, topology: str = "") -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Run each case, and once more.

    By name, the bytes that this rank sent to other hosts and the bytes of the model; and the bytes of the second time.
    """
    put_on_host(hosts, topology)
    found, again = {}, {}
    with group() as (rank, _):
        communicator = multiring.api.joined(None)
        for name, (state, root) in CASES.items():
            net, optimizer = trained(*state(rank))
            expected = trained(*state(0 if root is None else root))
            before = sent_to_other_hosts(communicator)
            multiring.torch.sync_state(net, optimizer, root)
            # Another collective ends only when what was sent has arrived.
            mr.barrier()
            is_as((net, optimizer), expected)
            nbytes = sum(x.nbytes for x in net.state_dict().values())
            found[name] = (sent_to_other_hosts(communicator) - before, nbytes)
            # All go on alike: what arrived is used in the next step.
            for _, one in ((net, optimizer), expected):
                one.zero_grad()
            for model, one in ((net, optimizer), expected):
                model.weight.square().sum().backward()
                one.step()
            is_as((net, optimizer), expected)
            before = sent_to_other_hosts(communicator)
            multiring.torch.sync_state(net, optimizer, root)
            mr.barrier()
            again[name] = sent_to_other_hosts(communicator) - before
        # As a layer for batches has it, whose statistics each rank gathers by itself.
        net.wrong[2], before = 5.0 + rank, sent_to_other_hosts(communicator)
        multiring.torch.sync_state(net, optimizer, 3)
        mr.barrier()
        assert net.wrong[2] == 8.0
        found["one buffer is a rank's own"] = (sent_to_other_hosts(communicator) - before, nbytes)
        other = caught(ValueError, lambda: multiring.torch.sync_state(nn.Linear(2, 1 + (rank == 1))))
        assert str(other).startswith(f"weight is float32 of shape ({1 + (rank == 1)}, 2) here")
        roots = caught(ValueError, lambda: multiring.torch.sync_state(nn.Linear(2, 1), root=rank % 2))
        assert str(roots) == f"root={rank % 2} here and {1 - rank % 2} on rank {1 - rank % 2}: all ranks need the same"
        if len(set(hosts)) == 1:  # where memory is shared, all read what the root wrote
            large = [each.plan.collective for each in communicator.plans_used() if each.nbytes >= 64 << 10]
            assert "broadcast" in large
        assert "root=4" in str(caught(ValueError, lambda: multiring.torch.sync_state(nn.Linear(2, 1), root=4)))
    return found, again


class Graph(nn.Module):
    """Weights, and edges of a graph in a layout of torch's that is not dense; both are a rank's own."""

    def __init__(self, rank: int, layout: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4000.0) + rank)
        edges = torch.zeros(3, 4)
        edges[rank % 3, rank] = 1.0 + rank
        self.register_buffer(
            "edges", {"coo": edges.to_sparse, "csr": edges.to_sparse_csr, "none": edges.clone}[layout]()
        )


def refusals_of_sparse(hosts: str, topology: str = "") -> list[str]:
    """The refusals that this rank hears, after each of which all go on with what they had."""
    put_on_host(hosts, topology)
    said = []
    with group() as (rank, _):

        def refused(call: Callable[[], object]) -> None:
            said.append(str(caught(ValueError, call)))
            mr.barrier()

        for layout in ("coo", "csr"):
            net = Graph(rank, layout)
            refused(lambda: multiring.torch.sync_state(net, root=1))  # noqa: B023
            refused(lambda: multiring.torch.broadcast_parameters(net.state_dict(), 1))  # noqa: B023
            same(net.weight.detach(), torch.arange(4000.0) + rank)
        mixed = Graph(rank, "coo" if rank == 2 else "none")
        refused(lambda: multiring.torch.sync_state(mixed, root=2))
        dense = Graph(rank, "none")
        optimizer = torch.optim.SGD(dense.parameters(), 0.1)
        if rank == 1:
            optimizer.state[dense.weight]["momentum_buffer"] = (torch.arange(4000.0) % 7).to_sparse()
        refused(lambda: multiring.torch.sync_state(dense, optimizer, root=1))
        same(dense.weight.detach(), torch.arange(4000.0) + rank)
        refused(lambda: multiring.torch.broadcast_optimizer_state(optimizer, root=1))
        multiring.torch.sync_state(dense, optimizer, root=2)  # that rank's optimizer has no sparse tensor
        assert not optimizer.state
        same(dense.weight.detach(), torch.arange(4000.0) + 2)
        edges = torch.zeros(3, 4)
        edges[2, 2] = 3.0
        same(dense.edges, edges)
    return said


@pytest.mark.parametrize(
    ("hosts", "topology"), [("aaaa", ""), ("aabb", THIN), ("aabb", FAST)], ids=["one", "thin", "fast"]
)
def test_sparse_tensors_are_refused_on_all_ranks_by_one_message(hosts: str, topology: str) -> None:
    outcomes = values(refusals_of_sparse, hosts, topology, world_size=4)
    not_dense = "multiring moves dense tensors, not torch.sparse_{}: hand over tensor.to_dense()"
    for rank, said in enumerate(outcomes):
        of_edges = [f"edges on rank 0: {not_dense.format(layout)}" for layout in ("coo", "coo", "csr", "csr")]
        of_optimizer = [f"the optimizer's state on rank 1: {not_dense.format('coo')}"] * 2
        dense, sparse = "float32 of shape (3, 4)", "float32 of shape (3, 4) in sparse_coo"
        mixed = f"edges is {dense} here and {sparse} on rank 2"
        if rank == 2:
            mixed = f"edges is {sparse} here and {dense} on rank 0"
        assert said == [*of_edges, mixed, *of_optimizer]


def sent_to_other_hosts(communicator: mr.Communicator) -> int:
    links = communicator.stats()["links"]
    return int(links.get("host", {}).get("bytes_sent", 0))


def test_only_what_is_lacking_is_sent_over_thin_links() -> None:
    outcomes = values(all_cases, "aabb", THIN, world_size=4)
    first, second = zip(*outcomes, strict=True)
    for name, (_, nbytes) in first[0].items():
        sent = sum(each[name][0] for each in first)
        if name in CROSSES:
            assert sent > nbytes, name
        else:
            assert sent < nbytes / 2, name
    for name in CASES:
        assert sum(each[name] for each in second) < first[0][name][1] / 2, name


def test_fast_links_carry_all_without_a_comparison() -> None:
    outcomes = values(all_cases, "aabb", FAST, world_size=4)
    first, second = zip(*outcomes, strict=True)
    for name, (_, nbytes) in first[0].items():
        assert sum(each[name][0] for each in first) > nbytes, name
    for name in CASES:
        assert sum(each[name] for each in second) > first[0][name][1], name


def test_ranks_of_one_host_share_a_broadcast() -> None:
    values(all_cases, "aaaa", world_size=4)
