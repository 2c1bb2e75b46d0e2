"""``multiring run`` on several hosts, with a stand-in for ssh that executes its command here."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import COMMAND, REGROW, SSH, Launch, wait_until
from terminals import at_terminal, exit_code

from multiring.launch import LaunchError
from multiring.launch.processes import descendants
from multiring.launch.ssh import SshAgent, SshTarget

REPORT = """
    import json, os, sys
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "FAKE_HOST", "CARRIED", "MASTER_ADDR")
    names += ("MULTIRING_STORE",)
    found = {name: os.environ.get(name) for name in names}
    with open(f"report-{os.environ['RANK']}", "w") as file:
        json.dump(found, file)
"""


def reports(directory: Path, count: int) -> list[dict[str, str]]:
    return [json.loads((directory / f"report-{rank}").read_text()) for rank in range(count)]


def test_ranks_fill_the_hosts_in_their_order(hosts: Launch) -> None:
    hosts.environment["CARRIED"] = "a 'b'\n\"c\""
    result = hosts.run("-n", "4", "-H", "a:1,b:2,c:3", "-v", hosts.script(REPORT))
    assert result.returncode == 0
    found = reports(hosts.directory, 4)
    assert [report["FAKE_HOST"] for report in found] == ["a", "b", "b", "c"]
    assert [report["LOCAL_RANK"] for report in found] == ["0", "0", "1", "0"]
    assert [report["LOCAL_WORLD_SIZE"] for report in found] == ["1", "2", "2", "1"]
    assert [report["WORLD_SIZE"] for report in found] == ["4"] * 4
    assert [report["CARRIED"] for report in found] == ["a 'b'\n\"c\""] * 4
    shown = re.findall(
        r"multiring: rank (\d) on host (\w): (?:bound to CPUs [\d,-]+|not bound), \d+ thread", result.stderr
    )
    assert shown == [("0", "a"), ("1", "b"), ("2", "b"), ("3", "c")]


def test_other_hosts_are_told_addresses_that_lead_here(hosts: Launch) -> None:
    assert hosts.run("-H", "localhost:1,b:1", hosts.script(REPORT)).returncode == 0
    here, there = reports(hosts.directory, 2)
    assert here["FAKE_HOST"] is None
    for name in ("MASTER_ADDR", "MULTIRING_STORE"):
        assert here[name] == there[name]
        assert not there[name].startswith("127.")


@pytest.mark.parametrize(
    ("listed", "notes"),
    [
        ("localhost:1,127.0.0.1:1", ["127.0.0.1 and localhost are one machine"]),
        (f"{socket.gethostname()}:1,localhost:1", [f"localhost and {socket.gethostname()} are one machine"]),
        ("a:1,c:1,a.example:1", ["a.example and a are one machine"]),
        ("b:1,localhost:1,b2:1", ["localhost and b are one machine", "b2 and b are one machine"]),
    ],
)
def test_a_machine_of_several_names_is_one_host(hosts: Launch, listed: str, notes: list[str]) -> None:
    machine = """case $1 in a*) MULTIRING_HOST=a;; b*) unset MULTIRING_HOST;; *) MULTIRING_HOST=$1;; esac"""
    (hosts.directory / "bin/ssh").write_text(
        SSH.replace("export FAKE_HOST=$1 MULTIRING_HOST=$1", f"{machine}\nexport MULTIRING_HOST")
    )
    result = hosts.run("-H", listed, hosts.script(REPORT))
    assert result.returncode == 0, result.stderr
    found = reports(hosts.directory, listed.count(",") + 1)
    together = len(notes) + 1
    expected = [(str(rank), str(together)) for rank in range(together)] + [("0", "1")] * (len(found) - together)
    assert [(report["LOCAL_RANK"], report["LOCAL_WORLD_SIZE"]) for report in found] == expected
    placed = "the ranks of both are placed there together"
    assert result.stderr == "".join(f"multiring: {note}: {placed}\n" for note in notes)
    wait_until(lambda: hosts.processes() == [], "all processes have ended")


def test_ranks_of_all_hosts_meet(hosts: Launch) -> None:
    script = hosts.script("""
        from multiring import env
        from multiring.job.bootstrap import rank_identity

        own = rank_identity()
        with own.meet(env.read(env.Settings)) as meeting:
            meeting.store.set(f"square of {own.rank}", b"%d" % own.rank**2)
            print(sum(int(meeting.store.get(f"square of {rank}", 30.0)) for rank in range(own.world_size)))
    """)
    result = hosts.run("-H", "localhost:1,b:2,c:1", script)
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(result.stdout.splitlines()) == ["14", "[1] 14", "[2] 14", "[3] 14"]


def test_another_command_may_stand_for_ssh(hosts: Launch) -> None:
    other = hosts.directory / "other"
    other.write_text('#!/bin/sh\necho "$@" >> calls\nexport MULTIRING_HOST=$2\nshift 2\nexec "$@"\n')
    other.chmod(0o755)
    result = hosts.run("-H", "a:1,b:1", "--ssh", "./other --flag", "--python", sys.executable, "true")
    assert (result.returncode, result.stderr) == (0, "")
    calls = sorted((hosts.directory / "calls").read_text().splitlines())
    assert calls == [f"--flag {host} {sys.executable} -m multiring.launch.agent" for host in "ab"]


def test_no_secret_is_on_a_command_line_or_in_the_environment(hosts: Launch) -> None:
    script = hosts.script("""
        import os
        from pathlib import Path
        secret = os.read(int(os.environ["MULTIRING_SECRET_FD"]), 1000)
        mine = f"LAUNCH_TEST={os.environ['LAUNCH_TEST']}".encode()
        processes = 0
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    visible = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if mine in visible:
                    processes += 1
                    assert secret not in visible
        assert processes >= 4, processes
    """)
    assert hosts.run("-H", "a:1,b:1", script, fresh=True).returncode == 0


def test_a_rank_0_elsewhere_reads_standard_input(hosts: Launch) -> None:
    script = hosts.script("import os, sys; print(os.environ['RANK'], len(sys.stdin.read()))")
    result = hosts.run("-H", "a:1,b:1", script, stdin="line\n" * 50000)
    assert sorted(result.stdout.splitlines()) == ["0 250000", "[1] 1 0"]


def test_input_that_a_rank_0_elsewhere_does_not_read_is_no_obstacle(hosts: Launch) -> None:
    result = hosts.run("-H", "a:1", "true", stdin="line\n" * 50000)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_restarted_rank_0_elsewhere_gets_the_rest_of_the_input(hosts: Launch) -> None:
    script = hosts.script("""
        import os, sys
        if os.environ["MULTIRING_RESTART"] == "0":
            sys.exit(1)
        print("restarted", len(sys.stdin.read()) % 5, sys.stdin.read() == "")
    """)
    result = hosts.run("-H", "a:1", "--max-restarts", "1", script, stdin="line\n" * 50000)
    assert (result.returncode, result.stdout.split()[0], result.stdout.split()[2]) == (0, "restarted", "True")


def test_an_interrupt_while_connecting_ends_at_once(hosts: Launch) -> None:
    with hosts.start("-H", "a:1,b:1", "--ssh", "sh -c 'touch connecting; sleep 100'", "true") as process:
        hosts.wait_for_file("connecting")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        wait_until(lambda: hosts.processes() == [], "all processes have ended")


def test_a_rank_0_elsewhere_has_a_terminal_to_write_to(hosts: Launch) -> None:
    script = hosts.script("""
        import os, sys
        print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size().columns)
        print("hello", input("name? "))
    """)
    with at_terminal(hosts, *COMMAND, "-H", "a:1", script) as (pid, screen):
        screen.expect(r"True True 100\r\n")
        screen.expect(r"name\? ")
        screen.type("ada\n")
        assert "hello ada\r\n" in screen.read_to_end()
        assert exit_code(pid) == 0


def test_a_failure_names_its_host(hosts: Launch) -> None:
    script = hosts.script("""
        import os, sys, time
        if os.environ["RANK"] == "2":
            sys.exit("the reason")
        time.sleep(100)
    """)
    result = hosts.run("-H", "a:2,b:2", script)
    assert result.returncode == 1
    last = result.stderr[result.stderr.index("multiring:") :]
    assert re.fullmatch(
        r"multiring: rank 2 on host b failed: exit code 1, after \d+\.\d s; its last lines:\n    the reason\n", last
    )
    assert hosts.processes() == []


@pytest.mark.parametrize("placement", [["-n", "4"], ["-H", "a:2,b:2"]], ids=["here", "hosts"])
@pytest.mark.parametrize(
    ("end", "how", "code"),
    [
        ("raise RuntimeError('the reason')", "exit code 1", 1),
        ("sys.exit(7)", "exit code 7", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"killed by signal 9 \(SIGKILL\)", 128 + signal.SIGKILL),
    ],
    ids=["raise", "exit", "kill"],
)
def test_the_rank_at_fault_is_named_though_others_may_end_before_it(
    hosts: Launch, placement: list[str], end: str, how: str, code: int
) -> None:
    script = hosts.script(f"""
        import atexit, os, signal, sys, time
        # The last thing that it does: the others have long noticed, and most have ended.
        if os.environ["RANK"] == "2":
            atexit.register(time.sleep, 0.3)
        import multiring as mr

        mr.init()
        mr.barrier()
        if mr.rank() == 2:
            print("rank 2 gives up", file=sys.stderr)
            {end}
        mr.barrier()
    """)
    for _ in range(3):
        result = hosts.run(*placement, script)
        last = result.stderr[result.stderr.rindex("multiring: rank") :]
        assert re.match(rf"multiring: rank 2 on host \S+ failed: {how}, after \d+\.\d s; its last lines:\n", last)
        assert "    rank 2 gives up\n" in last
        assert "PeerLost" not in last
        assert result.returncode == code
    assert hosts.processes() == []


SLEEP = """
    import os, subprocess, sys, time
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
    open(f"started-{os.environ['RANK']}", "w").close()
    time.sleep(100)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_launcher_leaves_no_process_on_any_host(hosts: Launch, number: int) -> None:
    with hosts.start("-H", "a:1,b:1", hosts.script(SLEEP)) as process:
        hosts.wait_for_file("started-0")
        hosts.wait_for_file("started-1")
        process.send_signal(number)
        assert process.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
        wait_until(lambda: hosts.processes() == [], "all processes have ended")


