"""Lost hosts that come back, and whose ranks start there again: ``multiring run``, over a stand-in for ssh."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from fork_server import Forked
from launching import Launch, wait_until

from multiring.launch import LaunchError
from multiring.launch.hosts import Assignment, HostEntry
from multiring.launch.launcher import Job as LaunchedJob
from multiring.launch.launcher import Launcher
from multiring.launch.ssh import SshAgent, SshTarget

SSH = """#!{python}
# Leads to a "host" of this machine, unless a file away-HOST says how it fails, and notes that it was asked to.
# When this process is killed, its host goes on as if cut off: a process that stays holds the agent's pipes open.
import itertools, os, subprocess, sys, threading
from pathlib import Path

here = Path("{directory}")
host, *words = itertools.dropwhile(lambda word: word.startswith("-"), sys.argv[1:])
away = here / ("away-" + host)
if away.exists():
    said = away.read_text()
    (here / ("asked-" + host)).touch()
    os.execvp("sh", ["sh", "-c", said])
to_agent, from_agent = os.pipe(), os.pipe()
own = to_agent[1], from_agent[0]
environment = dict(os.environ, FAKE_HOST=host, MULTIRING_HOST=host)
none = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.DEVNULL)
holder = subprocess.Popen(["sleep", "1000"], pass_fds=own, start_new_session=True, **none)
agent = subprocess.Popen(
    ["sh", "-c", "exec " + " ".join(words)],
    stdin=to_agent[0], stdout=from_agent[1], cwd="/", env=environment, start_new_session=True,
)
os.close(to_agent[0])
os.close(from_agent[1])
(here / ("part-" + host)).write_text(f"{{os.getpid()}} {{holder.pid}} {{agent.pid}}")
os.rename(here / ("part-" + host), here / ("relay-" + host))


def inward():
    while data := os.read(0, 1 << 16):
        while data:
            data = data[os.write(own[0], data):]
    holder.kill()
    os.close(own[0])


threading.Thread(target=inward, daemon=True).start()
while data := os.read(own[1], 1 << 16):
    os.write(1, data)
holder.kill()
os._exit(abs(agent.wait()))
"""

JOB = """
    import os, subprocess, sys, time
    from pathlib import Path
    import numpy as np
    import multiring as mr

    rank, size, replacement = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MULTIRING_REPLACEMENT"))
    host = os.environ["FAKE_HOST"]


    def write(name, text):
        Path(f"{name}.part").write_text(text)
        os.rename(f"{name}.part", name)


    mr.init(host=host)
    child = subprocess.Popen(["sleep", "1000"])
    write(f"started-{rank}-{replacement}", f"{os.getpid()} {child.pid}")
    while True:
        try:
            done = np.array(float(os.path.exists("end")))  # what one rank sees, all go by
            mr.all_reduce(done)
            if done:
                break
            time.sleep(0.02)
            if mr.world_size() < size:
                mr.grow()
                continue
            x = np.arange(4) * (rank + 1)
            mr.all_reduce(x)
            write(f"sum-{rank}-{replacement}", f"{x.tolist()} on {host} beside {mr.local_world_size()}")
        except mr.PeerLost:
            mr.shrink()
    print("left", mr.world_size())
"""


@pytest.fixture
def hosts(launch: Launch) -> Launch:
    """A launch that finds a stand-in as ssh, over which hosts can be lost and be back."""
    ssh = launch.directory / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH.format(python=sys.executable, directory=launch.directory))
    ssh.chmod(0o755)
    launch.environment["PATH"] = f"{ssh.parent}:{launch.environment['PATH']}"
    launch.environment["MULTIRING_HEARTBEAT_TIMEOUT"] = "5"
    return launch


@dataclass
class Job:
    """A job that runs, and what it leaves in the directory of its launch."""

    hosts: Launch
    process: Forked

    def wait_for(self, name: str) -> str:
        """Content of a file, once it is there."""
        file = self.hosts.directory / name
        wait_until(lambda: file.exists() or self.process.poll() is not None, f"{name} is written", 60)
        assert file.exists(), self.process.stderr.read()
        return file.read_text()

    def relay(self, host: str) -> tuple[int, int, int]:
        """The stand-in for ssh that leads to a host, what holds the agent's pipes for it, and the agent."""
        ssh, holder, agent = map(int, self.wait_for(f"relay-{host}").split())
        return ssh, holder, agent

    def numbers(self, rank: int, replacement: int) -> list[int]:
        """The processes of a rank, and of its child."""
        return [int(word) for word in self.wait_for(f"started-{rank}-{replacement}").split()]

    def ended(self) -> tuple[int, str, str]:
        """Exit code, output and errors, once it was told to end."""
        (self.hosts.directory / "end").touch()
        code = self.process.wait(60)
        return code, self.process.stdout.read(), self.process.stderr.read()


