"""``multiring run --hosts``: the same command typed on each host, without ssh."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fork_server import Forked
from free_ports import free_port
from launching import Launch, wait_until


@pytest.fixture
def port() -> int:
    return free_port()


def words(port: int, index: int, *rest: str, ranks: int = 3, hosts: int = 2) -> list[str]:
    given = ("--hosts", hosts, "--host-index", index, "--rendezvous", f"127.0.0.1:{port}", "-n", ranks)
    return [*map(str, given), *rest]


@contextmanager
def two_hosts(launch: Launch, port: int, *program: str, **environment: str) -> Iterator[tuple[Forked, Forked]]:
    with (
        launch.start(*words(port, 1, *program), **environment) as second,
        launch.start(*words(port, 0, *program), **environment) as first,
    ):
        yield first, second


def test_hosts_find_each_other_and_share_the_ranks(launch: Launch, port: int) -> None:
    script = launch.script("""
        import os
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        print(*(os.environ[name] for name in names))
    """)
    with two_hosts(launch, port, script) as (first, second):
        output, errors = first.communicate(timeout=60)
        assert (first.returncode, second.wait(30)) == (0, 0)
        assert sorted(output.splitlines()) == ["0 0 3 2", "[1] 1 1 3 2", "[2] 2 0 3 1"]
        assert errors == f"multiring: waiting at 127.0.0.1:{port} for host 1 of 2\n"
        assert second.communicate() == (
            "",
            f"multiring: host 1 of 2: the output is shown on host 0, 127.0.0.1:{port}\n",
        )


def test_pods_of_kubeflow_need_no_option(launch: Launch, port: int) -> None:
    script = launch.script("""
        import numpy as np
        import multiring as mr

        mr.init()
        x = np.arange(3) * 10**mr.rank()
        mr.all_reduce(x)
        print("rank", mr.rank(), *x)
    """)
    pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    with (
        launch.start(script, **pod, PET_NODE_RANK="1") as second,
        launch.start(script, **pod, PET_NODE_RANK="0") as first,
    ):
        output, errors = first.communicate(timeout=60)
        assert (first.returncode, second.wait(30)) == (0, 0), errors
    lines = sorted(line.rpartition("] ")[2] for line in output.splitlines())
    assert lines == [f"rank {rank} 0 1111 2222" for rank in range(4)]


def test_each_host_runs_what_was_typed_there(launch: Launch, port: int, tmp_path: Path) -> None:
    program = ("sh", "-c", 'echo "$RANK $WHERE $PWD"')
    other = Launch(launch.directory / "other")
    other.directory.mkdir()
    with (
        launch.start(*words(port, 0, *program, ranks=2), WHERE="first") as first,
        other.start(*words(port, 1, *program, ranks=2), WHERE="second"),
    ):
        output = first.communicate(timeout=60)[0]
    assert sorted(output.splitlines()) == [f"0 first {launch.directory}", f"[1] 1 second {other.directory}"]


def test_a_failure_ends_all_hosts_with_its_code(launch: Launch, port: int) -> None:
    script = launch.script("import os, sys, time; os.environ['RANK'] == '2' and sys.exit(9); time.sleep(100)")
    with two_hosts(launch, port, script) as (first, second):
        errors = first.communicate(timeout=60)[1]
        assert (first.returncode, second.wait(30)) == (9, 9)
    assert re.search(r"multiring: rank 2 on host \S+ failed: exit code 9, after [\d.]+ s\n$", errors)
    assert launch.processes() == []


SLEEP = """
    import os, time
    open(f"started-{os.environ['RANK']}", "w").close()
    time.sleep(100)
