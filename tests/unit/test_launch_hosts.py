"""The hosts of a job, and the number of ranks on each."""

from __future__ import annotations

import os
import pwd
import socket
from pathlib import Path

import pytest

from multiring.launch import LaunchError
from multiring.launch.hosts import Assignment, HostEntry, is_here, parse_hosts, place, read_hostfile, spread, together


def test_hosts_of_the_command_line() -> None:
    assert parse_hosts("a:2, user@b.example:3,c,[fe80::1%eth0]:4,[::2]") == [
        HostEntry("a", 2),
        HostEntry("user@b.example", 3),
        HostEntry("c", 1),
        HostEntry("fe80::1%eth0", 4),
        HostEntry("::2", 1),
    ]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2,b:2,", "a a b b"),
        ("a:2 b", "a a b"),  # as `scontrol show hostnames` lists them
        ("a\nb:2\n", "a b b"),
        ("a slots=2, b slots = 1 max_slots=4,c", "a a b c"),
        ("a slots=2 b", "a a b"),
        ("n[01-03]:2", "n01 n01 n02 n02 n03 n03"),
        ("n[1,3-4],m[7],x:2", "n1 n3 n4 m7 x x"),
        ("r[0-1]n[1,2]-ib:1", "r0n1-ib r0n2-ib r1n1-ib r1n2-ib"),
        ("fd00::a", "fd00::a"),
        ("fd00::10,::1", "fd00::10 ::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("1:2:3:4:5:6:7:8,b", "1:2:3:4:5:6:7:8 b"),
        ("[fd00::1]:2", "fd00::1 fd00::1"),
        ("10.0.0.1:2", "10.0.0.1 10.0.0.1"),
    ],
)
def test_hosts_as_people_list_them(text: str, hosts: str) -> None:
    assert [host.name for host in parse_hosts(text) for _ in range(host.slots)] == hosts.split()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fd00::1:4", r"'fd00::1:4' may be \[fd00::1:4\] or \[fd00::1\]:4: put the address in brackets"),
        ("n[3-1]", r"'n\[3-1\]': the range 3-1 is empty"),
        ("n[1-9999999999]:2", r"'n\[1-9999999999\]': more than 65536 hosts"),
        ("n[1-999][1-999]", "more than 65536 hosts"),
        ("n[1-3,5:2", r"-H n\[1-3,5:2: a bracket has no other half: write ranges as in n\[01-04,7\]:2"),
        ("n1-3]", "a bracket has no other half"),
        (",", "-H ,: a comma has no host beside it: expected host:ranks,host:ranks"),
        ("a:2,,b:2", "-H a:2,,b:2: a comma has no host beside it"),
        (",a", "-H ,a: a comma has no host beside it"),
        (",,localhost:2,,", "-H ,,localhost:2,,: a comma has no host beside it"),
        ("localhost 2", "-H localhost 2: '2' is not host:ranks,host:ranks"),
        ("./hosts.txt", "the name of a host has no '/': --hostfile reads a file of hosts"),
        (f"a:{10**30}", f"the number of slots in 'a:{10**30}' is not a whole number from 0 to 524288"),
    ],
)
def test_what_is_no_list_of_hosts_is_told_why(text: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        parse_hosts(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a:",
        "a:b",
        "host::2",
        "localhost 2",
        "2",
        "7:2",
        "-a:2",
        "a:-1",
        "slots=2",
        "a:2 slots=2",
        "[x]:2",
        "n[]",
        "a:\u0663",
        "n[\u0663]",
    ],
)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=r"is not host:ranks,host:ranks"):
        parse_hosts(text)


