"""Every row of the table of faults, on one host and on hosts of the lab."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flight_analysis import analysis, named
from jobs_under_fault import START_SECONDS, Job, World, launched, started

import faults
from faults import FAULTS, PARTINGS, SHORTAGES, Fault, Parting, Shortage
from multiring import lab
from multiring.planning.topology import LEVELS, Link, Place, Topology, ranks_in_host

obstacle = lab.obstacle()
in_lab = [pytest.mark.lab, pytest.mark.skipif(obstacle is not None, reason=str(obstacle))]

CARD = Link(up=5e7, down=5e7, latency=0.0)


@pytest.fixture(scope="module")
def spread() -> Iterator[World]:
    """Five ranks on three hosts of a lab."""
    ranks = {"a": [0, 1], "b": [2, 3], "c": [4]}
    places = tuple(Place(name, CARD, ranks_in_host(of)) for name, of in ranks.items())
    with lab.up(Topology(LEVELS[:2], places), "faults") as cluster:
        yield World(tuple("aabbc"), cluster)


def hurt(fault: Fault, world: World, calls: str, victim: int, folder: Path) -> None:
    records = folder / "records"
    environment = {
        "MULTIRING_TIMEOUT": str(fault.timeout),
        "MULTIRING_LATE_WARNING": "2",
        "MULTIRING_FLIGHT_RECORDER": str(records),
    }
    with started(world, folder, calls, environment=environment) as job:
        faults.judge(fault, job, victim, faults.strike(fault, job, victim))
        outcomes = outcomes_but(faults.struck_ranks(fault, job, victim), job)
    check_records(records, outcomes, raised=bool(fault.raises))


def outcomes_but(victims: set[int], job: Job) -> list[dict[str, Any]]:
    return [job.outcome(rank) for rank in range(job.world.size) if rank not in victims]


def check_records(records: Path, outcomes: list[dict[str, Any]], *, raised: bool) -> None:
    """AssertionError unless torch's analyser names exactly whom the survivors' errors name: a link by both ends."""
    written = sorted(path.name for path in records.iterdir())
    if not raised:
        assert written == []
        return
    (blamed,) = {frozenset({outcome["rank"], outcome["apart"]} - {-1}) for outcome in outcomes}
    said = analysis(records)
    assert named(said) == blamed, (written, said)


def name_of(value: object) -> str:
    return value.name.replace(" ", "-") if isinstance(value, (Fault, Parting, Shortage)) else ""


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if not fault.on_link], ids=name_of)
def test_on_one_host(fault: Fault, tmp_path: Path) -> None:
    hurt(fault, World(("here",) * 4), "large" if "stopped" in fault.name else "asynchronous", 2, tmp_path)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=in_lab) for fault in FAULTS],
    ids=name_of,
)
def test_across_hosts(fault: Fault, spread: World, tmp_path: Path) -> None:
    hurt(fault, spread, "medium", 3, tmp_path)


@pytest.fixture(scope="module")
def many() -> Iterator[World]:
    """Seven hosts of a rank each: the last two are below the second in the control tree."""
    names = "abcdefg"
    places = tuple(Place(name, CARD, ranks_in_host([rank])) for rank, name in enumerate(names))
    with lab.up(Topology(LEVELS[:2], places), "parted") as cluster:
        yield World(tuple(names), cluster)


def part(parting: Parting, world: World, calls: str, hosts: str, folder: Path, plan: str = "") -> None:
    records = folder / "records"
    environment = {"MULTIRING_PROBE": "off", **({"MULTIRING_PLAN": plan} if plan else {})}
    with started(world, folder, calls, environment={**environment, "MULTIRING_FLIGHT_RECORDER": str(records)}) as job:
        parting.judge(job, *hosts)
        outcomes = outcomes_but(set(), job)
    check_records(records, outcomes, raised=True)


@pytest.mark.lab
@pytest.mark.skipif(obstacle is not None, reason=str(obstacle))
@pytest.mark.parametrize(
    ("hosts", "calls", "plan"),
    [
        ("bc", "medium", "ring"),  # no edge of the control tree
        ("ef", "all_to_all", ""),
        ("ab", "all_to_all", ""),  # an edge, and others below it
        ("bg", "all_to_all", ""),  # the only edge of one
        ("ga", "all_to_all", ""),
    ],
)
@pytest.mark.parametrize("parting", PARTINGS, ids=name_of)
def test_two_hosts_that_cannot_reach_each_other(
    parting: Parting, hosts: str, calls: str, plan: str, many: World, tmp_path: Path
) -> None:
    if parting.larger_than and hosts != "bc":
        pytest.skip("what the control tree carries is small")
    part(parting, many, calls, hosts, tmp_path, plan)


@pytest.mark.lab
@pytest.mark.skipif(obstacle is not None, reason=str(obstacle))
@pytest.mark.parametrize(("hosts", "calls", "plan"), [("bc", "all_to_all", ""), ("cd", "small", "ring")])
@pytest.mark.parametrize("parting", PARTINGS[:2], ids=name_of)
def test_two_hosts_are_parted_before_their_first_call(
    parting: Parting, hosts: str, calls: str, plan: str, many: World, tmp_path: Path
) -> None:
    """No connection between them shows it: both dial in vain."""
    (tmp_path / "hold").touch()
    records = tmp_path / "records"
    environment = {"MULTIRING_PROBE": "off", **({"MULTIRING_PLAN": plan} if plan else {})}
    environment["MULTIRING_FLIGHT_RECORDER"] = str(records)
    with launched(many, tmp_path, calls, environment=environment) as job:
        for rank in range(many.size):
            job.await_line(rank, "held", START_SECONDS)
        replace(parting, within=faults.HEARTBEAT + 8).judge(job, *hosts)  # 4 s more of dialling
        outcomes = outcomes_but(set(), job)
    check_records(records, outcomes, raised=True)


@pytest.mark.lab
@pytest.mark.skipif(obstacle is not None, reason=str(obstacle))
@pytest.mark.parametrize("parting", PARTINGS[:2], ids=name_of)
def test_two_hosts_that_need_not_reach_each_other(parting: Parting, many: World, tmp_path: Path) -> None:
    """They are no neighbours in the ring, and no edge of the control tree: the job goes on, with the right sums."""
    environment = {"MULTIRING_PROBE": "off", "MULTIRING_PLAN": "ring"}
    with started(many, tmp_path, "medium", environment=environment) as job:
        parting.judge(job, "c", "e", needed=False)


@pytest.mark.lab
@pytest.mark.skipif(obstacle is not None, reason=str(obstacle))
@pytest.mark.parametrize("plan", ["ring", ""])
def test_one_way_of_an_edge_of_the_control_tree(plan: str, many: World, tmp_path: Path) -> None:
    """Half of the ranks hear of each of the two by way of the other one alone."""
    part(PARTINGS[1], many, "medium", "ca", tmp_path, plan)


@pytest.mark.lab
@pytest.mark.skipif(obstacle is not None, reason=str(obstacle))
@pytest.mark.parametrize("calls", ["small", "medium"])
def test_who_waits_in_the_same_call_has_no_mismatch(calls: str, many: World, tmp_path: Path) -> None:
    """Though some have gone on to the next one, and wait there: the time is up before the pair counts as apart."""
    limits = {"MULTIRING_TIMEOUT": "5", "MULTIRING_HEARTBEAT_TIMEOUT": "30"}
    records = tmp_path / "records"
    environment = {"MULTIRING_PROBE": "off", "MULTIRING_PLAN": "ring", **limits}
    environment["MULTIRING_FLIGHT_RECORDER"] = str(records)
    assert many.cluster is not None
    with started(many, tmp_path, calls, environment=environment) as job:
        lab.part(many.cluster, "b", "c")
        try:
            for rank in range(many.size):
                job.await_line(rank, "raised", 20)
        finally:
            lab.restore(many.cluster, "b")
            lab.restore(many.cluster, "c")
        job.write("settled")
        job.end(range(many.size))
        outcomes = [job.outcome(rank) for rank in range(many.size)]
    assert {outcome["kind"] for outcome in outcomes} == {"CollectiveTimeout"}, outcomes
    check_records(records, outcomes, raised=True)


@pytest.mark.lab
@pytest.mark.skipif(obstacle is not None, reason=str(obstacle))
def test_of_two_parted_hosts_that_with_fewer_ranks_is_given_up(spread: World, tmp_path: Path) -> None:
    part(PARTINGS[0], spread, "all_to_all", "bc", tmp_path)
    assert '"host": "c"' in (tmp_path / "0.json").read_text()


@pytest.mark.parametrize("victim", [pytest.param(0, marks=in_lab), pytest.param(4, marks=in_lab)])
def test_who_hears_nothing_accuses_others_in_vain(victim: int, spread: World, tmp_path: Path) -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == "hears nothing")
    hurt(fault, spread, "all_gather", victim, tmp_path)


@pytest.mark.lab
@pytest.mark.skipif(obstacle is not None, reason=str(obstacle))
def test_a_rate_that_fell_is_seen_in_the_middle_of_a_job(spread: World, tmp_path: Path) -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == "a tenth of the rate")
    with started(spread, tmp_path, "", program="rates.py") as job:
        time.sleep(2)
        struck = faults.strike(replace(fault, lasts=6.0), job, 3)
        restored = time.time()
        job.write("stop")
        job.end(range(spread.size))
        looks = {rank: job.outcome(rank) for rank in range(spread.size) if spread.hosts[rank] == spread.hosts[3]}
    before, meanwhile = (
        sum(rate_between(of, *window) for of in looks.values()) for window in ((0.0, struck), (struck, restored))
    )
    assert 0 < meanwhile < before / 2, (before, meanwhile)


def rate_between(looks: Any, begin: float, end: float) -> float:
    """Bytes a second that the links of a rank took while they were busy."""
    within = [(sent, busy) for at, sent, busy in looks if begin <= at <= end]
    sent, busy = (last - first for first, last in zip(within[0], within[-1], strict=True))
    return sent / busy if sent else 0.0


@pytest.mark.parametrize("shortage", SHORTAGES, ids=name_of)
def test_a_rank_that_lacks_something(shortage: Shortage, tmp_path: Path) -> None:
    world = World(("here",) * 3)
    with launched(
        world,
        tmp_path,
        "small",
        limits={1: shortage.limit},
        environment={"MULTIRING_INIT_TIMEOUT": f"{START_SECONDS:g}"},
    ) as job:
        shortage.judge(job, 1)


def test_two_jobs_on_one_host_do_not_touch_each_other(tmp_path: Path) -> None:
    world, killed = World(("here",) * 3), next(fault for fault in FAULTS if fault.name == "killed")
    with started(world, tmp_path / "one", "medium") as one, started(world, tmp_path / "two", "medium") as two:
        faults.judge(killed, two, 1, faults.strike(killed, two, 1))
        one.write("stop")
        one.end(range(3))
        assert [one.outcome(rank)["kind"] for rank in range(3)] == ["", "", ""]
