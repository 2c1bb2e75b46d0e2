"""Strangers at every port of a running job: none is believed, none holds it up, each address is logged once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jobs
import other_user
import pytest
import strangers
from free_ports import free_ports


def listening(ports: range) -> list[int]:
    found = []
    for port in ports:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                found.append(port)
    return found


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_cannot_hold_up_those_who_meet(tmp_path: Path) -> None:
    """The backlog of each rank is full, and stays so, before the last rank of the job comes."""
    size, nobody = 4, other_user.NOBODY
    before = set(other_user.sockets())
    job = jobs.start(strangers.meet_late, size, str(tmp_path))
    words = [sys.executable, other_user.__file__, "4200"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as crowd:
        try:
            assert crowd.stdin is not None
            assert crowd.stdout is not None
            for rank in range(size - 1):
                assert job.line(rank) == "coming"
            names = set[str]()
            until = time.monotonic() + 60
            while len(names) < size - 1 and time.monotonic() < until:
                time.sleep(0.1)
                names = set(other_user.sockets()) - before
            time.sleep(1.5)  # they have published their sockets, and wait for the last one
            crowd.stdin.write(" ".join(names) + "\n")
            crowd.stdin.flush()
            said = crowd.stdout.readline().split()
            assert said[0] == "full", said
            assert int(said[1]) >= size - 1, said
            assert int(said[2]) > 4096 * (size - 1), said
            (tmp_path / "go").touch()
            outcomes = job.wait(60)
        finally:
            crowd.kill()
    assert [outcome.code for outcome in outcomes] == [0] * size, outcomes
    assert [outcome.value for outcome in outcomes] == [[sum(range(1, size + 1))] * 3] * size
    refused = [outcome.error.count(f"it runs as user {nobody}, this process as user 0") for outcome in outcomes]
    assert max(refused) <= 2, outcomes  # once while they attach, once at the acceptor
