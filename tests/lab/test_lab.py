"""Labs as they are: measured from inside, and looked for after they have gone."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_traffic import Stream, measure_rate, measure_round_trip, rate_is

from multiring import lab
from multiring.lab import Cluster, LabError, build, directory
from multiring.planning.topology import LEVELS, Link, Place, Topology, ranks_in_host

MEGABIT = 1e6 / 8
CARD, SLOW_CARD, UPLINK = 400 * MEGABIT, 50 * MEGABIT, 200 * MEGABIT

reason = lab.obstacle()
pytestmark = [pytest.mark.lab, pytest.mark.skipif(reason is not None, reason=str(reason))]


def host(name: str, rank: int, link: Link) -> Place:
    return Place(name, link, ranks_in_host([rank]))


def racks(latency: float = 50e-6) -> Topology:
    """Two racks of two hosts of a rank each; the last host sends fast and receives slowly."""
    fast = Link(CARD, CARD, 50e-6)
    cards = [fast, fast, fast, Link(CARD, SLOW_CARD, 50e-6)]
    hosts = [host(name, rank, cards[rank]) for rank, name in enumerate("abcd")]
    uplink = Link(UPLINK, UPLINK, latency)
    return Topology(LEVELS[:3], (Place("left", uplink, tuple(hosts[:2])), Place("right", uplink, tuple(hosts[2:]))))


def links_of_the_machine() -> set[str]:
    return {entry.name for entry in Path("/sys/class/net").iterdir()}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with lab.up(racks()) as cluster:
        yield cluster


def test_every_host_has_its_own_name(cluster: Cluster) -> None:
    assert [cluster.run(name, "cat", "/proc/sys/kernel/hostname").stdout for name in "abcd"] == [
        "a\n",
        "b\n",
        "c\n",
        "d\n",
    ]


def test_hosts_know_each_other_by_name(cluster: Cluster) -> None:
    program = "import socket; print(socket.gethostbyname('a'), socket.gethostbyname(socket.gethostname()))"
    assert cluster.run("d", sys.executable, "-c", program).stdout == "10.77.0.1 10.77.0.4\n"


def test_a_host_sees_only_its_own_interfaces(cluster: Cluster) -> None:
    assert sorted(cluster.run("b", "ls", "/sys/class/net").stdout.split()) == ["eth0", "lo"]


def test_hosts_do_not_share_memory_files(cluster: Cluster) -> None:
    cluster.run("a", "touch", "/dev/shm/of-a")
    assert cluster.run("b", "ls", "/dev/shm").stdout == ""
    assert not Path("/dev/shm/of-a").exists()


def test_commands_run_in_the_current_directory(cluster: Cluster) -> None:
    assert cluster.run("c", "pwd").stdout == f"{os.getcwd()}\n"


def test_the_ssh_script_executes_a_command_on_a_host(cluster: Cluster) -> None:
    done = subprocess.run(
        [cluster.ssh, "-x", "c", "echo", "$(hostname)", "'two  words'"], capture_output=True, text=True
    )
    assert done.stdout == "c two  words\n"


def test_the_ssh_script_fails_as_ssh_does(cluster: Cluster) -> None:
    done = subprocess.run([cluster.ssh, "nowhere", "true"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (255, f"lab {cluster.name} has no host nowhere\n")


@pytest.mark.timed
def test_a_stream_gets_the_rate_of_the_card(cluster: Cluster) -> None:
    assert rate_is(cluster, [Stream("a", "b")], 8 << 20, CARD)


@pytest.mark.timed
def test_down_may_be_slower_than_up(cluster: Cluster) -> None:
    assert rate_is(cluster, [Stream("c", "d")], 1 << 20, SLOW_CARD)
    assert rate_is(cluster, [Stream("d", "c")], 8 << 20, CARD)


@pytest.mark.timed
def test_the_hosts_of_a_rack_share_its_uplink(cluster: Cluster) -> None:
    assert rate_is(cluster, [Stream("c", "a"), Stream("d", "b")], 4 << 20, UPLINK)


@pytest.mark.timed
def test_cards_of_a_host_add_up() -> None:
    link = Link(2 * CARD, 2 * CARD, 50e-6)
    hosts = (Place(name, link, ranks_in_host([rank]), cards=2) for rank, name in enumerate("ab"))
    with lab.up(Topology(LEVELS[:2], (*hosts, host("c", 2, Link(CARD, CARD, 50e-6))))) as cluster:
        assert rate_is(cluster, [Stream("a", "b", card=0), Stream("a", "b", card=1)], 8 << 20, 2 * CARD)
        assert rate_is(cluster, [Stream("c", "b", card=1), Stream("b", "c")], 8 << 20, 2 * CARD)
        assert rate_is(cluster, [Stream("a", "b", card=1)], 8 << 20, CARD)


@pytest.mark.timed
def test_racks_are_as_far_apart_as_asked() -> None:
    with lab.up(racks(latency=10e-3)) as cluster:
        assert measure_round_trip(cluster, "a", "c") == pytest.approx(20e-3, rel=0.25)
        assert measure_round_trip(cluster, "a", "b") < 5e-3
        assert measure_rate(cluster, [Stream("a", "c")], 4 << 20) < 1.25 * UPLINK


def test_hosts_are_bound_to_their_cores() -> None:
    first = min(os.sched_getaffinity(0))
    with lab.up(Topology.flat([1, 1]), cores=1) as cluster:
        program = "import os; print(os.sched_getaffinity(0))"
        assert cluster.run("host0", sys.executable, "-c", program).stdout == f"{{{first}}}\n"


def test_nothing_is_left_when_a_lab_is_closed() -> None:
    before = links_of_the_machine()
    with lab.up(racks(latency=1e-3)) as cluster:
        sleeper = subprocess.Popen(cluster.command("d", "sleep", "600"))
        while cluster.processes()["d"] != [sleeper.pid]:
            time.sleep(0.01)
        assert links_of_the_machine() == before
    assert sleeper.wait(timeout=5) == -signal.SIGKILL
    assert not cluster.directory.exists()
    assert processes_of(cluster) == []


def processes_of(cluster: Cluster) -> list[int]:
    """Processes on the hosts, and the keeper and forwarders: the lab's directory is in their command line."""
    found = list(directory.processes(cluster.directory))
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(cluster.directory).encode() in command.split(b"\0"):
                found.append(int(entry.name))
    return found


