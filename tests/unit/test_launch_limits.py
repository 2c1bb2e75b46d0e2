"""Number of ranks that a host has room for, by the limits of a made-up kernel."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from multiring.errors import ResourceError
from multiring.launch import limits
from multiring.launch.limits import OF_A_RANK, SPARE, check_room_for


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A process with 5 descriptors, whose user has two processes of 3 threads together."""
    for name in ("self/fd/0", "self/fd/1", "self/fd/2", "self/fd/3", "self/fd/4", "sys/kernel"):
        (tmp_path / "proc" / name).mkdir(parents=True)
    for task in ("7/task/7", "7/task/8", "9/task/9"):
        (tmp_path / "proc" / task).mkdir(parents=True)
    wanted = {resource.RLIMIT_NOFILE: 1 << 20, resource.RLIMIT_NPROC: resource.RLIM_INFINITY}
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (wanted[kind], wanted[kind]))
    monkeypatch.setattr(limits.os, "getuid", lambda: tmp_path.stat().st_uid)
    return tmp_path


def limit(monkeypatch: pytest.MonkeyPatch, kind: int, value: int) -> None:
    before = limits.resource.getrlimit
    monkeypatch.setattr(limits.resource, "getrlimit", lambda each: (value, value) if each == kind else before(each))


def room(root: Path, fits: int, words: str) -> None:
    check_room_for(fits, root)
    told = rf"^{fits + 1} ranks are more than the limit of {words}.* leaves room for: start {fits} here at most, or "
    with pytest.raises(ResourceError, match=told):
        check_room_for(fits + 1, root)


def test_descriptors(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, resource.RLIMIT_NOFILE, 5 + SPARE + 40 * OF_A_RANK + 2)
    room(root, 40, rf"{5 + SPARE + 122} descriptors \(ulimit -n\), of which a rank takes 3,")


def test_a_standby_takes_as_much_as_a_rank(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, resource.RLIMIT_NOFILE, 5 + SPARE + 40 * OF_A_RANK)
    check_room_for(38, root, standbys=2)
    told = r"^38 ranks and 3 standbys are more than .* leaves room for: start 40 of both here at most, or raise it$"
    with pytest.raises(ResourceError, match=told):
        check_room_for(38, root, standbys=3)


def test_no_room_at_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, resource.RLIMIT_NOFILE, 6)
    with pytest.raises(ResourceError, match=r"^1 ranks are more than .* leaves room for: raise it$"):
        check_room_for(1, root)


def test_processes_of_a_user(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, resource.RLIMIT_NPROC, 3 + SPARE + 50)
    assert limits._tasks_of_user(root) == 3
    monkeypatch.setattr(limits.os, "getuid", lambda: 1000)
    monkeypatch.setattr(limits, "_tasks_of_user", lambda root: 3)
    room(root, 50, rf"{SPARE + 53} processes of this user \(ulimit -u\)")
    monkeypatch.setattr(limits.os, "getuid", lambda: 0)
    check_room_for(1000, root)


@pytest.mark.parametrize("name", ["pid_max", "threads-max"])
def test_processes_of_a_kernel(root: Path, name: str) -> None:
    (root / "proc/sys/kernel" / name).write_text(f"{SPARE + 60}\n")
    room(root, 60, rf"{SPARE + 60} processes \(kernel.{name}\)")


@pytest.mark.parametrize(
    ("line", "group"),
    [("0::/a/b", "sys/fs/cgroup/a"), ("0::/", "sys/fs/cgroup"), ("7:cpu,pids:/a", "sys/fs/cgroup/pids")],
)
def test_processes_of_a_control_group(root: Path, line: str, group: str) -> None:
    (root / "proc/self/cgroup").write_text(f"3:memory:/elsewhere\n{line}\n")
    (root / group).mkdir(parents=True)
    (root / group / "pids.max").write_text(f"{SPARE + 80}\n")
    (root / group / "pids.current").write_text("10\n")
    room(root, 70, rf"{SPARE + 80} processes of this container or control group \({root / group}/pids.max\)")
    (root / group / "pids.max").write_text("max\n")
    check_room_for(1000, root)
