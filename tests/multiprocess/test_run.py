"""``multiring run`` on this host: what ranks are given, what becomes of their output, how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import hung_file_system
import pytest
from launching import REGROW, Launch, wait_until

PRINT_ENVIRONMENT = """
    import json, os, sys
    names = ("MULTIRING_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMP_NUM_THREADS", "PYTHONUNBUFFERED")
    found = {name: value for name, value in os.environ.items() if name.startswith(names)}
    found["secret"] = os.read(int(os.environ["MULTIRING_SECRET_FD"]), 1000).decode()
    found["arguments"] = sys.argv[1:]
    found["cpus"] = sorted(os.sched_getaffinity(0))
    with open(f"environment-{os.environ['RANK']}", "w") as file:
        json.dump(found, file)
"""


def environments(directory: Path, count: int) -> list[dict[str, object]]:
    return [json.loads((directory / f"environment-{rank}").read_text()) for rank in range(count)]


def test_each_rank_is_told_its_place(launch: Launch) -> None:
    result = launch.run("-n", "3", launch.script(PRINT_ENVIRONMENT), "-n", "7", "--lr=0.1", fresh=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    found = environments(launch.directory, 3)
    for rank, environment in enumerate(found):
        for prefix in ("", "MULTIRING_"):
            assert environment[prefix + "RANK"] == environment[prefix + "LOCAL_RANK"] == str(rank)
            assert environment[prefix + "WORLD_SIZE"] == environment[prefix + "LOCAL_WORLD_SIZE"] == "3"
        assert environment["arguments"] == ["-n", "7", "--lr=0.1"]
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["MULTIRING_RESTART"] == "0"
        assert environment["PYTHONUNBUFFERED"] == "1"
    for common in ("MASTER_PORT", "MULTIRING_STORE", "MULTIRING_JOB", "secret"):
        assert len({environment[common] for environment in found}) == 1
    assert len(str(found[0]["secret"])) >= 32


def test_so_many_ranks_that_end_at_once_say_nothing(launch: Launch) -> None:
    result = launch.run("-n", "300", "true")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_ranks_meet_at_the_launchers_store(launch: Launch) -> None:
    script = launch.script("""
        from multiring import env
        from multiring.job.bootstrap import rank_identity

        own = rank_identity()
        with own.meet(env.read(env.Settings)) as meeting:
            meeting.store.set(f"square of {own.rank}", b"%d" % own.rank**2)
            print(sum(int(meeting.store.get(f"square of {rank}", 30.0)) for rank in range(own.world_size)))
    """)
    result = launch.run("-n", "4", script)
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(result.stdout.splitlines()) == ["14", "[1] 14", "[2] 14", "[3] 14"]


def test_a_script_of_a_package_is_told_how_to_start_it(launch: Launch) -> None:
    (launch.directory / "package").mkdir()
    launch.script("answer = 42", "package/other.py")
    script = launch.script("from .other import answer; print(answer)", "package/train.py")
    result = launch.run("-n", "2", f"./{script}")
    assert result.returncode == 1
    assert result.stderr.endswith("./package/train.py is part of a package: start it by -m package.train\n")
    assert sorted(launch.run("-n", "2", "-m", "package.train").stdout.splitlines()) == ["42", "[1] 42"]


def test_an_error_of_all_ranks_is_shown_once(launch: Launch) -> None:
    script = launch.script("""
        import os, time

        def fail(reason):
            raise ValueError(reason)

        time.sleep(0.1 * int(os.environ["RANK"]))
        try:
            fail("the same")
        except ValueError:
            fail("of rank " + os.environ["RANK"] if os.environ["RANK"] == "2" else "of the others")
    """)
    result = launch.run("-n", "4", script)
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert lines.count("ValueError: the same") == lines.count("ValueError: of the others") == 1
    for rank in (1, 2, 3):
        assert lines.count(f"[{rank}] (the traceback of rank 0) ValueError: the same") == 1
        assert lines.count(f"[{rank}] (the traceback of rank 0) ValueError: of the others") == (rank != 2)
    assert lines.count("[2] ValueError: of rank 2") == 1
    assert result.stderr.count("Traceback") == 3  # two of rank 0, one of rank 2
    assert lines[-1] == "    ValueError: of the others"


def test_a_module_runs_with_this_python(launch: Launch) -> None:
    launch.script("import sys; print(sys.executable, sys.argv[1:])", "module.py")
    result = launch.run("-n", "1", "-m", "module", "--flag")
    assert result.stdout == f"{sys.executable} ['--flag']\n"


def test_any_other_word_is_executed(launch: Launch) -> None:
    program = launch.directory / "program"
    program.write_text("#!/bin/sh\necho rank $RANK of $WORLD_SIZE: $1\n")
    program.chmod(0o755)
    for word in ("./program", str(program)):
        assert launch.run("-n", "1", word, "yes").stdout == "rank 0 of 1: yes\n"
    assert sorted(launch.run("-np", "2", "sh", "-c", "echo $RANK").stdout.splitlines()) == ["0", "[1] 1"]


def test_lines_of_other_ranks_bear_their_rank(launch: Launch) -> None:
    script = launch.script(r"""
        import os, sys, time
        if os.environ["RANK"] == "0":
            print("first\nsecond\rthird", end="")
            open("written", "w").close()
        else:
            while not os.path.exists("written"):
                time.sleep(0.01)
            time.sleep(0.2)
            for part in ("one\n", "tw", "o\r", "\n\nthr", "ee\rfour\r", "\rfive \xe4"):
                sys.stdout.write(part)
                sys.stdout.flush()
                time.sleep(0.01)
            sys.stderr.write("error\nunfinished")
    """)
    result = launch.run("-n", "2", script)
    assert result.returncode == 0
    lines = ["[1] one", "[1] two", "[1] ", "[1] three", "[1] four", "[1] five ä"]
    assert result.stdout == "first\nsecond\nthird\n" + "\n".join(lines) + "\n"
    assert result.stderr == "[1] error\n[1] unfinished\n"


def test_any_bytes_pass(launch: Launch) -> None:
    script = launch.script("import os; os.write(1, bytes(range(256)) * 300 + b'\\n')")
    result = subprocess.run(
        [sys.executable, "-m", "multiring", "run", "-n", "2", script],
        cwd=launch.directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    whole = bytes(range(256)) * 300
    assert whole + b"\n" in result.stdout
    lines = re.split(rb"\r\n|\n|\r", whole)
    assert all(b"[1] " + line + b"\n" in result.stdout for line in lines)


def test_a_line_without_end_is_cut(launch: Launch) -> None:
    script = launch.script("import os; os.environ['RANK'] == '1' and os.write(1, b'x' * 1_000_000)")
    lines = launch.run("-n", "2", script).stdout.splitlines()
    assert all(line.startswith("[1] x") for line in lines)
    assert sum(line.count("x") for line in lines) == 1_000_000


def test_rank_0_reads_standard_input_and_the_others_nothing(launch: Launch) -> None:
    script = launch.script("import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))")
    result = launch.run("-n", "2", script, stdin="one\ntwo\n" * 20000)
    assert sorted(result.stdout.splitlines()) == sorted(["0 " + repr("one\ntwo\n" * 20000), "[1] 1 ''"])


def test_output_is_logged_for_each_rank(launch: Launch) -> None:
    script = launch.script("""
        import os, sys

        if os.environ["RANK"] != "2":
            print("out", os.environ["RANK"])
            print("error", file=sys.stderr)
    """)
    assert launch.run("-n", "3", "--log-dir", "logs/today", script).returncode == 0
    for rank in range(3):
        lines = (launch.directory / f"logs/today/rank-{rank}.log").read_text().splitlines()
        assert sorted(lines) == (["error", f"out {rank}"] if rank != 2 else [])


def test_a_full_disk_does_not_end_the_job(launch: Launch) -> None:
    script = launch.script("print(*range(100_000), sep='\\n'); open('trained', 'w').close()")
    logs = launch.directory / "logs"
    logs.mkdir()
    (logs / "rank-1.log").symlink_to("/dev/full")
    result = launch.run("-n", "2", "--log-dir", "logs", script, prefix=("sh", "-c", '"$@" > /dev/full', "sh"))
    assert result.returncode == 0
    assert sorted(result.stderr.splitlines()) == [
        f"multiring: cannot write to {name}: No space left on device; what else should go there is lost"
        for name in ("logs/rank-1.log", "standard output")
    ]
    assert (logs / "rank-0.log").read_text().splitlines() == [str(number) for number in range(100_000)]
    assert (launch.directory / "trained").exists()


def test_the_first_failure_ends_the_job_and_is_reported_last(launch: Launch) -> None:
    script = launch.script("""
        import os, sys, time
        rank = int(os.environ["RANK"])
        if rank == 2:
            for line in range(100):
                print("line", line)
            print("the reason", file=sys.stderr)
            sys.exit(7)
        try:
            time.sleep(60)
        finally:
            print("cleaned up", rank)
    """)
    result = launch.run("-n", "4", script)
    assert result.returncode == 7
    report = result.stderr[result.stderr.index("multiring:") :].splitlines()
    assert re.fullmatch(
        r"multiring: rank 2 on host \S+ failed: exit code 7, after \d+\.\d s; its last lines:", report[0]
    )
    assert report[-1] == "    the reason" or report[-1] == "    line 99"
    assert "    line 95" in report
    assert "    line 50" not in report
    assert launch.processes() == []


def test_the_rank_that_could_not_join_is_named_and_not_the_one_that_missed_it(launch: Launch) -> None:
    script = launch.script("""
        import os
        import time
        import multiring as mr

        if os.environ["RANK"] == "0":
            mr.init()  # ends first
        try:
            mr.init(interface="none-such")
        except mr.MultiringError:
            time.sleep(0.5)
            raise
    """)
    result = launch.run("-n", "2", script)
    assert result.returncode == 1
    assert "rank 1 failed to join: " in result.stderr
    assert re.search(r"rank 1 on host \S+ failed: exit code 1", result.stderr.split("failed to join")[-1])


def test_the_signal_that_ended_a_rank_is_named_and_passed_on(launch: Launch) -> None:
    script = launch.script("import os, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 11); time.sleep(60)")
    result = launch.run("-n", "2", script)
    assert result.returncode == 128 + signal.SIGSEGV
    assert re.search(r"rank 1 on host \S+ failed: killed by signal 11 \(SIGSEGV\)", result.stderr)


def test_a_rank_that_ignores_sigterm_is_killed(launch: Launch) -> None:
    script = launch.script("""
        import os, signal, sys, time
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open("ready", "w").close()
            time.sleep(100)
        while not os.path.exists("ready"):
            time.sleep(0.01)
        sys.exit(5)
    """)
    assert launch.run("-n", "2", script).returncode == 5
    assert launch.processes() == []


STARTS_CHILDREN = """
    import os, subprocess, sys, time
    # One child in the rank's session, one that leaves it.
    for new_session in (False, True):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=new_session)
    open(f"started-{os.environ['RANK']}", "w").close()
    time.sleep(float(sys.argv[1]))
