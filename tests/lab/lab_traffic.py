"""Measures the links of a lab, by running itself on the hosts: ``python lab_traffic.py WHAT ADDRESS``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from workers import named, worker

from multiring.lab import Cluster

PORT = 5201
CHUNK = bytes(1 << 16)


class Stream(NamedTuple):
    """A TCP stream between two hosts, to an address of the second."""

    source: str
    sink: str
    card: int = 0


def _listen(address: str) -> socket.socket:
    server = socket.create_server((address, PORT))
    print("listening", flush=True)
    connection, _ = server.accept()
    return connection


@worker
def receive(address: str) -> None:
    """Print when the first and the last byte of a connection came, and how many came in between."""
    connection = _listen(address)
    connection.recv(len(CHUNK))
    start, received = time.monotonic(), 0
    while data := connection.recv(len(CHUNK)):
        received += len(data)
    print(start, time.monotonic(), received)


@worker
def send(address: str, nbytes: str) -> None:
    with socket.create_connection((address, PORT)) as connection:
        for _ in range(int(nbytes) // len(CHUNK)):
            connection.sendall(CHUNK)


@worker
def echo(address: str) -> None:
    connection = _listen(address)
    while data := connection.recv(1):
        connection.sendall(data)


@worker
def ping(address: str) -> None:
    """Print the seconds of the fastest of ten round trips."""
    with socket.create_connection((address, PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(10):
            start = time.monotonic()
            connection.sendall(b".")
            connection.recv(1)
            times.append(time.monotonic() - start)
    print(min(times))


def _start(cluster: Cluster, host: str, *words: str) -> subprocess.Popen[str]:
    script = str(Path(__file__).resolve())
    return subprocess.Popen(
        cluster.command(host, sys.executable, script, *words),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )


def _start_listening(cluster: Cluster, what: str, stream: Stream) -> subprocess.Popen[str]:
    process = _start(cluster, stream.sink, what, _address(cluster, stream))
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    return process


def _address(cluster: Cluster, stream: Stream) -> str:
    return cluster.host(stream.sink).addresses[stream.card]


def measure_rate(cluster: Cluster, streams: list[Stream], nbytes: int) -> float:
    """Bytes a second of some streams at the same time, together."""
    receivers = [_start_listening(cluster, "receive", stream) for stream in streams]
    senders = [_start(cluster, stream.source, "send", _address(cluster, stream), str(nbytes)) for stream in streams]
    seen = [receiver.communicate(timeout=60)[0].split() for receiver in receivers]
    for sender in senders:
        sender.communicate(timeout=60)
        assert sender.returncode == 0
    starts, ends, counts = ([float(column) for column in columns] for columns in zip(*seen, strict=True))
    return sum(counts) / (max(ends) - min(starts))


def rate_is(cluster: Cluster, streams: list[Stream], nbytes: int, expected: float) -> bool:
    """True if the streams' rate is within a quarter of ``expected`` in one of 8 tries; AssertionError if it is higher.

    A busy machine may hold up a stream, but nothing may pass a link faster than its rate.
    """
    for _ in range(8):
        rate = measure_rate(cluster, streams, nbytes)
        assert rate < 1.25 * expected
        if rate > 0.75 * expected:
            return True
    return False


def measure_round_trip(cluster: Cluster, source: str, sink: str) -> float:
    """Seconds from ``source`` to ``sink`` and back."""
    stream = Stream(source, sink)
    with (
        _start_listening(cluster, "echo", stream),
        _start(cluster, source, "ping", _address(cluster, stream)) as pinger,
    ):
        return float(pinger.communicate(timeout=60)[0])


if __name__ == "__main__":
    named(sys.argv[1])(*sys.argv[2:])
