"""TCP between ranks of different hosts: whoever can reach the other connects, and the lower rank chooses.

A link is wanted by both its ends, at different times perhaps, and it may be that only one can reach the other. So
each end dials all addresses of the other as soon as it wants the link, and accepts at any time. A connection that has
proved its rank (all streams of it) is a candidate; the lower rank takes the first and says so by one byte, and closes
the others. An address that leads to somebody else (172.17.0.1 is on many hosts) fails the proof.

Links are numbered: a probe has several between two ranks, each by other addresses. The streams of a data link take
turns over the cards of both hosts where the topology says that they have several.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import errno
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from multiring.errors import MultiringError, RendezvousError, ResourceError, system_message
from multiring.net import auth, dial
from multiring.net.acceptor import Acceptor
from multiring.net.cards import Route
from multiring.net.channel import ProvenChannel
from multiring.net.loop import within

CHOSEN = b"\1"
RETRY_SECONDS = 0.2
MAX_RETRY_SECONDS = 1.0
NOTICE_SECONDS = 5.0
POLL_SECONDS = 0.2
CARDS_SECONDS = 3.0
"""Seconds to try a link over all cards, and then to wait for the other side's try; after that it goes over any."""

_log = logging.getLogger("multiring")


@dataclass
class _Link:
    """One link and what has been tried for it; ``sessions`` are incomplete candidates by number, then stream."""

    role: int
    peer: int
    number: int = 0
    addresses: Sequence[dial.Address] = ()
    attached: asyncio.Event = field(default_factory=asyncio.Event)
    chosen: bool = False
    failure: MultiringError | None = None
    """Error for which an attached connection is of no use."""
    dialling: asyncio.Task[None] | None = None
    unreachable: dial.Unreachable | None = None
    reached: ProvenChannel | None = None
    sessions: dict[int, dict[int, ProvenChannel]] = field(default_factory=dict)


