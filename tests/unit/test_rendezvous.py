"""Ranks as threads find each other: who shares a host, who is connected to whom, and who is to blame if not."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import pytest

from multiring import _native, env, errors
from multiring.errors import CollectiveTimeout, MultiringError, PeerLost, RendezvousError, ResourceError
from multiring.job import rendezvous
from multiring.job.bootstrap import JobMeeting, RankIdentity
from multiring.job.exchange import Exchange
from multiring.job.hosts import control_edges
from multiring.job.introduction import Introduction, fitting_streams
from multiring.job.store import Client, Server
from multiring.net import auth, interfaces, local, unix
from multiring.planning import topology_file
from multiring.planning.speeds import INTERNAL_WIRE_OVERHEAD, NATIVE
from multiring.planning.topology import Link, Topology
from multiring.version import __version__

SECRET = b"0123456789abcdef"
INTRODUCTION = Introduction(
    version="0.1.0",
    agreed={"the number of ranks": "2", "MULTIRING_STREAMS": "1"},
    host="a",
    machine="m",
    kernel="k",
    unix="socket",
    addresses=(("10.0.0.1", 5), ("127.0.0.1", 6)),
    cards=("eth0", "lo"),
    fastest=("eth0",),
    hardware=("02:00:00:00:00:01",),
    cpus=frozenset({0, 1, 2, 9}),
    quota=1.5,
)


class Peers:
    """Stands for the engine: keeps what it is given, as the engine would."""

    def __init__(self, rank: int, world_size: int, **options: Any) -> None:
        self.rank = rank
        self.hosts = options["hosts"]
        self.memory_fd = os.memfd_create(f"memory {rank}")
        self.doorbell_fd = os.eventfd(rank) if hasattr(os, "eventfd") else os.memfd_create("doorbell")
        os.write(self.memory_fd, b"%d" % rank)
        self.local: dict[int, tuple[int, int, int]] = {}
        self.tcp: dict[int, list[int]] = {}
        self.control: dict[int, int] = {}
        self.records: dict[tuple[str, int], list[_native.Records]] = {}
        self.failed: BaseException | None = None
        self.gone: set[int] = set()
        self.links: list[tuple[list[int], float, float]] = []

    def expect_links(self, links: list[tuple[list[int], float, float]]) -> None:
        assert not self.links
        self.links = links

    def attach_local(self, peer: int, memory: int, doorbell: int, sock: int) -> None:
        self.local[peer] = memory, doorbell, sock

    def attach_tcp(self, peer: int, sockets: list[int], records: list[_native.Records]) -> None:
        assert peer not in self.tcp
        self.tcp[peer] = sockets
        self.records["data", peer] = records

    def attach_control(self, peer: int, sock: int, records: _native.Records | None) -> None:
        assert peer not in self.control
        self.control[peer] = sock
        self.records["control", peer] = [records] if records else []

    def attached(self, peer: int) -> bool:
        return peer in self.local or peer in self.tcp

    def departed(self, peer: int) -> bool:
        return peer in self.gone

    def fail(self, kind: str, rank: int, message: str) -> None:
        self.failed = getattr(errors, kind)(message, rank=rank)

    def failure(self) -> BaseException | None:
        return self.failed

    def shutdown(self) -> None:
        owned = [fd for fds in (*self.local.values(), *self.tcp.values()) for fd in fds]
        for descriptor in [self.memory_fd, self.doorbell_fd, *owned, *self.control.values()]:
            os.close(descriptor)
        self.local, self.tcp, self.control = {}, {}, {}
        self.memory_fd, self.doorbell_fd = os.memfd_create("closed"), os.memfd_create("closed")


class Job:
    """Joins ranks as threads, through a store of its own."""

    def __init__(self) -> None:
        self.server = Server(SECRET, bind=["127.0.0.1"])
        self.worlds: dict[int, rendezvous.World] = {}
        self.errors: dict[int, BaseException] = {}
        self.joins = 0

    @contextmanager
    def meet(self, secret: bytes | None) -> Iterator[JobMeeting]:
        client = Client([("127.0.0.1", self.server.port)], SECRET)
        try:
            yield JobMeeting(client, secret)
        finally:
            client.close()

    def place(self, rank: int, size: int, secret: bytes | None = SECRET) -> RankIdentity:
        return RankIdentity(rank, size, "test", lambda settings: self.meet(secret), restart=self.joins)

    def join(self, size: int, settings: Callable[[int], env.Settings], secret: bytes | None = SECRET) -> None:
        self.joins += 1
        self.run([lambda r=rank: self._join(self.place(r, size, secret), settings(r)) for rank in range(size)])

    def _join(self, place: RankIdentity, settings: env.Settings) -> None:
        try:
            self.worlds[place.rank] = rendezvous.join(place, settings)
        except Exception as error:
            self.errors[place.rank] = error

    @staticmethod
    def run(targets: list[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=target) for target in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def engine(self, rank: int) -> Any:
        return self.worlds[rank].engine


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(
        rendezvous, "_engine", lambda place, hosts, settings, sampler: Peers(place.rank, place.world_size, hosts=hosts)
    )
    monkeypatch.setattr(rendezvous, "_joins", FirstJoin())
    job = Job()
    yield job
    for world in job.worlds.values():
        world.close()
    job.server.close()


class FirstJoin(dict[str, int]):
    """Each thread counts as a process that joins for the first time."""

    def __missing__(self, prefix: str) -> int:
        return 0

    def __setitem__(self, prefix: str, count: int) -> None:
        pass


def settings(hosts: str, **more: Any) -> Callable[[int], env.Settings]:
    """Rank r is on the host named by letter r."""
    return lambda rank: env.Settings(host=hosts[rank], init_timeout=20, timeout=10, **more)


@pytest.mark.parametrize(
    ("hosts", "wire"), [("aaa", NATIVE.wire_overhead), ("aba", INTERNAL_WIRE_OVERHEAD), ("abc", INTERNAL_WIRE_OVERHEAD)]
)
def test_all_know_how_many_ranks_share_a_core(
    job: Job, monkeypatch: pytest.MonkeyPatch, hosts: str, wire: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5})
    job.join(3, settings(hosts))
    assert not job.errors
    expected = replace(NATIVE, ranks_per_core=3.0, wire_overhead=wire)  # whatever hosts they are said to be on
    assert [job.worlds[rank].speeds for rank in range(3)] == [expected] * 3


def test_one_host_passes_memory(job: Job) -> None:
    job.join(3, settings("aaa"))
    assert not job.errors
    for rank in range(3):
        world, engine = job.worlds[rank], job.engine(rank)
        assert world.topology.hosts == ("a", "a", "a")
        assert world.links is None
        assert {peer: os.pread(fds[0], 9, 0) for peer, fds in engine.local.items()} == {
            peer: b"%d" % peer for peer in range(3) if peer != rank
        }


@pytest.mark.parametrize("hosts", ["ab", "aabbb", "abab", "abcdef"])
@pytest.mark.parametrize("streams", [1, 3])
def test_hosts_are_connected(job: Job, hosts: str, streams: int) -> None:
    size = len(hosts)
    job.join(size, settings(hosts, streams=streams), None)
    assert not job.errors
    for rank in range(size):
        assert job.worlds[rank].topology.hosts == tuple(hosts)
        assert set(job.engine(rank).local) == {p for p in range(size) if p != rank and hosts[p] == hosts[rank]}
        assert sorted(job.engine(rank).control) == sorted(control_edges(hosts, rank))
        assert not job.engine(rank).tcp  # opened when first needed
    others = {rank: {p for p in range(size) if hosts[p] != hosts[rank]} for rank in range(size)}
    job.run([lambda r=rank: job.worlds[r].connect(others[r], 10) for rank in range(size)])
    for rank in range(size):
        assert set(job.engine(rank).tcp) == others[rank]
        assert {len(sockets) for sockets in job.engine(rank).tcp.values()} == {streams}
    assert _talks(job, 0, hosts.index("b"), streams)


def _talks(job: Job, one: int, two: int, streams: int) -> bool:
    """True if both ends hold the same connections in the same order."""
    for stream in range(streams):
        os.write(job.engine(one).tcp[two][stream], b"stream %d" % stream)
    here = [socket.socket(fileno=os.dup(fd)) for fd in job.engine(two).tcp[one]]
    for sock in here:
        sock.settimeout(5)
    said = [sock.recv(20) for sock in here]
    for sock in here:
        sock.close()
    return said == [b"stream %d" % stream for stream in range(streams)]


def test_one_end_wants_a_link_the_other_accepts(job: Job) -> None:
    for wanting in (0, 1):
        job.join(2, settings("ab"))
        job.worlds[wanting].connect({1 - wanting}, 10)
        job.worlds[1 - wanting].connect({wanting}, 10)
        for world in job.worlds.values():
            world.close()


@pytest.mark.parametrize("able", [0, 1])
def test_one_way_reachability_is_enough(job: Job, monkeypatch: pytest.MonkeyPatch, able: int) -> None:
    addresses_for = Introduction.addresses_for

    def one_way(one: Introduction, mine: Introduction) -> list[tuple[str, int]]:
        return addresses_for(one, mine) if mine.host == "ab"[able] else [("127.0.0.1", 1)]

    monkeypatch.setattr(Introduction, "addresses_for", one_way)
    job.join(2, settings("ab", streams=2))
    job.run([lambda r=rank: job.worlds[r].connect({1 - r}, 10) for rank in range(2)])
    assert not job.errors
    assert _talks(job, 0, 1, 2)


def test_an_address_that_leads_to_somebody_else(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every host has 172.17.0.1, for example: here the first address of all ranks leads to rank 2."""
    addresses_for = Introduction.addresses_for
    first: list[tuple[str, int]] = []

    def shared(one: Introduction, mine: Introduction) -> list[tuple[str, int]]:
        if one.host == "c":
            first[:] = addresses_for(one, mine)[:1]
        return [*first, *addresses_for(one, mine)]

    monkeypatch.setattr(Introduction, "addresses_for", shared)
    job.join(3, settings("abc"))
    assert not job.errors
    job.run([lambda r=rank: job.worlds[r].connect({0, 1, 2} - {r}, 10) for rank in range(3)])
    assert _talks(job, 0, 1, 1)


