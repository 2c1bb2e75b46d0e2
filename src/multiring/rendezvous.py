"""The ranks of a job find each other, prove who shares a host, connect the hosts, and hand all of it to the engine.

Three rounds through the store, which is not used afterwards; the survivors of a loss meet by the same rounds, in a
store that one of them stands for (membership.py):

``arrive``   every rank publishes its host, its sockets, and the settings that must agree
``prove``    ranks that claim one host have attached each other over unix sockets, or are taken for different hosts
``connect``  the lowest ranks of the hosts have made the edges of the control tree, and if nobody knows how fast the
             hosts are linked, they have measured it
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import logging
import os
import secrets
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import multiring
from multiring import _native, bootstrap, descriptors, env, probe, topology_file, trace
from multiring.bootstrap import Place, no_meeting
from multiring.cores import cgroup_quota, format_list, parse_list
from multiring.cost import NATIVE, Speeds
from multiring.errors import MultiringError, PeerLost, RendezvousError
from multiring.exchange import Exchange, Record, spans
from multiring.net import auth, interfaces, listen, local, unix
from multiring.net.cards import Way, ways_between
from multiring.net.dial import Address
from multiring.net.gate import Gate, Membership
from multiring.net.links import Links
from multiring.plan import is_id
from multiring.planner import check_wire
from multiring.seats import Seat, speeds
from multiring.store import Store
from multiring.strategies import Strategy, forced
from multiring.topology import Topology

if TYPE_CHECKING:
    from multiring.engine import Engine
    from multiring.mpi.engine import Engine as MpiEngine

CONTROL_FANOUT = 4
"""Children of a host in the control tree: depth 5 at 1,024 hosts."""

REJOIN_HEARTBEATS = 4
"""In the time of so many heartbeat time-outs survivors meet, or look once more for who survives."""

LINK_SHARE = 0.9
"""Of the time that a call has, for making its links: who cannot be reached is named before others' calls time out."""

LEAVING_SECONDS = 0.5
"""How long after a rank's farewell the end of a link that it made may still be under way here."""

_log = logging.getLogger("multiring")
_joins: Counter[str] = Counter()  # init after shutdown must not read what the last one wrote