"""


def test_nothing_that_ranks_started_outlives_the_job(launch: Launch) -> None:
    assert launch.run("-n", "2", launch.script(STARTS_CHILDREN), "0").returncode == 0
    assert launch.processes() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_an_ended_launcher_leaves_no_process(launch: Launch, number: int) -> None:
    with launch.start("-n", "2", launch.script(STARTS_CHILDREN), "100") as process:
        launch.wait_for_file("started-0")
        launch.wait_for_file("started-1")
        assert len(launch.processes()) >= 8  # launcher, agent, two ranks, four children
        process.send_signal(number)
        process.wait(30)
        wait_until(lambda: launch.processes() == [], "all processes have ended")
        if number == signal.SIGKILL:
            assert process.returncode == -signal.SIGKILL
        else:
            assert process.returncode == 128 + number


def test_a_killed_agent_leaves_no_process(launch: Launch) -> None:
    with launch.start("-n", "2", launch.script(STARTS_CHILDREN), "100") as process:
        launch.wait_for_file("started-0")
        launch.wait_for_file("started-1")
        (agent,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        os.kill(agent, signal.SIGKILL)
        assert process.wait(30) == 1
        assert process.stderr is not None
        assert "its agent has ended: killed by signal 9 (SIGKILL)" in process.stderr.read()
        wait_until(lambda: launch.processes() == [], "all processes have ended")


def test_ranks_may_end_well_after_an_interrupt(launch: Launch) -> None:
    script = launch.script("""
        import os, time
        try:
            open(f"ready-{os.environ['RANK']}", "w").close()
            time.sleep(100)
        except KeyboardInterrupt:
            time.sleep(0.5)
            print("saved")
    """)
    with launch.start("-n", "2", script) as process:
        launch.wait_for_file("ready-0")
        launch.wait_for_file("ready-1")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert sorted(output.splitlines()) == ["[1] saved", "saved"]
    assert errors == "multiring: ended by SIGINT\n"
    assert process.returncode == 130


def test_a_second_interrupt_kills_at_once(launch: Launch) -> None:
    script = launch.script("""
        import os, signal, time
        def ignore(number, frame):
            open(f"ignored-{os.environ['RANK']}", "w").close()
        def record(number, frame):
            open("terminated", "w").close()
        signal.signal(signal.SIGINT, ignore)
        signal.signal(signal.SIGTERM, record)
        open(f"ready-{os.environ['RANK']}", "w").close()
        while True:
            time.sleep(1)
    """)
    with launch.start("-n", "2", script) as process:
        for name in ("ready-0", "ready-1"):
            launch.wait_for_file(name)
        process.send_signal(signal.SIGINT)
        for name in ("ignored-0", "ignored-1"):
            launch.wait_for_file(name)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert not (launch.directory / "terminated").exists()


def test_user_signals_reach_the_ranks(launch: Launch) -> None:
    script = launch.script("""
        import os, signal, sys
        signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(0))
        open(f"ready-{os.environ['RANK']}", "w").close()
        signal.pause()
    """)
    with launch.start("-n", "2", script) as process:
        for name in ("ready-0", "ready-1"):
            launch.wait_for_file(name)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(30) == 0


def test_a_reader_that_has_gone_ends_the_job(launch: Launch) -> None:
    script = launch.script("import time\nwhile True:\n    print('line'); time.sleep(0.01)")
    with launch.start("-n", "2", script) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 128 + signal.SIGPIPE
        wait_until(lambda: launch.processes() == [], "all processes have ended")


def test_ranks_that_fail_may_be_missing(launch: Launch) -> None:
    words = ("sh", "-c", "test $RANK -lt $FIRST || exit 6")
    launch.environment["FIRST"] = "2"
    result = launch.run("-n", "3", "--min-ranks", "2", *words)
    assert result.returncode == 0, result.stderr
    assert "rank 2 on host" in result.stderr
    assert "exit code 6" in result.stderr
    assert "the job may go on with 2 of 3 ranks" in result.stderr
    launch.environment["FIRST"] = "1"
    result = launch.run("-n", "3", "--min-ranks", "2", *words)
    assert result.returncode == 6, result.stderr


def test_a_lost_rank_is_started_again_and_admitted(launch: Launch) -> None:
    launch.environment["TEST_VICTIM"] = "0"
    result = launch.run("-n", "4", "--min-ranks", "3", "--max-replacements", "2", launch.script(REGROW))
    assert result.returncode == 0, result.stdout + result.stderr
    for rank in range(4):
        assert f"sum 0 10 20 30 40 of {rank} beside 4 oldest 1\n" in result.stdout
    assert "the job may go on with 3 of 4 ranks" in result.stderr
    assert "rank 0 is started again, replacement 1 of 2" in result.stderr
    assert "ranks in" in result.stderr  # the summary


@pytest.mark.parametrize("replacements", [1, 0])
def test_a_stopped_rank_is_ended_when_the_others_have_gone_on_without_it(launch: Launch, replacements: int) -> None:
    left = 3 + replacements
    launch.environment.update(
        TEST_VICTIM="1", TEST_STRIKES="SIGSTOP", TEST_WANTED=str(left), MULTIRING_HEARTBEAT_TIMEOUT="3"
    )
    words = ("--min-ranks", "3", "--max-replacements", str(replacements), launch.script(REGROW))
    result = launch.run("-n", "4", *words)
    assert result.returncode == 0, result.stdout + result.stderr
    ended = r"rank 1 on host \S+ was stopped or out of reach, and was ended: the others had gone on without it, after "
    assert re.search(ended, result.stderr), result.stderr
    assert ("rank 1 is started again, replacement 1 of 1" in result.stderr) == bool(replacements)
    total = sum(range(1, left + 1))
    sums = " ".join(str(total * index) for index in range(5))
    for rank in range(left):
        assert f"sum {sums} of {rank} beside {left} oldest 0\n" in result.stdout
    wait_until(lambda: launch.processes() == [], "all processes have ended")


@pytest.mark.timeout(200)
@pytest.mark.skipif(hung_file_system.obstacle() is not None, reason=str(hung_file_system.obstacle()))
@pytest.mark.parametrize("replacements", [1, 0])
def test_a_killed_rank_that_the_kernel_holds_is_not_waited_for(launch: Launch, replacements: int) -> None:
    left = 3 + replacements
    hung = launch.directory / "hung"
    hung.mkdir()
    launch.environment.update(TEST_WANTED=str(left), MULTIRING_TIMEOUT="4", MULTIRING_HEARTBEAT_TIMEOUT="3")
    script = launch.script("""
        import os
        import numpy as np
        import multiring as mr

        mr.init()
        if os.environ["MULTIRING_REPLACEMENT"] == "0":
            mr.barrier()
            if mr.rank() == 2:
                open("hung/file")
            try:
                mr.barrier()
            except mr.CollectiveTimeout:
                mr.shrink(timeout=4)
            while mr.world_size() < int(os.environ["TEST_WANTED"]):
                mr.grow()
        x = np.arange(5) * (mr.rank() + 1)
        mr.all_reduce(x)
        print("sum", *x, "of", mr.rank(), "beside", mr.local_world_size())
    """)
    words = ("--min-ranks", "3", "--max-replacements", str(replacements), script)
    with hung_file_system.mounted(hung):
        result = launch.run("-n", "4", *words, seconds=170)
        assert result.returncode == 0, result.stdout + result.stderr
        (process,) = launch.processes()
        assert Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "D"
    held = f"its process {process} is left, in a wait that the kernel does not interrupt; the job may go on with 3 of 4"
    assert re.search(rf"multiring: rank 2 on host \S+ was stopped or out of reach, .*; {held}", result.stderr)
    assert ("rank 2 is started again, replacement 1 of 1" in result.stderr) == bool(replacements)
    total = sum(range(1, left + 1))
    sums = " ".join(str(total * index) for index in range(5))
    for rank in range(left):
        assert f"sum {sums} of {rank} beside {left}\n" in result.stdout
    wait_until(lambda: launch.processes() == [], "all processes have ended")


@pytest.mark.parametrize("options", [("--min-ranks", "1"), ("--min-ranks", "2", "--max-replacements", "1"), ()])
@pytest.mark.parametrize("victims", ["0,1", "0,3"])
def test_ranks_that_are_stopped_do_not_hold_up_the_end_of_a_job_that_cannot_go_on(
    launch: Launch, victims: str, options: tuple[str, ...]
) -> None:
    """The two that are left are no quorum without rank 0."""
    launch.environment.update(TEST_VICTIMS=victims, MULTIRING_HEARTBEAT_TIMEOUT="3")
    script = launch.script("""
        import os, signal
        import multiring as mr

        mr.init()
        if os.environ["MULTIRING_REPLACEMENT"] == "0":
            try:
                while True:
                    mr.barrier()
                    if os.environ["RANK"] in os.environ["TEST_VICTIMS"].split(","):
                        os.kill(os.getpid(), signal.SIGSTOP)
            except mr.PeerLost:
                mr.shrink()
    """)
    result = launch.run("-n", "4", *options, script)
    assert result.returncode in (1, 137), result.stderr
    stopped = [int(rank) for rank in victims.split(",")]
    both = ", ".join(rf"rank {rank} on host \S+" for rank in stopped)
    if options:
        assert re.search(f"{both} are all that is left, and stopped: they are ended", result.stderr), result.stderr
    else:
        assert re.search(f"it waited in vain for {both}, which are stopped", result.stderr), result.stderr
    wait_until(lambda: launch.processes() == [], "all processes have ended")


def test_the_end_names_who_left_early_and_not_what_the_job_had_recovered_from(launch: Launch) -> None:
    leaves = """
        import sys
        for _ in range(5):
            mr.all_reduce(x)
        if mr.rank() == 1:
            mr.shutdown()
            sys.exit()
        mr.all_reduce(x)
    """
    script = launch.script("import numpy as np; import multiring as mr; mr.init(); x = np.ones(10)\n" + dedent(leaves))
    result = launch.run("-n", "3", script)
    assert result.returncode == 1
    failed = r"rank [02] on host \S+ failed: exit code 1, after \S+ s; "
    left = failed + r"it lost rank 1 on host \S+, which had ended with exit code 0;"
    assert re.search(left, result.stderr), result.stderr
    launch.environment["TEST_VICTIM"] = "1"
    script = launch.script(dedent(REGROW) + dedent(leaves))
    result = launch.run("-n", "4", "--min-ranks", "3", "--max-replacements", "1", script)
    assert result.returncode == 1
    assert re.search(left.replace("[02]", "[023]"), result.stderr), result.stderr


@pytest.mark.parametrize("ends", ["os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)", "os.abort()"])
def test_the_end_names_who_is_lost_where_ranks_end_at_once_as_they_hear_of_it(launch: Launch, ends: str) -> None:
    script = launch.script(f"""
        import os, signal
        import numpy as np
        import multiring as mr

        mr.init(heartbeat_timeout=2)
        x = np.ones(10)
        for call in range(5):
            if call == 4 and mr.rank() == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            try:
                mr.all_reduce(x)
            except mr.PeerLost:
                {ends}
    """)
    result = launch.run("-n", "3", script)
    assert result.returncode == {"os._exit(1)": 1, "os.abort()": 134}.get(ends, 137)
    awaited = r"rank [02] on host \S+ failed: [^;]*; it waited in vain for rank 1 on host \S+, which is stopped"
    assert re.search(awaited, result.stderr), result.stderr


def test_the_end_names_who_fails_after_the_others_had_gone_on_without_those_of_a_loss(launch: Launch) -> None:
    """Rank 2 ends as it hears of the loss of rank 3, and is blamed for nothing; rank 1 ends the job."""
    script = launch.script("""
        import os, signal, time
        import multiring as mr

        mr.init()
        rank = mr.rank()
        try:
            while True:
                mr.barrier()
                if rank == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
        except mr.PeerLost:
            if rank == 2:
                os.abort()
            mr.shrink()
        mr.barrier()
        time.sleep(1)
        if rank == 1:
            os._exit(5)
        mr.barrier()
    """)
    result = launch.run("-n", "4", "--min-ranks", "2", script)
    assert result.returncode == 5, result.stderr
    *_, line = [line for line in result.stderr.splitlines() if line.startswith("multiring: rank ")]
    assert re.match(r"multiring: rank 1 on host \S+ failed: exit code 5, after ", line), result.stderr


@pytest.mark.parametrize(
    ("stays_away", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "is stopped"),
        ("time.sleep(60)", "had not ended"),
    ],
    ids=["stopped", "late"],
)
def test_the_end_names_who_stays_away_and_has_not_ended(launch: Launch, stays_away: str, how: str) -> None:
    script = launch.script(f"""
        import os, signal, time
        import numpy as np
        import multiring as mr
        mr.init(heartbeat_timeout=2, timeout=4)
        for call in range(5):
            if call == 4 and mr.rank() == 1:
                {stays_away}
            mr.all_reduce(np.ones(10))
    """)
    result = launch.run("-n", "3", script)
    assert result.returncode == 1
    failed = r"rank [02] on host \S+ failed: exit code 1, after \S+ s; "
    awaited = failed + r"it waited in vain for rank 1 on host \S+, which " + how + "; its last lines:"
    assert re.search(awaited, result.stderr), result.stderr


def test_replacements_that_are_not_admitted_do_not_end_the_job(launch: Launch) -> None:
    script = launch.script("""
        import os, pathlib, sys, time
        import multiring as mr
        replacement = int(os.environ["MULTIRING_REPLACEMENT"])
        assert ("MASTER_ADDR" in os.environ) == (not replacement)
        if not replacement:
            mr.init()
        if os.environ["RANK"] == "1":
            if replacement < 2:
                sys.exit(7)
            pathlib.Path("waits").touch()
            time.sleep(100)
        while not pathlib.Path("waits").exists():
            time.sleep(0.02)
    """)
    words = ("-n", "3", "--min-ranks", "2", "--max-replacements", "2", "--no-summary")
    result = launch.run(*words, script)
    assert result.returncode == 0, result.stderr  # the one that waits is ended, since nobody can admit it any more
    lines = [re.sub(r" on host \S+|, after .*? s\b", "", line) for line in result.stderr.splitlines()]
    assert lines == [
        "multiring: rank 1 failed: exit code 7; the job may go on with 2 of 3 ranks",
        "multiring: rank 1 is started again, replacement 1 of 2",
        "multiring: rank 1 failed: exit code 7; the others had not admitted it",
        "multiring: rank 1 is started again, replacement 2 of 2",
    ]
    assert not launch.processes()


def test_too_few_ranks_end_a_job_whose_replacements_wait(launch: Launch) -> None:
    script = launch.script("""
        import os, sys, time
        import multiring as mr
        if os.environ["MULTIRING_REPLACEMENT"] == "0":
            mr.init()
        if os.environ["MULTIRING_REPLACEMENT"] == "0" and os.environ["RANK"] != "0":
            time.sleep(int(os.environ["RANK"]))
            sys.exit(10 + int(os.environ["RANK"]))
        time.sleep(100)
    """)
    result = launch.run("-n", "3", "--min-ranks", "2", "--max-replacements", "9", script)
    assert result.returncode == 11, result.stderr
    assert result.stderr.count("is started again") == 1
    assert not launch.processes()


def test_restarts_count_up(launch: Launch) -> None:
    script = launch.script("""
        import os, sys
        restart = os.environ["MULTIRING_RESTART"]
        print("restart", restart)
        sys.exit(4 if restart != "2" and os.environ["RANK"] == "1" else 0)
    """)
    result = launch.run("-n", "2", "--max-restarts", "3", script)
    assert result.returncode == 0
    assert [line for line in result.stdout.splitlines() if line.startswith("[1]")] == [
        f"[1] restart {n}" for n in range(3)
    ]
    assert [line for line in result.stderr.splitlines() if "restart" in line and "multiring" in line] == [
        "multiring: restart 1 of 3",
        "multiring: restart 2 of 3",
    ]


def test_a_directory_that_is_gone(launch: Launch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    prefix = ("sh", "-c", f'cd {gone} && rmdir {gone} && exec "$@"', "sh")
    result = launch.run("-n", "2", "true", prefix=prefix)
    assert result.returncode == 2
    assert result.stderr == (
        "multiring run: the current directory, in which the ranks would start: No such file or directory\n"
    )


def test_restarts_end(launch: Launch) -> None:
    result = launch.run("-n", "2", "--max-restarts", "1", "sh", "-c", "echo start; exit 6")
    assert result.returncode == 6
    assert result.stdout.count("start") == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "2", "missing.py"], r"host \S+: no such script: missing.py \(looked for /\S+/missing.py\)"),
        (["-n", "2", "no-such-command"], r"no such command: no-such-command \(a script's name ends in .py"),
        (["-n", "2", "--bnd", "core", "true"], r"no such option: --bnd; did you mean --bind\?"),
        (["-n", "2", "--log_dir=x", "true"], r"no such option: --log_dir=x; did you mean --log-dir\?"),
        (["--nnodes", "2", "true"], r"no such option: --nnodes; did you mean --hosts\?"),
        (["-n", "2", "--whatever", "true"], r"no such option: --whatever; see multiring run --help"),
        (["-n", "two", "true"], r"invalid value for .-n.*: 'two' is not a whole number from 1 to 524288"),
        (["-n", "2", "--max-restarts", "-1", "true"], r"'-1' is not a whole number from 0 to 524288"),
        (["-n", "2", "--nproc-per-node", "2", "true"], r"-n 2 and --nproc-per-node 2 do not go together"),
        (["--nproc-per-node", "2", "-H", "a", "true"], r"--nproc-per-node 2 is for hosts that are not listed: -H a:2"),
        (["--hosts", "0", "-n", "2", "true"], r"--hosts='0': expected a whole number from 1 to 524288"),
        (["-n", "\u0663", "true"], r"invalid value for .-n.*: '\u0663' is not a whole number from 1 to 524288"),
        (["-n", f"{10**30}", "true"], rf"'{10**30}' is not a whole number from 1 to 524288"),
        (["--hosts", "a:2", "-H", "b:2", "true"], r"-H b:2 and --hosts a:2 do not go together: they are two lists"),
        (["-n", "2", "--bind", "socket", "true"], r"'--bind': .*'socket' is not one of 'core', 'numa', 'none'"),
        (["-n", "2", "--launcher", "rsh", "true"], r"'--launcher': .*'rsh' is not one of 'mpirun', 'srun'"),
        (["-n", "2", "--python", "/no/python", "true"], r"--python /no/python is for hosts that are reached by ssh"),
        (["-n", "2", "--min-ranks", "3", "true"], r"--min-ranks 3 of 2 ranks: the job could not even begin"),
        (["-n", "2", "--max-replacements", "1", "true"], r"--max-replacements 1 needs --min-ranks M"),
        (["-n", "2", "-m"], r"-m needs the name of a module"),
        (["true"], r"how many ranks\? Give -n N"),
        (["-n", "0", "true"], r"invalid value for .-n"),
        (["-n", "3", "-H", "a:2", "true"], r"-n 3 is more than the 2 slots of the hosts \(a 2\)"),
        (["-H", "a:two", "true"], r"-H a:two: 'a:two' is not host:ranks,host:ranks"),
        (["-H", "a:0", "true"], r"-H a:0: 'a:0' gives the host no slot"),
        (["-H", "a", "--hostfile", "f", "true"], r"-H and --hostfile do not go together"),
        (["--hostfile", "missing", "true"], r"cannot read the hostfile missing: No such file"),
        (["-n", "1", "--log-dir", "/proc/logs", "true"], r"cannot create --log-dir /proc/logs: .*No such file"),
    ],
)
def test_a_wrong_command_line_is_one_clear_error(launch: Launch, words: list[str], message: str) -> None:
    result = launch.run(*words)
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.search(message, " ".join(result.stderr.split()))
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("ranks", "descriptors"), [(100_000, 20_000), (200, 256)])
def test_more_ranks_than_the_host_has_room_for(launch: Launch, ranks: int, descriptors: int) -> None:
    result = launch.run("-n", f"{ranks}", "true", prefix=("prlimit", f"--nofile={descriptors}"))
    assert result.returncode == 2
    assert result.stdout == ""
    told = (
        rf"multiring run: host \S+: {ranks} ranks are more than .* leaves room for: start (\d+) here at most, or .*\n"
    )
    found = re.fullmatch(told, result.stderr)
    assert found, result.stderr
    assert 0 < int(found[1]) < descriptors / 3


@pytest.mark.parametrize(
    "words", [["--np", "2"], ["--nproc-per-node", "2"], ["--nproc_per_node=2"], ["--hosts", "localhost:2"]]
)
def test_options_that_people_know_from_other_launchers(launch: Launch, words: list[str]) -> None:
    result = launch.run(*words, "sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert sorted(result.stdout.splitlines()) == ["[1] rank 1 of 2", "rank 0 of 2"], result.stderr


def test_a_hostfile_is_read(launch: Launch) -> None:
    (launch.directory / "hosts").write_text("# two\nlocalhost slots=2  # here\n\n")
    result = launch.run("--hostfile", "hosts", "sh", "-c", "echo $WORLD_SIZE")
    assert sorted(result.stdout.splitlines()) == ["2", "[1] 2"]
    (launch.directory / "hosts").write_text("localhost slots=1\nlocalhost cores=4\n")
    result = launch.run("--hostfile", "hosts", "true")
    assert (result.returncode, result.stderr) == (
        2,
        "multiring run: hosts, line 2: 'localhost cores=4' is not 'host slots=2', 'host:2' or 'host'\n",
    )


def test_cores_are_divided(launch: Launch) -> None:
    script = launch.script(PRINT_ENVIRONMENT)
    allowed = sorted(os.sched_getaffinity(0))
    launch.environment.pop("OMP_NUM_THREADS", None)
    if len(allowed) >= 2:
        mask = ",".join(map(str, allowed[:2]))
        result = launch.run("-n", "2", "-v", script, prefix=("taskset", "-c", mask))
        assert [e["cpus"] for e in environments(launch.directory, 2)] == [[cpu] for cpu in allowed[:2]]
        assert [e["OMP_NUM_THREADS"] for e in environments(launch.directory, 2)] == ["1", "1"]
        assert re.search(rf"rank 1 on host \S+: bound to CPUs {allowed[1]}, 1 thread\n", result.stderr)
    one = ("taskset", "-c", str(allowed[-1]))
    launch.run("-n", "2", script, prefix=one)
    assert [e["cpus"] for e in environments(launch.directory, 2)] == [[allowed[-1]]] * 2
    launch.run("-n", "1", "--bind", "none", script, fresh=True)
    assert environments(launch.directory, 1)[0]["cpus"] == allowed
    launch.environment["OMP_NUM_THREADS"] = "5"
    launch.run("-n", "2", script, fresh=True)
    assert [e["OMP_NUM_THREADS"] for e in environments(launch.directory, 2)] == ["5", "5"]


@pytest.mark.parametrize(
    ("limit", "what"),
    [
        (
            6,
            r"multiring run: cannot start an agent on this host.*: \[Errno 24\] .* \(raise ulimit -n\)",
        ),
        (7, r"multiring run: cannot create an event loop.*: \[Errno 24\] .* \(raise ulimit -n\)"),
        (20, r"multiring run: host \S+: 8 ranks are more than the limit of 20 descriptors \(ulimit -n\), .* raise it"),
    ],
)
def test_too_few_descriptors_are_said_in_one_line(launch: Launch, limit: int, what: str) -> None:
    result = launch.run("-n", "8", launch.script("pass"), prefix=("prlimit", f"--nofile={limit}"))
    assert result.returncode != 0
    assert re.fullmatch(f"{what}\n", result.stderr), result.stderr


DISAGREE = """
    import sys, time
    import numpy as np
    import multiring as mr

    mr.init()
    what, odd = sys.argv[1], mr.rank() in map(int, sys.argv[2].split(","))
    x = np.arange(6, dtype=np.float32)
    mr.all_reduce(x)
    if what == "late" and not odd:
        time.sleep(0.5)
    if what == "order":
        calls = [mr.barrier, lambda: mr.all_reduce(x)]
        for call in calls if odd else calls[::-1]:
            call()
    elif what == "dtype":
        mr.all_reduce(x.astype(np.int32) if odd else x)
    elif what == "op":
        mr.all_reduce(x, "max" if odd else "sum")
    else:
        mr.all_reduce(np.zeros(7 if odd else 6, np.float32))
    mr.barrier()
