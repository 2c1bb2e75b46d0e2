"""Measuring the network: what passes between hosts when several send at once, and how long a message takes.

One rank of each host takes part. The first leads: it tells the others over a control connection what to send to whom,
one round after the other, and they report what arrived; what they send are zeros, in clear also where the job encrypts.
Between rounds the network is quiet, so that a word arrives
at once; in a round each host goes by its own clock, from the moment it was told.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from multiring.net import auth, framing
from multiring.net.channel import ProvenChannel
from multiring.net.framing import Message
from multiring.probe.rounds import Burst, ProbeRound, Rates, Survey
from multiring.probe.tree import Seconds

_T = TypeVar("_T")

PATIENCE_SECONDS = 2.0
"""Seconds that a host may take for a word, or for an order beyond the time that it needs."""

DRAIN_SECONDS = 5.0
"""Seconds after which all bytes in flight at the end of a round have passed the slowest link."""

PINGS = 4

REST_SECONDS = 3e-3
"""Seconds of rest before a burst, in which a token bucket fills."""

TAIL_SECONDS = 4e-3
"""Seconds that a host goes on sending after it has measured, as others were told to begin a little later."""

LAST = b"\1"
"""The byte that ends a round's bytes, which are zeros."""

MAX_MESSAGE = 1 << 20
_TCP_INFO_SIZE = 192
_SENDER_MSS = struct.Struct("=16xI")
_BYTES_RECEIVED = struct.Struct("=128xQ")

FRAME_BYTES = 66
"""Bytes that Ethernet, IP and TCP add to a segment: 14, 20 and 32, as token buckets count them."""


_STEPS = {
    "tell": "connecting to each other",
    "use": "connecting to each other",
    "ping": "sending small messages",
    "carry": "sending at full speed",
    "burst": "sending at once",
}
"""Purpose of each order, in the words of messages."""


class Unresponsive(Exception):
    """Some hosts, by their numbers, did not do their part of a step in time."""

    def __init__(self, hosts: Collection[int], step: str = ""):
        super().__init__(hosts, step)
        self.hosts = tuple(sorted(hosts))
        self.step = step