class Links:
    """The links of this rank; ``attach(role, peer, channels)`` takes each over, in the thread of the links."""

    def __init__(
        self,
        acceptor: Acceptor,
        mine: auth.Hello,
        addresses: Mapping[int, Sequence[dial.Address]],
        streams: int,
        attach: Callable[[int, int, Sequence[ProvenChannel]], None],
        describe: Callable[[int], str],
    ) -> None:
        """``addresses[r]`` are those of rank r; ``streams`` are the connections of a data link by each of its routes;
        ``describe(r)`` names it for messages."""
        self._acceptor = acceptor
        self._mine = mine
        self._addresses = addresses
        self.streams = streams
        self._attach = attach
        self._describe = describe
        self._routes: dict[int, Sequence[Route]] = {}
        self._links: dict[tuple[int, int, int], _Link] = {}
        self._loop = acceptor.loop
        self._closed = False
        acceptor.open(self._accept)

    def spread(self, routes: Mapping[int, Sequence[Route]]) -> None:
        """Let the streams of data links to these ranks take turns over the routes to each."""
        self._routes = {peer: over for peer, over in routes.items() if over}

    def ensure_data(self, peers: Iterable[int], timeout: float, failure: Callable[[], BaseException | None]) -> None:
        """`ensure` for the links that carry the data of collectives."""
        self.ensure(auth.DATA, peers, timeout, failure)

    def ensure(
        self, role: int, peers: Iterable[int], timeout: float, failure: Callable[[], BaseException | None]
    ) -> None:
        """Wait until links to all ``peers`` stand; RendezvousError after ``timeout`` seconds, or what ``failure``
        returns in the meantime, or why one that was made could not be attached."""
        deadline = time.monotonic() + timeout
        links = [self._link(role, peer) for peer in sorted(peers)]
        for link in links:
            link.addresses = self._addresses[link.peer]
        waiting = self._loop.start(self._want(links))
        try:
            while True:
                remaining = deadline - time.monotonic()
                with contextlib.suppress(concurrent.futures.TimeoutError):
                    waiting.result(min(POLL_SECONDS, max(remaining, 0.0)))
                    break
                error = failure()
                if error is not None:
                    raise error
                if remaining <= 0:
                    raise self._give_up(role, peers, timeout)
        finally:
            waiting.cancel()
        for link in links:
            if link.failure is not None:
                raise copy.copy(link.failure)  # the traceback of one that is kept would keep its callers

    def dials(self, peer: int) -> bool:
        """True if this rank dials a peer for a data link over any card, and none stands."""
        link = self._link(auth.DATA, peer)
        return bool(link.addresses) and peer not in self._routes and not link.attached.is_set()

    def reach(
        self, wanted: Mapping[tuple[int, int], Sequence[dial.Address]], seconds: float
    ) -> dict[tuple[int, int], ProvenChannel]:
        """Connect a probe's streams; the channels that stand within ``seconds``, by (peer, number).

        ``wanted`` has the peer's addresses for each; where it has none, the peer connects. The other side may not have
        all of the channels."""
        links = {key: self._link(auth.PROBE, *key) for key in wanted}
        for key, addresses in wanted.items():
            links[key].addresses = addresses
        waiting = self._loop.start(self._want(list(links.values())))
        try:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                waiting.result(seconds)
        finally:
            waiting.cancel()
            self._loop.run(self._stop(list(links.values())))
        found = {key: link.reached for key, link in links.items() if link.reached is not None}
        for key in found:
            links[key].reached = None
        return found

    async def _stop(self, links: Sequence[_Link]) -> None:
        dialling = [link.dialling for link in links if link.dialling]
        for task in dialling:
            task.cancel()
        await asyncio.gather(*dialling, return_exceptions=True)

    def close(self) -> None:
        """Stop accepting and dialling; links that were attached are the engine's. May be called twice."""
        if not self._closed and not self._loop.closed:
            self._closed = True
            self._loop.run(self._end())
            del self._attach  # an event loop leaves cycles behind, and none shall hold the engine

    async def _end(self) -> None:
        await self._acceptor.shut()
        await self._stop(list(self._links.values()))
        for link in self._links.values():
            for session in list(link.sessions):
                self._expire(link, session)
            if link.reached is not None:
                link.reached.close()

    def _give_up(self, role: int, peers: Iterable[int], timeout: float) -> RendezvousError:
        links = [self._link(role, peer) for peer in sorted(peers)]
        missing = [link for link in links if not link.attached.is_set()]
        tried = "; ".join(
            f"{self._describe(link.peer)} cannot be reached ({link.unreachable or 'no answer'}), nor did it connect"
            for link in missing
        )
        return RendezvousError(
            f"{self._describe(self._mine.rank)} has no link after {round(timeout, 1):g} s: {tried}. Unless it has "
            "ended, let the hosts reach each other in one direction at least: see MULTIRING_INTERFACE, MULTIRING_PORTS",
            rank=missing[0].peer if missing else -1,
        )

    def _link(self, role: int, peer: int, number: int = 0) -> _Link:
        return self._links.setdefault((role, peer, number), _Link(role, peer, number))

    async def _want(self, links: Sequence[_Link]) -> None:
        for link in links:
            if link.addresses and not link.attached.is_set() and link.dialling is None:
                link.dialling = asyncio.create_task(self._dial(link))
        for link in links:
            await link.attached.wait()

    async def _dial(self, link: _Link) -> None:
        """Try all addresses until the link stands, whoever made it."""
        notice = asyncio.get_running_loop().call_later(NOTICE_SECONDS, self._notice, link)
        try:
            await self._dial_again_and_again(link)
        finally:
            notice.cancel()

    def _notice(self, link: _Link) -> None:
        _log.warning(
            "%s cannot reach %s (%s) and waits for it to connect",
            self._describe(self._mine.rank),
            self._describe(link.peer),
            link.unreachable or "no answer",
        )

    async def _dial_again_and_again(self, link: _Link) -> None:
        pause = RETRY_SECONDS
        while not link.attached.is_set():
            try:
                if link.role == auth.DATA and link.peer in self._routes:
                    await self._dial_by_cards(link)
                else:
                    await dial.race(link.addresses, lambda address: self._attempt(link, [Route("", address)]))
            except dial.Unreachable as error:
                link.unreachable = error
                if shortage := self._shortage(link, error):
                    link.failure = shortage
                    link.attached.set()
                    return
            with contextlib.suppress(asyncio.TimeoutError):
                await within(pause, link.attached.wait())
            pause = min(2 * pause, MAX_RETRY_SECONDS)

    def _shortage(self, link: _Link, error: dial.Unreachable) -> ResourceError | None:
        """Return why this rank itself cannot have the link: another attempt would need descriptors, too."""
        for reason in error.failures.values():
            if isinstance(reason, OSError) and reason.errno in (errno.EMFILE, errno.ENFILE):
                mine, other = self._describe(self._mine.rank), self._describe(link.peer)
                return ResourceError(
                    f"{mine} cannot be linked to {other}: {system_message(reason)}", rank=self._mine.rank
                )
        return None

    async def _dial_by_cards(self, link: _Link) -> None:
        """Open streams over all cards; where neither side can, the next try is over any."""
        routes = self._routes[link.peer]
        attempt = asyncio.ensure_future(self._attempt(link, routes))
        try:
            await asyncio.wait([attempt], timeout=CARDS_SECONDS)
        finally:
            attempt.cancel()
            (error,) = await asyncio.gather(attempt, return_exceptions=True)
        if not isinstance(error, (OSError, auth.Refused, asyncio.TimeoutError, asyncio.CancelledError, type(None))):
            raise error
        with contextlib.suppress(asyncio.TimeoutError):
            await within(CARDS_SECONDS, link.attached.wait())
            return
        _log.warning(
            "%s cannot be linked to %s over the cards %s (%s): they use one",
            self._describe(self._mine.rank),
            self._describe(link.peer),
            ", ".join(f"{route.source} - {route.address[0]}" for route in routes),
            str(error) or "no answer",
        )
        del self._routes[link.peer]

    async def _attempt(self, link: _Link, routes: Sequence[Route]) -> None:
        """Open all streams of a link, in turn over the routes, and attach them if they are chosen."""
        count = self.streams * len(routes) if link.role == auth.DATA else 1
        session = secrets.randbits(64)
        streams: list[ProvenChannel] = []
        try:
            for index in range(count):
                hello = replace(
                    self._mine,
                    role=link.role,
                    peer=link.peer,
                    stream=link.number + index,
                    streams=count,
                    session=session,
                )
                route = routes[index % len(routes)]
                handshake = auth.client(self._acceptor.secret, hello)
                streams.append(await dial.connect(route.address, handshake, route.source))
            await self._choose(link, streams)
        except BaseException:
            _close(streams)
            raise

    async def _accept(self, channel: ProvenChannel) -> None:
        """Gather the streams of a candidate; the last one to come carries it on."""
        hello = channel.hello
        link = self._link(hello.role, hello.rank, hello.stream if hello.role == auth.PROBE else 0)
        if hello.session not in link.sessions:
            link.sessions[hello.session] = {}
            asyncio.get_running_loop().call_later(auth.HANDSHAKE_SECONDS, self._expire, link, hello.session)
        gathered = link.sessions[hello.session]
        gathered[hello.stream] = channel
        if len(gathered) < hello.streams:
            return
        del link.sessions[hello.session]
        streams = [gathered[index] for index in sorted(gathered)]
        try:
            await self._choose(link, streams)
        except (OSError, auth.Refused):  # the other side dials again if it still needs the link
            _close(streams)
        except BaseException:
            _close(streams)
            raise

    def _expire(self, link: _Link, session: int) -> None:
        _close(link.sessions.pop(session, {}).values())

    async def _choose(self, link: _Link, streams: list[ProvenChannel]) -> None:
        """The lower rank takes the first candidate, the higher one waits for its word; neither gives up on its own,
        for then the other might believe in a link that is closed."""
        if self._mine.rank < link.peer:
            if link.chosen:
                raise auth.Refused("another connection was chosen")
            link.chosen = True
            try:
                await streams[0].send_async(CHOSEN)
            except OSError:
                link.chosen = False
                raise
        elif await streams[0].receive_async(len(CHOSEN)) != CHOSEN:
            raise auth.Refused("it answers something else than its choice")
        if link.role == auth.PROBE:
            (link.reached,) = streams
        else:
            try:
                self._attach(link.role, link.peer, streams)
            except MultiringError as error:  # told to who wants the link; a failed engine tells its callers itself
                link.failure = error.with_traceback(None)
                if isinstance(error, ResourceError):
                    mine, other = self._describe(self._mine.rank), self._describe(link.peer)
                    _log.warning("%s has no use of its link to %s: %s", mine, other, error)
        link.attached.set()
        if link.dialling:
            link.dialling.cancel()


def _close(channels: Iterable[ProvenChannel]) -> None:
    for channel in channels:
        channel.close()
