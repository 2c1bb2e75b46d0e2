"""Division of a host's cores among its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring.job.cores import Core, Share, allowed_cores, cgroup_quota, divide, format_list, parse_list


def cores(*domains: int, threads: int = 1) -> list[Core]:
    """Cores by their number in each domain; CPU n and n + total are threads of one core."""
    total = sum(domains)
    numbers = iter(range(total))
    return [
        Core(tuple(number + total * thread for thread in range(threads)), domain)
        for domain, count in enumerate(domains)
        for number in [next(numbers) for _ in range(count)]
    ]


@pytest.mark.parametrize(
    ("available", "ranks", "expected"),
    [
        (cores(8), 2, [((0, 1, 2, 3), 4), ((4, 5, 6, 7), 4)]),
        (cores(7), 2, [((0, 1, 2), 3), ((3, 4, 5, 6), 3)]),
        (cores(2, threads=2), 2, [((0, 2), 1), ((1, 3), 1)]),
        (cores(2, threads=2), 4, [((0,), 1), ((2,), 1), ((1,), 1), ((3,), 1)]),
        (cores(2), 3, [((), 1)] * 3),
        (cores(2), 4, [((0,), 1), ((0,), 1), ((1,), 1), ((1,), 1)]),
        (cores(2, threads=2), 6, [((), 1)] * 6),
        (cores(1, 1, threads=2), 8, [((0,), 1)] * 2 + [((2,), 1)] * 2 + [((1,), 1)] * 2 + [((3,), 1)] * 2),
        (cores(2, 2), 1, [((0, 1, 2, 3), 4)]),
        (cores(3, 3), 4, [((0,), 1), ((1, 2), 1), ((3,), 1), ((4, 5), 1)]),  # in equal domains
        (cores(4, 2), 3, [((0, 1), 2), ((2, 3), 2), ((4, 5), 2)]),  # shares follow the sizes of the domains
        (cores(3, 3), 3, [((0, 1), 2), ((2, 3), 2), ((4, 5), 2)]),  # equal shares matter more
    ],
)
def test_shares(available: list[Core], ranks: int, expected: list[tuple[tuple[int, ...], int]]) -> None:
    assert divide(available, None, ranks, "core") == [Share(*share) for share in expected]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 2), st.integers(1, 40))
def test_shares_use_every_core_equally_often(domains: list[int], threads: int, ranks: int) -> None:
    available = cores(*domains, threads=threads)
    shares = divide(available, None, ranks, "core")
    cpus = [cpu for share in shares for cpu in share.cpus]
    assert len(shares) == ranks
    assert all(share.threads >= 1 for share in shares)
    if ranks <= len(available) * threads:
        assert sorted(cpus) == list(range(len(available) * threads))
        sizes = [len(share.cpus) for share in shares]
        assert max(sizes) - min(sizes) <= threads
    elif ranks % (len(available) * threads) == 0:
        assert {len(share.cpus) for share in shares} == {1}
        assert {cpus.count(cpu) for cpu in range(len(available) * threads)} == {ranks // (len(available) * threads)}
    else:
        assert cpus == []


def test_a_quota_bounds_the_threads_and_not_the_cores() -> None:
    assert divide(cores(8), 4.5, 2, "core") == [Share((0, 1, 2, 3), 2), Share((4, 5, 6, 7), 2)]
    assert divide(cores(2), 0.5, 1, "core") == [Share((0, 1), 1)]
    assert divide(cores(8), 4.0, 2, "none") == [Share((), 2)] * 2


def test_binding_to_domains() -> None:
    first, second = (0, 1, 2), (3, 4, 5)
    assert divide(cores(3, 3), None, 4, "numa") == [Share(first, 1)] * 2 + [Share(second, 1)] * 2
    assert divide(cores(3, 3), None, 1, "numa") == [Share(first, 6)]
    assert divide(cores(3, 3), None, 8, "numa") == [Share(first, 1)] * 4 + [Share(second, 1)] * 4


def test_cores_and_domains_are_read_from_the_system(tmp_path: Path) -> None:
    for cpu in range(4):
        siblings = tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        siblings.parent.mkdir(parents=True)
        siblings.write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    for domain in range(2):
        listed = tmp_path / f"devices/system/node/node{domain}/cpulist"
        listed.parent.mkdir(parents=True)
        listed.write_text(f"{domain},{domain + 2}\n")
    assert allowed_cores(tmp_path, [0, 1, 2, 3]) == [Core((0, 2), 0), Core((1, 3), 1)]
    assert allowed_cores(tmp_path, [1, 2]) == [Core((2,), 0), Core((1,), 1)]


def test_a_quota_of_control_groups_v2(tmp_path: Path) -> None:
    groups = tmp_path / "fs/cgroup"
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/job/step\n")
    assert cgroup_quota(tmp_path, tmp_path) is None
    (groups / "job/step").mkdir(parents=True)
    (groups / "job/step/cpu.max").write_text("max 100000\n")
    assert cgroup_quota(tmp_path, tmp_path) is None
    (groups / "job/cpu.max").write_text("250000 100000\n")
    assert cgroup_quota(tmp_path, tmp_path) == 2.5
    (groups / "job/step/cpu.max").write_text("50000 100000\n")
    assert cgroup_quota(tmp_path, tmp_path) == 0.5


def test_a_quota_of_control_groups_v1(tmp_path: Path) -> None:
    group = tmp_path / "fs/cgroup/cpu,cpuacct"
    group.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("5:memory:/x\n4:cpu,cpuacct:/docker/0123\n0::/\n")
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_quota(tmp_path, tmp_path) is None
    (group / "cpu.cfs_quota_us").write_text("300000\n")  # a container sees its own group at the mount
    assert cgroup_quota(tmp_path, tmp_path) == 3.0


@given(st.sets(st.integers(0, 300)))
def test_lists_are_read_and_written(numbers: set[int]) -> None:
    assert parse_list(format_list(sorted(numbers))) == sorted(numbers)
    assert format_list([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
