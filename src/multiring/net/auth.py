"""The handshake that opens every connection: both ends prove that they know the job's secret.

::

    client                                   server
      Hello (fixed size, its nonce)   ---->
                                      <----  Hello (fixed size, its nonce)
      HMAC(secret, "client" + both)   ---->
                                      <----  HMAC(secret, "server" + both)

A Hello holds the protocol's number, the role, both ranks as its sender sees them, the job and the generation; as both
Hellos are under both proofs, none of it can be altered or replayed. Nothing else is read before the proofs hold. The
handshake is a generator that performs no input or output, so that blocking sockets and event loops share it.

Where a job encrypts, each nonce is the public key of a fresh X25519 pair. The keys of the two directions follow, by
HKDF, from what the pairs have in common, the job's secret, and both Hellos: who learns the secret later cannot read
what was recorded before. Two ends of which one encrypts exchange their proofs as well, so that each knows whether the
other is of its job or a stranger, and then end: no connection comes of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Generator
from dataclasses import dataclass, field, replace

from multiring import _native, version
from multiring.errors import RendezvousError
from multiring.net.loop import within

PROTOCOL = 2
HANDSHAKE_SECONDS = 10.0
"""A connection that has not proved itself by then is closed."""

STORE, DATA, CONTROL, LOCAL, LAUNCH, PROBE, SURVIVOR = range(7)
"""Roles: what the connection is for. Survivors may be of different generations: they tell each other of theirs."""

_MAGIC = b"multirng"
_LAYOUT = struct.Struct("!8s HH 32s iiII HHQ 16s 32s")
_PROOF = hashlib.sha256().digest_size
_ENCRYPTED = 1 << 15
"""Added to the role of a connection that is to be encrypted."""

Step = Generator["bytes | int", bytes, "Proven"]
"""Yields bytes to send or a number of bytes to receive; returns what came of it."""


class Refused(RendezvousError):
    """The other side is not who it should be."""


class EncryptionDiffers(Refused):
    """One of both sides encrypts. The other side ``is_proven`` if it has proved that it is of this job, no stranger."""

    def __init__(self, message: str, *, is_proven: bool) -> None:
        super().__init__(message)
        self.is_proven = is_proven


@dataclass(frozen=True)
class Hello:
    """Introduction of one side of a connection.

    ``peer`` is the rank it believes to speak to, -1 for any; ``restart`` counts the starts of all ranks, ``generation``
    the changes of membership since the last one. A link of several ``streams`` opens them in one ``session``, each with
    its own number. Of the links of a probe, ``stream`` is the number.
    """

    role: int
    rank: int = -1
    peer: int = -1
    restart: int = 0
    generation: int = 0
    stream: int = 0
    streams: int = 1
    session: int = 0
    job: str = ""
    encrypted: bool = False
    version: str = field(default_factory=lambda: version.__version__)
    protocol: int = PROTOCOL

    def pack(self, nonce: bytes) -> bytes:
        version = self.version.encode("ascii", "replace")[:32]
        place = self.rank, self.peer, self.restart, self.generation
        link = self.stream, self.streams, self.session
        role = self.role | _ENCRYPTED if self.encrypted else self.role
        return _LAYOUT.pack(_MAGIC, self.protocol, role, version, *place, *link, _digest(self.job), nonce)


@dataclass(frozen=True)
class Proven:
    """Result of a handshake: the other side's introduction, which is proved, and a cipher (None: in clear)."""

    hello: Hello
    cipher: _native.Records | None = None


def _digest(job: str) -> bytes:
    return hashlib.sha256(job.encode()).digest()[:16]


def _check(packed: bytes, mine: Hello) -> Hello:
    """Unpack the other side's Hello; Refused if it does not belong to ``mine``."""
    magic, protocol, role, version, rank, peer, *epoch, stream, streams, session, job, _ = _LAYOUT.unpack(packed)
    restart, generation = epoch
    if magic != _MAGIC:
        raise Refused("it does not speak multiring's protocol")
    theirs = version.rstrip(b"\0").decode("ascii", "replace")
    if (protocol, theirs) != (mine.protocol, mine.version):
        raise Refused(
            f"it runs multiring {theirs!r} (protocol {protocol}), this process multiring {mine.version!r} "
            f"(protocol {mine.protocol}): install the same version everywhere"
        )
    encrypted = bool(role & _ENCRYPTED)
    role &= ~_ENCRYPTED
    if role != mine.role:
        raise Refused("it is a connection for another purpose")
    if job != _digest(mine.job):
        raise Refused("it belongs to another job")
    if restart != mine.restart:
        raise Refused(
            f"it belongs to restart {restart} of this job, this process to restart {mine.restart}: one of them is left "
            "over from an earlier start of the ranks, and can only end"
        )
    if generation != mine.generation and role != SURVIVOR:
        raise Refused(
            f"it belongs to generation {generation} of this job, this process to generation {mine.generation}"
        )
    if mine.peer not in (-1, rank) or peer not in (-1, mine.rank):
        raise Refused(f"it is rank {rank} and looks for rank {peer}; this is rank {mine.rank}, looking for {mine.peer}")
    return Hello(role, rank, peer, restart, generation, stream, streams, session, mine.job, encrypted, theirs, protocol)


