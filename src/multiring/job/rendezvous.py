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
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from multiring import _native, env, probe, version
from multiring.errors import RendezvousError
from multiring.job import bootstrap, descriptors
from multiring.job.bootstrap import RankIdentity, no_meeting
from multiring.job.cores import cgroup_quota, format_list, parse_list
from multiring.job.exchange import Exchange, Record, spans
from multiring.job.store import KeyValueStore
from multiring.net import auth, interfaces, listen, local, unix
from multiring.net.acceptor import Acceptor, Membership
from multiring.net.cards import Route, ways_between
from multiring.net.dial import Address
from multiring.net.links import Links
from multiring.planning import topology_file
from multiring.planning.plan import is_id
from multiring.planning.planner import check_wire
from multiring.planning.speeds import RankPlacement, speeds
from multiring.planning.strategies import Strategy
from multiring.planning.topology import Topology
from multiring.runtime import trace
from multiring.runtime.world import World
from multiring.simulate import forced

if TYPE_CHECKING:
    from multiring.runtime.mpi.engine import MpiEngine

CONTROL_FANOUT = 4
"""Children of a host in the control tree: depth 5 at 1,024 hosts."""

REJOIN_HEARTBEATS = 4
"""Number of heartbeat time-outs in which survivors must meet; after that they look once more for who survives."""

_log = logging.getLogger("multiring")
_joins: Counter[str] = Counter()  # init after shutdown must not read what the last one wrote


def join(identity: RankIdentity, settings: env.Settings) -> World:
    """Meet the other ranks; RendezvousError names who did not come, cannot be reached, or does not fit.

    ValueError for a strategy to force that is none.
    """
    descriptors.fill_standard()
    check_settings(settings)
    strategy = forced.wanted(settings.plan, settings.wire)
    if identity.world_size == 1:
        return _alone(identity, settings, _topology_text(settings))
    job = f"multiring/{identity.job}"
    prefix = f"{job}/{identity.restart}"
    _joins[prefix] += 1
    with _blaming(identity.rank), identity.meet(settings) as meeting:
        key = f"{prefix}/{_joins[prefix]}"
        size, served_by = identity.world_size, meeting.store.served_by
        exchange = Exchange(meeting.store, key, identity.rank, size, settings.init_timeout, served_by=served_by)
        with exchange.settling(), contextlib.ExitStack() as undo:  # others notice by what is undone that we failed
            exchange.outdate(meeting.store, f"{job}/newest", identity.restart)
            exchange.claim(meeting.store, settings.host or socket.gethostname())
            world = _join(identity, settings, exchange, meeting.secret, lambda: _topology_text(settings), undo)
            _check_strategy(strategy, world.topology)
            undo.pop_all()
            return world


def join_beside(
    identity: RankIdentity,
    settings: env.Settings,
    exchange: Exchange,
    secret: bytes | None,
    topology_text: str,
    failure: Callable[[], BaseException | None],
) -> World:
    """A world beside the one that this rank may be in, which is left alone, with an acceptor of its own.

    ``failure`` tells why it cannot come about any more. RendezvousError for all that `join` raises it for.
    """
    with contextlib.ExitStack() as undo:
        world = _join(identity, settings, exchange, secret, lambda: topology_text, undo, failure=failure)
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
    world: World,
    acceptor: Acceptor,
    membership: Membership,
    store: KeyValueStore,
    failure: Callable[[], BaseException | None],
) -> World:
    """The world of those who have agreed to go on, at whose rank 0 is ``store``; ``world`` has been left.

    ``failure`` tells of another loss in the meantime. RendezvousError for all that `join` raises it for.
    """
    rank, size = membership.members.index(acceptor.rank), len(membership.members)
    entered = tuple(world.entered[world.members.index(member)] for member in membership.members)
    identity = RankIdentity(
        rank,
        size,
        "shrink",
        no_meeting,
        acceptor.hello.job,
        acceptor.hello.restart,
        membership.generation,
        members=membership.members,
        entered=entered,
    )
    settings = world.settings_again
    if size == 1:
        return replace(_alone(identity, settings, world.measured, acceptor), settings=world.settings)
    patience = min(settings.init_timeout, REJOIN_HEARTBEATS * settings.heartbeat_timeout)
    exchange = Exchange(store, "shrink", rank, size, patience)
    with contextlib.ExitStack() as undo:
        joined = _join(identity, settings, exchange, acceptor.secret, lambda: world.measured, undo, acceptor, failure)
        undo.pop_all()
        return replace(joined, settings=world.settings)


def _alone(identity: RankIdentity, settings: env.Settings, text: str, acceptor: Acceptor | None = None) -> World:
    hosts = [settings.host or socket.gethostname()]
    topology, timeline = _topology(text, hosts), _timeline(identity, settings)
    engine = _engine(identity, hosts, settings)
    return World(0, topology, engine, None, settings, acceptor, text, *_origins(identity), timeline=timeline)


