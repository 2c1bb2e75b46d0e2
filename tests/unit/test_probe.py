"""Probing: the tree that is found of networks that are only imagined, and what becomes of hosts that do not answer."""

from __future__ import annotations

import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from imagined import Network, sets_of_hosts, tightest_bound

from multiring import cache
from multiring.errors import RendezvousError
from multiring.net import auth
from multiring.net.channel import ProvenChannel
from multiring.planning import topology_file
from multiring.planning.bound import cut_bound
from multiring.planning.topology import LEVELS, Link, Place, Topology, ranks_in_host
from multiring.planning.topology_file import outline
from multiring.probe import classes, kept_topology, measure
from multiring.probe.found import topology
from multiring.probe.measure import Leader, Member, Unresponsive, follow
from multiring.probe.rounds import ALL_ROUNDS, Burst, Flow, ProbeRound, Rates, Survey

TOPOLOGIES = sorted((Path(__file__).parents[2] / "lab/topologies").glob("*.toml"))
MBIT = 125_000.0

CLASS = 0.13
"""A measured rate becomes one of a class, 6 % away at most; noise is 4 %, and bounds follow from sums of rates."""


def found(network: Network) -> Topology:
    return topology(network.survey(), network.hosts)


@pytest.mark.parametrize("path", TOPOLOGIES, ids=lambda path: path.stem)
def test_the_topologies_of_the_lab_are_found(path: Path) -> None:
    built = topology_file.load(path)
    seen = found(Network(built))
    assert seen.hosts == built.hosts
    for place in seen.places:
        assert 0.4e-3 < place.link.burst / min(place.link.up, place.link.down) < 1.1e-3
    for ranks in sets_of_hosts(built):
        for collective in ("all_reduce", "all_to_all"):
            expected = cut_bound(built.restrict(ranks), collective, 1)
            assert cut_bound(seen.restrict(ranks), collective, 1) == pytest.approx(expected, rel=0.01)


@st.composite
def clusters(draw: st.DrawFn) -> Topology:
    """Sites of racks of equal hosts, whose uplinks are no wider than a card."""
    ranks, names = count(), count()
    uplinks = st.sampled_from([100, 200, 250, 400])

    def place(level: int) -> Place:
        number = next(names)
        if level == 1:
            return Place(f"h{number}", Link(400 * MBIT, 400 * MBIT, 50e-6), ranks_in_host([next(ranks)]))
        rate = draw(uplinks) * MBIT
        link = Link(rate, rate, 50e-6)
        inside = tuple(place(level - 1) for _ in range(draw(st.integers(1, sizes[level]))))
        return Place(f"p{number}", link, inside)

    height = draw(st.integers(1, 3))
    sizes = {1: 9, 2: 3, 3: 2} if height < 3 else {2: 2, 3: 2}
    outermost = draw(st.integers(2, 3 if height > 1 else sizes[1]))
    places = tuple(place(height) for _ in range(outermost))
    return Topology(LEVELS[: height + 1], places)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(clusters(), st.integers(0, 1000))
def test_the_bound_of_every_set_of_hosts_is_found(built: Topology, seed: int) -> None:
    noise = random.Random(seed)
    low = [1 - 0.04 * noise.random() for _ in range(1000)]
    seen = found(Network(built, lambda number, flow: low[number]))
    for ranks in sets_of_hosts(built):
        expected = tightest_bound(built.restrict(ranks))
        assert tightest_bound(seen.restrict(ranks)) == pytest.approx(expected, rel=CLASS), list(outline(seen))


def test_a_value_that_others_have_by_chance_is_not_believed() -> None:
    """While h0 sends, h1 receives and takes 40 Mbit/s less from it than it would pass: 240 are as good as h1's 200."""
    ranks, names = count(), count()

    def rack(uplink: int, *cards: int) -> Place:
        hosts = [
            Place(f"h{next(names)}", Link(rate * MBIT, rate * MBIT, 50e-6), ranks_in_host([next(ranks)]))
            for rate in cards
        ]
        return Place(f"r{next(names)}", Link(uplink * MBIT, uplink * MBIT, 50e-6), tuple(hosts))

    built = Topology(LEVELS[:3], (rack(200, 1000, 200), rack(400, 200, 200, 200), rack(400, 200)))
    seen = found(Network(built))
    for chosen in sets_of_hosts(built):
        assert tightest_bound(seen.restrict(chosen)) == pytest.approx(tightest_bound(built.restrict(chosen)), rel=CLASS)