@dataclass(frozen=True)
class World:
    """A job that has come together: its engine, and its topology, in which ranks of one host share memory.

    ``links`` is None where all ranks share a host.
    """

    rank: int
    topology: Topology
    engine: Engine
    links: Links | None
    settings: env.Settings
    gate: Gate | None = None
    """None where this rank has always been alone."""
    measured: str = ""
    """What a file or a measurement says of the links between the hosts; "": in the topology they are as usual."""
    members: tuple[int, ...] = (0,)
    """The ranks that they had, or took the places of, when the job started: the launcher knows them by these."""
    entered: tuple[int, ...] = (0,)
    """The generation in which each rank came."""
    groups: set[int] = field(default_factory=set)
    """The numbers of the communicators that exist."""
    dropped: deque[int] = field(default_factory=deque)
    """Those of groups that nobody can call any more, and that were not closed: the next group frees them."""
    draws: Iterator[int] = field(default_factory=itertools.count)
    """Counts the numbers that this rank draws for groups."""
    timeline: trace.Timeline | None = None
    speeds: Speeds = NATIVE
    """What its ranks need, those that share cores included."""
    began: float = field(default_factory=time.monotonic)
    former: dict[str, Any] = field(default_factory=dict)
    """The account of the generations before this one, if there were any."""

    @property
    def known(self) -> bool:
        """Whether somebody said or measured how the hosts are linked."""
        return bool(self.measured)

    def connect(self, peers: set[int], timeout: float, *, any_source: bool = False) -> None:
        """Make the links to ``peers`` that do not stand yet, for a call that has ``timeout`` seconds.

        Whatever prevents it fails the engine, so that all ranks hear of it; it is left to the call to raise that, and
        to say which it was. With ``any_source`` those that have left are not needed, as long as another one can have
        sent something.
        """
        deadline = time.monotonic() + LINK_SHARE * timeout
        while self.links and (missing := {peer for peer in peers if not self.engine.attached(peer)}):
            remaining = max(deadline - time.monotonic(), 0.0)
            try:
                return self.links.ensure(auth.DATA, missing, remaining, self._obstacle(missing))
            except MultiringError as error:
                if self.engine.failure() is not None:
                    return
                possible = {peer for peer in peers if self.engine.attached(peer) or not self.engine.departed(peer)}
                if not (any_source and possible and isinstance(error, PeerLost)):
                    kind = "CollectiveTimeout" if isinstance(error, RendezvousError) else type(error).__name__
                    return self.engine.fail(kind, error.rank if error.rank >= 0 else self.rank, str(error))
                peers = possible

    def _obstacle(self, peers: set[int]) -> Callable[[], BaseException | None]:
        """Tells why links to ``peers`` cannot come about any more: the engine has failed, or one of them has left."""
        first_seen: dict[int, float] = {}

        def find() -> BaseException | None:
            now = time.monotonic()
            for peer in sorted(peers):
                if self.engine.departed(peer) and now - first_seen.setdefault(peer, now) >= LEAVING_SECONDS:
                    name = f"rank {peer} (host {self.topology.hosts[peer]})"
                    return self.engine.failure() or PeerLost(f"{name} has shut down, and was not linked yet", rank=peer)
            return self.engine.failure()

        return find

    def close(self) -> None:
        """Say farewell and release everything. May be called twice."""
        try:
            self.leave()
        finally:
            if self.gate:
                self.gate.close()

    def leave(self) -> None:
        """Say farewell and release everything but the gate, for another generation to come. May be called twice."""
        if self.links:
            self.links.close()
        try:
            self.engine.shutdown()
        finally:
            if self.timeline is not None:
                self.timeline.write(self.engine.traced())

    def account(self) -> dict[str, Any]:
        """What this rank did since it joined the job, and for which ranks its callers waited."""
        counted = self.engine.statistics()
        peers = counted["peers"]
        account = {
            "seconds": time.monotonic() - self.began,
            "calls": counted["operations"],
            "bytes": sum(peer["bytes_sent"] for peer in peers.values()),
            "in_calls": counted["seconds_in_calls"],
            "waiting": counted["seconds_waiting"],
            "waited_for": Counter(
                {self.members[rank]: peer.get("seconds_waited", 0.0) for rank, peer in peers.items()}
            ),
        }
        return {name: self.former[name] + account[name] for name in account} if self.former else account

    def follow(self, former: World, account: dict[str, Any]) -> None:
        """Go on with the account of the generation before, and with what its timeline knows of the job's clock."""
        self.former.update(account)
        if self.timeline is not None and former.timeline is not None:
            self.timeline.offset = former.timeline.offset

    @property
    def settings_again(self) -> env.Settings:
        """Those to join with once more: the host has the name by which it was told apart from others."""
        return replace(self.settings, host=self.topology.hosts[self.rank])


def join(place: Place, settings: env.Settings) -> World:
    """Meet the other ranks; RendezvousError names who did not come, cannot be reached, or does not fit.

    ValueError for a strategy to force that is none.
    """
    descriptors.fill_standard()
    check_settings(settings)
    strategy = forced.wanted(settings.plan, settings.wire)
    if place.world_size == 1:
        return _alone(place, settings, _topology_text(settings))
    job = f"multiring/{place.job}"
    prefix = f"{job}/{place.restart}"
    _joins[prefix] += 1
    with _blaming(place.rank), place.meet(settings) as meeting:
        key = f"{prefix}/{_joins[prefix]}"
        size, served_by = place.world_size, meeting.store.served_by
        exchange = Exchange(meeting.store, key, place.rank, size, settings.init_timeout, served_by=served_by)
        with exchange.settling(), contextlib.ExitStack() as undo:  # others notice by what is undone that we failed
            exchange.outdate(meeting.store, f"{job}/newest", place.restart)
            exchange.claim(meeting.store, settings.host or socket.gethostname())
            world = _join(place, settings, exchange, meeting.secret, lambda: _topology_text(settings), undo)
            _check_strategy(strategy, world.topology)
            undo.pop_all()
            return world