def _origins(identity: RankIdentity) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rank that each had when the job started, and the generation in which each came."""
    size = identity.world_size
    return identity.members or tuple(range(size)), identity.entered or (identity.generation,) * size


def _join(
    identity: RankIdentity,
    settings: env.Settings,
    exchange: Exchange,
    secret: bytes | None,
    topology_text: Callable[[], str],
    undo: contextlib.ExitStack,
    acceptor: Acceptor | None = None,
    failure: Callable[[], BaseException | None] = lambda: None,
) -> World:
    """``acceptor`` is this rank's from an earlier generation; ``topology_text`` is asked for on rank 0."""
    hello = auth.Hello(
        auth.LOCAL, identity.rank, restart=identity.restart, generation=identity.generation, job=identity.job
    )
    listening: list[socket.socket] = []
    with exchange.reporting("arrive"):
        here, unix_name = unix.listen()
        undo.enter_context(here)
        if acceptor is None:
            listening, own = _listen(settings) if settings.engine == "native" else ([], [])
            for sock in listening:
                undo.enter_context(sock)
        else:
            own = list(acceptor.own)
            acceptor.hello = hello
        text = topology_text() if identity.rank == 0 else ""
        timeline = _timeline(identity, settings)
    ports = dict(own)
    cards = [card for card in interfaces.admitted(settings.interface, loopback=True) if str(card[1]) in ports]
    introduction = {
        "version": version.__version__,
        "agreed": {"the number of ranks": str(identity.world_size), **env.agreed(settings)},
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
        engine = _engine(identity, [record["host"] for record in records], settings)
        undo.callback(engine.shutdown)
        claimed = _claimed(records, identity.rank)
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
        elif acceptor is None:
            acceptor = _acceptor(hello, _origins(identity)[0], secret, listening, here, records, hosts, settings)
            undo.callback(acceptor.close)
        else:
            here.close()
        if acceptor is not None and len(set(hosts)) > 1:
            links = _links(acceptor, hello, records, hosts, cast("_native.Engine", engine), settings)
            undo.callback(links.close)
            remaining = max(exchange.deadline - time.monotonic(), 0.0)
            either = partial(_first, failure, engine.failure)
            links.ensure(auth.CONTROL, control_edges(hosts, identity.rank), remaining, either)
            if proof["measure"] and identity.rank in _leaders(hosts):
                text = probe.measured(links, _party(records, hosts, identity.rank), exchange.deadline)
    _, told = exchange.round("connect", {}, lambda _: {"topology": text})
    text = told["topology"]
    topology = _topology(text, hosts)
    _check_wire(settings, topology)
    if links:
        links.spread(_over_cards(records, topology, identity.rank))
        if identity.rank == 0:
            _warn_of_missing_cards(records, topology)
    if timeline is not None:
        timeline.host = hosts[identity.rank]
    return World(
        identity.rank,
        topology,
        engine,
        links,
        settings,
        acceptor,
        text,
        *_origins(identity),
        timeline=timeline,
        speeds=speeds([_seat(record, host) for record, host in zip(records, hosts, strict=True)]),
    )


def _timeline(identity: RankIdentity, settings: env.Settings) -> trace.Timeline | None:
    if not settings.trace:
        return None
    host = settings.host or socket.gethostname()
    if identity.members:  # of a job that goes on
        return trace.resume(settings.trace, identity.rank, host, identity.restart, identity.generation)
    return trace.prepare(settings.trace, identity.rank, host, identity.restart)


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


def _engine(identity: RankIdentity, hosts: list[str], settings: env.Settings) -> _native.Engine | MpiEngine:
    if settings.engine == "mpi" and identity.world_size > 1:
        world = bootstrap.mpi_that_moves_data(identity)
        from multiring.runtime.mpi.engine import MpiEngine

        return MpiEngine(world, hosts, settings)
    return _native.Engine(
        identity.rank,
        identity.world_size,
        generation=identity.generation,
        hosts=hosts,
        arena_bytes=settings.arena_bytes,
        spin_seconds=settings.spin_seconds,
        heartbeat_timeout=settings.heartbeat_timeout,
        late_seconds=settings.late_warning,
        trace=bool(settings.trace),
        helpers=settings.card_threads,
        inproc=identity.world_size == 1,  # private memory: there is nobody to share it with
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


def _seat(introduction: Record, host: str) -> RankPlacement:
    return RankPlacement(
        host, introduction["kernel"], frozenset(parse_list(introduction["cpus"])), introduction["quota"]
    )


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


def _party(records: list[Record], hosts: Sequence[str], rank: int) -> probe.ProbeGroup:
    """Those who measure, as this rank sees them."""
    leaders = _leaders(hosts)
    found = tuple(
        probe.ProbedHost(hosts[each], tuple(r for r, host in enumerate(hosts) if host == hosts[each]))
        for each in leaders
    )
    ways = tuple(_ways(records[each], records[rank], each == rank) for each in leaders)
    return probe.ProbeGroup(found, leaders.index(rank), ways, _identity(records, hosts))


def _ways(record: Record, mine: Record, own: bool) -> list[list[tuple[str, int]]]:
    """The addresses of another rank (or of this one as others see it) by card; on the same machine there are none."""
    if record["machine"] == mine["machine"] and not own:
        return [_reachable(record, mine)]
    cards: dict[str, list[tuple[str, int]]] = {}
    for (host, port), card in zip(record["addresses"], record["cards"], strict=True):
        if card in record["fastest"] and not ipaddress.ip_address(host).is_loopback:
            cards.setdefault(card, []).append((host, port))
    return list(cards.values())


def _over_cards(records: list[Record], topology: Topology, rank: int) -> dict[int, list[Route]]:
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


def _acceptor(
    hello: auth.Hello,
    members: Sequence[int],
    secret: bytes,
    listening: list[socket.socket],
    here: socket.socket,
    records: list[Record],
    hosts: Sequence[str],
    settings: env.Settings,
) -> Acceptor:
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
    return Acceptor(listening, secret, hello, members[hello.rank], others, own, settings.heartbeat_timeout)


def _links(
    acceptor: Acceptor,
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
        acceptor,
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