@dataclass
class Member:
    """A host's part in the measurements.

    ``streams[peer]`` are the connections to another host by number, one for each card; ``index`` is its own number.
    """

    index: int
    hosts: int
    streams: Mapping[int, dict[int, socket.socket]]

    def report(self, order: Message) -> Message:
        """Execute one order: what was measured, or who did not do their part."""
        try:
            return self._execute(order)
        except Unresponsive as error:
            return {"silent": error.hosts}

    def _execute(self, order: Message) -> Message:
        if order["do"] == "ping":
            return {"seconds": self._ping()}
        if order["do"] == "tell":
            return {"streams": {peer: sorted(numbered) for peer, numbered in self.streams.items()}}
        if order["do"] == "use":
            for peer, numbers in order["streams"].items():
                self._use(int(peer), numbers)
            return {}
        if order["do"] == "burst":
            return {"seconds": self._burst(order)}
        with selectors.DefaultSelector() as selector:
            return {"rates": _Carrier(self.streams, selector, order).run(order["warm"], order["window"])}

    def _burst(self, order: Mapping[str, Any]) -> dict[str, float]:
        """Send or receive some bytes at once, if it is our turn; the sender's seconds until they were acknowledged."""
        peer = order["receiver"] if order["sender"] == self.index else order["sender"]
        if self.index not in (order["sender"], order["receiver"]):
            return {}
        streams = [stream for _, stream in sorted(self.streams[peer].items())]
        data = bytes(-(-order["nbytes"] // len(streams)))
        for stream in streams:
            stream.settimeout(PATIENCE_SECONDS)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(data))
        try:
            if self.index == order["receiver"]:
                for stream in streams:
                    auth.receive(stream, len(data))
                    stream.sendall(LAST)
                return {}
            time.sleep(REST_SECONDS)
            started = time.monotonic()
            for stream in streams:
                stream.sendall(data)
            for stream in streams:
                auth.receive(stream, 1)
        except OSError:
            raise Unresponsive([peer]) from None
        return {str(peer): time.monotonic() - started}

    def _use(self, peer: int, numbers: Sequence[int]) -> None:
        """Close the streams to a host that it does not have."""
        for number in self.streams[peer].keys() - set(numbers):
            self.streams[peer].pop(number).close()

    def _ping(self) -> dict[str, float]:
        """Seconds of the fastest round trip to each host; pairs take turns as in a tournament."""
        found: dict[str, float] = {}
        for peer in _partners(self.index, self.hosts):
            stream = self.streams[peer][min(self.streams[peer])]
            stream.settimeout(PATIENCE_SECONDS)
            try:
                times = [_round_trip(stream, first=self.index < peer) for _ in range(PINGS)]
            except OSError:
                raise Unresponsive([peer]) from None
            found[str(peer)] = min(times[1:])
        return found


class _Carrier:
    """One round on one host."""

    def __init__(
        self,
        streams: Mapping[int, Mapping[int, socket.socket]],
        selector: selectors.BaseSelector,
        order: Mapping[str, Any],
    ):
        self._selector = selector
        self._sending = {stream: peer for peer in order["send"] for stream in streams[peer].values()}
        self._receiving = {stream: peer for peer in order["receive"] for stream in streams[peer].values()}
        self._read_bytes = dict.fromkeys(self._receiving, 0)
        self._scratch = memoryview(bytearray(1 << 18))
        self._chunk = memoryview(bytes(min(order["in_flight"], 1 << 18)))
        for stream in self._sending:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, order["in_flight"])
        for stream in {**self._sending, **self._receiving}:
            stream.setblocking(False)
            selector.register(stream, self._events(stream))

    def _events(self, stream: socket.socket) -> int:
        reads = selectors.EVENT_READ if stream in self._receiving else 0
        return reads | (selectors.EVENT_WRITE if stream in self._sending else 0)

    def run(self, warm: float, seconds: float) -> dict[str, float]:
        started = time.monotonic()
        peers = dict(self._receiving)
        self._turn(started + warm, over=False)
        before = {stream: self._received(stream) for stream in peers}
        self._turn(started + warm + seconds, over=False)
        after = {stream: self._received(stream) for stream in peers}
        self._turn(time.monotonic() + TAIL_SECONDS, over=False)
        self._turn(time.monotonic() + DRAIN_SECONDS, over=True)
        silent = {*self._receiving.values(), *self._sending.values()}
        if silent:
            raise Unresponsive(silent)
        rates: dict[str, float] = {}
        for stream, peer in peers.items():
            (t0, bytes0), (t1, bytes1) = before[stream], after[stream]
            rates[str(peer)] = rates.get(str(peer), 0.0) + (bytes1 - bytes0) / (t1 - t0) * _framing(stream)
        return rates

    def _turn(self, until: float, over: bool) -> None:
        """Send and receive until then; once it is ``over``, only what ends the round."""
        while self._sending or self._receiving:
            remaining = until - time.monotonic()
            if remaining <= 0:
                return
            for key, events in self._selector.select(remaining):
                stream: socket.socket = key.fileobj  # type: ignore[assignment]
                try:
                    if events & selectors.EVENT_READ:
                        self._read(stream)
                    if events & selectors.EVENT_WRITE:
                        self._write(stream, over)
                except BlockingIOError:
                    continue
                except OSError:
                    peer = self._receiving.get(stream, self._sending.get(stream, -1))
                    raise Unresponsive([peer]) from None

    def _read(self, stream: socket.socket) -> None:
        count = stream.recv_into(self._scratch)
        if not count:
            raise ConnectionError("closed by the other side")
        self._read_bytes[stream] += count
        if self._scratch[count - 1]:
            del self._receiving[stream]
            self._watch(stream)

    def _write(self, stream: socket.socket, over: bool) -> None:
        stream.send(LAST if over else self._chunk)
        if over:
            del self._sending[stream]
            self._watch(stream)

    def _watch(self, stream: socket.socket) -> None:
        events = self._events(stream)
        if events:
            self._selector.modify(stream, events)
        else:
            self._selector.unregister(stream)

    def _received(self, stream: socket.socket) -> tuple[float, int]:
        """The time, and the bytes received so far, by the kernel if it says: a host that is held up reads late."""
        info = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
        now = time.monotonic()
        if len(info) < _BYTES_RECEIVED.size:
            return now, self._read_bytes[stream]
        return now, _BYTES_RECEIVED.unpack_from(info)[0]


def _framing(stream: socket.socket) -> float:
    """Return the ratio of a link's bytes to the stream's own bytes."""
    (segment,) = _SENDER_MSS.unpack_from(stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE))
    return float((segment + FRAME_BYTES) / segment)


def _round_trip(stream: socket.socket, first: bool) -> float:
    started = time.monotonic()
    if first:
        stream.sendall(LAST)
    auth.receive(stream, 1)
    if not first:
        stream.sendall(LAST)
    return time.monotonic() - started


def _partners(index: int, hosts: int) -> list[int]:
    """The order in which a host meets all others, so that all pairs of a turn are disjoint: a round robin."""
    size = hosts + hosts % 2
    turns = []
    for turn in range(size - 1):
        order = [size - 1, *((turn + place) % (size - 1) for place in range(size - 1))]
        turns.append(order[size - 1 - order.index(index)])
    return [peer for peer in turns if peer < hosts and peer != index]


def follow(member: Member, control: ProvenChannel, deadline: float) -> None:
    """Do what the host that leads says, until it says that it is over, or ends."""
    with contextlib.suppress(OSError):
        while True:
            order = framing.receive(partial(control.receive, deadline=deadline), MAX_MESSAGE)
            if order["do"] == "end":
                return
            _send(control, member.report(order))