def test_unreachable_names_both_and_the_addresses(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Introduction, "addresses_for", lambda one, mine: [("127.0.0.1", 1)])
    job.join(2, lambda rank: env.Settings(host="ab"[rank], init_timeout=1))
    for rank in range(2):
        with pytest.raises(RendezvousError, match=r"127\.0\.0\.1:1: Connection refused"):
            raise job.errors[rank]
    assert "rank 1 (host b) cannot be reached" in str(job.errors[0])


def test_a_lost_peer_ends_the_wait_for_a_link(job: Job) -> None:
    job.join(2, settings("ab"))
    job.worlds[1].links.close()  # type: ignore[union-attr]
    job.worlds[1].acceptor.close()  # type: ignore[union-attr]
    lost = RendezvousError("rank 1 is gone", rank=1)
    threading.Timer(0.3, setattr, (job.engine(0), "failed", lost)).start()
    job.worlds[0].connect({1}, 10)  # the engine refuses the call that wanted it
    assert not job.engine(0).attached(1)


def test_who_has_left_ends_the_wait_for_a_link(job: Job) -> None:
    job.join(2, settings("ab"))
    job.worlds[1].close()
    threading.Timer(0.3, job.engine(0).gone.add, [1]).start()
    job.worlds[0].connect({1}, 300)
    failed = job.engine(0).failed
    assert isinstance(failed, PeerLost)
    assert (failed.rank, str(failed)) == (1, "rank 1 (host b) has shut down, and was not linked yet")


