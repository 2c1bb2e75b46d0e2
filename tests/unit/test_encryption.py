"""Connections that encrypt or sum: known answers, the same values as in clear, and nothing that was altered is used."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from engines import (
    BothEnds,
    Rank,
    all_reduce_plan,
    blocked_plan,
    checksums,
    ciphers,
    close,
    connected_sockets,
    contribution,
    errors_of,
    in_threads,
    rooted_plan,
    two_level_plan,
    world,
)

from multiring import _native as native
from multiring import env
from multiring.errors import PeerLost, RendezvousError
from multiring.job import bootstrap
from multiring.job.checks import check_settings
from multiring.job.store import Client, Server
from multiring.net import auth
from multiring.net.channel import Altered, ProvenChannel
from multiring.net.relay import Relay

SECRET = b"0123456789abcdef"
LARGE = 1_000_003
"""Elements: messages of many records."""

RECORDS = pytest.mark.parametrize("records", [ciphers, checksums])

ONE, OTHER = bytes(range(32)), bytes(range(32, 64))
OVERHEAD = native.RECORD_SIZE_BYTES + native.RECORD_TAG_BYTES


def unhex(text: str) -> bytes:
    return bytes.fromhex(text)


# The Galois/Counter Mode of Operation, McGrew and Viega, appendix B: key, nonce, additional data, text, and the answer.
GCM = [
    ("00" * 16, "00" * 12, "", "", "58e2fccefa7e3061367f1d57a4e7455a"),
    ("00" * 16, "00" * 12, "", "00" * 16, "0388dace60b6a392f328c2b971b2fe78ab6e47d42cec13bdf53a67b21257bddf"),
    (
        "feffe9928665731c6d6a8f9467308308",
        "cafebabefacedbaddecaf888",
        "feedfacedeadbeeffeedfacedeadbeefabaddad2",
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
        "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39",
        "42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e"
        "21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973d58e0915bc94fbc3221a5db94fae95ae7121a47",
    ),
]


@pytest.mark.parametrize(("key", "nonce", "additional", "text", "answer"), GCM)
def test_gcm_gives_the_answers_of_its_authors(key: str, nonce: str, additional: str, text: str, answer: str) -> None:
    assert native.gcm_seal(unhex(key), unhex(nonce), unhex(additional), unhex(text)) == unhex(answer)


# RFC 5869, appendices A.1 and A.3: material, salt, info, and both answers.
HKDF = [
    (
        "0b" * 22,
        "000102030405060708090a0b0c",
        "f0f1f2f3f4f5f6f7f8f9",
        "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    (
        "0b" * 22,
        "",
        "",
        "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
]


@pytest.mark.parametrize(("material", "salt", "info", "key", "answer"), HKDF)
def test_hkdf_gives_the_answers_of_its_rfc(material: str, salt: str, info: str, key: str, answer: str) -> None:
    assert native.hkdf_extract(unhex(salt), unhex(material)) == unhex(key)
    assert native.hkdf_expand(unhex(key), unhex(info), 42) == unhex(answer)


def test_x25519_gives_the_answers_of_its_rfc() -> None:
    """RFC 7748, section 6.1."""
    alice = unhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = unhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    told = unhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    assert native.public_key(alice) == told
    shared = unhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    assert native.shared_key(alice, native.public_key(bob)) == shared
    assert native.shared_key(bob, told) == shared
    with pytest.raises(ValueError, match="public key is invalid"):
        native.shared_key(alice, bytes(32))


def record_by_hand(secret: bytes, number: int, text: bytes) -> bytes:
    """A record as csrc/records.hpp defines it."""
    mask = native.hkdf_expand(secret, b"multiring nonce", 12)
    nonce = bytes(a ^ b for a, b in zip(mask, struct.pack("<Q4x", number), strict=True))
    size = struct.pack("<I", len(text))
    return size + native.gcm_seal(native.hkdf_expand(secret, b"multiring key", 16), nonce, size, text)


def test_records_are_as_they_are_said_to_be_and_go_on_to_the_next_key() -> None:
    writer, reader = native.Records(ONE, OTHER), native.Records(OTHER, ONE)
    assert writer.seal(b"first") == record_by_hand(ONE, 0, b"first")
    assert reader.open(record_by_hand(ONE, 0, b"first")) == b"first"
    for number in range(1, 1 << 16):
        assert reader.open(writer.seal(b"%d" % number)) == b"%d" % number
    after = native.hkdf_expand(ONE, b"multiring next", 32)
    sealed = writer.seal(b"later")
    assert sealed == record_by_hand(after, 1 << 16, b"later")
    assert reader.open(sealed) == b"later"
    assert reader.next_received == (1 << 16) + 1


def test_much_text_is_several_records() -> None:
    writer, reader = native.Records(ONE, OTHER), native.Records(OTHER, ONE)
    text = bytes(n * 7 % 251 for n in range((2 << 15) + 5))
    records = list(split(writer.seal(text)))
    assert [len(record) - OVERHEAD for record in records] == [1 << 15, 1 << 15, 5]
    assert b"".join(reader.open(record) or b"" for record in records) == text


def split(stream: bytes) -> Iterator[bytes]:
    """The records in a stream."""
    while stream:
        size = native.Records.text_size(stream) + OVERHEAD
        yield stream[:size]
        stream = stream[size:]


def flipped(record: bytes, at: int, bit: int = 3) -> bytes:
    return record[:at] + bytes([record[at] ^ 1 << bit]) + record[at + 1 :]


@pytest.mark.parametrize("at", [native.RECORD_SIZE_BYTES, 12, -1])
def test_a_flipped_bit_is_found(at: int) -> None:
    writer, reader = native.Records(ONE, OTHER), native.Records(OTHER, ONE)
    record = writer.seal(b"a text of some bytes")
    assert reader.open(flipped(record, at % len(record))) is None


def test_what_comes_in_another_place_or_direction_is_found() -> None:
    records = list(map(native.Records(ONE, OTHER).seal, (b"one", b"two")))
    assert native.Records(OTHER, ONE).open(records[1]) is None  # the first was dropped
    reader = native.Records(OTHER, ONE)
    assert reader.open(records[0]) == b"one"
    assert reader.open(records[0]) is None  # repeated
    assert native.Records(ONE, OTHER).open(records[0]) is None  # sent back


def test_a_cipher_that_an_engine_has_is_of_no_use_elsewhere() -> None:
    engine = native.Engine(0, 2, hosts=["a", "b"], inproc=True)
    (here, spare), (there, other) = connected_sockets(2)
    cipher = native.Records(ONE, OTHER)
    engine.attach_tcp(1, [here], [cipher])
    with pytest.raises(ValueError, match="an engine has taken these records"):
        cipher.seal(b"text")
    with pytest.raises(ValueError, match="1 records given for 2 sockets of rank 1"):
        engine.attach_tcp(1, [spare, other], [native.Records(ONE, OTHER)])
    engine.shutdown()
    socket.socket(fileno=there).close()


def crc32c(text: bytes) -> int:
    """RFC 3720, B.4, bit by bit."""
    rest = 0xFFFFFFFF
    for byte in text:
        rest ^= byte
        for _ in range(8):
            rest = rest >> 1 ^ (0x82F63B78 if rest & 1 else 0)
    return rest ^ 0xFFFFFFFF


def test_the_sum_by_hand_gives_the_answers_of_its_rfc() -> None:
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


def lanes(whole: bytes) -> list[bytes]:
    """The words of 8 bytes that each of the four sums takes."""
    return [b"".join(whole[at : at + 8] for at in range(8 * lane, len(whole), 32)) for lane in range(4)]


def summed_by_hand(number: int, text: bytes) -> bytes:
    """A record as csrc/records.hpp and csrc/checksum.hpp describe it, computed in Python."""
    size = struct.pack("<I", len(text))
    whole = (struct.pack("<Q", number) + size).ljust(32, b"\0") + text.ljust(-(-len(text) // 32) * 32, b"\0")
    return size + text + struct.pack("<4I", *map(crc32c, lanes(whole)))


@pytest.mark.parametrize("by_tables", [False, True])
def test_sums_by_the_processor_and_by_tables(by_tables: bool) -> None:
    for size in (0, 1, 8, 31, 32, 33, 1000):
        text = bytes(n * 7 % 251 for n in range(size))
        whole = text.ljust(-(-size // 32) * 32, b"\0")
        assert native.checksum(text, by_tables=by_tables) == struct.pack("<4I", *map(crc32c, lanes(whole)))


@pytest.mark.parametrize("size", [1, 7, 31, 32, 33, 100, 4096])
def test_sums_are_as_they_are_said_to_be(size: int) -> None:
    writer, reader = native.Records(), native.Records()
    for number in range(2):
        text = bytes((n * 7 + number) % 251 for n in range(size))
        record = writer.seal(text)
        assert record == summed_by_hand(number, text)
        assert reader.open(record) == text


@pytest.mark.parametrize("at", [native.RECORD_SIZE_BYTES, 12, -1])
def test_a_flipped_bit_changes_the_sum(at: int) -> None:
    writer, reader = native.Records(), native.Records()
    record = writer.seal(b"a text of some bytes")
    assert reader.open(flipped(record, at % len(record))) is None


# ---- what ranks compute ----


def programs(rank: Rank) -> list[np.ndarray]:
    """Calls of each kind, with floats whose sums depend on the order."""
    random = np.random.default_rng(rank.rank)
    found = []
    for count in (1, 1000, LARGE):
        for plan in (all_reduce_plan(3, "direct"), all_reduce_plan(3, "ring", 1 << 16), all_reduce_plan(3, "at once")):
            found.append(rank.run(plan, random.standard_normal(count).astype(np.float32)))
        found.append(rank.run(rooted_plan("broadcast", 3, 1, "tree"), random.standard_normal(count)))
        found.append(rank.run(rooted_plan("reduce", 3, 2, "direct"), random.standard_normal(count)))
        found[-1] = found[-1] if rank.rank == 2 else np.zeros(0)
        for collective in ("all_gather", "all_to_all"):
            found.append(rank.run(blocked_plan(collective, 3), random.standard_normal(3 * count)))
    works, inbox = [], []
    for other in {0, 1, 2} - {rank.rank}:
        works.append(rank.send(other, contribution(rank.rank, 70_000 + other), tag=other))
        inbox.append(np.zeros(70_000 + rank.rank, np.float32))
        works.append(rank.recv(other, inbox[-1], tag=rank.rank))
    for work in works:
        work.wait(30)
    return found + inbox


@pytest.mark.parametrize("streams", [1, 3])
def test_all_calls_give_the_same_bits_as_in_clear(streams: int) -> None:
    found = []
    for records in (None, ciphers, checksums):
        with world(3, [0, 1, 2], streams=streams, records=records, socket_threads=1) as ranks:
            found.append(in_threads(ranks, programs))
    for clear, *others in zip(*found, strict=True):
        for other in others:
            assert [each.tobytes() for each in other] == [each.tobytes() for each in clear]


@RECORDS
def test_ranks_of_one_host_and_of_others_in_one_call(records: Callable[[int], BothEnds]) -> None:
    with world(4, [0, 0, 1, 1], records=records) as ranks:
        results = in_threads(ranks, lambda rank: rank.run(two_level_plan(2, 2), contribution(rank.rank, LARGE)))
    for result in results:
        np.testing.assert_array_equal(result, sum(contribution(rank, LARGE) for rank in range(4)))


# ---- who stands in between ----


@contextmanager
def between(
    pass_on: Callable[[int, int, bytes], bytes], records: Callable[[int], BothEnds] = ciphers, *, data: bool
) -> Iterator[list[Rank]]:
    """Two ranks whose data or control connection leads through ``pass_on(sender, number, record)``."""
    engines = [native.Engine(rank, 2, hosts=["h0", "h1"], inproc=True) for rank in range(2)]
    (near, far), passed = zip(*(connected_sockets(1), connected_sockets(1)), strict=True), records(1)
    middle = [socket.socket(fileno=far[0][0]), socket.socket(fileno=far[1][0])]
    outer = near[0][0], near[1][0]
    straight, others = connected_sockets(1), records(1)
    for rank, engine in enumerate(engines):
        through, direct = outer[rank], straight[rank][0]
        engine.attach_tcp(1 - rank, [through if data else direct], passed[rank] if data else others[rank])
        engine.attach_control(1 - rank, direct if data else through, (others if data else passed)[rank][0])
        engine.communicator(0, [0, 1])

    def relay(sender: int) -> None:
        with suppress(OSError), middle[sender].makefile("rb") as reading:
            for number in itertools.count():
                begin = reading.read(native.RECORD_SIZE_BYTES)
                if len(begin) < native.RECORD_SIZE_BYTES:
                    break
                record = begin + reading.read(native.Records.text_size(begin) + native.RECORD_TAG_BYTES)
                middle[1 - sender].sendall(pass_on(sender, number, record))
        with suppress(OSError):
            middle[1 - sender].shutdown(socket.SHUT_WR)

    threads = [threading.Thread(target=relay, args=(sender,)) for sender in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield [Rank(engine, rank) for rank, engine in enumerate(engines)]
    finally:
        close(engines)
        for thread in threads:
            thread.join()
        for end in middle:
            end.close()


def altering(kind: str, at: int) -> Callable[[int, int, bytes], bytes]:
    """Does something to a record of rank 1."""

    def pass_on(sender: int, number: int, record: bytes) -> bytes:
        if sender != 1 or number != at:
            return record
        return {
            "flip": flipped(record, len(record) // 2),
            "shorten": struct.pack("<I", native.Records.text_size(record) - 1) + record[native.RECORD_SIZE_BYTES :],
            "lengthen": struct.pack("<I", native.Records.text_size(record) + 1) + record[native.RECORD_SIZE_BYTES :],
            "drop": b"",
            "repeat": record + record,
            "no record": b"\xff" * len(record),
        }[kind]

    return pass_on


WORDS = (
    r"^the link from rank 1 \(host h1\) to rank 0 \(host h0\) cannot be trusted: record {} of {} is not what was sent; "
    "something on the way has altered, dropped or repeated it"
)


@RECORDS
@pytest.mark.parametrize("kind", ["flip", "shorten", "lengthen", "drop", "repeat", "no record"])
def test_who_alters_data_is_found_and_both_ends_name_the_link(kind: str, records: Callable[[int], BothEnds]) -> None:
    plan = all_reduce_plan(2, "direct")

    def program(rank: Rank) -> None:
        for number in range(20):
            result = rank.run(plan, contribution(rank.rank + number, LARGE))
            np.testing.assert_array_equal(
                result, contribution(number, LARGE) + contribution(number + 1, LARGE), err_msg="used all the same"
            )

    with between(altering(kind, 5), records, data=True) as ranks:
        for error in errors_of(ranks, program):
            assert isinstance(error, PeerLost)
            assert error.rank == 1
            with pytest.raises(PeerLost, match=WORDS.format(6 if kind == "repeat" else 5, "connection 0")):
                raise error


@RECORDS
def test_who_alters_a_control_connection_is_found(records: Callable[[int], BothEnds]) -> None:
    with between(altering("flip", 1), records, data=False) as ranks:
        work = ranks[0].recv(1, np.zeros(4, np.float32))
        other = ranks[1].recv(0, np.zeros(4, np.float32))
        for each in (work, other):  # nobody sends: the beats of rank 1 are what is altered
            with pytest.raises(PeerLost, match=WORDS.format(1, "the control connection")):
                each.wait(30)


def test_who_listens_sees_nothing_that_is_sent() -> None:
    pattern = b"a pattern of the user's"
    message = np.frombuffer(pattern * 10_000, np.uint8).copy()
    heard: list[bytes] = []

    def listen(sender: int, number: int, record: bytes) -> bytes:
        heard.append(record)
        return record

    with between(listen, data=True) as ranks:
        received = np.zeros_like(message)
        works = [ranks[1].send(0, message), ranks[0].recv(1, received)]
        for work in works:
            work.wait(30)
    assert received.tobytes() == message.tobytes()
    stream = b"".join(heard)
    assert len(stream) > message.nbytes
    assert pattern not in stream
    assert pattern[:8] not in stream


# ---- handshakes and channels ----


def handshake(ours: auth.Hello, theirs: auth.Hello, secret: bytes = SECRET) -> list[ProvenChannel | Exception]:
    """Return the channel or the error of a client and of a server; ``secret`` is the client's."""
    ends = socket.socketpair()
    found: list[ProvenChannel | Exception] = [ValueError(), ValueError()]

    def run(end: int, steps: auth.Step) -> None:
        try:
            found[end] = ProvenChannel(ends[end], auth.run(ends[end], steps, 20))
        except (OSError, auth.Refused) as error:
            ends[end].close()
            found[end] = error

    sides = auth.client(secret, ours), auth.server(SECRET, theirs)
    threads = [threading.Thread(target=run, args=each) for each in enumerate(sides)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_both_ends_have_the_same_keys_and_other_connections_have_others() -> None:
    seen = []
    for _ in range(2):
        one, other = handshake(auth.Hello(auth.DATA, 1, encrypted=True), auth.Hello(auth.DATA, 0, encrypted=True))
        assert isinstance(one, ProvenChannel)
        assert isinstance(other, ProvenChannel)
        with one, other:
            sent = bytes(n % 251 for n in range(100_000))
            sender = threading.Thread(target=one.send, args=(sent,))
            sender.start()
            assert other.receive(70_000) + other.receive(30_000) == sent
            sender.join()
            other.send(b"back")
            assert one.receive(4) == b"back"
            seen.append(one.sealed(b"the same text"))
            seen.append(other.sealed(b"the same text"))
    assert len(set(seen)) == 4


@pytest.mark.parametrize("client_encrypts", [True, False])
def test_one_end_that_encrypts_and_one_that_does_not(client_encrypts: bool) -> None:
    hellos = (
        auth.Hello(auth.DATA, 1, encrypted=client_encrypts),
        auth.Hello(auth.DATA, 0, encrypted=not client_encrypts),
    )
    does = int(client_encrypts)
    text = (
        f"rank {does} encrypts (MULTIRING_ENCRYPT=1), and rank {1 - does} does not: set MULTIRING_ENCRYPT=1 for all "
        "ranks and what starts them, or for none"
    )
    unknown = f"{text}; besides, it does not know this job's secret"
    for secret, words in ((SECRET, text), (b"the secret of another job", unknown)):
        for each in handshake(*hellos, secret):
            assert isinstance(each, auth.EncryptionDiffers)
            assert (each.is_proven, str(each)) == (secret == SECRET, words)


def test_in_clear_a_hello_has_the_bytes_that_it_always_had() -> None:
    layout = struct.Struct("!8s HH 32s iiII HHQ 16s 32s")
    told = auth.Hello(auth.CONTROL, 3, 4, 1, 2, 5, 6, 7, "job", version="0.1")
    assert layout.unpack(told.pack(OTHER)) == (
        *(b"multirng", 2, auth.CONTROL, b"0.1".ljust(32, b"\0"), 3, 4, 1, 2, 5, 6, 7),
        *(auth._digest("job"), OTHER),
    )


def test_a_public_key_that_is_none_is_refused() -> None:
    here, there = socket.socketpair()
    with here, there:
        mine = auth.Hello(auth.STORE, encrypted=True)
        steps = auth.server(SECRET, mine)
        next(steps)
        hello = mine.pack(bytes(32))
        answer = steps.send(hello)
        assert isinstance(answer, bytes)
        next(steps)
        steps.send(auth._proof(SECRET, b"client", hello + answer))
        with pytest.raises(auth.Refused, match="its public key is invalid"):
            next(steps)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(SECRET, bind=["127.0.0.1"], encrypt=True)
    yield server
    server.close()


def test_a_store_is_spoken_to_in_secret(server: Server) -> None:
    client = Client([("127.0.0.1", server.port)], SECRET, encrypt=True)
    value = bytes(n % 253 for n in range(200_000))
    client.set("key", value)
    assert client.get("key", 5) == value
    assert client.swap("key", value, b"other") == b"other"
    client.close()


def test_a_store_names_who_does_not_encrypt(server: Server) -> None:
    with pytest.raises(
        RendezvousError,
        match=r"it encrypts \(MULTIRING_ENCRYPT=1\), and rank 3 does not: set MULTIRING_ENCRYPT=1 ",
    ):
        Client([("127.0.0.1", server.port)], SECRET, rank=3)


@pytest.mark.parametrize("encrypts", [0, 1])
def test_a_store_of_rank_0_ends_for_all_when_a_rank_encrypts_otherwise(encrypts: int) -> None:
    """Two ranks wait there, and a stranger that encrypts as that rank does changes nothing."""
    does, does_not = (1, 0) if encrypts else (0, 1)
    words = rf"rank {does} encrypts \(MULTIRING_ENCRYPT=1\), and rank {does_not} does not: set MULTIRING_ENCRYPT=1 "
    with ExitStack() as stack:
        server = stack.enter_context(closing(Server(SECRET, bind=["127.0.0.1"], encrypt=not encrypts, rank=0)))
        address = [("127.0.0.1", server.port)]
        others = [stack.enter_context(closing(Client(address, SECRET, encrypt=not encrypts))) for _ in range(3)]
        threads = stack.enter_context(ThreadPoolExecutor(2))
        waiting = [threads.submit(other.get, "key", 60) for other in others[:2]]
        with pytest.raises(RendezvousError, match=words):
            Client(address, b"the secret of another job", encrypt=bool(encrypts), rank=1)
        others[2].set("other", b"value")
        with pytest.raises(RendezvousError, match=f"^the job's store cannot be used: {words}"):
            Client(address, SECRET, encrypt=bool(encrypts), rank=1, sought=True)
        for each in [*waiting, threads.submit(others[2].get, "other", 60)]:
            with pytest.raises(RendezvousError, match=f"^{words}"):
                each.result(30)


def test_a_reply_of_the_store_that_was_altered_is_found(server: Server) -> None:
    client = Client([("127.0.0.1", server.port)], SECRET, encrypt=True)
    client.set("key", b"value")
    receive = client._channel.sock
    near, far = socket.socketpair()
    client._channel.sock = near
    far.sendall(flipped(record := b"\1\0\0\0" + bytes(17), len(record) - 1))
    with receive, far:
        with pytest.raises(
            RendezvousError, match="the job's store was lost: record 1 is not what was sent: something on"
        ):
            client.get("key", 5)
        client.close()


def test_a_channel_says_which_record_was_altered() -> None:
    one, other = handshake(auth.Hello(auth.DATA, 1, encrypted=True), auth.Hello(auth.DATA, 0, encrypted=True))
    assert isinstance(one, ProvenChannel)
    assert isinstance(other, ProvenChannel)
    with one, other:
        one.send(b"first")
        one.sock.sendall(flipped(one.sealed(b"second"), 9))
        assert other.receive(5) == b"first"
        with pytest.raises(Altered, match=r"^record 1 is not what was sent"):
            other.receive(6)


def test_a_relay_passes_on_both_ways_and_ends_at_what_was_altered(caplog: pytest.LogCaptureFixture) -> None:
    one, other = handshake(auth.Hello(auth.LAUNCH, 1, encrypted=True), auth.Hello(auth.LAUNCH, 0, encrypted=True))
    assert isinstance(one, ProvenChannel)
    assert isinstance(other, ProvenChannel)
    relay = Relay(one, "the agent at b")
    with relay.inner, other:
        relay.inner.settimeout(20)
        text = bytes(n % 251 for n in range(100_000))
        sender = threading.Thread(target=relay.inner.sendall, args=(text,))
        sender.start()
        assert other.receive(len(text)) == text
        sender.join()
        other.send(b"back")
        assert auth.receive(relay.inner, 4) == b"back"
        other.sock.sendall(flipped(other.sealed(b"more"), 5))
        assert relay.inner.recv(100) == b""
    relay.end(20)
    assert [record.getMessage() for record in caplog.records] == [
        "the connection to the agent at b cannot be trusted: record 1 is not what was sent: something on the way has "
        "altered, dropped or repeated it"
    ]


# ---- settings ----


@pytest.mark.parametrize("name", ["encrypt", "checksum"])
def test_mpi_neither_encrypts_nor_sums(name: str) -> None:
    settings = env.Settings(**{name: True}, engine="mpi")  # type: ignore[arg-type]
    words = f"^MULTIRING_{name.upper()}=1 and MULTIRING_ENGINE=mpi do not go together: MPI"
    with pytest.raises(RendezvousError, match=words):
        check_settings(settings)


def test_a_secret_that_others_know_is_refused() -> None:
    with pytest.raises(RendezvousError, match="needs a secret that nobody else knows, and here it follows from"):
        bootstrap.check_secret(env.Settings(encrypt=True), None, "here it follows from the address")
    bootstrap.check_secret(env.Settings(encrypt=True), SECRET, "here it follows from the address")
    bootstrap.check_secret(env.Settings(), None, "here it follows from the address")
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    settings = env.Settings(encrypt=True)
    with (
        pytest.raises(RendezvousError, match="from the job's address, which is no secret: give all ranks the same"),
        bootstrap.rank_identity(environ).meet(settings),
    ):
        pass


@pytest.mark.parametrize("kind", ["missing", "old"])
def test_without_libcrypto_one_line_says_what_to_install(tmp_path: Path, kind: str) -> None:
    names = ("libcrypto.so.3", "libcrypto.so.1.1")
    for name in names:
        (tmp_path / name).touch()  # before one that this machine may have
    if kind == "old":
        subprocess.run(["cc", "-shared", "-x", "c", "/dev/null", "-o", tmp_path / names[0]], check=True, timeout=60)
    program = "from multiring import _native; _native.load_libcrypto()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    (last,) = [line for line in done.stderr.splitlines() if "Error" in line]
    expected = {
        "missing": "MULTIRING_ENCRYPT needs OpenSSL's libcrypto, and it cannot be loaded (",
        "old": "MULTIRING_ENCRYPT needs OpenSSL 1.1.1 or newer, and libcrypto.so.3 of this host has no EVP_CIPHER",
    }
    assert expected[kind] in last
    assert done.returncode == 1