def join_beside(
    place: Place,
    settings: env.Settings,
    exchange: Exchange,
    secret: bytes | None,
    topology_text: str,
    failure: Callable[[], BaseException | None],
) -> World:
    """A world beside the one that this rank may be in, which is left alone, with a gate of its own.

    ``failure`` tells why it cannot come about any more. RendezvousError for all that `join` raises it for.
    """
    with contextlib.ExitStack() as undo:
        world = _join(place, settings, exchange, secret, lambda: topology_text, undo, failure=failure)
        undo.pop_all()
        return world


@contextlib.contextmanager
def _blaming(rank: int) -> Iterator[None]:
    """The launcher learns because of which other rank this one could not join."""
    try:
        yield
    except RendezvousError as error:
        if error.rank not in (-1, rank):
            bootstrap.report(error.rank)
        raise


def rejoin(
    world: World, gate: Gate, membership: Membership, store: Store, failure: Callable[[], BaseException | None]
) -> World:
    """The world of those who have agreed to go on, at whose rank 0 is ``store``; ``world`` has been left.

    ``failure`` tells of another loss in the meantime. RendezvousError for all that `join` raises it for.
    """
    rank, size = membership.members.index(gate.rank), len(membership.members)
    entered = tuple(world.entered[world.members.index(member)] for member in membership.members)
    place = Place(
        rank,
        size,
        "shrink",
        no_meeting,
        gate.hello.job,
        gate.hello.restart,
        membership.generation,
        members=membership.members,
        entered=entered,
    )
    settings = world.settings_again
    if size == 1:
        return replace(_alone(place, settings, world.measured, gate), settings=world.settings)
    patience = min(settings.init_timeout, REJOIN_HEARTBEATS * settings.heartbeat_timeout)
    exchange = Exchange(store, "shrink", rank, size, patience)
    with contextlib.ExitStack() as undo:
        joined = _join(place, settings, exchange, gate.secret, lambda: world.measured, undo, gate, failure)
        undo.pop_all()
        return replace(joined, settings=world.settings)


def _alone(place: Place, settings: env.Settings, text: str, gate: Gate | None = None) -> World:
    hosts = [settings.host or socket.gethostname()]
    topology, timeline = _topology(text, hosts), _timeline(place, settings)
    engine = _engine(place, hosts, settings)
    return World(0, topology, engine, None, settings, gate, text, *_origins(place), timeline=timeline)