"""
SUM_OF_6 = "all_reduce(dtype=float32, count=6, op=sum)"
ODD_CALLS = {
    "shape": "all_reduce(dtype=float32, count=7, op=sum)",
    "late": "all_reduce(dtype=float32, count=7, op=sum)",
    "dtype": "all_reduce(dtype=int32, count=6, op=sum)",
    "op": "all_reduce(dtype=float32, count=6, op=max)",
    "order": "barrier()",
}


NO_SIDE = "ranks disagree on {about}, and no side has most of them: "


@pytest.mark.parametrize("what", ODD_CALLS)
@pytest.mark.parametrize(
    ("ranks", "odd", "said"),
    [
        (2, "1", NO_SIDE + "rank 0 called {usual}, rank 1 called {other}"),
        (4, "0,3", NO_SIDE + "ranks 0 and 3 called {other}, ranks 1 and 2 called {usual}"),
        (4, "2", "rank 2 called {other} where ranks 0, 1 and 3 called {usual}: {about}"),
        (5, "0", "rank 0 called {other} where ranks 1, 2, 3 and 4 called {usual}: {about}"),
        (5, "1,3", "ranks 1 and 3 called {other} where ranks 0, 2 and 4 called {usual}: {about}"),
    ],
)
def test_whose_call_differs_from_most_is_named(launch: Launch, ranks: int, odd: str, said: str, what: str) -> None:
    result = launch.run("-n", str(ranks), launch.script(DISAGREE), what, odd)
    assert result.returncode == 1
    expected = said.format(about="call number 1 of communicator 0", usual=SUM_OF_6, other=ODD_CALLS[what])
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("multiring: ") and "failed" in line]
    found = re.fullmatch(
        r"multiring: rank (\d) on host \S+ failed: exit code 1, after \S+ s; (.*); its last lines:", line
    )
    assert found, line
    assert found[2] == expected
    assert found[1] in odd.split(",") or "no side" in said
    assert "multiring.errors.Mismatch: " in result.stderr.split(line)[1]


@pytest.mark.parametrize(
    ("what", "pair", "said"),
    [
        ("size", {"1", "2"}, r"rank 1 .* called send.*6.*, rank 2 .* called recv.*7.*: ranks disagree on message"),
        ("cycle", {"1", "2", "3"}, "ranks wait for each other in a cycle"),
    ],
)
def test_a_rank_that_only_hears_of_a_mismatch_of_messages_is_not_named(
    launch: Launch, what: str, pair: set[str], said: str
) -> None:
    """Ranks 0 and 4 have no part in it, and end first."""
    script = launch.script("""
        import sys, time
        import numpy as np
        import multiring as mr

        mr.init()
        rank, what = mr.rank(), sys.argv[1]
        mr.all_reduce(np.arange(5) + rank)
        x = np.arange(5 + rank, dtype=np.float32)
        try:
            if what == "size" and rank == 1:
                mr.send(x, 2)
            elif what == "size" and rank == 2:
                mr.recv(x, 1)
            elif what == "cycle" and 1 <= rank <= 3:
                mr.recv(x, rank % 3 + 1)
            mr.barrier()
        finally:
            time.sleep(0.3 if 1 <= rank <= 3 else 0)
    """)
    launch.environment["MULTIRING_TIMEOUT"] = "4"
    result = launch.run("-n", "5", script, what)
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("multiring: ") and "failed" in line]
    found = re.fullmatch(
        r"multiring: rank (\d) on host \S+ failed: exit code 1, after \S+ s; (.*); its last lines:", line
    )
    assert found, line
    assert found[1] in pair, line
    assert re.search(said, found[2]), line


LACKS_MEMORY = """
    import sys, time
    import numpy as np
    import multiring as mr

    world = mr.init().world
    mr.all_reduce(np.arange(5) + world.rank)
    if world.rank == int(sys.argv[2]):
        world.engine.fail(sys.argv[1], world.rank, f"rank {world.rank} lacks memory")
    try:
        while True:
            mr.barrier()
    finally:
        time.sleep(0.1 * world.rank)
