"""Discovery of jobs to watch, and answers of their launchers; the sockets of other tests are left out."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from multiring.launch import LaunchError, watch
from multiring.launch.watch import JobView, WatchSocket
from multiring.net import unix
from multiring.net.loop import LoopThread


class Launchers:
    """Sockets as launchers have them, which answer by what they are told here."""

    def __init__(self) -> None:
        self.loop = LoopThread("launchers")
        self.sockets: list[WatchSocket] = []
        self.noted: list[str] = []

    def start(self, program: tuple[str, ...], ranks: int, process: int) -> str:
        """The name of the socket of another one."""

        async def who() -> dict[str, Any]:
            return {"kind": "who", "process": process, "job": f"job{ranks}", "program": program, "ranks": ranks}

        async def look() -> dict[str, Any]:
            return {"kind": "look", "ranks": [10 * rank for rank in range(ranks)]}

        async def make() -> WatchSocket:
            return WatchSocket({"who": who, "look": look}, self.noted.append)

        self.sockets.append(self.loop.run(make()))
        return self.sockets[-1].name

    def end(self, index: int, code: int, reason: str) -> None:
        self.loop.run(self.sockets.pop(index).close(code, reason))


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launchers]:
    """Launchers that are found instead of those of the machine."""
    made = Launchers()
    monkeypatch.setattr(unix, "names", lambda kind: [each.name for each in made.sockets])
    yield made
    for _ in list(made.sockets):
        made.end(0, 0, "")
    made.loop.close()


def refused(wanted: str | None) -> str:
    with pytest.raises(LaunchError) as error:
        watch.find(wanted)
    return str(error.value)


def test_the_only_job_is_found_without_a_name(launchers: Launchers) -> None:
    name = launchers.start(("/home/ada/train.py", "--lr=3"), 3, 77)
    found = watch.find(None)
    assert (found.socket, found.process, found.ranks, str(found)) == (name, 77, 3, "77 (train.py, 3 ranks)")
    assert watch.find("train.py") == watch.find("77") == watch.find("job3") == found


def test_one_of_several_jobs_is_to_be_named(launchers: Launchers) -> None:
    for ranks, program, process in ((1, ("-m", "eval.it", "x"), 90), (4, ("train.py",), 81), (2, ("train.py",), 85)):
        launchers.start(program, ranks, process)
    listed = "81 (train.py, 4 ranks), 85 (train.py, 2 ranks)"
    assert refused(None) == f"3 jobs run here: {listed}, 90 (eval.it, 1 rank); name one: multiring top 81"
    assert refused("train.py") == f"2 jobs named train.py run here: {listed}; name one: multiring top 81"
    assert watch.find("eval.it").process == 90
    assert watch.find("job2").process == 85
    told = f"no job named other.py of this user ({os.getuid()}) runs on this host, where {listed}, 90 (eval.it, 1 rank)"
    assert refused("other.py").startswith(f"{told} do;")


def test_no_job(launchers: Launchers) -> None:
    assert refused(None) == (
        f"no job of this user ({os.getuid()}) runs on this host; a job that `multiring run` started is watched on the "
        "host where that was typed"
    )


def test_a_launcher_that_is_stopped_is_named(launchers: Launchers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ANSWER_SECONDS", 0.3)
    listening, name = unix.listen(watch.KIND)
    monkeypatch.setattr(unix, "names", lambda kind: [name])
    with listening:
        assert f"; launcher {os.getpid()} does not answer within 0.3 s: if it is stopped, let it go on" in refused(None)


def test_a_socket_that_has_gone_is_no_job(launchers: Launchers, monkeypatch: pytest.MonkeyPatch) -> None:
    listening, name = unix.listen(watch.KIND)
    listening.close()
    monkeypatch.setattr(unix, "names", lambda kind: [name])
    assert refused(None).startswith("no job of this user")


def test_another_user_is_turned_away_at_both_ends(launchers: Launchers, monkeypatch: pytest.MonkeyPatch) -> None:
    name = launchers.start(("train.py",), 2, 77)
    user = os.getuid()
    monkeypatch.setattr("multiring.net.unix.os.getuid", lambda: user + 1)
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(10)
            stranger.connect("\0" + name)
            assert stranger.recv(1) == b""
    assert f"; there are jobs of other users ({user}), who alone may watch them;" in refused(None)
    users = f"it runs as user {user}, this process as user {user + 1}"
    assert launchers.noted == [f"somebody wanted to watch this job and was turned away: {users}"]


def test_what_is_asked_and_how_it_ends(launchers: Launchers) -> None:
    name = launchers.start(("train.py",), 3, 77)
    with JobView(name) as one, JobView(name) as two:
        for view in (one, two, one):
            assert view.ask("look")["ranks"] == [0, 10, 20]
        launchers.end(0, 3, "rank 2 failed")
        for view in (one, two):
            assert view.ask("look") == {"kind": "ended", "code": 3, "reason": "rank 2 failed"}
            assert view.ask("look") == {"kind": "ended", "code": None, "reason": "its launcher has gone"}
    with pytest.raises(ConnectionRefusedError):
        JobView(name)


@pytest.mark.parametrize(
    "said", [b"\0\0\0\4kill", b"\0\0\0\2[]", b'\0\0\0\x0f{"kind":"kill"}', b"\xff\xff\xff\xff", b"GET /"]
)
def test_who_asks_anything_else_is_left(launchers: Launchers, said: bytes) -> None:
    name = launchers.start(("train.py",), 2, 77)
    with unix.connect(name, 10) as sock:
        sock.settimeout(10)
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    with JobView(name) as view:
        assert view.ask("who")["process"] == 77


def test_nobody_is_let_in_for_a_while_without_descriptors(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "REST_SECONDS", 0.3)
    name = launchers.start(("train.py",), 2, 77)
    accept: Callable[[socket.socket], socket.socket] = unix.accept
    tries: list[int] = []

    def short_of_descriptors(listening: socket.socket) -> socket.socket:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(24, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(unix, "accept", short_of_descriptors)
    with JobView(name) as view:
        assert view.ask("who")["ranks"] == 2
    assert len(tries) == 3
    (noted,) = launchers.noted
    assert noted.startswith("those who want to watch this job cannot be let in: ")


def test_sockets_are_found_by_their_kind() -> None:
    listening, name = unix.listen(watch.KIND)
    other, plain = unix.listen()
    with listening, other:
        assert name in unix.names(watch.KIND)
        assert plain not in unix.names(watch.KIND)
    assert name not in unix.names(watch.KIND)


def test_the_loop_of_the_launcher_is_not_held_up_by_one_who_does_not_read(launchers: Launchers) -> None:
    name = launchers.start(("train.py",), 2, 77)
    with JobView(name) as silent, JobView(name) as view:
        for _ in range(20_000):
            try:
                silent._sock.settimeout(0.05)
                silent._sock.sendall(b'\0\0\0\x0f{"kind":"look"}')
            except TimeoutError:
                break
        assert view.ask("look")["ranks"] == [0, 10]


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (["examples/digits.py", "--steps", "3"], "digits.py"),
        (["-m", "my.package", "x"], "my.package"),
        (["/usr/bin/python3", "-u", "work/train.py", "--lr", "1"], "train.py"),
        (["python", "-m", "pytest", "x"], "pytest"),
        (["python", "-W", "ignore", "-Xdev", "-X", "utf8", "work/train.py", "-W"], "train.py"),
        (["python3.11"], "python3.11"),
        (["python", "-c", "print(1)", "x"], "python"),
        (["./a.out", "-x", "y"], "a.out"),
    ],
)
def test_a_job_has_the_name_of_its_program(program, name):
    assert watch.program_name(program) == name