def _origins(place: Place) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which ranks they were when the job started, and in which generation each came."""
    size = place.world_size
    return place.members or tuple(range(size)), place.entered or (place.generation,) * size


def _join(
    place: Place,
    settings: env.Settings,
    exchange: Exchange,
    secret: bytes | None,
    topology_text: Callable[[], str],
    undo: contextlib.ExitStack,
    gate: Gate | None = None,
    failure: Callable[[], BaseException | None] = lambda: None,
) -> World:
    """``gate`` is the one that this rank has from an earlier generation; ``topology_text`` is asked for on rank 0."""
    hello = auth.Hello(auth.LOCAL, place.rank, restart=place.restart, generation=place.generation, job=place.job)
    listening: list[socket.socket] = []
    with exchange.reporting("arrive"):
        here, unix_name = unix.listen()
        undo.enter_context(here)
        if gate is None:
            listening, own = _listen(settings) if settings.engine == "native" else ([], [])
            for sock in listening:
                undo.enter_context(sock)
        else:
            own = list(gate.own)
            gate.hello = hello
        text = topology_text() if place.rank == 0 else ""
        timeline = _timeline(place, settings)
    ports = dict(own)
    cards = [card for card in interfaces.admitted(settings.interface, loopback=True) if str(card[1]) in ports]
    introduction = {
        "version": multiring.__version__,
        "agreed": {"the number of ranks": str(place.world_size), **env.agreed(settings)},
        "host": settings.host or socket.gethostname(),
        "machine": local.machine(),
        "kernel": local.kernel(),
        "unix": unix_name,
        "addresses": [(str(ip), ports[str(ip)]) for _, ip in cards],
        "cards": [name for name, _ in cards],
        "fastest": interfaces.fastest(name for name, ip in cards if not ip.is_loopback),
        "hardware": sorted({interfaces.hardware(name) for name, ip in cards if not ip.is_loopback}),
        "cpus": format_list(sorted(os.sched_getaffinity(0))),
        "quota": cgroup_quota(),
    }
    shared = {"secret": "" if secret else secrets.token_hex(32), "topology": text}
    records, shared = exchange.round("arrive", introduction, partial(_agree, shared=shared))
    secret = secret or bytes.fromhex(shared["secret"])

    with exchange.reporting("prove"):
        engine = _engine(place, [record["host"] for record in records], settings)
        undo.callback(engine.shutdown)
        claimed = _claimed(records, place.rank)
        attached = local.attach(engine, here, claimed, secret, hello, exchange.deadline, failure)
    judge = partial(_prove, introductions=records, text=shared["topology"], settings=settings)
    _, proof = exchange.round("prove", {"attached": attached}, judge)
    hosts: list[str] = proof["hosts"]

    links = None
    text = proof["topology"]
    with exchange.reporting("connect"):
        _topology(text, hosts)
        if settings.engine == "mpi":
            here.close()
            cast("MpiEngine", engine).connect()
        elif gate is None:
            gate = _gate(hello, _origins(place)[0], secret, listening, here, records, hosts, settings)
            undo.callback(gate.close)
        else:
            here.close()
        if gate is not None and len(set(hosts)) > 1:
            links = _links(gate, hello, records, hosts, cast("_native.Engine", engine), settings)
            undo.callback(links.close)
            remaining = max(exchange.deadline - time.monotonic(), 0.0)
            either = partial(_first, failure, engine.failure)
            links.ensure(auth.CONTROL, control_edges(hosts, place.rank), remaining, either)
            if proof["measure"] and place.rank in _leaders(hosts):
                text = probe.measured(links, _party(records, hosts, place.rank), exchange.deadline)
    _, told = exchange.round("connect", {}, lambda _: {"topology": text})
    text = told["topology"]
    topology = _topology(text, hosts)
    _check_wire(settings, topology)
    if links:
        links.spread(_over_cards(records, topology, place.rank))
        if place.rank == 0:
            _warn_of_missing_cards(records, topology)
    if timeline is not None:
        timeline.host = hosts[place.rank]
    return World(
        place.rank,
        topology,
        engine,
        links,
        settings,
        gate,
        text,
        *_origins(place),
        timeline=timeline,
        speeds=speeds([_seat(record, host) for record, host in zip(records, hosts, strict=True)]),
    )


def _timeline(place: Place, settings: env.Settings) -> trace.Timeline | None:
    if not settings.trace:
        return None
    host = settings.host or socket.gethostname()
    if place.members:  # of a job that goes on
        return trace.resume(settings.trace, place.rank, host, place.restart, place.generation)
    return trace.prepare(settings.trace, place.rank, host, place.restart)


def _first(*failures: Callable[[], BaseException | None]) -> BaseException | None:
    return next((error for error in (failure() for failure in failures) if error is not None), None)


def _topology_text(settings: env.Settings) -> str:
    if not settings.topology:
        return ""
    path = Path(settings.topology)
    try:
        topology_file.load(path)  # what is wrong in it is said of the file, before it is handed to all
        return path.read_text()
    except OSError as error:
        raise RendezvousError(f"MULTIRING_TOPOLOGY={path}: {error.strerror}") from None


def _topology(text: str, hosts: Sequence[str]) -> Topology:
    """What the file says of the hosts that are there; without one, two levels with links as usual."""
    return topology_file.parse(text).assign(hosts) if text else Topology.of_hosts(hosts)


def _check_wire(settings: env.Settings, topology: Topology) -> None:
    try:
        check_wire(env.parse_wire(settings.wire), topology)
    except ValueError as error:
        raise RendezvousError(f"{error} (of init, or MULTIRING_WIRE)") from None


def check_settings(settings: env.Settings) -> None:
    """RendezvousError for settings that contradict one another, wherever the job runs."""
    trace, engine = f"MULTIRING_TRACE={settings.trace}", f"MULTIRING_ENGINE={settings.engine}"
    wire, plan = f"MULTIRING_WIRE={settings.wire}", f"MULTIRING_PLAN={settings.plan}"
    if settings.trace and settings.engine != "native":
        raise _contradiction(trace, engine, "the native engine alone notes what happens when")
    if settings.reproducible and settings.wire:
        why = "where a sum is rounded to a narrower format depends on where the ranks are"
        raise _contradiction(wire, "MULTIRING_REPRODUCIBLE", why)
    if settings.reproducible and settings.plan and not is_id(settings.plan):
        raise _contradiction(plan, "MULTIRING_REPRODUCIBLE", "the strategy sums in an order of its own")


def _contradiction(one: str, other: str, why: str) -> RendezvousError:
    return RendezvousError(f"{one} and {other} do not go together: {why}")


def _check_strategy(strategy: Strategy | None, topology: Topology) -> None:
    if strategy is None:
        return
    try:
        strategy.plan(topology, 1)
    except ValueError as error:
        raise RendezvousError(f"MULTIRING_PLAN={strategy.name}: {error}") from None


def _engine(place: Place, hosts: list[str], settings: env.Settings) -> _native.Engine | MpiEngine:
    if settings.engine == "mpi" and place.world_size > 1:
        world = bootstrap.mpi_that_moves_data(place)
        from multiring.mpi.engine import Engine as MpiEngine

        return MpiEngine(world, hosts, settings)
    return _native.Engine(
        place.rank,
        place.world_size,
        generation=place.generation,
        hosts=hosts,
        arena_bytes=settings.arena_bytes,
        spin_seconds=settings.spin_seconds,
        heartbeat_timeout=settings.heartbeat_timeout,
        late_seconds=settings.late_warning,
        trace=bool(settings.trace),
        helpers=settings.card_threads,
        inproc=place.world_size == 1,  # private memory: there is nobody to share it with
    )


def _listen(settings: env.Settings) -> tuple[list[socket.socket], list[tuple[str, int]]]:
    """The sockets on which other hosts may connect, and their addresses, loopback included."""
    found = interfaces.addresses(settings.interface, loopback=True)
    if not settings.interface:
        sock = listen.bind("", settings.ports)
        return [sock], [(address, sock.getsockname()[1]) for address in found]
    sockets = [listen.bind(address, settings.ports) for address in found]
    return sockets, [(address, sock.getsockname()[1]) for address, sock in zip(found, sockets, strict=True)]


def _agree(records: list[Record], shared: Record) -> Record:
    """RendezvousError shows both sides of the first difference to rank 0."""
    first = records[0]
    for rank, record in enumerate(records):
        if record["version"] != first["version"]:
            raise RendezvousError(
                f"rank {rank} (host {record['host']}) runs multiring {record['version']}, rank 0 (host "
                f"{first['host']}) multiring {first['version']}: install the same version everywhere",
                rank=rank,
            )
        different = difference(f"rank {rank}", record, "rank 0", first)
        if different:
            raise RendezvousError(different, rank=rank)
    return shared


def difference(one: str, record: Record, other: str, first: Record) -> str:
    """Both sides of the first setting in which two ranks differ that must agree; "" if they do."""
    for name, value in record["agreed"].items():
        if value != first["agreed"][name]:
            theirs = first["agreed"][name]
            return (
                f"{name} is {value or 'not set'} on {one} (host {record['host']}) and {theirs or 'not set'} on {other} "
                f"(host {first['host']}): it must be the same everywhere"
            )
    return ""


def _claimed(records: list[Record], rank: int) -> dict[int, str]:
    """The unix sockets of the ranks that say they share this rank's host."""
    mine = records[rank]
    return {
        peer: record["unix"]
        for peer, record in enumerate(records)
        if peer != rank and (record["host"], record["machine"]) == (mine["host"], mine["machine"])
    }


