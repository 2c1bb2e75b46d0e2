"""The ranks of a job find each other, prove who shares a host, connect the hosts, and hand all of it to the engine.

Three rounds through the store, which is not used afterwards; the survivors of a loss meet by the same rounds, in a
store that one of them stands for (survivors.py):

``arrive``   every rank publishes its host, its sockets, and the settings that must agree
``prove``    ranks that claim one host have attached each other over unix sockets, or are taken for different hosts
``connect``  the lowest ranks of the hosts have made the edges of the control tree, and if nobody knows how fast the
             hosts are linked, they have measured it
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from multiring import _native, env, probe
from multiring.errors import RendezvousError
from multiring.job import bootstrap, descriptors, gatherings, hosts
from multiring.job.bootstrap import RankIdentity, no_meeting
from multiring.job.checks import check_formats, check_settings, check_strategy, difference, topology_of, topology_text
from multiring.job.exchange import ARRIVE, CONNECT, PROVE, Exchange, RankLost, Record, first_open
from multiring.job.hosts import Proof
from multiring.job.introduction import Introduction, fitting_streams, introduce
from multiring.job.store import JobStore, KeyValueStore
from multiring.net import auth, interfaces, listen, local, unix
from multiring.net.acceptor import Acceptor
from multiring.net.channel import ProvenChannel
from multiring.net.dial import Address
from multiring.net.links import Links
from multiring.planning.speeds import speeds
from multiring.planning.strategies import Strategy
from multiring.runtime import flight_recorder, trace
from multiring.runtime.engine import Connecting
from multiring.runtime.sampler import Sampler
from multiring.runtime.world import World
from multiring.simulate import forced

if TYPE_CHECKING:  # mpi4py, which the native engine does without
    from multiring.runtime.mpi.engine import MpiEngine

REJOIN_HEARTBEATS = 4
"""Heartbeat time-outs within which survivors must meet; then survivors are counted again."""

_log = logging.getLogger("multiring")
_joins: Counter[str] = Counter()  # init after shutdown must not read what the last one wrote


@dataclass(frozen=True)
class _Joiner:
    """State of a rank before the three rounds."""

    identity: RankIdentity
    settings: env.Settings
    exchange: Exchange
    secret: bytes | None
    """None: rank 0 draws one."""
    topology_text: Callable[[], str]
    """Asked for on rank 0."""
    acceptor: Acceptor | None = None
    """This rank's from an earlier generation."""
    failure: Callable[[], BaseException | None] = lambda: None
    """Tells why the world cannot come about any more."""


@dataclass(frozen=True)
class _Arrival:
    """State of a rank once all have arrived."""

    hello: auth.Hello
    unix_socket: socket.socket
    """Socket to which the ranks of its host connect."""
    listening: list[socket.socket]
    """Sockets to which other hosts connect; none if the acceptor of an earlier generation goes on."""
    timeline: trace.Timeline | None
    recorder: flight_recorder.FlightRecorder | None
    introductions: tuple[Introduction, ...]
    secret: bytes
    topology: str
    """The text of the topology file of rank 0, "" if it has none."""


@dataclass(frozen=True)
class _Attachment:
    """State of a rank once all have proved who shares a host: its engine, to which those of its host are attached."""

    engine: _native.Engine | MpiEngine
    sampler: Sampler
    proof: Proof


@dataclass(frozen=True)
class _Connection:
    """State of a rank once the hosts are connected."""

    acceptor: Acceptor | None
    links: Links | None
    topology: str
    """Text of a topology file or of a measurement of the links between the hosts; "" if there is none."""