def test_a_lost_host_ends_the_job(hosts: Launch) -> None:
    with hosts.start("-H", "a:1,b:1", "--max-restarts", "2", hosts.script(SLEEP)) as process:
        hosts.wait_for_file("started-0")
        hosts.wait_for_file("started-1")
        os.kill(hosts.agent_of("b"), signal.SIGKILL)
        assert process.wait(30) == 1
        assert process.stderr is not None
        report = "multiring: host b: ssh has ended: exit code 137; try by hand: ssh b true\n    Killed\n"
        assert process.stderr.read().endswith(report)
        wait_until(lambda: hosts.processes() == [], "all processes have ended")


@pytest.mark.parametrize(
    ("with_ranks", "options", "code"),
    [(True, ("--min-ranks", "2"), 0), (True, (), 1), (False, ("--min-ranks", "2"), 0)],
    ids=["with its ranks", "with its ranks, which are needed", "alone"],
)
def test_a_host_whose_agent_is_stopped_is_lost(
    hosts: Launch, with_ranks: bool, options: tuple[str, ...], code: int
) -> None:
    """The connection to it stands, and its ranks never end."""
    script = hosts.script("""
        import os, signal
        import numpy as np
        import multiring as mr

        mr.init(host=os.environ["FAKE_HOST"])
        mr.barrier()
        open(f"started-{mr.rank()}", "w").close()
        try:
            has_stopped = np.zeros(1)
            while not has_stopped:
                has_stopped[0] = os.path.exists("stop")
                mr.all_reduce(has_stopped)
        except mr.PeerLost:
            mr.shrink()
        x = np.arange(3) * (mr.rank() + 1)
        mr.all_reduce(x)
        print("sum", *x, "of", mr.rank())
    """)
    words = ("-n", "4", "-H", "a:2,b:2", *options, script)
    with hosts.start(*words, MULTIRING_HEARTBEAT_TIMEOUT="3") as process:
        for rank in range(4):
            hosts.wait_for_file(f"started-{rank}")
        agent = hosts.agent_of("b")
        stopped = [agent, *descendants(agent)] if with_ranks else [agent]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        (hosts.directory / "stop").touch()
        output, errors = process.communicate(timeout=50)
    assert process.returncode == code, errors
    assert (
        "multiring: host b: its agent has not answered for 8 s: it is stopped, or its host hangs or is out of reach"
        in errors
    )
    left = 2 if with_ranks else 4
    sums = " ".join(str(sum(range(1, left + 1)) * index) for index in range(3))
    assert all(f"sum {sums} of {rank}\n" in output for rank in range(2))
    wait_until(lambda: hosts.processes() == [], "all processes have ended")