def _seat(introduction: Record, host: str) -> Seat:
    return Seat(host, introduction["kernel"], frozenset(parse_list(introduction["cpus"])), introduction["quota"])


def _prove(records: list[Record], introductions: list[Record], text: str, settings: env.Settings) -> Record:
    """Who shares a host; and what is known of the links between the hosts, or that they are to be measured."""
    hosts = _proven(records, [introduction["host"] for introduction in introductions])
    leaders = [introductions[rank] for rank in _leaders(hosts)]
    if text or len(leaders) == 1 or settings.probe == "off" or settings.engine == "mpi":
        return {"hosts": hosts, "topology": text, "measure": False}
    if len(leaders) > probe.MOST_HOSTS:
        _log.warning(
            "%d hosts are more than the %d between which links are measured: they are taken for equal; give a topology "
            "file by MULTIRING_TOPOLOGY",
            len(leaders),
            probe.MOST_HOSTS,
        )
        return {"hosts": hosts, "topology": "", "measure": False}
    if settings.probe == "refresh":
        return {"hosts": hosts, "topology": "", "measure": True}
    elsewhere = len({leader["machine"] for leader in leaders}) > 1  # else there is no network between them
    text = probe.kept(_identity(introductions, hosts)) if elsewhere else ""
    return {"hosts": hosts, "topology": text, "measure": elsewhere and not text}


