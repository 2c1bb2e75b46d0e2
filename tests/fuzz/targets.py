"""Targets for bytes that none of our processes would send: each must refuse or survive them.

The bytes stand for those of a stranger (``handshake``) or of a rank gone wrong (the others). A target raises if the
process is no longer well afterwards. ``SEEDS`` are well-formed inputs, to be mutated.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable

import numpy as np

from multiring import _native as native
from multiring.env import split_address
from multiring.errors import MultiringError
from multiring.job.store import Client, Server
from multiring.net import auth

SECRET = b"the secret of a fuzzed job"
# Frame of csrc/frame.hpp.
FRAME = struct.Struct("<IBBHIIQQQIBBHQII")
FIELDS = (
    "turn type op ordinal communicator segment number count plan root collective dtype generation place bytes token"
)
DATA, RELEASE, GRANT, ASK, WAITS, CREDIT, BEAT, NOTICE, FAREWELL = range(1, 10)
STATUS = struct.Struct("<QQiIffBBB5x")
OURS, THEIRS = bytes(range(32)), bytes(range(32, 64))
"""Secrets from which the keys of both directions follow."""


def handshake(data: bytes) -> None:
    """A stranger's bytes, instead of a handshake: never believed, whether the job encrypts or not."""
    for encrypted in (False, True):
        here, there = socket.socketpair()
        with here, there:
            here.settimeout(5)
            there.sendall(data)
            there.shutdown(socket.SHUT_WR)
            mine = auth.Hello(auth.STORE, job="fuzz", encrypted=encrypted)
            try:
                auth.run(here, auth.server(SECRET, mine, (auth.DATA, auth.CONTROL)))
            except (auth.Refused, OSError):
                continue
            raise AssertionError("a stranger was believed")


class _Store:
    """One server for all inputs: it has to outlive them."""

    server: Server | None = None

    @classmethod
    def connect(cls) -> Client:
        if cls.server is None:
            cls.server = Server(SECRET, job="fuzz", bind=["127.0.0.1"])
        return Client([split_address(cls.server.addresses[0])], SECRET, job="fuzz", timeout=10)

    @classmethod
    def close(cls) -> None:
        if cls.server is not None:
            cls.server.close()
            cls.server = None


def store(data: bytes) -> None:
    """Requests of a client that knows the secret and nothing else: the next client is served."""
    broken = _Store.connect()
    with contextlib.suppress(OSError):
        broken._channel.sock.sendall(data)
        broken._channel.sock.shutdown(socket.SHUT_WR)
        broken._channel.sock.settimeout(0.02)
        broken._channel.sock.recv(100)
    broken.close()
    client = _Store.connect()
    client.set("alive", data[:10])
    assert client.get("alive", 5) == data[:10]
    client.close()


def close_store() -> None:
    """End what `store` has begun."""
    _Store.close()


def _engine_fed(data: bytes, attach: Callable[[native.Engine, int], None]) -> None:
    engine = native.Engine(0, 2, hosts=["a", "b"], inproc=True)
    here, there = socket.socketpair()
    with there:
        attach(engine, here.detach())
        engine.communicator(0, [0, 1])
        memory = np.zeros(4)
        recv = native.Call(native.COLLECTIVES.index("recv"), memory.ctypes.data, 0, 0, 60.0, tag=7)
        engine.start_message(0, 1, recv, memory)
        with contextlib.suppress(OSError):
            there.sendall(data)
    deadline = time.monotonic() + 10
    while engine.failure() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    failure = engine.failure()
    engine.shutdown()
    assert isinstance(failure, MultiringError), "the end of a connection was not seen"


def frames(data: bytes) -> None:
    """A data connection: ends in an error, whatever came."""
    _engine_fed(data, lambda engine, sock: engine.attach_tcp(1, [sock]))


def control(data: bytes) -> None:
    """A control connection: ends in an error, whatever came."""

    def attach(engine: native.Engine, sock: int) -> None:
        data_here, data_there = socket.socketpair()
        engine.attach_tcp(1, [data_here.detach()])
        data_there.close()
        engine.attach_control(1, sock)

    _engine_fed(data, attach)


def records(data: bytes) -> None:
    """An encrypted connection, for data or, where the first byte is odd, for control: ends in an error as well."""

    def attach(engine: native.Engine, sock: int) -> None:
        cipher = native.Records(OURS, THEIRS)
        if not data[:1] or data[0] % 2 == 0:
            engine.attach_tcp(1, [sock], [cipher])
            return
        data_here, data_there = socket.socketpair()
        engine.attach_tcp(1, [data_here.detach()])
        data_there.close()
        engine.attach_control(1, sock, cipher)

    _engine_fed(data[1:], attach)


def _sealed(kind: bytes, *texts: bytes) -> bytes:
    """A record of each text, as a rank sends them."""
    cipher = native.Records(THEIRS, OURS)
    return kind + b"".join(cipher.seal(text) for text in texts)


def _frame(type: int, payload: bytes = b"", **fields: int) -> bytes:
    names = (
        "turn type op ordinal communicator segment number count plan root collective dtype generation place bytes token"
    )
    values = {**dict.fromkeys(names.split(), 0), "type": type, "bytes": len(payload), **fields}
    return FRAME.pack(*values.values()) + payload


TARGETS: dict[str, Callable[[bytes], None]] = {
    "handshake": handshake,
    "store": store,
    "frames": frames,
    "control": control,
    "records": records,
}
SEEDS: dict[str, list[bytes]] = {
    "handshake": [
        auth.Hello(auth.DATA, 1, 0, job="fuzz", encrypted=encrypted).pack(bytes(32)) + bytes(32)
        for encrypted in (False, True)
    ],
    "store": [
        *(struct.pack("!BIId", op, 1, 1, 0.1) + b"k1" for op in range(5)),
        struct.pack("!BIId", 3, 1, 6, 0.1) + b"k" + struct.pack("!I", 1) + b"12",
    ],
    "frames": [
        _frame(DATA, bytes(32), collective=7, plan=7, count=4),
        _frame(GRANT, segment=1, collective=7, plan=7, count=4),
        _frame(ASK, collective=7, plan=7, count=4),
        _frame(WAITS, collective=7, plan=7, count=4),
        _frame(CREDIT, count=1 << 20),
        _frame(FAREWELL),
        _frame(DATA, bytes(64), communicator=9),
        _frame(NOTICE, b"rank 1 is lost", root=1, token=1, count=1000),
    ],
    "control": [
        _frame(BEAT),
        _frame(BEAT, STATUS.pack(1, 2, 1, 0, 0.5, 0.0, 0, 1, 0)),
        _frame(BEAT, STATUS.pack(1, 2, 1, 0, 0.5, 0.0, 0, 1, 1) + bytes(104)),
        _frame(NOTICE, b"rank 1 is lost", root=1, token=1, count=1000),
        _frame(FAREWELL),
    ],
    "records": [
        _sealed(b"\0", _frame(DATA, bytes(32), collective=7, plan=7, count=4)),
        _sealed(b"\0", _frame(NOTICE, b"rank 1 is lost", root=1, token=1, count=1000)[:70], b"is lost"),
        _sealed(b"\0", bytes(100), bytes(100)),
        _sealed(b"\1", _frame(BEAT), _frame(FAREWELL)),
        _sealed(b"\1", _frame(NOTICE, b"rank 1 is lost", root=1, token=1, count=1000)),
    ],
}