def test_unreachable_hosts_are_all_named(hosts: Launch) -> None:
    failing = hosts.directory / "failing"
    failing.write_text(
        '#!/bin/sh\n[ $1 = b ] && exec "$0.real" "$@"\necho "connect to host $1: No route" >&2\nexit 255\n'
    )
    failing.chmod(0o755)
    (hosts.directory / "failing.real").symlink_to(hosts.directory / "bin/ssh")
    result = hosts.run("-H", "a:1,b:1,c:1", "--ssh", "./failing", "true")
    assert result.returncode == 2
    assert result.stderr == (
        "multiring run: host a: ./failing has ended: exit code 255; try by hand: ./failing a true\n"
        "    connect to host a: No route\n"
        "host c: ./failing has ended: exit code 255; try by hand: ./failing c true\n"
        "    connect to host c: No route\n"
    )
    assert hosts.processes() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--python", "/nowhere/python"], "is there /nowhere/python on it\\? Another is given by --python"),
        (["--ssh", "no-such-ssh"], "cannot execute 'no-such-ssh' for host a: No such file or directory"),
        (["--ssh", ""], "--ssh needs a command"),
        (["--ssh", "'ssh"], "--ssh 'ssh: No closing quotation"),
        (["--ssh", "true"], "host a: true has ended: exit code 0; try by hand: true a true"),
    ],
)
def test_what_is_missing_is_said(hosts: Launch, words: list[str], message: str) -> None:
    result = hosts.run("-H", "a:1", *words, "true")
    assert result.returncode == 2
    assert re.search(message, result.stderr)


