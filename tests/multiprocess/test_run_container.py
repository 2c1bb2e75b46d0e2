"""Process 1 of a container, to which Kubernetes sends SIGTERM before it ends a pod: the launcher, and a rank itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from free_ports import free_port
from launching import COMMAND, Launch, wait_until

from multiring.launch.processes import descendants

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a namespace of processes needs root")

CLUSTERS = Path(__file__).parents[2] / "docs" / "clusters.md"
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@contextmanager
def container(launch: Launch, *words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A command as process 1, and the number that it has outside."""
    with subprocess.Popen(
        [*CONTAINER, *words],
        cwd=launch.directory,
        env={**launch.environment, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_until(lambda: children(process.pid) != [], "process 1 is there")
            yield process, children(process.pid)[0]
        finally:
            process.kill()


def children(pid: int) -> list[int]:
    """Also those that have ended and were not waited for."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def ended(pid: int) -> list[int]:
    """Children of a process and of its descendants that have ended and were not waited for."""
    alive = [pid, *descendants(pid)]
    return [child for parent in alive for child in children(parent) if child not in alive]


@pytest.mark.timeout(120)
def test_a_launcher_that_is_process_1_reaps_orphans_and_lets_ranks_save(launch: Launch) -> None:
    script = launch.script("""
        import signal, subprocess, sys, time
        import numpy as np
        import multiring as mr

        def save(*_):
            rank = mr.rank()
            time.sleep(6 if rank == 0 else 0.1)  # longer than the time after which a signal is followed by SIGTERM
            with open(f"saved-{rank}", "a") as file:
                print("step", step, file=file)
            sys.exit(0)

        mr.init()
        step = 0
        signal.signal(signal.SIGTERM, save)
        subprocess.run(["sh", "-c", f"(sleep 0.1; echo > orphan-{mr.rank()}) &"])
        while True:
            mr.all_reduce(x := np.arange(5) * (mr.rank() + 1))
            assert x.tolist() == [0, 3, 6, 9, 12]
            step += 1
            open(f"started-{mr.rank()}", "w").close()
            time.sleep(0.01)
    """)
    pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    pod["PET_MASTER_PORT"] = str(free_port())
    with (
        launch.start(script, **pod, PET_NODE_RANK="1", MULTIRING_HOST="pod-1") as other,
        container(launch, *COMMAND, script, **pod, PET_NODE_RANK="0", MULTIRING_HOST="pod-0") as (first, init),
    ):
        for name in ("started-0", "started-1", "orphan-0", "orphan-1"):
            launch.wait_for_file(name)
        leave = f"(sleep 0.1; echo > {launch.directory}/orphan-2) &"  # as a command of `kubectl exec` may
        subprocess.run(["nsenter", "--target", str(init), "--pid", "--mount", "sh", "-c", leave], check=True)
        launch.wait_for_file("orphan-2")
        wait_until(lambda: ended(init) == [], "orphans are gone")
        os.kill(init, signal.SIGTERM)
        errors = first.communicate(timeout=60)[1]
        others = other.communicate(timeout=60)[1]
    assert (first.returncode, other.returncode) == (143, 143), errors
    assert errors.endswith("multiring: ended by SIGTERM\n")
    assert others.endswith("multiring: host pod-0: ended by SIGTERM\n")
    for rank in range(2):
        assert re.fullmatch("step [0-9]+\n", (launch.directory / f"saved-{rank}").read_text())


def test_a_rank_that_is_process_1_tells_the_others_that_it_was_told_to_end(launch: Launch) -> None:
    (recipe,) = re.findall(r"^```python\n(import signal\n.*?)^```$", CLUSTERS.read_text(), re.MULTILINE | re.DOTALL)
    loop = """
        import os
        import numpy as np

        while True:
            mr.all_reduce(x := np.arange(5) * (mr.rank() + 1))
            assert x.tolist() == [0, 3, 6, 9, 12]
            open(f"started-{mr.rank()}", "w").close()
    """
    script = launch.script(recipe + textwrap.dedent(loop))
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    words = (sys.executable, script)
    with (
        container(launch, *words, **job, RANK="0", MULTIRING_HOST="pod-0") as (other, _),
        container(launch, *words, **job, RANK="1", MULTIRING_HOST="pod-1") as (evicted, init),
    ):
        for rank in range(2):
            launch.wait_for_file(f"started-{rank}")
        os.kill(init, signal.SIGTERM)
        assert evicted.communicate(timeout=60)[1].endswith("Evicted: told to end by SIGTERM\n")
        errors = other.communicate(timeout=60)[1]
    assert (other.returncode, evicted.returncode) == (1, 1)
    outside, within = "ended with Evicted: told to end by SIGTERM", "was interrupted by a signal in a collective"
    assert re.search(rf"PeerLost: rank 1 \(host pod-1\) ({outside}|{within}); ", errors), errors