def _difference(theirs: Hello, mine: Hello) -> str:
    """Say which side encrypts and which does not; "" if both do the same."""
    if theirs.encrypted == mine.encrypted:
        return ""
    what = "host" if mine.role == LAUNCH else "rank"
    there = "it" if theirs.rank < 0 else f"{what} {theirs.rank}"
    here = "this process" if mine.rank < 0 else f"{what} {mine.rank}"
    does, does_not = (there, here) if theirs.encrypted else (here, there)
    return (
        f"{does} encrypts (MULTIRING_ENCRYPT=1), and {does_not} does not: set MULTIRING_ENCRYPT=1 for all ranks and "
        "what starts them, or for none"
    )


def _judge(is_proven: bool, different: str) -> None:
    """Raise what is wrong with the other side, once both have sent their proofs."""
    unknown = "it does not know this job's secret"
    if different:
        raise EncryptionDiffers(different if is_proven else f"{different}; besides, {unknown}", is_proven=is_proven)
    if not is_proven:
        raise Refused(unknown)


def _proof(secret: bytes, side: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, side + transcript, "sha256")


def _nonce(mine: Hello) -> tuple[bytes, bytes]:
    """The secret that this side keeps, and the nonce that it tells."""
    drawn = secrets.token_bytes(32)
    return drawn, _native.public_key(drawn) if mine.encrypted else drawn


def _cipher(secret: bytes, kept: bytes, packed: bytes, transcript: bytes, side: bytes) -> _native.Records:
    """The cipher of one side; ``packed`` is the other side's Hello, with its public key."""
    try:
        shared = _native.shared_key(kept, _LAYOUT.unpack(packed)[-1])
    except ValueError:
        raise Refused("its public key is invalid") from None
    key = _native.hkdf_extract(hashlib.sha256(transcript).digest(), shared + secret)
    ours = side, b"server" if side == b"client" else b"client"
    return _native.Records(*(_native.hkdf_expand(key, b"multiring from " + way, 32) for way in ours))


def client(secret: bytes, mine: Hello) -> Step:
    """The side that connected."""
    kept, told = _nonce(mine)
    hello = mine.pack(told)
    yield hello
    answer = yield _LAYOUT.size
    theirs = _check(answer, mine)
    yield _proof(secret, b"client", hello + answer)
    proven = hmac.compare_digest((yield _PROOF), _proof(secret, b"server", hello + answer))
    _judge(proven, _difference(theirs, mine))
    return Proven(theirs, _cipher(secret, kept, answer, hello + answer, b"client") if mine.encrypted else None)


def server(secret: bytes, mine: Hello, roles: tuple[int, ...] = ()) -> Step:
    """The side that listens, for connections of any of ``roles`` (of ``mine.role`` if empty).

    A stranger learns nothing of the secret. A client of another version or job gets a Hello back, so that it can say
    so too; one with another secret gets a proof that fails.
    """
    hello = yield _LAYOUT.size
    magic, _, role, *_ = _LAYOUT.unpack(hello)
    if magic != _MAGIC:
        raise Refused("it does not speak multiring's protocol")
    if role & ~_ENCRYPTED in roles:
        mine = replace(mine, role=role & ~_ENCRYPTED)
    kept, told = _nonce(mine)
    answer = mine.pack(told)
    yield answer
    theirs = _check(hello, mine)
    proven = hmac.compare_digest((yield _PROOF), _proof(secret, b"client", hello + answer))
    yield _proof(secret, b"server", hello + answer) if proven else bytes(_PROOF)
    _judge(proven, _difference(theirs, mine))
    return Proven(theirs, _cipher(secret, kept, hello, hello + answer, b"server") if mine.encrypted else None)


def run(sock: socket.socket, steps: Step, seconds: float = HANDSHAKE_SECONDS) -> Proven:
    """Perform a handshake over a blocking socket, within ``seconds`` altogether; it changes the socket's time-out."""
    deadline = time.monotonic() + seconds
    reply = b""
    want = next(steps)
    while True:
        if isinstance(want, int):
            reply = receive(sock, want, deadline)
        else:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock.sendall(want)
        try:
            want = steps.send(reply)
        except StopIteration as finished:
            return finished.value  # type: ignore[no-any-return]


def receive(sock: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Exactly ``size`` bytes from a blocking socket; ConnectionError if it closes before.

    TimeoutError at ``deadline`` (monotonic seconds); without one the socket's own time-out holds for each part.
    """
    parts = bytearray()
    while len(parts) < size:
        if deadline is not None:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
        part = sock.recv(size - len(parts))
        if not part:
            raise ConnectionError("closed by the other side")
        parts += part
    return bytes(parts)


async def run_async(sock: socket.socket, steps: Step, seconds: float = HANDSHAKE_SECONDS) -> Proven:
    """Perform a handshake over a non-blocking socket of the running event loop, within ``seconds`` altogether."""

    async def perform() -> Proven:
        loop = asyncio.get_running_loop()
        reply = b""
        want = next(steps)
        while True:
            if isinstance(want, int):
                reply = await receive_async(sock, want)
            else:
                await loop.sock_sendall(sock, want)
            try:
                want = steps.send(reply)
            except StopIteration as finished:
                return finished.value  # type: ignore[no-any-return]

    return await within(seconds, perform())


async def receive_async(sock: socket.socket, size: int) -> bytes:
    """Exactly ``size`` bytes from a non-blocking socket; ConnectionError if it closes before."""
    loop = asyncio.get_running_loop()
    parts = bytearray()
    while len(parts) < size:
        part = await loop.sock_recv(sock, size - len(parts))
        if not part:
            raise ConnectionError("closed by the other side")
        parts += part
    return bytes(parts)
