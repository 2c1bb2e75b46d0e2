"""A rank that dies before all have met is started again, and nobody else fails."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest
from launching import Launch, wait_until

STRIKES = """
    import os, pathlib, signal, time

    rank, moment = os.environ["RANK"], os.environ["TEST_MOMENT"]
    victim = rank == os.environ["TEST_VICTIM"]
    strikes = victim and len(list(pathlib.Path().glob("struck-*"))) < int(os.environ.get("TEST_TIMES", "1"))

    def die(*_):
        pathlib.Path(f"struck-{os.getpid()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if strikes and moment == "import":
        die()
    import numpy as np
    import multiring as mr
    from multiring.job import rendezvous
    from multiring.job.exchange import Exchange

    if rank == "2" and moment == "arrived":
        while not list(pathlib.Path().glob("struck-*")):
            time.sleep(0.02)
    if strikes and moment == "init":
        die()
    if strikes and moment == "introduced":
        rendezvous.introduce = die
    if strikes and moment == "met":
        rendezvous._prove = die
    if strikes and moment == "attached":
        rendezvous._connect = die
    publish = Exchange._publish

    def publish_and_die(exchange, name, who, record):
        publish(exchange, name, who, record)
        if name == {"arrived": "arrive", "connected": "connect"}.get(moment) and str(who) == rank:
            die()

    if strikes:
        Exchange._publish = publish_and_die
"""
"""The victim dies at a moment, as often as it is to."""

MOMENTS = [
    ("import", 0),
    ("init", 1),
    ("introduced", 0),
    ("arrived", 1),
    ("arrived", 0),
    ("met", 1),
    ("met", 0),
    ("attached", 1),
    ("connected", 0),
]
"""Moments at which a rank dies, and that rank: before it imports multiring; before init; in init before its arrival;
after that while others have yet to come; after all have arrived; after those of its host have attached it; as rank 0
would say that all have met."""

AS_AT_FIRST = """
    assert os.environ["MULTIRING_REPLACEMENT"] == "0"
    assert "MASTER_ADDR" in os.environ
"""

SUMS = """
    mr.init(host=os.environ.get("MULTIRING_HOST", ""))
    x = np.arange(5) * (mr.rank() + 1)
    mr.all_reduce(x)
    print("sum", *x, "of", mr.rank())
"""

TORCH_SUMS = """
    import torch
    import torch.distributed as dist
    import multiring.torch

    dist.init_process_group("multiring")
    x = torch.arange(5) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    print("sum", *x.tolist(), "of", dist.get_rank())
    y = torch.arange(3) + dist.get_rank()
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        dist.all_reduce(y, group=group)
        assert y.tolist() == [2, 4, 6]
    dist.destroy_process_group()
"""


def check_that_all_sum(launch: Launch, result: subprocess.CompletedProcess[str], times: int = 1) -> None:
    """The job ended well: all three ranks met, and only the victim was started again."""
    assert result.returncode == 0, result.stdout + result.stderr
    victim = launch.environment["TEST_VICTIM"]
    for rank in range(3):
        assert f"sum 0 6 12 18 24 of {rank}\n" in result.stdout
    lost = re.findall(
        r"rank (\d) on host \S+ failed: killed by signal 9 \(SIGKILL\), after \S+ s; the ranks had not all met yet",
        result.stderr,
    )
    assert lost == [victim] * times
    again = [f"multiring: rank {victim} is started again, replacement {n} of {times}" for n in range(1, times + 1)]
    assert [line for line in result.stderr.splitlines() if "started again" in line] == again
    assert "may go on" not in result.stderr
    wait_until(lambda: launch.processes() == [], "all processes have ended")


def script(launch: Launch, moment: str, victim: int, sums: str, **environment: str) -> str:
    launch.environment.update(TEST_MOMENT=moment, TEST_VICTIM=str(victim), **environment)
    return launch.script(STRIKES + AS_AT_FIRST + sums)


@pytest.mark.parametrize(("moment", "victim"), MOMENTS)
def test_it_is_met(launch: Launch, moment: str, victim: int) -> None:
    words = ("-n", "3", "--min-ranks", "2", "--max-replacements", "1")
    check_that_all_sum(launch, launch.run(*words, script(launch, moment, victim, SUMS)))


def test_all_may_be_needed_and_it_may_die_twice(launch: Launch) -> None:
    words = ("-n", "3", "--min-ranks", "3", "--max-replacements", "2")
    check_that_all_sum(launch, launch.run(*words, script(launch, "met", 2, SUMS, TEST_TIMES="2")), times=2)


@pytest.mark.parametrize(("moment", "victim"), [("arrived", 0), ("met", 2), ("attached", 0), ("attached", 2)])
def test_it_is_met_across_hosts(hosts: Launch, moment: str, victim: int) -> None:
    words = ("-H", "a:2,b:1", "--min-ranks", "2", "--max-replacements", "1", "--python", sys.executable)
    check_that_all_sum(hosts, hosts.run(*words, script(hosts, moment, victim, SUMS)))


@pytest.mark.parametrize(("moment", "victim"), [("import", 0), ("init", 1), ("arrived", 1), ("met", 0)])
def test_it_is_met_by_torch(launch: Launch, moment: str, victim: int) -> None:
    pytest.importorskip("torch")
    words = ("-n", "3", "--min-ranks", "2", "--max-replacements", "1")
    check_that_all_sum(launch, launch.run(*words, script(launch, moment, victim, TORCH_SUMS), seconds=240))


def test_who_dies_when_it_has_met_all_is_met_or_lost_to_the_job(launch: Launch) -> None:
    """It has told rank 0 so, and that goes on with it, unless the launcher has heard of its end before."""
    launch.environment.update(TEST_MOMENT="connected", TEST_VICTIM="1")
    sums = """
        mr.init()
        newcomer = os.environ["MULTIRING_REPLACEMENT"] != "0"
        try:
            if not newcomer:
                mr.barrier()
        except mr.PeerLost:
            mr.shrink()
        while mr.world_size() < 3:
            mr.grow()
        x = np.arange(5) * (mr.rank() + 1)
        mr.all_reduce(x)
        print("sum", *x, "of", mr.rank())
    """
    program = launch.script(textwrap.dedent(STRIKES) + textwrap.dedent(sums))
    result = launch.run("-n", "3", "--min-ranks", "2", "--max-replacements", "1", program)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(re.findall("sum 0 6 12 18 24 of ([0-2])\n", result.stdout)) == ["0", "1", "2"]
    assert result.stderr.count("rank 1 is started again, replacement 1 of 1") == 1
    assert ("had not all met yet" in result.stderr) != ("the job may go on with 2 of 3 ranks" in result.stderr)


@pytest.mark.parametrize("moment", ["met", "init"])
def test_when_no_replacement_is_left_the_others_name_it_at_once(launch: Launch, moment: str) -> None:
    words = ("-n", "3", "--min-ranks", "1", "--max-replacements", "1")  # all say why they fail
    result = launch.run(*words, script(launch, moment, 1, SUMS, TEST_TIMES="9"))
    assert result.returncode == 128 + 9, result.stdout + result.stderr
    why = (
        r"RendezvousError: rank 1 on host \S+ failed: killed by signal 9 \(SIGKILL\), after \S+ s, before all ranks "
        r"had met; no replacement is left \(--max-replacements 1\)"
    )
    assert len(re.findall(why, result.stderr)) == 2, result.stderr
    assert result.stderr.count("is started again") == 1
    wait_until(lambda: launch.processes() == [], "all processes have ended")


def test_who_fails_of_itself_is_not_started_again(launch: Launch) -> None:
    result = launch.run(
        *("-n", "3", "--min-ranks", "2", "--max-replacements", "5"),
        launch.script("""
            import os
            import multiring as mr
            if os.environ["RANK"] == "1":
                os.environ["MULTIRING_TOPOLOGY"] = "missing.toml"
            mr.init(streams=1 + (os.environ["RANK"] == "2"))
        """),
    )
    assert result.returncode == 1, result.stderr
    assert "started again" not in result.stderr
    assert "it must be the same everywhere" in result.stderr


def test_programs_that_end_by_themselves_are_not_started_again(launch: Launch) -> None:
    words = ("-n", "4", "--min-ranks", "2", "--max-replacements", "8", "--no-summary")
    result = launch.run(*words, "sh", "-c", "exit 2")
    assert result.returncode == 2, result.stderr
    assert "started again" not in result.stderr
    alone = launch.run("-n", "1", "--min-ranks", "1", "--max-replacements", "2", "sh", "-c", "kill -9 $$")
    assert alone.returncode == 128 + 9, alone.stderr
    assert "the ranks had not all met yet" not in alone.stderr


RETRIES = """
    import os, signal, time
    import numpy as np
    import multiring as mr

    newcomer = os.environ["MULTIRING_REPLACEMENT"] != "0"
    if not newcomer:
        try:
            mr.init(streams=1 + (os.environ["RANK"] == "1"))
            raise SystemExit("it has not failed")
        except mr.RendezvousError as error:
            assert "it must be the same everywhere" in str(error)
"""
"""The first init fails on all ranks."""


def test_ranks_that_begin_again_after_all_have_failed_get_replacements(launch: Launch) -> None:
    program = launch.script(
        textwrap.dedent(RETRIES)
        + textwrap.dedent("""
        mr.init()
        done, was_there = 0, False
        while done < 3:
            try:
                x = np.arange(5) * (mr.rank() + 1)
                mr.all_reduce(x)
                size = mr.world_size()
                assert (x == np.arange(5) * size * (size + 1) // 2).all()
                if not newcomer and mr.rank() == 2 and not done:
                    os.kill(os.getpid(), signal.SIGKILL)
                done += size == 3 and (newcomer or was_there)
                if not done:
                    mr.grow()
                    time.sleep(0.05)
            except mr.PeerLost:
                mr.shrink()
                was_there = True
        print("sum", *x, "of", mr.rank())
        """)
    )
    result = launch.run("-n", "3", "--min-ranks", "2", "--max-replacements", "1", program)
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(re.findall("sum 0 6 12 18 24 of ([0-2])\n", result.stdout)) == ["0", "1", "2"]
    assert "rank 2 is started again, replacement 1 of 1" in result.stderr


@pytest.mark.parametrize("lost", ["in init", "in init, before others see it", "before init"])
def test_who_is_lost_as_all_begin_again_is_not_replaced_and_that_is_told(launch: Launch, lost: str) -> None:
    launch.environment["TEST_LOST"] = lost
    program = launch.script(
        textwrap.dedent(RETRIES)
        + textwrap.dedent("""
        import pathlib
        from multiring.job import rendezvous
        prove, lost = rendezvous._prove, os.environ["TEST_LOST"]

        def die(*_):
            pathlib.Path("struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)

        def see_nothing_of_it(*given):
            while not pathlib.Path("struck").exists():
                time.sleep(0.02)
            time.sleep(0.5)  # it has ended
            return prove(*given)

        if os.environ["RANK"] == "2":
            if lost == "before init":
                die()
            rendezvous._prove = die
        elif lost.endswith("before others see it"):
            rendezvous._prove = see_nothing_of_it
        try:
            mr.init()
        except mr.RendezvousError as error:
            print("blames", error.rank)
        """)
    )
    result = launch.run("-n", "3", "--min-ranks", "2", "--max-replacements", "1", program)
    assert result.stdout.count("blames 2\n") == 2, result.stdout + result.stderr
    told = result.stderr.count("rank 2 is not started again: the first init() had failed on all ranks")
    assert told == (lost != "before init")
    assert "is started again, replacement" not in result.stderr


def test_a_child_that_keeps_the_input_of_rank_0_does_not_stop_that_of_the_next(hosts: Launch) -> None:
    words = ("-H", "a:2", "--python", sys.executable, "-n", "2", "--min-ranks", "2", "--max-replacements", "1")
    program = hosts.script("""
        import os, pathlib, signal, subprocess, sys, time
        struck = pathlib.Path("struck")
        if os.environ["RANK"] == "0":
            if not struck.exists():
                struck.touch()
                subprocess.Popen(["sleep", "100"])
                time.sleep(2)  # the pipe is full then
                os.kill(os.getpid(), signal.SIGKILL)
            print("the rest ends with", sys.stdin.read()[-5:])
            pathlib.Path("read").touch()
        while not pathlib.Path("read").exists():
            time.sleep(0.05)
    """)
    result = hosts.run(*words, program, stdin="line\n" * 100_000 + "end.\n", seconds=60)
    assert (result.returncode, result.stdout.strip()) == (0, "the rest ends with end."), result.stderr


@pytest.mark.parametrize("place", [(), ("-H", "a:2", "--python", sys.executable)], ids=["here", "another host"])
def test_rank_0_that_is_started_again_reads_on_to_the_end_of_the_input(hosts: Launch, place: tuple[str, ...]) -> None:
    words = (*place, "-n", "2", "--min-ranks", "2", "--max-replacements", "1")
    program = hosts.script("""
        import os, pathlib, signal, sys, time
        struck, again = pathlib.Path("struck"), pathlib.Path("again")
        while os.environ["RANK"] == "1" and not again.exists():  # who has ended well shows that the job had begun
            time.sleep(0.02)
        if os.environ["RANK"] == "0":
            if not struck.exists():
                struck.write_text(input())
                os.kill(os.getpid(), signal.SIGKILL)
            again.touch()
            print("after", struck.read_text(), "nothing is left" if sys.stdin.read() == "" else "more")
    """)
    result = hosts.run(*words, program, stdin="one line\n")
    assert (result.returncode, result.stdout) == (0, "after one line nothing is left\n"), result.stderr
    assert "rank 0 is started again, replacement 1 of 1" in result.stderr