def test_two_labs_stand_side_by_side() -> None:
    with lab.up(racks(), "test-one") as one:
        with lab.up(Topology.flat([1, 1]), "test-two") as two:
            assert one.run("a", "hostname").stdout == "a\n"
            assert two.run("host1", "hostname").stdout == "host1\n"
            with pytest.raises(LabError, match=r"which lab\? there is .*test-one, test-two"):
                lab.find()
        assert one.run("b", "hostname").stdout == "b\n"
        with pytest.raises(LabError, match="there is no lab 'test-two'"):
            lab.find("test-two")


def test_a_name_is_taken_only_once() -> None:
    with lab.up(racks(), "test-one") as one:
        with pytest.raises(LabError, match="there is a lab test-one already"):
            lab.up(Topology.flat([1, 1]), "test-one")
        assert one.run("a", "hostname").stdout == "a\n"


def test_a_congestion_control_that_is_not_here_is_refused_before_anything_is_made() -> None:
    with pytest.raises(LabError, match=r"^there is no congestion control 'none-such' here; there is .*cubic"):
        lab.up(racks(), "test-failing", congestion="none-such")
    assert not (directory.LABS / "test-failing").exists()


@pytest.mark.parametrize("fraction", [-1.0, 0.0, 2.0, math.nan])
def test_a_link_is_throttled_to_a_fraction(cluster: Cluster, fraction: float) -> None:
    with pytest.raises(ValueError, match=f"^{fraction:g} of the rate of a: it must be more than 0, and 1 at most$"):
        lab.throttle(cluster, "a", fraction)


def test_a_failure_while_it_is_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_check_congestion", lambda _: None)
    with pytest.raises(LabError, match="congctl none-such failed in host a: "):
        lab.up(racks(), "test-failing", congestion="none-such")
    assert not (directory.LABS / "test-failing").exists()


MAKER = """
import sys, time
from multiring import lab
from multiring.planning.topology import Topology
cluster = lab.up(Topology.flat([1, 1, 1]), sys.argv[1], detach=sys.argv[2] == "detach")
print("up", flush=True)
time.sleep(600)
"""