def test_unfair_flows_do_not_hide_a_shared_link() -> None:
    """TCP shares a link as it likes: here each flow gets up to twice or half of its part, sums as they are."""
    built = topology_file.load(TOPOLOGIES[0].parent / "twelve.toml")
    moods = random.Random(1)
    part: dict[tuple[int, Flow], float] = {}

    def held_up(number: int, flow: Flow) -> float:
        """Two flows that a host sends trade what they get; the first ones do, as there is an odd number of them."""
        sender, receiver = flow
        key = (number, (sender, min(receiver, receiver ^ 1)))
        mood = part.setdefault(key, moods.uniform(-0.5, 0.5))
        traded = receiver ^ 1
        return 1.0 if traded == sender or number > ALL_ROUNDS else 1 + (mood if receiver < traded else -mood)

    assert list(outline(found(Network(built, held_up))))[::5] == [
        "rack rack1, 200 Mbit/s, 50 us, 25 kB at once",
        "rack rack2, 200 Mbit/s, 50 us, 25 kB at once",
        "rack rack3, 200 Mbit/s, 50 us, 25 kB at once",
    ]


def test_places_far_apart_are_told_apart_though_nothing_binds_between_them() -> None:
    wide, far = Link(1e4 * MBIT, 1e4 * MBIT, 5e-3), Link(400 * MBIT, 400 * MBIT, 50e-6)
    racks = (
        Place(name, wide, tuple(Place(f"{name}{i}", far, ranks_in_host([2 * side + i])) for i in range(2)))
        for side, name in enumerate("pq")
    )
    seen = found(Network(Topology(LEVELS[:3], tuple(racks))))
    assert [place.link.latency for place in seen.places] == [5e-3, 5e-3]
    assert seen.hosts == ("p0", "p1", "q0", "q1")


def test_a_single_host_far_from_the_rest_hangs_from_its_own_link() -> None:
    near, far = Link(400 * MBIT, 400 * MBIT, 50e-6), Link(100 * MBIT, 200 * MBIT, 5e-3)
    hosts = tuple(Place(f"h{i}", far if i == 2 else near, ranks_in_host([i])) for i in range(4))
    assert list(outline(found(Network(Topology(LEVELS[:2], hosts))))) == [
        "host h0, 400 Mbit/s, 50 us, 1 rank",
        "host h1, 400 Mbit/s, 50 us, 1 rank",
        "host h2, 100 Mbit/s up, 200 Mbit/s down, 5 ms, 1 rank",
        "host h3, 400 Mbit/s, 50 us, 1 rank",
    ]


def test_what_all_but_one_host_seem_to_share_is_no_link_of_theirs() -> None:
    """The fourth was held up while all sent to all, and again while what three of them share was measured."""
    link = Link(400 * MBIT, 400 * MBIT, 50e-6)
    built = Topology(LEVELS[:2], tuple(Place(f"h{i}", link, ranks_in_host([i])) for i in range(4)))

    def held_up(number: int, flow: Flow) -> float:
        return 0.5 if 3 in flow and not ALL_ROUNDS < number <= ALL_ROUNDS + 4 else 1.0

    assert list(outline(found(Network(built, held_up)))) == list(outline(built))


def test_rates_are_those_that_links_are_sold_with() -> None:
    sold = [0.1, 1, 2.5, 10, 25, 40, 50, 56, 100, 200, 400]
    for gigabit in sold:
        for measured in (0.95, 1.0, 1.05):
            assert classes.rates([measured * gigabit * 1e9 / 8]) == [pytest.approx(gigabit * 1e9 / 8)]


@pytest.mark.parametrize("burst", [0.0, 5e3, 20e3, 70e3])
def test_a_burst_is_found_where_most_of_a_millisecond_passes_at_once(burst: float) -> None:
    rack = Link(200 * MBIT, 200 * MBIT, 30e-6, burst)
    card = Link(400 * MBIT, 400 * MBIT, 25e-6, 100e3)
    racks = [
        Place(name, rack, tuple(Place(name + host, card, ranks_in_host([2 * n + h])) for h, host in enumerate("ab")))
        for n, name in enumerate("xyz")
    ]
    seen = found(Network(Topology(LEVELS[:3], tuple(racks))))
    assert {place.link.burst for place in seen.places} == {25e3 if burst > 12.5e3 else 0.0}
    assert {host.link.burst for place in seen.places for host in place.places} == {50e3 if burst > 12.5e3 else 0.0}