def join(
    identity: RankIdentity,
    settings: env.Settings,
    when_lost: Callable[[int, Callable[[], None]], None] = lambda rank, look: None,
) -> World:
    """Meet the other ranks; RendezvousError names who did not come, cannot be reached, or does not fit.

    ``when_lost(rank, look)`` is called before this rank gathers anew because another one was lost and is started again;
    while that waits for something, it calls ``look``, which raises if nothing can come of it any more. ValueError for a
    strategy to force that is none.
    """
    descriptors.fill_standard()
    check_settings(settings)
    strategy = forced.wanted(settings.plan, settings.wire)
    with flight_recorder.requests.held(settings.flight_recorder_signal):
        if identity.world_size == 1:
            return _alone(identity, settings, topology_text(settings))
        return _met(identity, settings, strategy, when_lost)


def _met(
    identity: RankIdentity,
    settings: env.Settings,
    strategy: Strategy | None,
    when_lost: Callable[[int, Callable[[], None]], None],
) -> World:
    job = f"multiring/{identity.job}"
    prefix = f"{job}/{identity.restart}"
    _joins[prefix] += 1
    with _blaming(identity.rank), identity.meet(settings) as meeting:
        bootstrap.check_secret(settings, meeting.secret, "torch's store would tell one to whoever asks")

        def meet_at(key: str, *, gathers: bool = False) -> World:
            size, served_by = identity.world_size, meeting.store.served_by
            exchange = Exchange(meeting.store, key, identity.rank, size, settings.init_timeout, served_by=served_by)
            if gathers:
                exchange.settle_in(meeting.store, CONNECT)
            with exchange.settling(), contextlib.ExitStack() as undo:  # others notice by what is undone that we failed
                exchange.outdate(meeting.store, f"{job}/newest", identity.restart)
                exchange.claim(meeting.store, settings.host_name, lasting=meeting.lasting)
                text = partial(topology_text, settings)
                world = _join(_Joiner(identity, settings, exchange, meeting.secret, text, failure=exchange.end), undo)
                check_strategy(strategy, world.topology)
                undo.pop_all()
                return world

        if not (identity.gathers and _joins[prefix] == 1):
            return meet_at(f"{prefix}/{first_open(meeting.store, prefix) if meeting.lasting else _joins[prefix]}")
        for number in itertools.count(1):
            end = gatherings.end_of(meeting.store, prefix, number)
            try:
                if end is None or "lost" not in end:  # who comes when all have met is refused there
                    return meet_at(gatherings.key_of(prefix, number), gathers=True)
                lost = end["lost"]
            except RankLost as error:
                lost = error.rank
            when_lost(lost, partial(_look_ahead, meeting.store, prefix, number + 1))
    raise AssertionError("not reached")


def _look_ahead(store: JobStore, prefix: str, number: int) -> None:
    """RendezvousError if the gathering of this number, or a later one, has failed for all."""
    for each in itertools.count(number):
        end = gatherings.end_of(store, prefix, each)
        if end is None or "lost" not in end:
            return


def join_beside(
    identity: RankIdentity,
    settings: env.Settings,
    exchange: Exchange,
    secret: bytes | None,
    text: str,
    failure: Callable[[], BaseException | None],
) -> World:
    """A world beside the one that this rank may be in, which is left alone, with an acceptor of its own.

    ``text`` is that of the topology file, "" if there is none; ``failure`` tells why it cannot come about any more.
    RendezvousError for all that `join` raises it for.
    """
    with contextlib.ExitStack() as undo:
        joiner = _Joiner(identity, settings, exchange, secret, lambda: text, failure=failure)
        world = _join(joiner, undo)
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
    world: World, acceptor: Acceptor, store: KeyValueStore, failure: Callable[[], BaseException | None]
) -> World:
    """The world of those who have agreed to go on, whom the acceptor knows; ``store`` is at their rank 0.

    ``world`` has been left; ``failure`` tells of another loss in the meantime. RendezvousError for all that `join`
    raises it for.
    """
    membership, hello = acceptor.membership, acceptor.hello
    rank, size = membership.members.index(acceptor.rank), len(membership.members)
    identity = RankIdentity(rank, size, "shrink", no_meeting, hello.job, hello.restart, membership=membership)
    settings = world.settings_again
    if size == 1:
        return replace(_alone(identity, settings, world.measured, acceptor), settings=world.settings)
    patience = min(settings.init_timeout, REJOIN_HEARTBEATS * settings.heartbeat_timeout)
    exchange = Exchange(store, "shrink", rank, size, patience)
    joiner = _Joiner(identity, settings, exchange, acceptor.secret, lambda: world.measured, acceptor, failure)
    with contextlib.ExitStack() as undo:
        joined = _join(joiner, undo)
        undo.pop_all()
        return replace(joined, settings=world.settings)