def _proven(records: list[Record], hosts: list[str]) -> list[str]:
    """The host of each rank by who attached whom; the second of two hosts that have one name is told apart."""
    groups = [sorted({rank, *record["attached"]}) for rank, record in enumerate(records)]
    names: dict[int, str] = {}
    for rank, group in enumerate(groups):
        for peer in group:
            if groups[peer] != group:
                raise RendezvousError(
                    f"rank {rank} shares memory with {spans(group)}, but rank {peer} with {spans(groups[peer])}: give "
                    "the ranks of one host the same MULTIRING_HOST, and those of others another",
                    rank=rank,
                )
        if group[0] == rank:
            names[rank] = f"{hosts[rank]}#{rank}" if hosts[rank] in names.values() else hosts[rank]
    return [names[group[0]] for group in groups]


def _leaders(hosts: Sequence[str]) -> list[int]:
    """The lowest rank of each host."""
    return [hosts.index(host) for host in dict.fromkeys(hosts)]


def _identity(records: Sequence[Record], hosts: Sequence[str]) -> list[list[str]]:
    """What tells this set of hosts from others: their names, addresses and cards."""
    return [
        [hosts[rank], *records[rank]["hardware"], *sorted(host for host, _ in records[rank]["addresses"])]
        for rank in _leaders(hosts)
    ]


def _party(records: list[Record], hosts: Sequence[str], rank: int) -> probe.Party:
    """Those who measure, as this rank sees them."""
    leaders = _leaders(hosts)
    found = tuple(
        probe.Host(hosts[each], tuple(r for r, host in enumerate(hosts) if host == hosts[each])) for each in leaders
    )
    ways = tuple(_ways(records[each], records[rank], each == rank) for each in leaders)
    return probe.Party(found, leaders.index(rank), ways, _identity(records, hosts))


def _ways(record: Record, mine: Record, own: bool) -> list[list[tuple[str, int]]]:
    """The addresses of another rank (or of this one as others see it) by card; on the same machine there are none."""
    if record["machine"] == mine["machine"] and not own:
        return [_reachable(record, mine)]
    cards: dict[str, list[tuple[str, int]]] = {}
    for (host, port), card in zip(record["addresses"], record["cards"], strict=True):
        if card in record["fastest"] and not ipaddress.ip_address(host).is_loopback:
            cards.setdefault(card, []).append((host, port))
    return list(cards.values())