@pytest.mark.parametrize("burst", [0.0, 250e3])
def test_an_uplink_that_is_wider_than_a_card_does_not_seem_to_save_what_it_carries(burst: float) -> None:
    uplink, card = Link(1000 * MBIT, 1000 * MBIT, 50e-6, burst), Link(400 * MBIT, 400 * MBIT, 50e-6, 100e3)
    ranks = count()
    racks = [
        Place(name, uplink, tuple(Place(f"{name}{h}", card, ranks_in_host([next(ranks)])) for h in range(8)))
        for name in "xy"
    ]
    seen = found(Network(Topology(LEVELS[:3], tuple(racks))))
    assert {place.link.burst for place in seen.places} == {50e3 if burst else 0.0}


def test_a_link_too_slow_to_be_tried_has_no_burst() -> None:
    hosts = [Place(name, Link(1e3, 1e3, 1e-3, 70e3), ranks_in_host([n])) for n, name in enumerate("abc")]
    assert {place.link.burst for place in found(Network(Topology(LEVELS[:2], tuple(hosts)))).places} == {0.0}


def test_values_that_are_alike_are_of_one_class() -> None:
    assert classes.rates([49e6, 43e6, 50e6, 51e6, 12.4e6]) == [50e6, 50e6, 50e6, 50e6, 12.5e6]
    assert classes.latencies([52e-6, 60e-6, 5.1e-3]) == pytest.approx([50e-6, 50e-6, 5e-3])


@contextmanager
def members(hosts: int) -> Iterator[tuple[list[Member], dict[int, ProvenChannel], list[ProvenChannel]]]:
    """Hosts that are connected over loopback, the control connections of the first, and the others' ends of them."""
    with ExitStack() as stack:

        def connected() -> tuple[socket.socket, socket.socket]:
            with socket.create_server(("127.0.0.1", 0)) as server:
                one = stack.enter_context(socket.create_connection(server.getsockname()))
                return one, stack.enter_context(server.accept()[0])

        streams: list[dict[int, dict[int, socket.socket]]] = [{} for _ in range(hosts)]
        for a in range(hosts):
            for b in range(a):
                one, other = connected()
                streams[a][b], streams[b][a] = {1: one}, {1: other}
        proof = auth.Proven(auth.Hello(auth.PROBE))
        controls = [[ProvenChannel(end, proof) for end in connected()] for _ in range(hosts - 1)]
        yield (
            [Member(host, hosts, streams[host]) for host in range(hosts)],
            {host: controls[host - 1][0] for host in range(1, hosts)},
            [theirs for _, theirs in controls],
        )


def one_round(seconds: object) -> Iterator[ProbeRound]:
    rates = yield ProbeRound(((0, 1), (1, 2), (2, 0)), 0.02, 0.05, 1 << 18)  # type: ignore[misc]
    return rates  # type: ignore[return-value]


def test_what_is_measured_is_what_arrives() -> None:
    with members(3) as (hosts, controls, theirs):
        threads = [
            threading.Thread(target=follow, args=(hosts[h], theirs[h - 1], time.monotonic() + 30)) for h in (1, 2)
        ]
        for thread in threads:
            thread.start()
        leader = Leader(hosts[0], controls)
        assert leader.agree() == [{1: {1}, 2: {1}}, {0: {1}, 2: {1}}, {0: {1}, 1: {1}}]
        rates = leader.measure(one_round)  # type: ignore[arg-type]
        leader.end()
        for thread in threads:
            thread.join()
    assert sorted(rates) == [(0, 1), (1, 2), (2, 0)]
    assert all(1e6 < rate < 1e12 for rate in rates.values())


def test_the_seconds_of_a_burst_are_those_until_its_last_byte_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    def bursts(seconds: object) -> Survey[list[Rates]]:
        found = []
        for flow in ((0, 1), (1, 2), (2, 0)):
            found.append((yield Burst(flow, 100_000)))
        return found

    receive = measure.auth.receive

    def late(stream: socket.socket, count: int, *deadline: float) -> bytes:
        received = receive(stream, count, *deadline)
        if count == 100_000:
            time.sleep(0.1)
        return received

    monkeypatch.setattr(measure.auth, "receive", late)
    with members(3) as (hosts, controls, theirs):
        threads = [
            threading.Thread(target=follow, args=(hosts[h], theirs[h - 1], time.monotonic() + 30)) for h in (1, 2)
        ]
        for thread in threads:
            thread.start()
        leader = Leader(hosts[0], controls)
        found = leader.measure(bursts)
        leader.end()
        for thread in threads:
            thread.join()
    assert [list(each) for each in found] == [[(0, 1)], [(1, 2)], [(2, 0)]]
    assert all(0.1 <= seconds < 2 for each in found for seconds in each.values())