@contextmanager
def running(hosts: Launch, listed: str, ranks: int, *more: str) -> Iterator[Job]:
    """A job whose ranks have all met."""
    words = ["-H", listed, "--min-ranks", "1", "--max-replacements", "6", "--no-summary", *more]
    with hosts.start(*words, "--python", sys.executable, hosts.script(JOB)) as process:
        assert isinstance(process, Forked)
        job = Job(hosts, process)
        for rank in range(ranks):
            job.wait_for(f"sum-{rank}-0")
        yield job


def is_there(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_host_that_is_back_gets_its_ranks_again_and_nothing_former_is_left_there(hosts: Launch) -> None:
    """Agent and ranks are stopped while they are cut off, so that none of them can end by itself."""
    with running(hosts, "a:2,b:2", 4) as job:
        ssh, holder, agent = job.relay("b")
        former = [agent, *job.numbers(2, 0), *job.numbers(3, 0)]
        for pid in (agent, former[1], former[3]):
            os.kill(pid, signal.SIGSTOP)
        os.kill(ssh, signal.SIGKILL)
        sums = [job.wait_for(f"sum-{rank}-{number}") for rank, number in ((2, 1), (3, 2))]
        assert [pid for pid in former if is_there(pid)] == []
        os.kill(holder, signal.SIGKILL)
        code, output, errors = job.ended()
    assert code == 0, output + errors
    assert sums == ["[0, 10, 20, 30] on b beside 2"] * 2
    assert output.count("left 4\n") == 4, output
    assert "host b is lost; its ranks 2, 3 start there again when it is back\n" in errors
    assert "host b is back\n" in errors
    assert "ranks 2, 3 of host b start again on host b, replacements 1, 2 of 6\n" in errors
    wait_until(lambda: hosts.processes() == [], "all processes have ended")


@pytest.mark.parametrize("how", ["sleep 1000", "echo no route to host >&2; exit 255"])
def test_a_job_does_not_wait_at_its_end_for_a_host_that_is_away(hosts: Launch, how: str) -> None:
    with running(hosts, "a:2,b:2", 4) as job:
        (hosts.directory / "away-b").write_text(how)
        os.kill(job.relay("b")[2], signal.SIGKILL)
        job.wait_for("asked-b")
        code, output, errors = job.ended()
    assert code == 0, output + errors
    assert output.count("left 2\n") == 2, output
    assert errors.count("host b is lost; its ranks 2, 3 start there again when it is back\n") == 1
    assert "host b is back\n" not in errors
    assert "no route to host" not in errors.partition("is lost; its ranks")[2]
    wait_until(lambda: hosts.processes() == [], "all processes have ended")


def test_a_host_that_is_back_when_its_ranks_have_moved_is_a_spare_one(hosts: Launch) -> None:
    with running(hosts, "a:1,b:1", 2, "--spares", "c:1") as job:
        os.kill(job.relay("b")[2], signal.SIGKILL)
        (hosts.directory / "relay-b").unlink()
        assert job.wait_for("sum-1-1") == "[0, 3, 6, 9] on c beside 1"
        job.relay("b")
        os.kill(job.relay("c")[2], signal.SIGKILL)
        assert job.wait_for("sum-1-2") == "[0, 3, 6, 9] on b beside 1"
        code, output, errors = job.ended()
    assert code == 0, output + errors
    assert output.count("left 2\n") == 2, output
    told = [
        "rank 1 of host b starts again on host c, replacement 1 of 6\n",
        "host b is lost; when it is back, it is a spare host\n",
        "host b is back\n",
        "rank 1 of host c starts again on host b, replacement 2 of 6\n",
    ]
    places = [errors.find(line) for line in told]
    assert -1 not in places, errors
    assert places == sorted(places), errors
    wait_until(lambda: hosts.processes() == [], "all processes have ended")


def test_a_host_that_can_be_reached_and_not_used_is_told_of(hosts: Launch) -> None:
    with running(hosts, "a:1,b:1", 2) as job:
        (hosts.directory / "away-b").write_text("echo no such file >&2; exit 127")
        os.kill(job.relay("b")[2], signal.SIGKILL)
        job.wait_for("asked-b")
        (hosts.directory / "away-b").unlink()
        assert job.wait_for("sum-1-1") == "[0, 3, 6, 9] on b beside 1"
        code, output, errors = job.ended()
    assert code == 0, output + errors
    assert f"is there {sys.executable} on it? Another is given by --python\n    no such file; it is tried" in errors
    assert "host b is back\n" in errors
    wait_until(lambda: hosts.processes() == [], "all processes have ended")


def target(host: str, ssh: str = 'shift; exec sh -c "$*"') -> SshTarget:
    """A host for a stand-in that leads to this machine, or does what it is told."""
    return SshTarget(host, ["sh", "-c", ssh, "ssh"], sys.executable)


async def agent_on(host: str) -> SshAgent:
    agent = await SshAgent.connect(target(host))
    await agent.greet()
    return agent


def launcher_of(*agents: SshAgent) -> Launcher:
    placed = [(Assignment(agent.host, i, 1), agent) for i, agent in enumerate(agents)]
    return Launcher(LaunchedJob(("true",), min_ranks=1, max_replacements=1), placed, None)


async def tried(lost: SshAgent, ssh: str) -> SshAgent | None:
    """Return what comes of a try to reach the host of a lost agent by a command."""
    lost.target = target(lost.host, ssh)
    launcher = launcher_of(lost)
    before = set(launcher._children)
    try:
        return await launcher._reach_again(HostEntry(lost.host, 1), lost)
    finally:
        assert launcher._children == before  # no ssh is left


def test_ssh_that_gets_nowhere_is_told_from_a_host_that_cannot_be_used() -> None:
    async def reached() -> None:
        lost = await agent_on("b")
        try:
            assert await tried(lost, "echo no route >&2; exit 255") is None
            with pytest.raises(LaunchError, match=r"host b: sh has ended: exit code 127; is there .* on it\?"):
                await tried(lost, "exit 127")
            trying = asyncio.create_task(tried(lost, "sleep 1000"))
            await asyncio.sleep(0.2)
            trying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await trying
            assert lost.former == []
        finally:
            await lost.close()

    asyncio.run(reached())


def test_a_host_that_is_back_as_the_machine_of_another_is_refused() -> None:
    async def reached() -> None:
        other, lost = await agent_on("a"), await agent_on("b")
        try:
            with pytest.raises(LaunchError, match="host b is the machine of host a, and would be lost with it"):
                await launcher_of(other, lost)._reach_again(HostEntry("b", 1), lost)
            assert [machine for machine, _ in lost.former] == [other.machine]  # the next try sees that it is gone
        finally:
            await other.close()
            await lost.close()

    asyncio.run(reached())


def test_a_former_agent_that_is_stopped_is_killed_before_another_is_ready() -> None:
    async def reached() -> None:
        lost = await agent_on("b")
        launcher = launcher_of(lost)
        assert lost.process is not None
        os.kill(lost.process[0], signal.SIGSTOP)
        back = await launcher._reach_again(HostEntry("b", 1), lost)
        assert back is not None
        assert back.former == [(lost.machine, lost.process)]
        assert not is_there(lost.process[0])
        assert back.child in launcher._children
        await back.close()
        await lost.close()

    asyncio.run(reached())
