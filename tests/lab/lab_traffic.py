"""Measures the links of a lab: ``python lab_traffic.py receive|send|echo|ping``, results on standard output."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

from multiring.lab import Cluster

PORT = 5201
CHUNK = bytes(1 << 16)


def _listen() -> socket.socket:
    server = socket.create_server(("", PORT))
    print("listening", flush=True)
    connection, _ = server.accept()
    return connection


def receive() -> None:
    """Print when the first and the last byte of a connection came, and how many came after the first few."""
    connection = _listen()
    connection.recv(len(CHUNK))
    start, received = time.monotonic(), 0
    while data := connection.recv(len(CHUNK)):
        received += len(data)
    print(start, time.monotonic(), received)


def send(address: str, nbytes: int) -> None:
    with socket.create_connection((address, PORT)) as connection:
        for _ in range(nbytes // len(CHUNK)):
            connection.sendall(CHUNK)


def echo() -> None:
    connection = _listen()
    while data := connection.recv(1):
        connection.sendall(data)


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
    return subprocess.Popen(cluster.command(host, sys.executable, script, *words), stdout=subprocess.PIPE, text=True)


def _start_listening(cluster: Cluster, host: str, what: str) -> subprocess.Popen[str]:
    process = _start(cluster, host, what)
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    return process


def measure_rate(cluster: Cluster, pairs: list[tuple[str, str]], nbytes: int) -> float:
    """Bytes a second of streams from the first to the second host of each pair, all at the same time, together."""
    receivers = [_start_listening(cluster, sink, "receive") for _, sink in pairs]
    addresses = [cluster.host(sink).addresses[0] for _, sink in pairs]
    senders = [
        _start(cluster, source, "send", address, str(nbytes))
        for (source, _), address in zip(pairs, addresses, strict=True)
    ]
    seen = [receiver.communicate(timeout=60)[0].split() for receiver in receivers]
    for sender in senders:
        sender.communicate(timeout=60)
        assert sender.returncode == 0
    starts, ends, counts = ([float(column) for column in columns] for columns in zip(*seen, strict=True))
    return sum(counts) / (max(ends) - min(starts))


def measure_round_trip(cluster: Cluster, source: str, sink: str) -> float:
    """Seconds from ``source`` to ``sink`` and back."""
    with (
        _start_listening(cluster, sink, "echo"),
        _start(cluster, source, "ping", cluster.host(sink).addresses[0]) as pinger,
    ):
        return float(pinger.communicate(timeout=60)[0])


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "send":
        send(words[0], int(words[1]))
    elif what == "ping":
        ping(words[0])
    else:
        {"receive": receive, "echo": echo}[what]()