def test_a_host_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PATIENCE_SECONDS", 0.3)
    with members(3) as (hosts, controls, theirs):
        thread = threading.Thread(target=follow, args=(hosts[1], theirs[0], time.monotonic() + 30))
        thread.start()
        leader = Leader(hosts[0], controls)
        with pytest.raises(Unresponsive) as caught:
            leader.measure(one_round)  # type: ignore[arg-type]
        assert caught.value.hosts == (2,)
        leader.end()
        thread.join()


def test_streams_that_only_one_end_has_are_left() -> None:
    with members(2) as (hosts, controls, theirs):
        one, other = socket.socketpair()
        hosts[1].streams[0][2] = one
        thread = threading.Thread(target=follow, args=(hosts[1], theirs[0], time.monotonic() + 30))
        thread.start()
        leader = Leader(hosts[0], controls)
        assert leader.agree() == [{1: {1}}, {0: {1}}]
        leader.end()
        thread.join()
        assert one.fileno() == -1
        other.close()


def test_hosts_that_cannot_reach_each_other_are_named() -> None:
    with members(3) as (hosts, controls, theirs):
        hosts[1].streams[2].clear()
        threads = [
            threading.Thread(target=follow, args=(hosts[h], theirs[h - 1], time.monotonic() + 30)) for h in (1, 2)
        ]
        for thread in threads:
            thread.start()
        leader = Leader(hosts[0], controls)
        with pytest.raises(Unresponsive) as caught:
            leader.agree()
        assert (caught.value.hosts, caught.value.step) == ((1, 2), "connecting to each other")
        leader.end()
        for thread in threads:
            thread.join()


HOSTS = [["a", "02:00:00:00:00:01", "10.0.0.1"], ["b", "02:00:00:00:00:02", "10.0.0.2"]]


def test_what_was_found_is_kept_for_these_hosts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = topology_file.text(Topology.of_hosts(["a", "b"]))
    assert kept_topology(HOSTS) == ""
    cache.keep(cache.path(HOSTS), text)
    assert cache.path(HOSTS[::-1]) == cache.path(HOSTS)
    assert topology_file.parse(kept_topology(HOSTS)) == topology_file.parse(text)
    other_card = [HOSTS[0], ["b", "02:00:00:00:00:03", "10.0.0.2"]]
    assert kept_topology(other_card) == kept_topology(HOSTS[:1]) == ""
    assert sorted(tmp_path.rglob("*.*")) == [cache.path(HOSTS)]


def test_a_file_that_was_spoilt_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache.keep(cache.path(HOSTS), 'host = [{ name = "a" }]')
    with pytest.raises(RendezvousError, match=r"rank 1 is on host 'b'.*remove it to have .* measured again"):
        kept_topology(HOSTS)


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            cache.keep(cache.path(HOSTS), "x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(cache.path(HOSTS))
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_only_the_latest_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "MOST_FILES", 2)
    files = [cache.path([[name, "", ""]]) for name in "abc"]
    for age, file in enumerate(files):
        cache.keep(file, "")
        os.utime(file, (age, age))
    cache.keep(files[0], "")
    assert sorted(file.name for file in tmp_path.rglob("*.toml")) == sorted([files[0].name, files[2].name])


def test_what_a_rank_cannot_heed_is_refused_and_written_nowhere(tmp_path: Path) -> None:
    def rank(*words: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "multiring.cli.probe_rank", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    for words, fault in (
        (["--topology=a.toml"], "no such option: --topology"),
        (["a.toml"], "got unexpected extra argument(s) (a.toml)"),
    ):
        code, shown, error = rank(*words)
        assert (code, shown) == (2, "")
        program = "multiring run -m multiring.cli.probe_rank"
        assert error == f"{program}: {fault}; see {program} --help\n"
    told = "multiring probe: --output /proc/a.toml: it cannot be made (No such file or directory)\n"
    assert rank("--output", "/proc/a.toml") == (2, "", told)
    code, shown, error = rank("--help")
    assert (code, error) == (0, "")
    assert "--output FILE" in shown
    assert list(tmp_path.iterdir()) == []