def _over_cards(records: list[Record], topology: Topology, rank: int) -> dict[int, list[Way]]:
    """The ways to the ranks of other hosts, over the cards that the topology gives each host."""

    def cards(peer: int) -> list[list[tuple[str, int]]]:
        return _ways(records[peer], records[rank], peer == rank)[: topology.cards[peer]]

    mine = cards(rank)
    others = (peer for peer, host in enumerate(topology.hosts) if host != topology.hosts[rank])
    return {peer: ways_between(mine, cards(peer)) for peer in others}


def _warn_of_missing_cards(records: list[Record], topology: Topology) -> None:
    """Say which hosts have fewer usable cards than plans count on."""
    for rank in _leaders(topology.hosts):
        usable = _ways(records[rank], records[rank], True)
        if max(len(usable), 1) < topology.cards[rank]:
            _log.warning(
                "host %s has %d cards by the topology, but only %d of its interfaces (%s) can be used as equals: plans "
                "count on more than there is. Correct `cards` in the topology file, or see MULTIRING_INTERFACE",
                topology.hosts[rank],
                topology.cards[rank],
                len(usable),
                ", ".join(records[rank]["fastest"]) or "none",
            )


def control_edges(hosts: Sequence[str], rank: int) -> list[int]:
    """The ranks to which ``rank`` keeps a control connection: the tree over the lowest ranks of the hosts."""
    leaders = _leaders(hosts)
    if rank not in leaders:
        return []
    position = leaders.index(rank)
    children = range(CONTROL_FANOUT * position + 1, CONTROL_FANOUT * position + CONTROL_FANOUT + 1)
    edges = [leaders[child] for child in children if child < len(leaders)]
    return [leaders[(position - 1) // CONTROL_FANOUT], *edges] if position else edges


def _gate(
    hello: auth.Hello,
    members: Sequence[int],
    secret: bytes,
    listening: list[socket.socket],
    here: socket.socket,
    records: list[Record],
    hosts: Sequence[str],
    settings: env.Settings,
) -> Gate:
    """Where all ranks share a host, nobody else can reach it: it is the unix socket, over which they have attached."""
    own: Sequence[Address] = records[hello.rank]["addresses"]
    if len(set(hosts)) > 1:
        here.close()
        addresses = [_reachable(record, records[hello.rank]) for record in records]
    else:
        for sock in listening:
            sock.close()
        here.setblocking(False)
        listening = [here]
        addresses = [[("\0" + record["unix"], 0)] for record in records]
    others = {members[rank]: found for rank, found in enumerate(addresses) if rank != hello.rank}
    return Gate(listening, secret, hello, members[hello.rank], others, own, settings.heartbeat_timeout)


def _links(
    gate: Gate,
    hello: auth.Hello,
    records: list[Record],
    hosts: Sequence[str],
    engine: _native.Engine,
    settings: env.Settings,
) -> Links:
    def attach(role: int, peer: int, descriptors: list[int]) -> None:
        if role == auth.CONTROL:
            engine.attach_control(peer, *descriptors)
        else:
            engine.attach_tcp(peer, descriptors)

    return Links(
        gate,
        hello,
        {peer: _reachable(record, records[hello.rank]) for peer, record in enumerate(records)},
        settings.streams,
        attach,
        lambda rank: f"rank {rank} (host {hosts[rank]})",
    )


def _reachable(record: Record, mine: Record) -> list[tuple[str, int]]:
    """The addresses of another rank; loopback ones lead there only on the same machine, and then before others."""
    same = record["machine"] == mine["machine"]
    loopback = [ipaddress.ip_address(host).is_loopback for host, _ in record["addresses"]]
    found = [
        (host, port) for (host, port), local in zip(record["addresses"], loopback, strict=True) if same or not local
    ]
    return found[::-1] if same else found
