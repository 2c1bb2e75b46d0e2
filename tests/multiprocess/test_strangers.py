"""Strangers at every port of a running job: none is believed, none holds it up, each address is logged once."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import jobs
import strangers


def listening(ports: range) -> list[int]:
    found = []
    for port in ports:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                found.append(port)
    return found


def free_ports(count: int) -> range:
    while True:
        start = random.randrange(20_000, 30_000)
        if not listening(range(start, start + count)):
            return range(start, start + count)


def test_a_job_goes_on_whatever_strangers_do_at_its_ports(tmp_path: Path) -> None:
    size, ports = 3, free_ports(12)
    environment = {"MULTIRING_PORTS": f"{ports[0]}-{ports[-1]}", "PYTHONWARNINGS": "default"}
    job = jobs.start(strangers.work_on, size, str(tmp_path), hosts="abc", environment=environment)
    for rank in range(size):
        assert job.line(rank) == "ready"
    found = listening(ports)
    assert len(found) == size
    words = [sys.executable, strangers.__file__, jobs.SECRET.decode(), str(job.store_port), *map(str, found)]
    crowd = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert crowd.stdout is not None
        assert crowd.stdout.readline() == "there\n"
        time.sleep(1)  # every port is full by now
        (tmp_path / "go").touch()
        for rank in range(size):
            assert job.line(rank) == "working"
        time.sleep(2)
        (tmp_path / "stop").touch()
        outcomes = job.wait(60)
    finally:
        said, _ = crowd.communicate()
    assert said == "gone\n"
    assert len({outcome.value for outcome in outcomes}) == 1
    assert outcomes[0].value > 1
    for outcome in outcomes:
        assert outcome.code == 0, outcome
        assert outcome.error.count("refused a connection from 127.0.0.1") == 1, outcome.error