def test_a_host_without_this_package_is_told_what_to_install(hosts: Launch) -> None:
    python = hosts.directory / "python"
    python.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    result = hosts.run("-H", "a:1", "--python", str(python), "true")
    assert result.returncode == 2
    assert re.search(r"host a: .* install multiring \S+ for \S+/python on it", result.stderr)


@pytest.mark.parametrize("noise", ["printf Welcome", "printf 'Welcome\\n> '", "printf '{'", "printf '\\377\\000'"])
def test_what_a_login_prints_is_no_obstacle(hosts: Launch, noise: str) -> None:
    (hosts.directory / "bin/ssh").write_text(SSH.replace('echo "Welcome to $FAKE_HOST"', noise))
    result = hosts.run("-H", "a:1,b:1", hosts.script(REPORT))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert [report["FAKE_HOST"] for report in reports(hosts.directory, 2)] == ["a", "b"]


def test_what_a_login_printed_is_shown_where_it_starts_no_agent(hosts: Launch) -> None:
    result = hosts.run("-H", "a:1", "--ssh", "sh -c 'printf \"maintenance\\n\\ncome back later\"; exit 1'", "true")
    assert result.returncode == 2
    assert result.stderr == (
        "multiring run: host a: sh has ended: exit code 1; try by hand: sh a true; it said:\n"
        "    maintenance\n    come back later\n"
    )


