"""Strangers at the ports of a job, all at once and over and over, and ranks that work on meanwhile.

    python strangers.py SECRET STORE_PORT RANK_PORT...

goes on until its standard input ends, and prints a line for every stranger that was believed.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import multiring as mr
from multiring.net import auth

HALF_OPEN = 300
"""On each port: more than a listener has in their handshake at once."""

PROOF = bytes(32)
"""No server gives this one but to those who have not proved themselves."""


class Strangers:
    """Strangers at one port. ``hello`` opens the first of a rank's two streams there: never a whole link."""

    def __init__(self, port: int, role: int, secret: bytes, over: threading.Event) -> None:
        self.port = port
        self.over = over
        self.hello = auth.Hello(role, rank=1, streams=2, session=1, job="test")
        self.size = len(self.hello.pack(PROOF))
        self.overheard = self.overhear(secret)

    def connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def overhear(self, secret: bytes) -> bytes:
        """All that one who knows the secret says."""
        said = b""
        with self.connected() as sock:
            steps = auth.client(secret, self.hello)
            want: bytes | int = next(steps)
            with contextlib.suppress(StopIteration):
                while True:
                    if isinstance(want, bytes):
                        said += want
                        sock.sendall(want)
                        want = steps.send(b"")
                    else:
                        want = steps.send(auth.receive(sock, want))
        return said

    def expect_refusal(self, sock: socket.socket) -> None:
        heard = b""
        with contextlib.suppress(ConnectionError):
            while part := sock.recv(1000):
                heard += part
        if heard[self.size :] not in (b"", PROOF):
            print(f"port {self.port}: {sys._getframe(1).f_code.co_name} was believed", flush=True)

    def scan(self) -> None:
        self.connected().close()
        with self.connected() as sock:  # ends with a reset
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def talk_nonsense(self) -> None:
        for noise in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 300_000, bytes(500)):
            with self.connected() as sock:
                sock.sendall(noise)
                sock.shutdown(socket.SHUT_WR)
                self.expect_refusal(sock)

    def write_slowly(self) -> None:
        with self.connected() as sock:
            for byte in self.hello.pack(os.urandom(32)):
                sock.sendall(bytes([byte]))
                time.sleep(0.1)

    def send_too_much(self) -> None:
        """A right Hello, no proof, and a frame of gigabytes."""
        with self.connected() as sock:
            sock.sendall(self.hello.pack(os.urandom(32)) + os.urandom(32) + b"\xff" * 64 + b"x" * 100_000)
            self.expect_refusal(sock)

    def know_another_secret(self) -> None:
        with self.connected() as sock, contextlib.suppress(auth.Refused):
            auth.run(sock, auth.client(b"another secret..", self.hello))
            print(f"port {self.port}: another secret was believed", flush=True)

    def replay(self) -> None:
        with self.connected() as sock:
            sock.sendall(self.overheard)
            self.expect_refusal(sock)

    def reflect(self) -> None:
        """Give the server its own words back, as Hello and as proof."""
        with self.connected() as first, self.connected() as second:
            first.sendall(self.hello.pack(os.urandom(32)))
            answer = auth.receive(first, self.size)
            second.sendall(answer + answer[-32:])
            self.expect_refusal(second)

    def keep_silent(self) -> None:
        """Fill the room for handshakes until thrown out."""
        with contextlib.ExitStack() as held:
            for _ in range(HALF_OPEN):
                held.enter_context(self.connected())
            self.over.wait(30)

    @property
    def ways(self) -> list[Callable[[], None]]:
        return [
            self.scan,
            self.talk_nonsense,
            self.write_slowly,
            self.send_too_much,
            self.know_another_secret,
            self.replay,
            self.reflect,
            self.keep_silent,
        ]

    def repeat(self, way: Callable[[], None]) -> None:
        while not self.over.is_set():
            with contextlib.suppress(OSError):  # closed by who has had enough
                way()
            self.over.wait(0.1)


def work_on(folder: str) -> int:
    """The number of right sums; the links are made when strangers are at the ports."""
    mr.init()
    print("ready", flush=True)
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    rank, size, steps, stop = mr.rank(), mr.world_size(), 0, np.zeros(1)
    while not stop[0]:
        x = np.arange(20_000) % 1021 * (rank + 1.0) + steps
        mr.all_reduce(x)
        assert (x == np.arange(20_000) % 1021 * (size * (size + 1) / 2) + size * steps).all()
        stop[0] = Path(folder, "stop").exists()
        mr.all_reduce(stop, "max")
        steps += 1
        if steps == 1:
            print("working", flush=True)
    mr.shutdown()
    return steps


def meet_late(folder: str) -> list[float]:
    """A sum after all have met; the last rank comes when it is told to."""
    if int(os.environ["MULTIRING_RANK"]) == int(os.environ["MULTIRING_WORLD_SIZE"]) - 1:
        while not Path(folder, "go").exists():
            time.sleep(0.02)
    print("coming", flush=True)
    mr.init()
    x = np.full(3, mr.rank() + 1.0)
    mr.all_reduce(x)
    mr.shutdown()
    return x.tolist()  # type: ignore[no-any-return]


def main() -> None:
    secret, store, *ranks = sys.argv[1:]
    roles = [(int(store), auth.STORE), *((int(port), auth.DATA) for port in ranks)]
    over = threading.Event()
    everywhere = [Strangers(port, role, secret.encode(), over) for port, role in roles]
    threads = [threading.Thread(target=at.repeat, args=(way,)) for at in everywhere for way in at.ways]
    for thread in threads:
        thread.start()
    print("there", flush=True)
    select.select([sys.stdin], [], [])
    over.set()
    for thread in threads:
        thread.join()
    print("gone", flush=True)


if __name__ == "__main__":
    main()