class Leader:
    """Has all hosts perform what is to be measured; the host of ``member`` takes part itself."""

    def __init__(self, member: Member, controls: Mapping[int, ProvenChannel]):
        self._member = member
        self._controls = controls

    def agree(self) -> list[dict[int, set[int]]]:
        """Find the streams that both their ends have, and leave the others: their numbers, for each host and peer.

        Unresponsive names two hosts that have none.
        """
        reports = self._perform([{"do": "tell"} for _ in range(self._member.hosts)], PATIENCE_SECONDS)
        told = [{int(peer): set(numbers) for peer, numbers in report["streams"].items()} for report in reports]
        common = [{peer: here[peer] & told[peer][host] for peer in here} for host, here in enumerate(told)]
        for host, here in enumerate(common):
            for peer, numbers in here.items():
                if not numbers:
                    raise Unresponsive([host, peer], _STEPS["tell"])
        orders = [{"do": "use", "streams": {peer: sorted(n) for peer, n in here.items()}} for here in common]
        self._perform(orders, PATIENCE_SECONDS)
        return common

    def measure(self, survey: Callable[[Seconds], Survey[_T]]) -> _T:
        """Run a survey, which is given the round trips, and return its result.

        Unresponsive names hosts that did not do their part.
        """
        hosts = range(self._member.hosts)
        trips = PINGS * PATIENCE_SECONDS + PATIENCE_SECONDS
        rounds = survey(_by_flow(self._perform([{"do": "ping"} for _ in hosts], trips), "seconds"))
        answer: Mapping[tuple[int, int], float] | None = None
        while True:
            try:
                asked = next(rounds) if answer is None else rounds.send(answer)
            except StopIteration as finished:
                return finished.value  # type: ignore[no-any-return]
            answer = self._burst(asked) if isinstance(asked, Burst) else self._carry(asked)

    def _carry(self, asked: ProbeRound) -> Rates:
        patience = asked.warm + asked.window + DRAIN_SECONDS + PATIENCE_SECONDS
        orders = [_order(asked, host) for host in range(self._member.hosts)]
        return _by_flow(self._perform(orders, patience), "rates")

    def _burst(self, asked: Burst) -> Mapping[tuple[int, int], float]:
        sender, receiver = asked.flow
        order = {"do": "burst", "sender": sender, "receiver": receiver, "nbytes": asked.nbytes}
        reports = self._perform([order] * self._member.hosts, 4 * PATIENCE_SECONDS)
        return {asked.flow: reports[sender]["seconds"][str(receiver)]}

    def end(self) -> None:
        """Let the others go."""
        for control in self._controls.values():
            with contextlib.suppress(OSError):
                _send(control, {"do": "end"})

    def _perform(self, orders: Sequence[Message], patience: float) -> list[Message]:
        """Have every host execute its order; their reports."""
        deadline = time.monotonic() + patience
        step = _STEPS[orders[0]["do"]]
        for host, control in self._controls.items():
            try:
                _send(control, orders[host])
            except OSError:
                raise Unresponsive([host], step) from None
        reports = {self._member.index: self._member.report(orders[self._member.index])}
        for host, control in self._controls.items():
            with contextlib.suppress(OSError):
                reports[host] = framing.receive(partial(control.receive, deadline=deadline), MAX_MESSAGE)
        culprits = _culprits(reports, self._member.hosts)
        if culprits:
            raise Unresponsive(culprits, step)
        return [reports[host] for host in range(self._member.hosts)]


def _culprits(reports: Mapping[int, Message], hosts: int) -> set[int]:
    """The hosts that sent no report; if all did, those accused that accuse nobody, and if there are none, all accused.

    A host that accuses another waited in vain, and kept others waiting by that.
    """
    absent = set(range(hosts)) - reports.keys()
    complaining = {host for host, report in reports.items() if "silent" in report}
    blamed = {each for host in complaining for each in reports[host]["silent"]}
    return absent or blamed - complaining or blamed


def _order(asked: ProbeRound, host: int) -> Message:
    return {
        "do": "carry",
        "send": [to for sender, to in asked.flows if sender == host],
        "receive": [sender for sender, to in asked.flows if to == host],
        "warm": asked.warm,
        "window": asked.window,
        "in_flight": asked.in_flight,
    }


def _by_flow(reports: Sequence[Message], what: str) -> dict[tuple[int, int], float]:
    """Return the hosts' reports by pair of sender and receiver."""
    return {(int(peer), host): value for host, report in enumerate(reports) for peer, value in report[what].items()}


def _send(control: ProvenChannel, message: Message) -> None:
    control.sock.settimeout(PATIENCE_SECONDS)
    control.send(framing.pack(message))
