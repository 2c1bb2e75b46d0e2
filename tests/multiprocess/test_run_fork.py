"""``multiring run --fork``: a host does the script's imports once, and its ranks are what they are without."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import COMMAND, IN_STANDBY, REGROW, Launch, wait_until

MARK = f"""
    import os, pathlib

    kind = "once" if {IN_STANDBY} else "fresh"
    pathlib.Path(os.environ["LAUNCH_TEST"], f"{{kind}}-{{os.environ.get('FAKE_HOST', '')}}-{{os.getpid()}}").touch()
"""
"""A module that tells where it is imported: in what imports for several ranks, or in a rank of its own."""

SUM = """
    import os, sys
    import mark
    import numpy as np
    import multiring as mr

    before = set(sys.modules)
    mr.init(host=os.environ.get("FAKE_HOST", ""))
    x = np.arange(4) * (mr.rank() + 1)
    mr.all_reduce(x)
    late = sorted(name for name in set(sys.modules) - before if name.startswith("multiring"))
    print("sum", *x, "of", mr.rank(), mr.local_rank(), sys.argv[1:], repr(sys.stdin.read()), "fork", late)
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path, fresh=True)
    launch.script(MARK, "mark.py")
    yield launch
    launch.kill_all()


def imported(launch: Launch, kind: str, host: str = "") -> int:
    return len(list(launch.directory.glob(f"{kind}-{host}-*")))


def nothing_is_left(launch: Launch) -> None:
    wait_until(lambda: launch.processes() == [], "all processes have ended")


def sums(output: str, ranks: int) -> dict[int, str]:
    """Return what each rank printed after the right sum of all."""
    total = ranks * (ranks + 1) // 2
    wanted = " ".join(str(i * total) for i in range(4))
    found = re.findall(rf"sum {wanted} of (\d+) (.*)", output)
    return {int(rank): rest for rank, rest in found}


def test_the_imports_are_done_once_for_all_but_rank_0(launch: Launch) -> None:
    result = launch.run("-n", "4", "--fork", "--no-summary", launch.script(SUM), "--lr", "x y", stdin="typed\n")
    assert (result.returncode, result.stderr) == (0, "")
    found = sums(result.stdout, 4)
    assert found.pop(0).startswith(r"0 ['--lr', 'x y'] 'typed\n' fork [")
    assert found == {rank: f"{rank} ['--lr', 'x y'] '' fork []" for rank in range(1, 4)}
    assert (imported(launch, "fresh"), imported(launch, "once")) == (1, 1)
    nothing_is_left(launch)


def test_each_host_does_them_once(hosts: Launch) -> None:
    words = ("-H", "a:2,b:3", "--python", sys.executable, "--fork", "--no-summary")
    result = hosts.run(*words, hosts.script(SUM))
    assert (result.returncode, result.stderr) == (0, "")
    assert {rank: rest.split()[0] for rank, rest in sums(result.stdout, 5).items()} == dict(enumerate("01012"))
    assert [imported(hosts, kind, host) for host in "ab" for kind in ("fresh", "once")] == [2, 0, 0, 1]
    nothing_is_left(hosts)


WITHOUT = {
    "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()": (
        r"standbys cannot be forked: what it imports has started threads \(1\); each does the imports itself"
    ),
    f"import os\nif {IN_STANDBY}:\n    os._exit(7)": (
        r"3 standbys in a row have ended before they were needed \(exit code 7\); ranks start in fresh interpreters "
        "from now on"
    ),
}


@pytest.mark.parametrize("module", WITHOUT, ids=["threads", "dies"])
def test_where_none_can_be_forked_ranks_import_by_themselves_and_it_is_said(launch: Launch, module: str) -> None:
    launch.script(module, "module.py")
    result = launch.run("-n", "3", "--fork", "--no-summary", launch.script(SUM.replace("mark", "mark, module", 1)))
    assert result.returncode == 0, result.stderr
    assert set(sums(result.stdout, 3)) == {0, 1, 2}
    assert re.fullmatch(rf"multiring: host \S+: {WITHOUT[module]}\n", result.stderr)
    nothing_is_left(launch)