def start_maker(name: str, detach: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", MAKER, name, detach], stdout=subprocess.PIPE, text=True)


def wait_until_gone(name: str) -> None:
    deadline = time.monotonic() + 10
    while (directory.LABS / name).exists():
        assert time.monotonic() < deadline, f"lab {name} is still there"
        time.sleep(0.01)


@pytest.mark.parametrize("latency", [50e-6, 5e-3])
def test_an_interrupt_at_the_last_moment_leaves_nothing(monkeypatch: pytest.MonkeyPatch, latency: float) -> None:
    def interrupted(keeper: subprocess.Popen[str], line: str) -> None:
        tell(keeper, line)
        if line == "detach":
            raise KeyboardInterrupt

    tell = build._tell
    monkeypatch.setattr(build, "_tell", interrupted)
    link = Link(CARD, CARD, latency)
    with pytest.raises(KeyboardInterrupt):
        lab.up(Topology(LEVELS[:2], (host("a", 0, link), host("b", 1, link))), "test-interrupted", detach=True)
    assert not (directory.LABS / "test-interrupted").exists()


@pytest.mark.parametrize("moment", [0.05, 0.1, 0.2, "up"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_lab_goes_with_who_made_it(moment: float | str, how: signal.Signals) -> None:
    with start_maker("test-orphan", "stay") as maker:
        if moment == "up":
            assert maker.stdout is not None
            assert maker.stdout.readline() == "up\n"
        else:
            time.sleep(float(moment))
        maker.send_signal(how)
    wait_until_gone("test-orphan")


def test_a_detached_lab_stays_until_it_is_removed() -> None:
    with start_maker("test-detached", "detach") as maker:
        assert maker.stdout is not None
        maker.stdout.readline()
        maker.kill()
    cluster = lab.find("test-detached")
    assert cluster.run("host2", "hostname").stdout == "host2\n"
    cluster.close()
    assert processes_of(cluster) == []
    assert not cluster.directory.exists()


def test_down_clears_what_a_killed_keeper_left() -> None:
    cluster = lab.up(racks(), "test-broken")
    with subprocess.Popen(cluster.command("a", "sleep", "600")) as sleeper:
        while not cluster.processes()["a"]:
            time.sleep(0.01)
        os.kill(cluster.keeper, signal.SIGKILL)
        cluster.close()
        assert sleeper.wait(timeout=5) == -signal.SIGKILL
    assert not cluster.directory.exists()


def test_a_new_lab_clears_what_a_killed_keeper_left() -> None:
    with start_maker("test-broken", "detach") as maker:
        assert maker.stdout is not None
        maker.stdout.readline()
        maker.kill()
    os.kill(lab.find("test-broken").keeper, signal.SIGKILL)
    while lock_is_held("test-broken"):
        time.sleep(0.01)
    remedy = "clear it away by multiring lab down --lab test-broken"
    with pytest.raises(LabError, match=f"lab test-broken has ended by itself; {remedy}$"):
        lab.find("test-broken")
    with lab.up(racks(), "test-broken") as again:
        assert again.run("a", "hostname").stdout == "a\n"


@pytest.mark.parametrize("state", ["", "{}", "[]", '{"hosts": [{}]}', None])
def test_a_lab_whose_record_is_damaged_can_be_removed(state: str | None) -> None:
    with start_maker("test-damaged", "detach") as maker:
        assert maker.stdout is not None
        maker.stdout.readline()
        maker.kill()
    cluster = lab.find("test-damaged")
    record = cluster.directory / "state.json"
    record.unlink()
    if state is not None:
        record.write_text(state)
    remedy = "clear it away by multiring lab down --lab test-damaged"
    begun = "lab test-damaged is just being made or removed; else " if state is None else f"{record} is damaged; "
    with pytest.raises(LabError, match=f"^{begun}{remedy}$"):
        lab.find("test-damaged")
    lab.remove("test-damaged")
    assert processes_of(cluster) == []
    assert not cluster.directory.exists()


def lock_is_held(name: str) -> bool:
    locked = directory.lock(directory.LABS / name)
    if locked is not None:
        os.close(locked)
    return locked is None