"""


def test_a_killed_launcher_leaves_no_process_on_other_hosts(launch: Launch, port: int) -> None:
    with two_hosts(launch, port, launch.script(SLEEP)) as (first, second):
        for rank in range(3):
            launch.wait_for_file(f"started-{rank}")
        first.kill()
        assert second.wait(30) == 2
        assert second.stderr is not None
        assert f"the connection to host 0, 127.0.0.1:{port}, is lost: all ranks here have been ended" in (
            second.stderr.read()
        )
        wait_until(lambda: launch.processes() == [], "all processes have ended")


def test_an_interrupt_on_another_host_ends_the_job(launch: Launch, port: int) -> None:
    with two_hosts(launch, port, launch.script(SLEEP)) as (first, second):
        for rank in range(3):
            launch.wait_for_file(f"started-{rank}")
        second.send_signal(signal.SIGINT)
        errors = first.communicate(timeout=60)[1]
        assert first.returncode == 1
        assert second.wait(30) == 130
    assert re.search(r"multiring: host \S+: ended by SIGINT, with rank 2\n$", errors)
    assert launch.processes() == []


EVICTED = """
    import os, signal, sys, time
    import numpy as np
    import multiring as mr

    def save(*_):
        open(f"saving-{mr.rank()}", "w").close()
        time.sleep(1.5)  # longer than the others wait for a rank that has failed
        open(f"saved-{mr.rank()}", "a").write(str(step))
        print(f"rank {mr.rank()} saved step {step}")
        sys.exit(0)

    mr.init()
    signal.signal(signal.SIGTERM, save)
    step = 0
    while True:
        x = np.arange(5) * (mr.rank() + 1)
        mr.all_reduce(x)
        assert x.tolist() == [0, 10, 20, 30, 40]
        step += 1
        if step == 5:
            open(f"started-{mr.rank()}", "w").close()