def _alone(identity: RankIdentity, settings: env.Settings, text: str, acceptor: Acceptor | None = None) -> World:
    names = [settings.host_name]
    topology, timeline = topology_of(text, names), _timeline(identity, settings)
    recorder = _recorder(identity, settings)
    engine = _engine(identity, names, settings, Sampler("rank 0"))
    return World(
        0, topology, engine, None, settings, acceptor, text, identity.present, timeline=timeline, recorder=recorder
    )


def _join(joiner: _Joiner, undo: contextlib.ExitStack) -> World:
    """The three rounds; ``undo`` releases what they have made, if the world does not come about."""
    arrival = _arrive(joiner, undo)
    attachment = _prove(joiner, arrival, undo)
    connection = _connect(joiner, arrival, attachment, undo)
    identity, settings, names = joiner.identity, joiner.settings, attachment.proof.hosts
    topology = topology_of(connection.topology, names)
    check_formats(settings, topology)
    if connection.links:
        connection.links.spread(hosts.routes_over_cards(arrival.introductions, topology, identity.rank))
        if identity.rank == 0:
            hosts.warn_of_missing_cards(arrival.introductions, topology)
    if connection.topology:  # somebody knows what the links carry
        attachment.engine.expect_links([(ranks, link.up, link.down) for ranks, link in topology.links()])
    if arrival.timeline is not None:
        arrival.timeline.host = names[identity.rank]
    return World(
        identity.rank,
        topology,
        attachment.engine,
        connection.links,
        settings,
        connection.acceptor,
        connection.topology,
        identity.present,
        timeline=arrival.timeline,
        sampler=attachment.sampler,
        recorder=arrival.recorder,
        speeds=speeds([one.placement(name) for one, name in zip(arrival.introductions, names, strict=True)]),
    )


def _arrive(joiner: _Joiner, undo: contextlib.ExitStack) -> _Arrival:
    """The first round: every rank publishes its introduction, and rank 0 the secret and the topology file."""
    identity, settings, exchange = joiner.identity, joiner.settings, joiner.exchange
    generation = identity.present.generation
    hello = auth.Hello(
        auth.LOCAL,
        identity.rank,
        restart=identity.restart,
        generation=generation,
        job=identity.job,
        encrypted=settings.encrypt,
    )
    listening: list[socket.socket] = []
    with exchange.reporting(ARRIVE):
        unix_socket, unix_name = unix.listen()
        undo.enter_context(unix_socket)
        if joiner.acceptor is None:
            listening, own = _listen(settings) if settings.engine == "native" else ([], [])
            for sock in listening:
                undo.enter_context(sock)
        else:
            own = list(joiner.acceptor.own)
            joiner.acceptor.hello = hello
        text = joiner.topology_text() if identity.rank == 0 else ""
        timeline, recorder = _timeline(identity, settings), _recorder(identity, settings)
    introduction = introduce(identity.world_size, settings, unix_name, own)
    shared = {"secret": "" if joiner.secret else secrets.token_hex(32), "topology": text}
    records, shared = exchange.round(ARRIVE, introduction.encode(), partial(_agree, shared=shared))
    return _Arrival(
        hello,
        unix_socket,
        listening,
        timeline,
        recorder,
        tuple(Introduction.decode(record, rank) for rank, record in enumerate(records)),
        joiner.secret or bytes.fromhex(shared["secret"]),
        shared["topology"],
    )