def test_of_several_sources_those_that_have_left_are_not_waited_for(job: Job) -> None:
    job.join(3, settings("abc"))
    job.worlds[2].close()
    job.engine(0).gone.add(2)
    job.worlds[0].connect({1, 2}, 300, any_source=True)
    assert job.engine(0).failed is None
    assert [job.engine(0).attached(peer) for peer in (1, 2)] == [True, False]
    job.worlds[0].connect({2}, 300, any_source=True)
    assert job.engine(0).failed.rank == 2


def test_who_cannot_be_reached_is_named_within_the_time_of_the_call(job: Job) -> None:
    job.join(2, lambda rank: env.Settings(host="ab"[rank], init_timeout=20, timeout=300))
    job.worlds[1].close()
    job.worlds[0].connect({1}, 0.5)
    failed = job.engine(0).failed
    assert isinstance(failed, CollectiveTimeout)
    assert failed.rank == 1
    assert re.match(r"rank 0 \(host a\) has no link after 0\.4\d* s: rank 1 \(host b\) cannot be reached", str(failed))


@pytest.mark.parametrize(("given", "records"), [({}, None), ({"checksum": True}, "sum"), ({"encrypt": True}, "other")])
def test_connections_carry_the_records_that_settings_ask_for(
    job: Job, given: dict[str, Any], records: str | None
) -> None:
    job.join(2, lambda rank: env.Settings(host="ab"[rank], streams=2, **given))
    assert job.errors == {}
    for rank in range(2):
        job.worlds[rank].connect({1 - rank}, 20)
    for rank in range(2):
        found = job.engine(rank).records
        assert {kind: len(each) for (kind, _), each in found.items()} == (
            {"data": 2, "control": 1} if records else {"data": 0, "control": 0}
        )
        tags = [each.seal(b"text")[-16:] for some in found.values() for each in some]
        summed = _native.Records().seal(b"text")[-16:]
        assert all((tag == summed) == (records == "sum") for tag in tags)