"""
"""A job of four ranks that save their state when told to end."""


@pytest.mark.parametrize("evicted", [0, 1])
def test_a_pod_that_is_evicted_ends_in_good_order_and_is_named(launch: Launch, port: int, evicted: int) -> None:
    pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    script = launch.script(EVICTED)
    with (
        launch.start(script, **pod, PET_NODE_RANK="1", MULTIRING_HOST="pod-1") as second,
        launch.start(script, **pod, PET_NODE_RANK="0", MULTIRING_HOST="pod-0") as first,
    ):
        for rank in range(4):
            launch.wait_for_file(f"started-{rank}")
        (first, second)[evicted].send_signal(signal.SIGTERM)
        output, errors = first.communicate(timeout=60)
        others = second.communicate(timeout=60)[1]
    said = [errors, others]
    reason = "host pod-0: ended by SIGTERM" if evicted == 0 else "host pod-1: ended by SIGTERM, with ranks 2, 3"
    assert said[evicted].endswith("multiring: ended by SIGTERM\n"), said
    assert said[1 - evicted].endswith(f"multiring: {reason}\n"), said
    assert (first.returncode, second.returncode) == ((143, 143) if evicted == 0 else (1, 143))
    for rank in range(2 * evicted, 2 * evicted + 2):
        saved = (launch.directory / f"saved-{rank}").read_text()  # once: written by one call of the handler
        assert f"rank {rank} saved step {saved}\n" in output
    assert launch.processes() == []


def test_a_job_may_go_on_without_a_pod_that_is_evicted(launch: Launch, port: int) -> None:
    script = launch.script("""
        import os
        import numpy as np
        import multiring as mr

        mr.init()
        try:
            while True:
                mr.barrier()
                open(f"started-{mr.rank()}", "w").close()
        except mr.PeerLost:
            mr.shrink()
        x = np.arange(5) * (mr.rank() + 1)
        mr.all_reduce(x)
        print("sum", *x)
    """)
    with (
        launch.start(*words(port, 1, "--min-ranks", "2", script, ranks=4), MULTIRING_HOST="pod-1") as second,
        launch.start(*words(port, 0, "--min-ranks", "2", script, ranks=4), MULTIRING_HOST="pod-0") as first,
    ):
        for rank in range(4):
            launch.wait_for_file(f"started-{rank}")
        second.send_signal(signal.SIGTERM)
        output, errors = first.communicate(timeout=60)
        assert (first.returncode, second.wait(30)) == (0, 143), errors
    assert output.count("sum 0 3 6 9 12\n") == 2
    lost = "host pod-1: ended by SIGTERM, with ranks 2, 3; the job may go on with 2 of 4 ranks"
    assert errors.count(lost) == 1
    assert "failed" not in errors


def test_who_typed_something_else_is_refused_and_may_try_again(launch: Launch, port: int) -> None:
    with launch.start(*words(port, 0, "true")) as first:
        for wrong, reason in (
            (words(port, 1, "false"), r"was started with program \['false'\], host 0 with \['true'\]"),
            (words(port, 1, "true", ranks=4), "was started with ranks 4, host 0 with 3"),
            (words(port, 1, "true", hosts=3), "was started with hosts 3, host 0 with 2"),
            (words(port, 2, "true", hosts=3), "was started with --host-index 2, but there are 2 hosts"),
        ):
            result = launch.run(*wrong)
            assert result.returncode == 2
            assert re.search(f"multiring run: host \\S+ {reason}", result.stderr)
        assert launch.run(*words(port, 1, "true")).returncode == 0
        assert first.wait(30) == 0


def test_an_index_is_taken_once(launch: Launch, port: int) -> None:
    with (
        launch.start(*words(port, 0, "true", hosts=3)) as first,
        launch.start(*words(port, 1, "true", hosts=3)) as second,
    ):
        assert second.stderr is not None
        second.stderr.readline()
        result = launch.run(*words(port, 1, "true", hosts=3))
        assert result.returncode == 2
        assert re.search(r"host (\S+) and host \1 were both started with --host-index 1", result.stderr)
        assert launch.run(*words(port, 2, "true", hosts=3)).returncode == 0
        assert (first.wait(30), second.wait(30)) == (0, 0)


def test_a_secret_may_be_given(launch: Launch, port: int) -> None:
    secret = launch.directory / "secret"
    secret.write_text("sixteen bytes or more\n")
    other = launch.directory / "other"
    other.write_text("another one of sixteen bytes\n")
    script = launch.script("""
        import os
        print(os.read(int(os.environ["MULTIRING_SECRET_FD"]), 100), os.environ.get("MULTIRING_SECRET_FILE"))
    """)
    with launch.start(*words(port, 0, script, ranks=2), MULTIRING_SECRET_FILE=str(secret)) as first:
        with launch.start(*words(port, 1, script, ranks=2), MULTIRING_SECRET_FILE=str(other)) as stranger:
            assert stranger.wait(30) == 2
            assert stranger.stderr is not None
            assert "it does not know this job's secret (MULTIRING_SECRET_FILE must be the same" in (
                stranger.stderr.read()
            )
        with launch.start(*words(port, 1, script, ranks=2), MULTIRING_SECRET_FILE=str(secret)) as second:
            output = first.communicate(timeout=60)[0]
            assert second.wait(30) == 0
    assert sorted(output.splitlines()) == [
        "[1] b'sixteen bytes or more' None",
        "b'sixteen bytes or more' None",
    ]


def test_strangers_are_no_obstacle(launch: Launch, port: int) -> None:
    with launch.start(*words(port, 0, "true")) as first:
        assert first.stderr is not None
        first.stderr.readline()
        with socket.create_connection(("127.0.0.1", port)) as stranger, socket.create_connection(("127.0.0.1", port)):
            stranger.sendall(json.dumps({"kind": "hello"}).encode() * 100)
            assert launch.run(*words(port, 1, "true")).returncode == 0
            assert first.wait(30) == 0


def test_hosts_that_do_not_come_are_named(launch: Launch, port: int) -> None:
    launch.environment["MULTIRING_INIT_TIMEOUT"] = "1"
    result = launch.run(*words(port, 0, "true", hosts=3))
    assert result.returncode == 2
    assert f"host 1, 2 of 3 has not come to 127.0.0.1:{port} within 1 s" in result.stderr
    result = launch.run(*words(port, 1, "true"))
    assert result.returncode == 2
    assert f"host 0 does not answer within 1 s (MULTIRING_INIT_TIMEOUT): 127.0.0.1:{port}: Conn" in result.stderr
    assert launch.processes() == []


def test_a_taken_port_is_named(launch: Launch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        result = launch.run(*words(port, 0, "true"))
    assert result.returncode == 2
    assert result.stderr.startswith(f"multiring run: the rendezvous port {port} is taken on this host")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--hosts", "2"], "--hosts needs --host-index and --rendezvous too"),
        (["--hosts", "2", "--host-index", "0", "-H", "a"], "--hosts and --host-index and -H do not go together"),
        (["--hosts", "2", "--host-index", "2", "--rendezvous", "a:1", "-n", "2"], "--host-index 2 of --hosts 2"),
        (["--hosts", "2", "--host-index", "0", "--rendezvous", "a", "-n", "2"], "--rendezvous a: expected host:port"),
        (["--hosts", "2", "--host-index", "0", "--rendezvous", "a:1", "-n", "1"], "-n 1 ranks on --hosts 2"),
        (["--hosts", "2", "--host-index", "0", "--rendezvous", "a:1"], "how many ranks? Give -n N"),
    ],
)
def test_options_that_do_not_fit_are_refused(launch: Launch, given: list[str], message: str) -> None:
    result = launch.run(*given, "true")
    assert result.returncode == 2
    assert result.stderr.startswith(f"multiring run: {message}")