"""


@pytest.mark.parametrize("what", ["shape", "late", "ResourceError"])
def test_nobody_is_started_again_after_a_failure_that_stands_on_all_ranks(launch: Launch, what: str) -> None:
    """Ranks end one after the other, and the first ones leave more than the fewest that go on."""
    script = launch.script(LACKS_MEMORY if what == "ResourceError" else DISAGREE)
    result = launch.run("-n", "4", "--min-ranks", "1", "--max-replacements", "4", script, what, "2")
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("multiring: ")]
    assert not [line for line in lines if "again" in line or "go on" in line], lines
    (line,) = [line for line in lines if " failed: exit code 1" in line]
    if what == "ResourceError":
        assert result.stderr.count("ResourceError: rank 2 lacks memory") >= 1
    else:
        assert f"rank 2 called {ODD_CALLS[what]} where ranks 0, 1 and 3 called {SUM_OF_6}: call number 1" in line


RANK_2_CALLED_ANOTHER = f"rank 2 called {ODD_CALLS['shape']} where ranks 0, 1 and 3 called {SUM_OF_6}: call number 0"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("mr.all_reduce(x)", RANK_2_CALLED_ANOTHER),
        ("mr.all_reduce(x, async_op=True).wait()", RANK_2_CALLED_ANOTHER),
        (
            "mr.new_group([0, 2, 1, 3] if odd else [0, 1, 2, 3])",
            "rank 2 makes a group of [0, 2, 1, 3], rank 0 one of [0, 1, 2, 3]",
        ),
    ],
    ids=["call", "work", "group"],
)
def test_nobody_is_started_again_where_ranks_end_by_themselves_as_they_hear_of_such_a_failure(
    launch: Launch, call: str, said: str
) -> None:
    """Rank 2 ends first, which alone sees the difference of a group."""
    script = launch.script(f"""
        import os, time
        import numpy as np
        import multiring as mr

        mr.init()
        odd = mr.rank() == 2
        x = np.arange(7 if odd else 6, dtype=np.float32)
        try:
            {call}
            mr.barrier()
        except mr.Mismatch:
            time.sleep(0.1 * ((mr.rank() + 2) % 4))
            os._exit(3)
    """)
    result = launch.run("-n", "4", "--min-ranks", "1", "--max-replacements", "4", script)
    assert result.returncode == 3
    lines = [line for line in result.stderr.splitlines() if line.startswith("multiring: ")]
    assert not [line for line in lines if "again" in line or "go on" in line], lines
    (line,) = [line for line in lines if " failed: exit code 3" in line]
    assert said in line


def test_a_replacement_that_is_stopped_while_it_waits_is_replaced(launch: Launch) -> None:
    script = launch.script("""
        import os, signal, time
        import numpy as np
        import multiring as mr
        from multiring.job.admission import JoinQueue

        replacement = os.environ["MULTIRING_REPLACEMENT"]
        if replacement == "1":
            JoinQueue.invitation = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
        mr.init()
        if replacement == "0":
            try:
                while True:
                    mr.barrier()
                    if mr.rank() == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
            except mr.PeerLost:
                mr.shrink()
            while mr.world_size() < 3:
                mr.grow()
                time.sleep(0.05)
        x = np.arange(5) * (mr.rank() + 1)
        mr.all_reduce(x)
        print("sum", *x, "of", mr.rank(), "replacement", replacement)
    """)
    result = launch.run("-n", "3", "--min-ranks", "2", "--max-replacements", "3", script, seconds=120)
    assert result.returncode == 0, result.stderr
    told = sorted(line.partition("sum ")[2] for line in result.stdout.splitlines())
    assert told == [f"0 6 12 18 24 of {rank} replacement {2 if rank == 1 else 0}" for rank in range(3)], result.stderr
    assert re.search(
        r"rank 1 on host \S+ was stopped or out of reach, and was ended: the others had gone on without it, "
        r"after \S+ s; the others had not admitted it\n",
        result.stderr,
    ), result.stderr


@pytest.mark.parametrize("more", [(), ("--max-replacements", "1")], ids=str)
def test_whose_call_differs_is_named_after_a_loss_without_which_the_others_had_gone_on(
    launch: Launch, more: tuple[str, ...]
) -> None:
    script = launch.script("""
        import os, signal, sys, time
        import numpy as np
        import multiring as mr

        if os.environ["MULTIRING_REPLACEMENT"] != "0":
            time.sleep(60)
        mr.init()
        try:
            while True:
                mr.barrier()
                if mr.rank() == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        except mr.PeerLost:
            mr.shrink()
        mr.all_reduce(np.zeros(7 if os.environ["RANK"] == "2" else 6, np.float32))
        mr.barrier()
    """)
    result = launch.run("-n", "5", "--min-ranks", "4", *more, script)
    assert result.returncode == 1, result.stderr
    *_, line = [line for line in result.stderr.splitlines() if line.startswith("multiring: ")]
    assert re.fullmatch(
        r"multiring: rank 2 on host \S+ failed: exit code 1, after \S+ s; rank 2 called all_reduce\(dtype=float32, "
        r"count=7, op=sum\) where ranks 1, 3 and 4 called all_reduce\(dtype=float32, count=6, op=sum\): "
        r"call number \d+ of communicator 0; its last lines:",
        line,
    ), result.stderr


@pytest.mark.parametrize("lost", [0, 1])
def test_a_message_that_its_receiver_expected_otherwise_shows_both_sides(launch: Launch, lost: int) -> None:
    """The first ``lost`` ranks are killed, and the others shrink: they have their numbers of the job's start here."""
    script = launch.script("""
        import os, signal, sys
        import numpy as np
        import multiring as mr

        mr.init()
        if sys.argv[1] == "1":
            try:
                while True:
                    mr.barrier()
                    if mr.rank() == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
            except mr.PeerLost:
                mr.shrink()
        if mr.rank() == 1:
            mr.send(np.zeros(4), 0)
        if mr.rank() == 0:
            mr.recv(np.zeros(3), 1)
        mr.barrier()
    """)
    result = launch.run("-n", "4", "--min-ranks", "3", script, str(lost))
    assert result.returncode == 1
    *_, line = [line for line in result.stderr.splitlines() if line.startswith("multiring: rank ")]
    one, other = lost, lost + 1
    assert re.search(
        rf"; rank {one} \(host \S+\) called recv\(count=3\), rank {other} \(host \S+\) called send\(count=4\): ranks "
        rf"disagree on message number 0 with tag 0 from rank {other} to rank {one} of communicator 0; its last lines:$",
        line,
    ), result.stderr