@pytest.mark.parametrize("dialling", [0, 1])
@pytest.mark.parametrize("error", [PeerLost("rank 7 is lost", rank=7), ResourceError("no descriptors")])
def test_what_attaching_a_link_raises_reaches_who_wants_it(
    job: Job, caplog: pytest.LogCaptureFixture, error: MultiringError, dialling: int
) -> None:
    def refuse(peer: int, sockets: list[int], records: list[_native.Records]) -> None:
        for descriptor in sockets:
            os.close(descriptor)
        raise error

    job.join(2, settings("ab"))
    job.engine(0).attach_tcp = refuse
    job.worlds[dialling].connect({1 - dialling}, 300)
    job.worlds[0].connect({1}, 300)
    failed = job.engine(0).failed
    assert (type(failed), str(failed), failed.rank) == (type(error), str(error), max(error.rank, 0))
    job.worlds[0].close()
    gc.collect()
    assert "never retrieved" not in caplog.text
    assert ("rank 0 (host a) has no use of its link to rank 1 (host b): no descriptors" in caplog.text) == (
        error.rank < 0
    )


def test_same_name_without_a_common_socket_is_another_host(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines that call themselves alike: the unix socket of one is not found on the other."""
    monkeypatch.setattr(unix, "exists", lambda name: False)
    job.join(2, settings("aa"))
    assert job.worlds[0].topology.hosts == job.worlds[1].topology.hosts == ("a", "a#1")
    assert list(job.engine(0).control) == [1]


def test_a_stranger_on_the_unix_socket_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    listening, name = unix.listen()
    engine = Peers(0, 2, hosts=["a", "a"])
    with listening, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\0" + name)
        stranger.sendall(bytes(500))
        assert local._answer(engine, listening, SECRET, auth.Hello(auth.LOCAL, rank=0), {1}, set()) == -1
    assert "rank 0 refused a connection on its host: it does not speak multiring's protocol" in caplog.text
    assert not engine.local
    engine.shutdown()


def test_another_user_on_the_unix_socket_is_not_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, and however little they say."""
    listening, name = unix.listen()
    engine = Peers(0, 2, hosts=["a", "a"])
    user, strangers = os.getuid(), set[str]()
    monkeypatch.setattr("multiring.net.unix.os.getuid", lambda: user + 1)
    with listening:
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as silent:
                silent.connect("\0" + name)
                assert local._answer(engine, listening, SECRET, auth.Hello(auth.LOCAL), {1}, strangers) == -1
    assert [record.getMessage() for record in caplog.records] == [
        f"rank -1 refused a connection on its host: it runs as user {user}, this process as user {user + 1}"
    ]
    engine.shutdown()


def test_settings_that_must_agree(job: Job) -> None:
    job.join(2, lambda rank: env.Settings(host="a", streams=1 + rank, init_timeout=10))
    for error in job.errors.values():
        assert str(error) == (
            "MULTIRING_STREAMS is 2 on rank 1 (host a) and 1 on rank 0 (host a): it must be the same everywhere"
        )
    assert len(job.errors) == 2


def test_a_wire_for_a_level_that_is_not_there(job: Job) -> None:
    job.join(2, lambda rank: env.Settings(host="ab"[rank], wire="rack=bfloat16", init_timeout=10))
    for error in job.errors.values():
        assert str(error) == "wire for level 'rack': the topology has host (of init, or MULTIRING_WIRE)"
    assert len(job.errors) == 2


def test_a_different_number_of_ranks(job: Job) -> None:
    job.run(
        [
            lambda: job._join(job.place(0, 2), settings("aa")(0)),
            lambda: job._join(job.place(1, 3), settings("aa")(1)),
        ]
    )
    assert "the number of ranks is 3 on rank 1 (host a) and 2 on rank 0" in str(job.errors[0])
    assert str(job.errors[1]) == str(job.errors[0])


@pytest.mark.parametrize("says", ["as we do", "in words of its own"])
def test_versions_that_differ(job: Job, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    agree = rendezvous._agree

    def older(records: list[dict[str, Any]], shared: dict[str, Any]) -> dict[str, Any]:
        known = records[1] if says == "as we do" else {"host": "a"}
        return agree([records[0], known | {"version": "0.0.9"}], shared)

    monkeypatch.setattr(rendezvous, "_agree", older)
    job.join(2, settings("aa"))
    assert f"rank 1 (host a) runs multiring 0.0.9, rank 0 (host a) multiring {__version__}" in str(job.errors[0])
    assert str(job.errors[1]) == str(job.errors[0])


def test_who_did_not_arrive(job: Job) -> None:
    short = replace(settings("aaaa")(0), init_timeout=0.5)
    job.run([lambda r=rank: job._join(job.place(r, 4), short) for rank in (0, 1, 3)])
    for rank in (0, 1, 3):
        assert str(job.errors[rank]) == "rank 2 did not arrive (arrived: 0-1, 3), within 0.5 s"
        assert job.errors[rank].rank == 2  # type: ignore[attr-defined]


def test_rank_zero_did_not_arrive(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiring.job.exchange.GRACE_SECONDS", 0.2)
    short = replace(settings("aaa")(0), init_timeout=0.5)
    job.run([lambda r=rank: job._join(job.place(r, 3), short) for rank in (1, 2)])
    assert str(job.errors[1]) == "rank 0 did not arrive (arrived: 1-2), within 0.5 s"


def test_a_rank_that_fails_tells_the_others(job: Job) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {2: range(port, port + 1)}
        job.join(3, lambda rank: env.Settings(host="a", ports=ports.get(rank), init_timeout=10))
    assert "no free port" in str(job.errors[2])
    for rank in (0, 1):
        assert f"rank 2 failed to join: no free port on any address in {port}-{port}" in str(job.errors[rank])


def test_cards_that_a_host_does_not_have_are_named(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "fastest", lambda names: ["eth7"])
    file = tmp_path / "topology.toml"
    file.write_text('host = [{ name = "a", cards = 2 }, { name = "b" }]\n')
    job.join(2, lambda rank: env.Settings(host="ab"[rank], topology=str(file) if rank == 0 else ""))
    assert not job.errors
    (said,) = [record.getMessage() for record in caplog.records if "cards" in record.getMessage()]
    assert said.startswith("host a has 2 cards by the topology, but only 0 of its interfaces (eth7) can be used")


def test_topology_file_of_rank_zero_is_everybodys(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "topology.toml"
    text = topology_file.text(Topology.flat([1, 1], host_link=Link(1e8, 2e8, 1e-3)))
    file.write_text(text.replace("host0", "a").replace("host1", "b"))
    job.join(2, lambda rank: env.Settings(host="ab"[rank], topology=str(file) if rank == 0 else ""))
    assert not job.errors
    assert job.worlds[1].topology == job.worlds[0].topology
    assert job.worlds[1].topology.places[0].link.up == 1e8
    for rank in range(2):
        assert cast("Any", job.worlds[rank].engine).links == [([0], 1e8, 2e8), ([1], 1e8, 2e8)]
    job.join(2, lambda rank: env.Settings(host="ac"[rank], topology=str(file) if rank == 0 else ""))
    for rank in range(2):
        assert "rank 1 is on host 'c'; the topology has only a, b" in str(job.errors[rank])


def test_interface_that_does_not_exist(job: Job) -> None:
    job.join(2, settings("ab", interface="nosuch0"))
    assert "MULTIRING_INTERFACE='nosuch0' admits no address of this host; it has: " in str(job.errors[0])


def test_only_the_interface_that_is_given(job: Job) -> None:
    job.join(2, settings("ab", interface="127.0.0.0/8"))
    assert not job.errors
    job.run([lambda r=rank: job.worlds[r].connect({1 - r}, 10) for rank in range(2)])
    with socket.socket(fileno=os.dup(job.engine(0).tcp[1][0])) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"


def test_ports_are_kept_to(job: Job) -> None:
    with socket.create_server(("", 0)) as probe:
        first = probe.getsockname()[1]
    job.join(2, settings("ab", ports=range(first, first + 8)))
    assert not job.errors
    job.worlds[0].connect({1}, 10)
    with socket.socket(fileno=os.dup(job.engine(0).tcp[1][0])) as sock:
        assert {sock.getsockname()[1], sock.getpeername()[1]} & set(range(first, first + 8))


@pytest.mark.parametrize("role", [auth.DATA, auth.CONTROL, auth.SURVIVOR])
def test_what_is_left_of_an_earlier_start_is_refused(job: Job, role: int, caplog: pytest.LogCaptureFixture) -> None:
    job.join(2, settings("ab"))
    acceptor = job.worlds[0].acceptor
    assert acceptor is not None
    assert acceptor.hello.restart == job.joins == 1
    stale = replace(acceptor.hello, role=role, rank=1, restart=0)  # it has the same generation, say after shrink
    with (
        caplog.at_level(logging.WARNING, "multiring"),
        socket.create_connection(acceptor.own[0]) as sock,
        pytest.raises(auth.Refused, match="it belongs to restart 1 of this job, this process to restart 0"),
    ):
        auth.run(sock, auth.client(SECRET, stale))
    deadline = time.monotonic() + 30
    while "it belongs to restart 0 of this job, this process to restart 1" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stale", [0, 1])
@pytest.mark.parametrize("stale_first", [True, False])
def test_who_comes_from_an_earlier_start_is_told_and_the_newest_go_on(job: Job, stale: int, stale_first: bool) -> None:
    left_over, job.joins = replace(job.place(stale, 2), restart=3), 4
    given, errors = settings("aa"), []

    def come_late() -> None:
        with pytest.raises(RendezvousError, match="restart 3 of the job, and others to restart 4") as caught:
            rendezvous.join(left_over, given(stale))
        errors.append(caught.value)

    newest = [threading.Thread(target=job._join, args=(job.place(rank, 2), given(rank))) for rank in range(2)]
    other = threading.Thread(target=come_late)
    order = [other, newest[1 - stale]] if stale_first else [newest[1 - stale], other]
    order[0].start()
    while job.server.peek("multiring//newest") is None:
        time.sleep(0.01)
    order[1].start()
    other.join()  # though the newest are not complete yet
    newest[stale].start()
    for thread in newest:
        thread.join()
    assert not job.errors
    assert sorted(job.worlds) == [0, 1]
    assert errors[0].rank == -1


class Interrupted(Client):
    """Something else happens between the first and the second word to the store about one key."""

    def __init__(self, port: int, key: str, meanwhile: Callable[[], object]) -> None:
        super().__init__([("127.0.0.1", port)], SECRET)
        self._of, self._meanwhile = key, meanwhile

    def _call(self, operation: int, key: str, value: bytes, seconds: float) -> bytes:
        try:
            return super()._call(operation, key, value, seconds)
        finally:
            if key == self._of:
                self._of = ""
                self._meanwhile()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("interrupted", [3, 4])
@pytest.mark.parametrize("earlier", [[], [2]])
def test_who_comes_in_the_same_instant_as_a_restart_is_told(
    job: Job, earlier: list[int], interrupted: int, rank: int
) -> None:
    """A rank of restart 3 and the last one of restart 4, after which nobody of that waits any more."""
    key = "multiring//newest"
    left_over, told = [], threading.Event()

    def come(store: Client, restart: int) -> None:
        exchange = Exchange(store, f"multiring//{restart}/1", rank, 2, 60)
        try:
            exchange.outdate(store, key, restart)
            if restart == 3:
                exchange.round("arrive", {})
        except RendezvousError as error:
            left_over.append(str(error))
            told.set()
        finally:
            store.close()

    def beside(restart: int) -> threading.Thread:
        return threading.Thread(target=come, args=(Client([("127.0.0.1", job.server.port)], SECRET), restart))

    for restart in earlier:
        come(Client([("127.0.0.1", job.server.port)], SECRET), restart)
    other = beside(7 - interrupted)

    def meanwhile() -> None:
        other.start()
        if other_is_newer:
            other.join()
        else:
            told.wait(1)  # it goes on to wait for others

    other_is_newer = interrupted == 3
    come(Interrupted(job.server.port, key, meanwhile), interrupted)
    other.join()
    assert len(left_over) == 1
    assert "this rank belongs to restart 3 of the job, and others to restart 4" in left_over[0]


def test_of_restarts_that_come_at_once_the_newest_goes_on(job: Job) -> None:
    together = threading.Barrier(4)
    outcomes: dict[int, str] = {}

    def come(restart: int) -> None:
        store = Client([("127.0.0.1", job.server.port)], SECRET)
        exchange = Exchange(store, f"multiring//{restart}/1", 1, 2, 30)
        together.wait()
        try:
            exchange.outdate(store, "multiring//newest", restart)
            if restart < 8:
                exchange.round("arrive", {})
            outcomes[restart] = "goes on"
        except RendezvousError as error:
            outcomes[restart] = str(error)
        finally:
            store.close()

    threads = [threading.Thread(target=come, args=(restart,)) for restart in (5, 6, 7, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.pop(8) == "goes on"
    for restart, outcome in outcomes.items():
        assert re.search(rf"belongs to restart {restart} of the job, and others to restart [{restart + 1}-8]:", outcome)


def test_joining_twice_reads_nothing_old(job: Job) -> None:
    store = Client([("127.0.0.1", job.server.port)], SECRET)
    Exchange(store, "multiring//0/1", 1, 2, 5)._publish("arrive", 1, {"stale": True})
    place = RankIdentity(0, 2, "test", lambda settings: nullcontext(JobMeeting(store, SECRET)))
    with pytest.raises(RendezvousError, match="rank 1 did not arrive"):
        rendezvous.join(replace(place, restart=1), env.Settings(init_timeout=0.3))
    store.close()


@pytest.mark.parametrize(
    ("hosts", "edges"),
    [
        ("a", {0: []}),
        ("aab", {0: [2], 1: [], 2: [0]}),
        ("abcdefg", {0: [1, 2, 3, 4], 1: [0, 5, 6], 2: [0], 5: [1]}),
    ],
)
def test_control_tree(hosts: str, edges: dict[int, list[int]]) -> None:
    assert {rank: control_edges(hosts, rank) for rank in edges} == edges


def test_control_tree_is_symmetric_and_connected() -> None:
    hosts = [str(rank // 3) for rank in range(300)]
    edges = {(rank, peer) for rank in range(300) for peer in control_edges(hosts, rank)}
    assert edges == {(peer, rank) for rank, peer in edges}
    assert len(edges) == 2 * 99


def test_loopback_never_leads_to_another_machine() -> None:
    here = replace(INTRODUCTION, addresses=(("10.0.0.1", 5), ("fd00::1", 5), ("127.0.0.1", 5), ("::1", 5)))
    there = replace(INTRODUCTION, machine="n")
    assert here.addresses_for(there) == [("10.0.0.1", 5), ("fd00::1", 5)]
    assert here.addresses_for(here)[0] == ("::1", 5)


def test_cards_that_are_no_equals_are_not_used() -> None:
    addresses = (("10.0.0.1", 5), ("10.1.0.1", 6), ("10.0.0.2", 5), ("10.2.0.1", 7), ("127.0.0.1", 5))
    cards = ("eth0", "eth1", "eth0", "eth2", "lo")
    here = replace(INTRODUCTION, addresses=addresses, cards=cards, fastest=("eth0", "eth2", "lo"))
    apart = [[("10.0.0.1", 5), ("10.0.0.2", 5)], [("10.2.0.1", 7)]]
    assert here.usable_cards() == here.cards_for(replace(here, machine="n")) == apart
    assert here.cards_for(replace(here, host="b")) == [[*addresses[::-1]]]  # no network lies between them


def test_what_the_store_carries_says_the_same() -> None:
    carried = json.loads(json.dumps(INTRODUCTION.encode()))
    assert Introduction.decode(carried | {"claim": {"pid": 7}}, 3) == INTRODUCTION
    assert carried["cpus"] == "0-2,9"


@pytest.mark.parametrize("name", sorted(field.name for field in fields(Introduction)))
def test_an_introduction_that_lacks_something_names_its_rank(name: str) -> None:
    carried = INTRODUCTION.encode()
    del carried[name]
    with pytest.raises(RendezvousError, match=rf"^what rank 3 says of itself lacks '{name}': .* install the same") as e:
        Introduction.decode(carried, 3)
    assert e.value.rank == 3


@pytest.mark.parametrize(
    ("name", "wrong"), [("addresses", [["10.0.0.1"]]), ("cpus", "two"), ("cpus", 2), ("cards", None)]
)
def test_an_introduction_that_cannot_be_read_names_its_rank(name: str, wrong: object) -> None:
    with pytest.raises(RendezvousError, match=r"^what rank 3 says of itself cannot be read \(.*install the same"):
        Introduction.decode(INTRODUCTION.encode() | {name: wrong}, 3)


def test_without_proc_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local, "PROC", tmp_path)
    for tell, file in ((local.machine, "sys/kernel/random/boot_id"), (local.kernel, "sys/kernel/random/boot_id")):
        with pytest.raises(ResourceError) as raised:
            tell()
        assert str(raised.value) == (
            f"cannot tell which machine this is: {tmp_path / file}: No such file or directory; mount /proc in this "
            "container or chroot (mount -t proc proc /proc)"
        )


def of_kernel(kernel: str, cpus: int, quota: float | None = None) -> Introduction:
    return replace(INTRODUCTION, kernel=kernel, cpus=frozenset(range(cpus)), quota=quota)


@pytest.mark.parametrize(
    ("introductions", "streams"),
    [
        ([of_kernel("k", 2)] * 2, 1),
        ([of_kernel("k", 16)] * 2, 4),
        ([of_kernel("k", 16, 7.0)] * 2, 2),
        ([of_kernel("k", 16), of_kernel("l", 3)], 2),
        ([of_kernel("k", 16), of_kernel("l", 1)], 1),
        ([of_kernel(str(number), 16) for number in range(64)], 4),
        ([of_kernel(str(number), 16) for number in range(100)], 2),
        ([of_kernel(str(number), 16) for number in range(300)], 1),
    ],
)
def test_connections_by_the_cores_that_all_ranks_have(introductions: list[Introduction], streams: int) -> None:
    assert fitting_streams(introductions) == streams
