"""The job's store: values, waiting, and who is refused."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

import multiring
from multiring import env
from multiring.errors import RendezvousError, ResourceError
from multiring.job.store import _SWAP, MAX_VALUE, Client, JobStore, Server, TorchStore
from multiring.net import auth, listen
from multiring.net.channel import ProvenChannel

SECRET = b"0123456789abcdef"


@pytest.fixture
def server() -> Iterator[Server]:
    serving = Server(SECRET, job="j", bind=["127.0.0.1"])
    yield serving
    serving.close()


def connect(server: Server, secret: bytes = SECRET, job: str = "j") -> Client:
    return Client([("127.0.0.1", server.port)], secret, job=job, timeout=5)


def test_set_get_add(server: Server) -> None:
    one, two = connect(server), connect(server)
    one.set("a", b"\0\xff" * 40000)
    assert two.get("a", 0) == b"\0\xff" * 40000
    one.set("a", b"")
    assert two.get("a", 0) == b""
    assert (one.add("n", 2), two.add("n", 40), two.get("n", 0)) == (2, 42, b"42")
    one.close()
    two.close()


def test_what_is_settled_stays(server: Server) -> None:
    one, two = connect(server), connect(server)
    assert one.settle("verdict", b"first") == two.settle("verdict", b"second") == b"first"
    assert server.peek("verdict") == two.get("verdict", 0) == b"first"
    assert server.peek("another") is None
    assert (one.settle("empty", b""), two.settle("empty", b"later")) == (b"", b"")
    one.close()
    two.close()


def swaps(one: JobStore, two: JobStore) -> None:
    assert one.swap("k", b"", b"first") == b"first"
    assert two.swap("k", b"", b"second") == b"first"
    assert two.swap("k", b"fir", b"second") == b"first"
    assert two.swap("k", b"first", b"\0\xff") == one.get("k", 0) == b"\0\xff"
    assert one.swap("k", b"first", b"third") == two.get("k", 0) == b"\0\xff"


def test_what_is_not_expected_is_not_swapped(server: Server) -> None:
    one, two = connect(server), connect(server)
    swaps(one, two)
    with pytest.raises(ValueError, match="refused the operation on 'k'"):
        one._call(_SWAP, "k", b"\0\0\0", 0.0)
    one.close()
    two.close()


def test_torchs_store_swaps_alike() -> None:
    dist = pytest.importorskip("torch.distributed")
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    swaps(TorchStore(served), TorchStore(dist.TCPStore("127.0.0.1", served.port, is_master=False)))


def test_the_end_of_a_connection_settles_what_was_set_at_its_end(server: Server) -> None:
    one, two = connect(server), connect(server)
    one.settle("settled", b"before")
    one.set_at_end("settled", b"too late")
    one.set_at_end("open", b"one is gone")
    with pytest.raises(TimeoutError):
        two.get("open", 0)
    one.close()
    assert two.get("open", 10) == b"one is gone"
    assert two.get("settled", 0) == b"before"
    two.close()


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH])
def test_a_client_whose_host_is_out_of_reach_ends_without_an_error_of_the_server(
    server: Server, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def lost(channel: ProvenChannel, size: int) -> bytes:
        raise OSError(number, "nothing was acknowledged")

    client = connect(server)
    client.set_at_end("ended", b"one is lost")
    with monkeypatch.context() as patched:
        patched.setattr(ProvenChannel, "receive_async", lost)
        with pytest.raises(RendezvousError):
            client.set("last", b"word")  # the server gets its beginning alone
        deadline = time.monotonic() + 10
        while server.peek("ended") is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert server.peek("ended") == b"one is lost"
    assert server.at_once(gc.collect) >= 0  # a task that failed is told of when nobody has it any more
    assert "exception" not in caplog.text
    client.close()


def test_get_waits_for_set(server: Server) -> None:
    one, two = connect(server), connect(server)
    late = threading.Timer(0.1, one.set, ("late", b"value"))
    late.start()
    assert two.get("late", 10) == b"value"
    late.join()
    one.close()
    two.close()


def test_get_gives_up(server: Server) -> None:
    client = connect(server)
    with pytest.raises(TimeoutError, match=r"'never' was not set within 0\.05 s"):
        client.get("never", 0.05)
    client.set("a", b"still usable")
    assert client.get("a", 0) == b"still usable"
    client.close()


def test_add_to_what_is_no_number(server: Server) -> None:
    client = connect(server)
    client.set("a", b"text")
    with pytest.raises(ValueError, match="refused the operation on 'a'"):
        client.add("a", 1)
    client.close()


def test_too_large_is_refused_here(server: Server) -> None:
    client = connect(server)
    with pytest.raises(ValueError, match="limits are"):
        client.set("k" * 2000, b"")
    client.close()


def test_a_lying_length_ends_the_connection_only(server: Server) -> None:
    liar, other = connect(server), connect(server)
    liar._channel.sock.sendall(struct.pack("!BIId", 0, 1, MAX_VALUE + 1, 0.0))
    with pytest.raises(RendezvousError, match="store was lost"):
        liar.get("a", 1)
    other.set("a", b"1")
    assert other.get("a", 0) == b"1"
    liar.close()
    other.close()


def test_any_of_several_addresses(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, never answers
        client = Client(
            [("127.0.0.1", 1), silent.getsockname(), ("nosuch.invalid", 5), ("localhost", server.port)], SECRET, job="j"
        )
        client.set("a", b"1")
        client.close()


def test_nobody_there() -> None:
    with pytest.raises(RendezvousError, match=r"did not answer within 0.1 s: 127.0.0.1:1: Connection refused"):
        Client([("127.0.0.1", 1)], SECRET, timeout=0.1)


def test_server_that_comes_later() -> None:
    port = listen.bind("127.0.0.1", None)
    address = port.getsockname()
    port.close()
    late: list[Server] = []
    timer = threading.Timer(
        0.3, lambda: late.append(Server(SECRET, bind=["127.0.0.1"], ports=range(address[1], address[1] + 1)))
    )
    timer.start()
    client = Client([address], SECRET, timeout=10)
    timer.join()
    client.set("a", b"1")
    client.close()
    late[0].close()


@pytest.mark.parametrize(
    ("secret", "job", "reason"),
    [(b"another secret..", "j", "does not know this job's secret"), (SECRET, "k", "belongs to another job")],
)
def test_wrong_secret_or_job(
    server: Server, caplog: pytest.LogCaptureFixture, secret: bytes, job: str, reason: str
) -> None:
    client = connect(server)
    with caplog.at_level(logging.WARNING, "multiring"):
        for _ in range(3):
            with pytest.raises(RendezvousError, match=reason):
                connect(server, secret, job)
        client.set("a", b"the job goes on")  # behind the refusals, which are logged in the same loop
    assert [record.getMessage() for record in caplog.records] == [
        f"the job's store refused a connection from 127.0.0.1: it {reason}"
    ]
    client.close()


def test_another_version_is_told_both(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    told = re.escape(f"multiring '{multiring.__version__}' (protocol 2), this process multiring '9.8.7'")
    monkeypatch.setattr("multiring.version.__version__", "9.8.7")
    with pytest.raises(RendezvousError, match=told):
        connect(server)


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.0\r\n\r\n", b"\0" * 500, b""])
def test_noise_is_refused(server: Server, noise: bytes) -> None:
    stranger = socket.create_connection(("127.0.0.1", server.port))
    with stranger, contextlib.suppress(OSError):  # what the server did not read makes it reset the connection
        stranger.sendall(noise)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""
    connect(server).close()


def test_half_open_connection_times_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth.run_async, "__defaults__", (0.05,))
    with socket.create_connection(("127.0.0.1", server.port)) as silent:
        silent.settimeout(5)
        assert silent.recv(1) == b""


def test_a_proof_cannot_be_replayed(server: Server) -> None:
    """A second connection sends the first one's bytes: the server's nonce is new, so the proof does not hold."""
    hello = auth.Hello(auth.STORE, job="j")
    sent = []
    with socket.create_connection(("127.0.0.1", server.port)) as honest:
        steps = auth.client(SECRET, hello)
        sent.append(next(steps))
        honest.sendall(sent[0])
        sent.append(steps.send(b"") or b"")
        want = sent.pop()
        assert isinstance(want, int)
        proof = steps.send(auth.receive(honest, want))
        honest.sendall(proof)
        assert auth.receive(honest, 32) != bytes(32)
    with socket.create_connection(("127.0.0.1", server.port)) as replay:
        replay.sendall(sent[0])
        auth.receive(replay, want)
        replay.sendall(proof)
        assert auth.receive(replay, 32) == bytes(32)  # a proof that fails
        assert replay.recv(1) == b""


def test_client_recognises_a_server_without_the_secret() -> None:
    other = Server(b"another secret..", job="j", bind=["127.0.0.1"])
    with pytest.raises(RendezvousError, match="does not know"):
        connect(other)
    other.close()


def test_ranks_that_look_for_someone_else() -> None:
    mine = auth.Hello(auth.DATA, rank=1, peer=2)
    for theirs in (replace(mine, rank=3, peer=1), replace(mine, rank=2, peer=4)):
        with pytest.raises(auth.Refused, match="this is rank 1, looking for 2"):
            auth._check(theirs.pack(bytes(32)), mine)
    assert auth._check(replace(mine, rank=2, peer=1, stream=3).pack(bytes(32)), mine).stream == 3


def test_port_range() -> None:
    taken = listen.bind("127.0.0.1", None)
    port = taken.getsockname()[1]
    with pytest.raises(ResourceError, match=f"no free port on 127.0.0.1 in {port}-{port}: widen MULTIRING_PORTS"):
        Server(SECRET, bind=["127.0.0.1"], ports=range(port, port + 1))
    taken.close()
    server = Server(SECRET, bind=["127.0.0.1"], ports=range(port, port + 1))
    assert server.addresses == (f"127.0.0.1:{port}",)
    server.close()


def test_all_addresses_ipv6_too() -> None:
    server = Server(SECRET)
    for host in ("127.0.0.1", "::1"):
        client = Client([(host, server.port)], SECRET, timeout=5)
        client.set(host, b"1")
        client.close()
    assert not any(env.split_address(address)[0].startswith("127.") for address in server.addresses)
    server.close()


def test_draining_waits_for_the_clients() -> None:
    server = Server(SECRET, bind=["127.0.0.1"])
    client = Client([("127.0.0.1", server.port)], SECRET)
    client.set("b", b"2")  # until it is answered the server may not have counted the client
    closing = threading.Thread(target=server.close, kwargs={"drain": 10})
    closing.start()
    time.sleep(0.1)
    client.set("a", b"1")
    assert client.get("a", 0) == b"1"
    client.close()
    closing.join()
    server.close()


def test_draining_does_not_wait_for_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth.run_async, "__defaults__", (60.0,))
    server = Server(SECRET, job="j", bind=["127.0.0.1"])
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        connect(server).close()
        began = time.monotonic()
        server.close(drain=60.0)
        assert time.monotonic() - began < 30
        assert stranger.recv(1) == b""