def test_hosts_of_a_file(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# a comment\na slots=2\n\n  b:3  # another\nc\na\nd slots = 4\n")
    assert read_hostfile(hostfile) == [HostEntry("a", 3), HostEntry("b", 3), HostEntry("c", 1), HostEntry("d", 4)]


def test_a_file_of_open_mpi_from_another_system(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_bytes(
        "\ufeffa slots=2 max_slots=4\r\nb max-slots = 3 slots = 3,\r\nn[08-10] slots=1\r\nfd00::a\tslots=2\r\n".encode()
    )
    assert read_hostfile(hostfile) == [
        HostEntry("a", 2),
        HostEntry("b", 3),
        *(HostEntry(f"n{number}", 1) for number in ("08", "09", "10")),
        HostEntry("fd00::a", 2),
    ]
    hostfile.write_text("a slots=3 max_slots=2")
    with pytest.raises(LaunchError, match=r"'a slots=3 max_slots=2' gives the host more slots than it may have"):
        read_hostfile(hostfile)


@pytest.mark.parametrize(
    "line",
    ["a slots=", "a slots=x", "a b", "a max_slots=3", "a slots=2 cores=4", "a slots=2 slots=3", "a:2 slots=2", "a=2"],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"first\n{line}\n")
    with pytest.raises(LaunchError) as error:
        read_hostfile(hostfile)
    assert str(error.value) == f"{hostfile}, line 2: {line!r} is not 'host slots=2', 'host:2' or 'host'"


def test_a_file_without_hosts_is_refused(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# nothing\n")
    with pytest.raises(LaunchError, match=f"the hostfile {hostfile} names no host"):
        read_hostfile(hostfile)


def test_ranks_fill_the_hosts() -> None:
    hosts = [HostEntry("a", 3), HostEntry("b", 1), HostEntry("c", 2)]
    assert place(hosts, None) == [Assignment("a", 0, 3), Assignment("b", 3, 1), Assignment("c", 4, 2)]
    assert place(hosts, 4) == [Assignment("a", 0, 3), Assignment("b", 3, 1)]
    with pytest.raises(LaunchError, match=r"-n 7 is more than the 6 slots of the hosts \(a 3, b 1, c 2\)"):
        place(hosts, 7)
    with pytest.raises(LaunchError, match="the hosts have 600000 slots, and a job has 524288 ranks at most: give -n"):
        place([HostEntry(f"n{number}", 100_000) for number in range(6)], None)


def test_ranks_are_spread_over_hosts_that_may_share_a_name() -> None:
    assert spread(["a", "b", "a"], 7) == [Assignment("a", 0, 3), Assignment("b", 3, 2), Assignment("a", 5, 2)]


def test_names_of_one_machine_are_one_host() -> None:
    assignments = [Assignment("a", 0, 2), Assignment("b", 2, 1), Assignment("a.example", 3, 3)]
    assert together(assignments, ["m", "n", "m"]) == [Assignment("a", 0, 5), Assignment("b", 5, 1)]
    assert together(assignments, ["m", "n", "o"]) == assignments


def test_this_host_is_known_by_name_and_address() -> None:
    assert is_here("localhost")
    assert is_here(socket.gethostname())
    assert is_here("127.0.0.1")
    assert is_here("localhost.")
    assert is_here(f"{socket.gethostname()}.")
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert is_here(f"{user}@localhost")
    assert is_here(f"{user}@127.0.0.1")
    assert not is_here(f"no-{user}@localhost")
    assert not is_here(f"{user}@192.0.2.1")
    assert not is_here("192.0.2.1")  # reserved for documentation
    assert not is_here("no-such-host.invalid")


@pytest.mark.timeout(60)
def test_a_hostfile_is_a_regular_file_in_utf_8(tmp_path: Path) -> None:
    pipe, latin = tmp_path / "pipe", tmp_path / "latin"
    os.mkfifo(pipe)
    latin.write_bytes(b"a:2\nb\xe4r:2\n")
    with pytest.raises(LaunchError, match=f"cannot read the hostfile {pipe}: it is a pipe, and a regular"):
        read_hostfile(pipe)
    with pytest.raises(LaunchError, match=f"cannot read the hostfile {latin}: its byte 5 is no UTF-8: save the file"):
        read_hostfile(latin)
