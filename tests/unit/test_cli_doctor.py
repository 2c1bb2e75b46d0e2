"""Each thing that stops a job is found, with the value that is wrong."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from multiring.cli import findings
from multiring.cli.findings import Finding, State
from multiring.net import interfaces


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MULTIRING_")]:
        monkeypatch.delenv(name)


def about(subject: str) -> Finding:
    (found,) = [finding for finding in findings.all_findings() if finding.about == subject]
    return found


def doctor(**variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "multiring", "doctor", "--json"]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)


def test_nothing_stops_a_job_here() -> None:
    job = doctor()
    assert job.returncode == 0, job.stdout
    subjects = [finding["about"] for finding in json.loads(job.stdout)]
    assert set(subjects) >= {"version", "engine", "cores", "shared memory", "addresses", "ports", "secret", "framework"}


@pytest.mark.parametrize(
    ("name", "value", "subject"),
    [
        ("MULTIRING_PORTS", "7x", "settings"),
        ("MULTIRING_TOPOLOGY", "/nowhere/topology.toml", "settings"),
        ("MULTIRING_PLAN", "groups", "settings"),
        ("MULTIRING_ARENA_BYTES", "90000G", "shared memory"),
        ("MULTIRING_INTERFACE", "eth99", "addresses"),
        ("MULTIRING_SECRET_FILE", "/nowhere/secret", "secret"),
    ],
)
def test_what_stops_a_job_is_named_and_ends_with_one(name: str, value: str, subject: str) -> None:
    job = doctor(**{name: value})
    assert job.returncode == 1
    stops = [finding for finding in json.loads(job.stdout) if finding["state"] == "stop"]
    assert [finding["about"] for finding in stops] == [subject]
    assert stops[0]["remedy"]


def test_bad_value_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRING_PORTS", "7x")
    assert "7x" in about("settings").found


def test_settings_that_contradict_one_another_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRING_WIRE", "rack=bfloat16")
    monkeypatch.setenv("MULTIRING_REPRODUCIBLE", "1")
    found = about("settings")
    assert found.state is State.stop
    assert found.found.startswith("MULTIRING_WIRE=rack=bfloat16 and MULTIRING_REPRODUCIBLE do not go together")


def test_unknown_variable_is_noted_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRING_PROTS", "3")
    note = about("settings")
    assert note.state is State.note
    assert "MULTIRING_PORTS" in note.remedy


def test_occupied_port_range_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MULTIRING_PORTS", str(port))
        found = about("ports")
    assert found.state is State.stop
    assert str(port) in found.found


def test_host_with_loopback_alone_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "named_addresses", lambda: [("lo", ipaddress.ip_address("127.0.0.1"))])
    found = about("addresses")
    assert found.state is State.note
    assert "loopback" in found.found


def test_a_limit_of_file_sizes_below_the_arena_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings.resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    found = about("shared memory")
    assert found.state is State.note
    assert "leaves a rank 1024 KB of the 256 MB" in found.found
    assert found.remedy == "raise ulimit -f"


def test_quota_below_the_cores_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "cgroup_quota", lambda: 0.5)
    found = about("cores")
    assert found.state is State.note
    assert "0.5" in found.found


def test_given_secret_is_told_from_one_that_the_store_hands_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert about("secret").state is State.note
    file = tmp_path / "secret"
    file.write_bytes(bytes(range(65, 97)))
    monkeypatch.setenv("MULTIRING_SECRET_FILE", str(file))
    assert about("secret").state is State.ok
