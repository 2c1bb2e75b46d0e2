"""Abstract unix sockets whose backlog somebody keeps full, and other users at them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from multiring.errors import RendezvousError
from multiring.net import auth, dial, local, unix
from multiring.net.acceptor import Acceptor
from multiring.net.membership import Membership

SECRET = b"0123456789abcdef"


def connect(name: str, seconds: float) -> socket.socket:
    return unix.connect(name, seconds)


def connect_in_loop(name: str, seconds: float) -> socket.socket:
    return asyncio.run(unix.connect_async(name, seconds))


both_ways = pytest.mark.parametrize("connect", [connect, connect_in_loop])


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, str]]:
    """A socket that accepts nobody, and has no room for more."""
    monkeypatch.setattr(unix, "BACKLOG", 3)
    listening, name = unix.listen()
    with listening, contextlib.ExitStack() as held:
        with contextlib.suppress(BlockingIOError):
            while True:
                stranger = held.enter_context(socket.socket(socket.AF_UNIX))
                stranger.setblocking(False)
                stranger.connect("\0" + name)
        yield listening, name


@both_ways
def test_a_connection_to_a_full_backlog_has_a_deadline(
    connect: Callable[[str, float], socket.socket], full: tuple[socket.socket, str]
) -> None:
    _, name = full
    assert unix.exists(name)
    with pytest.raises(TimeoutError, match="its backlog is full, and it accepts nobody"):
        connect(name, 0.7)


@both_ways
def test_a_connection_gets_its_turn_when_there_is_room(
    connect: Callable[[str, float], socket.socket], full: tuple[socket.socket, str]
) -> None:
    listening, name = full
    accepted: list[socket.socket] = []

    def drain() -> None:
        time.sleep(0.7)
        accepted.extend(unix.accept(listening) for _ in range(5))

    drainer = threading.Thread(target=drain)
    drainer.start()
    with connect(name, 20) as sock:
        drainer.join()
        accepted[-1].sendall(b"welcome")
        sock.settimeout(5)
        assert sock.recv(7) == b"welcome"
    for each in accepted:
        each.close()


def test_a_signal_does_not_make_it_connected(full: tuple[socket.socket, str]) -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with pytest.raises(TimeoutError):
            unix.connect(full[1], 1.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_socket_that_is_gone_does_not_exist() -> None:
    listening, name = unix.listen()
    assert unix.exists(name)
    listening.close()
    assert not unix.exists(name)
    with pytest.raises(ConnectionRefusedError):
        unix.connect(name, 5)
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(unix.connect_async(name, 5))


@pytest.fixture
def another_user(monkeypatch: pytest.MonkeyPatch) -> int:
    """This process takes itself for one of another user than the kernel does."""
    user = os.getuid()
    monkeypatch.setattr("multiring.net.unix.os.getuid", lambda: user + 1)
    return user


def test_an_acceptor_says_nothing_to_another_user(another_user: int, caplog: pytest.LogCaptureFixture) -> None:
    """Not even to one that knows the secret, as one that is derived from what the machine tells all."""
    listening, name = unix.listen()
    listening.setblocking(False)
    mine = auth.Hello(auth.LOCAL, 0, job="test")
    acceptor = Acceptor([listening], SECRET, mine, Membership.at_start(2), {1: []}, [], patience=5)
    try:
        for role in (auth.SURVIVOR, auth.DATA, auth.CONTROL, auth.LOCAL) * 20:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(5)
                stranger.connect("\0" + name)
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(auth.Hello(role, 1, job="test").pack(bytes(32)))
                    assert stranger.recv(1) == b""
    finally:
        acceptor.close()
    users = f"it runs as user {another_user}, this process as user {another_user + 1}"
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 0 refused a connection from this host: {users}"
    ]


def test_nobody_dials_a_socket_of_another_user(another_user: int) -> None:
    listening, name = unix.listen()
    with listening:
        for attempt in (lambda: unix.connect(name, 5), lambda: asyncio.run(unix.connect_async(name, 5))):
            with pytest.raises(auth.Refused, match=f"^it runs as user {another_user}, "):
                attempt()
        with pytest.raises(auth.Refused, match=f"^it runs as user {another_user}, "):
            asyncio.run(dial.connect(("\0" + name, 0), auth.client(SECRET, auth.Hello(auth.SURVIVOR))))


class NoEngine:
    """An engine that attaches to nobody, as nobody's memory arrives."""

    memory_fd = doorbell_fd = 0

    def attach_local(self, *_: int) -> None:
        raise AssertionError("nothing has arrived")


def test_a_rank_that_ends_before_its_memory_has_arrived_is_named() -> None:
    """It was said that descriptors are short here."""
    listening, name = unix.listen()

    def end_early() -> None:
        unix.accept(listening).close()  # who only looks whether there is somebody
        with unix.accept(listening) as sock:
            auth.run(sock, auth.server(SECRET, auth.Hello(auth.LOCAL, 0)))
            sock.recv(1)

    with listening:
        listening.settimeout(30)
        ending = threading.Thread(target=end_early)
        ending.start()
        mine = auth.Hello(auth.LOCAL, 1)
        with (
            unix.listen()[0] as own,
            pytest.raises(RendezvousError, match="rank 1 cannot attach rank 0 of its host: it has ended") as raised,
        ):
            local.attach(NoEngine(), own, {0: name}, SECRET, mine, time.monotonic() + 30)
        ending.join(30)
    assert raised.value.rank == 0