def _prove(joiner: _Joiner, arrival: _Arrival, undo: contextlib.ExitStack) -> _Attachment:
    """The second round: ranks that claim one host attach each other, and rank 0 judges who has."""
    identity, settings, exchange = joiner.identity, joiner.settings, joiner.exchange
    introductions = arrival.introductions
    with exchange.reporting(PROVE):
        mine = introductions[identity.rank]
        sampler = Sampler(f"rank {identity.rank} (host {mine.host})")
        engine = _engine(identity, [each.host for each in introductions], settings, sampler)
        undo.callback(engine.shutdown)
        claimed = {peer: each.unix for peer, each in enumerate(introductions) if each.claims_host_of(mine)}
        del claimed[identity.rank]
        attached = local.attach(
            engine, arrival.unix_socket, claimed, arrival.secret, arrival.hello, exchange.deadline, joiner.failure
        )

    def judge(records: Sequence[Record]) -> Record:
        found = [record["attached"] for record in records]
        return hosts.prove(found, introductions, arrival.topology, settings).encode()

    _, verdict = exchange.round(PROVE, {"attached": attached}, judge)
    return _Attachment(engine, sampler, Proof.decode(verdict))


def _connect(joiner: _Joiner, arrival: _Arrival, attachment: _Attachment, undo: contextlib.ExitStack) -> _Connection:
    """The third round: the lowest ranks of the hosts connect, and measure the links if nobody knows their rates."""
    settings, exchange, introductions = joiner.settings, joiner.exchange, arrival.introductions
    acceptor, engine, names = joiner.acceptor, attachment.engine, attachment.proof.hosts
    links, text, rank = None, attachment.proof.topology, joiner.identity.rank
    with exchange.reporting(CONNECT):
        topology_of(text, names)
        if isinstance(engine, Connecting):
            arrival.unix_socket.close()
            engine.connect()
        else:
            if acceptor is None:
                acceptor = _acceptor(joiner, arrival, names)
                undo.callback(acceptor.close)
            else:
                arrival.unix_socket.close()
            if len(set(names)) > 1:
                links = _links(acceptor, arrival, names, engine, settings)
                undo.callback(links.close)
                remaining = max(exchange.deadline - time.monotonic(), 0.0)
                either = partial(_first, joiner.failure, engine.failure)
                links.ensure(auth.CONTROL, hosts.control_edges(names, rank), remaining, either)
                if attachment.proof.measure and rank in hosts.leaders(names):
                    text = probe.measured(links, hosts.probe_group(introductions, names, rank), exchange.deadline)
    _, told = exchange.round(CONNECT, {}, lambda _: {"topology": text})
    return _Connection(acceptor, links, told["topology"])


def _timeline(identity: RankIdentity, settings: env.Settings) -> trace.Timeline | None:
    if not settings.trace:
        return None
    host = settings.host_name
    if identity.membership is not None:  # a member of a job that goes on
        return trace.resume(settings.trace, identity.rank, host, identity.restart, identity.membership.generation)
    return trace.prepare(settings.trace, identity.rank, host, identity.restart)


def _recorder(identity: RankIdentity, settings: env.Settings) -> flight_recorder.FlightRecorder | None:
    if not settings.flight_recorder:
        return None
    return flight_recorder.prepare(
        settings.flight_recorder,
        identity.rank,
        settings.host_name,
        identity.restart,
        identity.present,
        goes_on=identity.membership is not None,
    )


def _first(*failures: Callable[[], BaseException | None]) -> BaseException | None:
    return next((error for error in (failure() for failure in failures) if error is not None), None)