def test_an_import_that_fails_fails_in_each_rank(launch: Launch) -> None:
    launch.script("raise OSError('no licence')", "module.py")
    result = launch.run("-n", "3", "--fork", "--no-summary", launch.script("import module"))
    assert result.returncode == 1
    assert "a standby has not imported all that a rank does: OSError: no licence" in result.stderr
    assert re.search(r"rank \d on host \S+ failed: exit code 1", result.stderr)
    nothing_is_left(launch)


SLOW = f"""
    import os, time
    if {IN_STANDBY}:
        open(os.path.join(os.environ["LAUNCH_TEST"], "importing"), "w").close()
        time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_ended_while_they_are_done_leaves_nothing(launch: Launch, number: signal.Signals) -> None:
    launch.script(SLOW, "slow.py")
    script = launch.script("import slow\nimport multiring as mr\nmr.init()\n")
    with launch.start("-n", "3", "--fork", script) as process:
        wait_until(lambda: (launch.directory / "importing").exists(), "it imports")
        began = time.monotonic()
        process.send_signal(number)
        process.communicate(timeout=30)
        assert time.monotonic() - began < 12  # with a rank 0 that waits for the others
    assert process.returncode in (128 + number, -number)
    nothing_is_left(launch)


def test_a_rank_that_fails_while_they_are_done_ends_the_job(launch: Launch) -> None:
    launch.script(SLOW, "slow.py")
    script = launch.script("import slow\nimport os\nif os.environ['RANK'] == '0':\n    os._exit(5)\n")
    result = launch.run("-n", "3", "--fork", "--no-summary", script)
    assert result.returncode == 5
    assert re.search(r"rank 0 on host \S+ failed: exit code 5", result.stderr)
    assert not re.search(r"rank [12] on host", result.stderr)
    nothing_is_left(launch)


def test_a_restart_forks_again(launch: Launch) -> None:
    fails = "if mr.rank() == 2 and os.environ['MULTIRING_RESTART'] == '0':\n        os._exit(9)\n    x = np"
    script = launch.script(SUM.replace("x = np", fails))
    result = launch.run("-n", "3", "--fork", "--max-restarts", "1", "--no-summary", script)
    assert result.returncode == 0, result.stderr
    assert "rank 2" in result.stderr
    assert set(sums(result.stdout, 3)) == {0, 1, 2}
    assert (imported(launch, "fresh"), imported(launch, "once")) == (2, 2)
    nothing_is_left(launch)


def test_replacements_are_forked_from_the_same_imports(launch: Launch) -> None:
    launch.environment["TEST_VICTIM"] = "2"
    words = ("-n", "4", "--fork", "--min-ranks", "3", "--max-replacements", "2", "--standby", "1", "--no-summary")
    result = launch.run(*words, launch.script(REGROW.replace("import os", "import mark, os", 1)))
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(4):
        assert f"sum 0 10 20 30 40 of {rank} beside 4" in result.stdout
    assert (imported(launch, "fresh"), imported(launch, "once")) == (1, 1)
    assert "standby" not in result.stderr
    nothing_is_left(launch)


def test_it_is_of_no_use_for_what_is_no_python(launch: Launch) -> None:
    result = launch.run("-n", "2", "--fork", "--no-summary", "env")
    assert result.returncode == 0
    assert result.stderr == (
        "multiring: --fork is of no use: env is no script (train.py) and no module (-m) of Python; ranks are started "
        "without\n"
    )


def test_another_launcher_forks_nothing() -> None:
    words = [*COMMAND, "-n", "2", "--fork", "--launcher", "mpirun", "train.py"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--fork and --launcher do not go together" in done.stderr
