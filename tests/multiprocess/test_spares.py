"""Hosts that take the places of lost ones: ``multiring run --spares``, over a stand-in for ssh."""

from __future__ import annotations

import os
import re
import signal
import sys

import pytest
from launching import Launch, wait_until

JOB = """
    import os, signal, sys, time
    from pathlib import Path
    import numpy as np
    import multiring as mr

    rank, replacement = int(os.environ["RANK"]), int(os.environ["MULTIRING_REPLACEMENT"])
    if int(os.environ["MULTIRING_RESTART"]):
        print("restarted", rank, "on", os.environ["FAKE_HOST"], "local", os.environ["LOCAL_RANK"], replacement)
        sys.exit()
    mr.init()
    Path(f"started-{rank}-{replacement}").touch()
    if replacement == 0:
        try:
            while True:
                mr.barrier()
                time.sleep(0.01)
        except mr.PeerLost:
            mr.shrink()
    while mr.world_size() < int(os.environ["WORLD_SIZE"]):
        mr.grow()
    x = np.arange(3) * (rank + 1)
    mr.all_reduce(x)
    print("sum", *x, "of", rank, "on", os.environ["FAKE_HOST"], "beside", mr.local_world_size(), flush=True)
    mr.barrier()
    if "TEST_FAILS" in os.environ and replacement:
        raise RuntimeError("after it was admitted")
    mr.barrier()
"""


def words(listed: str, spares: str, ranks: int, replacements: int = 4) -> list[str]:
    some = ["-H", listed, "--spares", spares, "--min-ranks", str(ranks), "--max-replacements", str(replacements)]
    return [*some, "--no-summary", "--python", sys.executable]


def ended(
    hosts: Launch, words: list[str], lost: list[tuple[str, int]], ranks: int, **more: str
) -> tuple[int, str, str]:
    """Exit code, output and errors of a job; once it runs, agents are ended by signals."""
    with hosts.start(*words, hosts.script(JOB), **more) as process:
        for rank in range(ranks):
            hosts.wait_for_file(f"started-{rank}-0")
        for host, number in lost:
            os.kill(hosts.agent_of(host), number)
        code = process.wait(60)
        assert process.stdout is not None
        assert process.stderr is not None
        output, errors = process.stdout.read(), process.stderr.read()
    wait_until(lambda: hosts.processes() == [], "all processes have ended")
    return code, output, errors


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGKILL, "host b: it is lost; the job may go on with 2 of 4 ranks"),
        (signal.SIGTERM, "host b: ended by SIGTERM, with ranks 2, 3; the job may go on with 2 of 4 ranks"),
    ],
)
def test_the_ranks_of_a_lost_host_start_again_on_a_spare_one(hosts: Launch, number: int, why: str) -> None:
    code, output, errors = ended(hosts, words("a:2,b:2", "c:2", 2), [("b", number)], 4)
    assert code == 0, output + errors
    for rank, host in enumerate("aacc"):
        assert f"sum 0 10 20 of {rank} on {host} beside 2\n" in output
    assert why in errors
    assert "ranks 2, 3 of host b start again on host c, replacements 1, 2 of 4\n" in errors


def test_rank_0_may_move_too(hosts: Launch) -> None:
    code, output, errors = ended(hosts, words("a:1,b:2", "c:2", 2), [("a", signal.SIGKILL)], 3)
    assert code == 0, output + errors
    for rank, (host, beside) in enumerate([("c", 1), ("b", 2), ("b", 2)]):
        assert f"sum 0 6 12 of {rank} on {host} beside {beside}\n" in output
    assert "rank 0 of host a starts again on host c, replacement 1 of 4\n" in errors


def test_a_spare_that_is_small_or_lost_itself_is_passed_over(hosts: Launch) -> None:
    lost = [("d", signal.SIGKILL), ("b", signal.SIGKILL)]
    code, output, errors = ended(hosts, words("a:2,b:2,f:1", "c:1,d:2,e:2", 2), lost, 5)
    assert code == 0, output + errors
    for rank, host in enumerate("aaeef"):
        assert f"sum 0 15 30 of {rank} on {host} beside {2 if host != 'f' else 1}\n" in output
    assert re.search(r"host d: ssh has ended: .*(\n.*)*; it cannot take the place of host b", errors), errors
    assert "ranks 2, 3 of host b start again on host e, replacements 1, 2 of 4\n" in errors


def test_a_restart_keeps_the_host_that_came(hosts: Launch) -> None:
    """It fails once the spare is in use, and starts again as a whole: there, and no more on the lost one."""
    some = ["--max-restarts", "1", *words("a:1,b:1", "c:1", 1)]
    code, output, errors = ended(hosts, some, [("b", signal.SIGKILL)], 2, TEST_FAILS="yes")
    assert code == 0, output + errors
    assert re.search("multiring: rank 1 on host c failed: exit code 1, .*(\n.*)*multiring: restart 1 of 1\n", errors), (
        errors
    )
    assert "ssh has ended" not in errors  # the job had recovered from that
    for rank, host in enumerate("ac"):
        assert f"restarted {rank} on {host} local 0 0\n" in output


@pytest.mark.parametrize(
    ("spares", "replacements", "message"),
    [
        ("c:2", 1, "ranks 2, 3 of host b need 2 replacements, and 1 of 1 are left (--max-replacements): they are not"),
        ("c:1", 2, "host b is lost; its ranks 2, 3 start there again when it is back"),
    ],
)
def test_where_no_spare_can_help_the_others_go_on(hosts: Launch, spares: str, replacements: int, message: str) -> None:
    script = hosts.script(
        """
        import os
        from pathlib import Path
        import multiring as mr

        mr.init()
        Path(f"started-{mr.rank()}-0").touch()
        try:
            while True:
                mr.barrier()
        except mr.PeerLost:
            mr.shrink()
        print("left", mr.world_size())
        """
    )
    with hosts.start(*words("a:2,b:2,f:1", spares, 2, replacements), script) as process:
        for rank in range(5):
            hosts.wait_for_file(f"started-{rank}-0")
        os.kill(hosts.agent_of("b"), signal.SIGKILL)
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read().count("left 3\n") == 3
        assert message in process.stderr.read()


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (["-H", "a:2", "--spares", "c:2"], r"--spares c:2 needs --max-replacements N"),
        (
            ["--max-replacements", "1", "--min-ranks", "1", "-n", "2", "--spares", "c"],
            "needs the hosts of the job by -H",
        ),
        (words("a:2", "c:1", 1), r"--spares c:1: it could take the place of no host, as each has 2 ranks or more"),
        (words("a:1", "a:1", 1), "--spares a: it is the machine of host a, and would be lost with it"),
        (words("localhost:1", "localhost:1", 1)[:-2], "--spares localhost: it is the machine of host localhost"),
        (words("localhost:1", "127.0.0.1:1", 1)[:-2], "--spares 127.0.0.1: it is the machine of host localhost"),
        (words("a:1", "c:x", 1), r"--spares c:x: 'c:x' is not host:ranks,host:ranks"),
        (words("a:1", "missing", 1)[:-2], r"host missing: .*"),
        (["--launcher", "mpirun", *words("a:1", "c:1", 1)[:-2]], "--spares and --launcher do not go together"),
    ],
)
def test_what_cannot_be_a_spare_is_refused(hosts: Launch, listed: list[str], message: str) -> None:
    if "missing" in listed:
        listed = [*listed, "--ssh", "false"]
    result = hosts.run(*listed, "true")
    assert result.returncode == 2
    assert re.search(message, result.stderr), result.stderr
    wait_until(lambda: hosts.processes() == [], "all processes have ended")