def _engine(
    identity: RankIdentity, names: list[str], settings: env.Settings, sampler: Sampler
) -> _native.Engine | MpiEngine:
    if settings.engine == "mpi" and identity.world_size > 1:
        world = bootstrap.mpi_that_moves_data(identity)
        from multiring.runtime.mpi.engine import MpiEngine

        return MpiEngine(world, names, settings)
    return _native.Engine(
        identity.rank,
        identity.world_size,
        generation=identity.present.generation,
        hosts=names,
        arena_bytes=settings.arena_bytes,
        spin_seconds=settings.spin_seconds,
        heartbeat_timeout=settings.heartbeat_timeout,
        late_seconds=settings.late_warning,
        trace=bool(settings.trace),
        record=bool(settings.flight_recorder),
        helpers=settings.device_threads,
        socket_threads=settings.socket_threads,
        when_slow=sampler.look,
        inproc=identity.world_size == 1,  # private memory: there is nobody to share it with
    )


def _listen(settings: env.Settings) -> tuple[list[socket.socket], list[Address]]:
    """The sockets on which other hosts may connect, and their addresses, loopback included."""
    found = interfaces.addresses(settings.interface, loopback=True)
    if not settings.interface:
        sock = listen.bind("", settings.ports)
        return [sock], [(address, sock.getsockname()[1]) for address in found]
    sockets = [listen.bind(address, settings.ports) for address in found]
    return sockets, [(address, sock.getsockname()[1]) for address, sock in zip(found, sockets, strict=True)]


def _agree(records: list[Record], shared: Record) -> Record:
    """Return ``shared``, of rank 0, if all fit together; RendezvousError shows both sides of the first difference."""
    first = Introduction.decode(records[0], 0)
    for rank, record in enumerate(records):
        runs = record.get("version")
        if runs != first.version:  # before it is decoded: another version may introduce itself otherwise
            raise RendezvousError(
                f"rank {rank} (host {record.get('host')}) runs multiring {runs}, rank 0 (host {first.host}) multiring "
                f"{first.version}: install the same version everywhere",
                rank=rank,
            )
        different = difference(f"rank {rank}", Introduction.decode(record, rank).terms, "rank 0", first.terms)
        if different:
            raise RendezvousError(different, rank=rank)
    return shared


def _acceptor(joiner: _Joiner, arrival: _Arrival, names: Sequence[str]) -> Acceptor:
    """Return the acceptor: if all ranks share a host, their unix socket, which nobody else can reach."""
    hello, listening = arrival.hello, arrival.listening
    mine = arrival.introductions[hello.rank]
    if len(set(names)) > 1:
        arrival.unix_socket.close()
        addresses = [each.addresses_for(mine) for each in arrival.introductions]
    else:
        for sock in listening:
            sock.close()
        arrival.unix_socket.setblocking(False)
        listening = [arrival.unix_socket]
        addresses = [[("\0" + each.unix, 0)] for each in arrival.introductions]
    membership = joiner.identity.present
    others = {membership.members[rank]: found for rank, found in enumerate(addresses) if rank != hello.rank}
    patience = joiner.settings.heartbeat_timeout
    return Acceptor(listening, arrival.secret, hello, membership, others, mine.addresses, patience)


def _links(
    acceptor: Acceptor, arrival: _Arrival, names: Sequence[str], engine: _native.Engine, settings: env.Settings
) -> Links:
    def attach(role: int, peer: int, channels: Sequence[ProvenChannel]) -> None:
        descriptors, ciphers = zip(*(channel.detach() for channel in channels), strict=True)
        records = [_native.Records() if cipher is None and settings.checksum else cipher for cipher in ciphers]
        if role == auth.CONTROL:
            engine.attach_control(peer, *descriptors, *records)
        else:
            engine.attach_tcp(peer, list(descriptors), [each for each in records if each is not None])

    mine = arrival.introductions[arrival.hello.rank]
    return Links(
        acceptor,
        arrival.hello,
        {peer: each.addresses_for(mine) for peer, each in enumerate(arrival.introductions)},
        settings.streams or fitting_streams(arrival.introductions),
        attach,
        lambda rank: f"rank {rank} (host {names[rank]})",
    )