async def answered(menu: str) -> None:
    agent = await SshAgent.connect(SshTarget("a", ["sh", "-c", menu], "python"))
    try:
        await agent.expect("hello", 1.0)
    finally:
        await agent.close()


def test_what_a_login_asks_for_is_shown_where_it_never_ends() -> None:
    said = "host a: no answer within 1 s; it said:\n    Terms of use\n    press any key to go on: "
    with pytest.raises(LaunchError, match=said):
        asyncio.run(answered("printf 'Terms of use\\npress any key to go on: '; sleep 60"))


def test_another_version_is_refused(hosts: Launch) -> None:
    python = hosts.directory / "python"
    python.write_text("""#!/bin/sh\necho '{"kind": "hello", "version": "0.0.1", "host": "a"}'\ncat > /dev/null\n""")
    python.chmod(0o755)
    result = hosts.run("-H", "a:1", "--python", str(python), "true")
    assert result.returncode == 2
    assert re.search(r"host a has multiring 0.0.1, this one \S+: install the same everywhere", result.stderr)


def agent_answers(directory: Path, **prepare: object) -> dict[str, object]:
    """Start an agent as ssh would, and return its answer to ``prepare``."""
    message = {
        "kind": "prepare",
        "program": ["true"],
        "directory": str(directory),
        "environment": dict(os.environ),
        "host": "a",
        "first": 0,
        "count": 1,
        "binding": "core",
        "standby": 0,
        "fork": False,
        "former": [],
        "lifeline": None,
        **prepare,
    }
    agent = subprocess.run(
        [sys.executable, "-m", "multiring.launch.agent"],
        input=json.dumps(message) + "\n",
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert agent.returncode == 0, agent.stderr
    hello, answer = map(json.loads, agent.stdout.strip().splitlines())
    assert hello["kind"] == "hello"
    return dict(answer)


def test_an_agent_checks_what_it_shall_run(tmp_path: Path) -> None:
    assert agent_answers(tmp_path)["kind"] == "ready"
    missing = tmp_path / "missing"
    assert agent_answers(missing) == {
        "kind": "error",
        "text": f"there is no directory {missing}: the job's directory must exist on every host",
    }
    assert agent_answers(tmp_path, program=["train.py"]) == {
        "kind": "error",
        "text": f"no such script: train.py (looked for {tmp_path}/train.py)",
    }


@pytest.mark.parametrize(
    ("strikes", "how"),
    [
        ("SIGKILL", r"failed: killed by signal 9 \(SIGKILL\)"),
        ("SIGSTOP", "was stopped or out of reach, and was ended: the others had gone on without it"),
    ],
)
def test_a_lost_rank_is_started_again_on_its_host(hosts: Launch, strikes: str, how: str) -> None:
    words = ["-H", "a:2,b:2", "--min-ranks", "3", "--max-replacements", "1", "--python", sys.executable]
    hosts.environment.update(TEST_VICTIM="3", TEST_STRIKES=strikes, MULTIRING_HEARTBEAT_TIMEOUT="5")
    result = hosts.run(*words, hosts.script(REGROW))
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(4):
        assert f"sum 0 10 20 30 40 of {rank} beside 2 oldest 0\n" in result.stdout
    assert len(re.findall(f"rank 3 on host b {how}, after ", result.stderr)) == 1, result.stderr
    assert "rank 3 is started again, replacement 1 of 1" in result.stderr
    wait_until(lambda: hosts.processes() == [], "all processes have ended")
