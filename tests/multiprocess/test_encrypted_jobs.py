"""Jobs that encrypt or sum: they compute, lose ranks and get others as in clear, and nobody in clear is one of them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import fork_server
import pytest
from free_ports import free_port
from launching import Launch

REMEDY = ": set MULTIRING_ENCRYPT=1 for all ranks and what starts them, or for none"

MEET = """
import os
import multiring as mr

try:
    mr.init(host="host" + os.environ["RANK"])
except mr.RendezvousError as error:
    print(error)
"""
"""A rank of a job that cannot meet."""

LOSE_ONE = """
    import os, signal
    import numpy as np
    import multiring as mr

    mr.init(host="aabb"[int(os.environ["RANK"])])
    if os.environ["MULTIRING_REPLACEMENT"] == "0":
        x = np.arange(100_000.0) * (mr.rank() + 1)
        mr.all_reduce(x)
        assert (x == 10 * np.arange(100_000.0)).all()
        try:
            while True:
                mr.barrier()
                if mr.rank() == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
        except mr.PeerLost:
            mr.shrink()
        while mr.world_size() < 4:
            mr.grow()
    x = np.arange(5) * (mr.rank() + 1)
    mr.all_reduce(x)
    print("sum", *x, "of", mr.rank(), "beside", mr.local_world_size())
"""


@pytest.mark.parametrize("start", [("--encrypt",), ("--encrypt", "--fork"), ("--encrypt", "--standby", "1"), ()])
def test_a_rank_is_lost_and_replaced(launch: Launch, start: tuple[str, ...]) -> None:
    """All that ranks say to each other: in collectives, while they agree on who is left, and in the join queue."""
    words = ("-n", "4", *start, "--min-ranks", "3", "--max-replacements", "1", "--no-summary")
    launch.environment["MULTIRING_CHECKSUM"] = "1"
    result = launch.run(*words, launch.script(LOSE_ONE))
    assert result.returncode == 0, result.stderr
    assert sorted(line.rpartition("] ")[2] for line in result.stdout.splitlines()) == [
        f"sum 0 10 20 30 40 of {rank} beside 2" for rank in range(4)
    ]


@pytest.mark.parametrize("encrypts", [0, 1])
def test_a_rank_that_does_not_encrypt_is_refused_at_once(launch: Launch, encrypts: int) -> None:
    script = launch.script(f"""
        import os
        import multiring as mr

        mr.init(encrypt=int(os.environ["RANK"]) == {encrypts})
    """)
    result = launch.run("-n", "2", *(["--encrypt"] if encrypts else []), "--no-summary", script)
    assert result.returncode == 1
    does, does_not = ("it", f"rank {1 - encrypts}") if encrypts else (f"rank {encrypts}", "it")
    assert "the job's store cannot be used: " in result.stderr
    assert f": {does} encrypts (MULTIRING_ENCRYPT=1), and {does_not} does not{REMEDY}" in result.stderr


@pytest.mark.parametrize("encrypts", [0, 1])
def test_by_hand_both_ranks_end_at_once_when_one_encrypts(
    launch: Launch, secret: dict[str, str], encrypts: int
) -> None:
    """Each would wait for the other far longer than the test may take."""
    meets = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **secret}
    ranks = [
        fork_server.start(
            MEET,
            environment={
                **launch.environment,
                **meets,
                "RANK": str(rank),
                "MULTIRING_ENCRYPT": str(int(rank == encrypts)),
                "MULTIRING_INIT_TIMEOUT": "600",
                "OMP_NUM_THREADS": "1",
            },
            seat=rank,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    words = f"rank {encrypts} encrypts (MULTIRING_ENCRYPT=1), and rank {1 - encrypts} does not{REMEDY}\n"
    assert said == [(words, ""), (f"the job's store cannot be used: {words}", "")]


@contextmanager
def overheard(port: int, heard: list[bytes]) -> Iterator[int]:
    """A port that leads to another one; what passes is heard."""

    def pass_on(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                heard.append(data)
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with suppress(OSError):  # the test is over
            while True:
                near = stack.enter_context(server.accept()[0])
                try:
                    far = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                except ConnectionRefusedError:  # host 0 is not there yet
                    near.close()
                    continue
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=pass_on, args=ends, daemon=True).start()

    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as server:
        serving = threading.Thread(target=serve)
        serving.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        serving.join()


def typed(index: int, port: int) -> list[str]:
    return ["--hosts", "2", "--host-index", str(index), "--rendezvous", f"127.0.0.1:{port}", "-n", "2"]


@pytest.fixture
def secret(tmp_path: Path) -> dict[str, str]:
    """The variable that names the file of a secret."""
    file = tmp_path / "secret"
    file.write_bytes(b"a secret of a test's job")
    file.chmod(0o600)
    return {"MULTIRING_SECRET_FILE": str(file)}


def test_where_the_command_is_typed_the_launchers_speak_in_secret(launch: Launch, secret: dict[str, str]) -> None:
    port, heard = free_port(), list[bytes]()
    script = launch.script("""
        import numpy as np
        import multiring as mr

        mr.init()
        x = np.arange(3) + mr.rank()
        mr.all_reduce(x)
        print(*x, mr.local_world_size(), "of a job that encrypts")
    """)
    given = {**secret, "MULTIRING_ENCRYPT": "1"}
    with (
        overheard(port, heard) as other_port,
        launch.start(*typed(1, other_port), script, **given, MULTIRING_HOST="b") as second,
        launch.start(*typed(0, port), script, **given, MULTIRING_HOST="a") as first,
    ):
        output, errors = first.communicate(timeout=60)
        assert (first.returncode, second.wait(30)) == (0, 0), errors
    lines = [line.rpartition("] ")[2] for line in output.splitlines()]
    assert lines == ["1 3 5 1 of a job that encrypts"] * 2
    stream = b"".join(heard)
    assert b"multirng" in stream  # the handshake
    assert not any(word in stream for word in (b"of a job", b"kind", b"MULTIRING_"))


def test_hosts_of_which_one_does_not_encrypt_name_both(launch: Launch, secret: dict[str, str]) -> None:
    port = free_port()
    with (
        launch.start(*typed(0, port), "true", **secret, MULTIRING_ENCRYPT="1"),
        launch.start(*typed(1, port), "true", **secret) as second,
    ):
        _, errors = second.communicate(timeout=60)
        assert second.wait(30) == 2
    words = "host 0 encrypts (MULTIRING_ENCRYPT=1), and host 1 does not: set MULTIRING_ENCRYPT=1 for all ranks and what"
    assert words in errors


def test_hosts_that_encrypt_know_each_other_by_a_secret(launch: Launch) -> None:
    refused = launch.run(*typed(0, free_port()), "--encrypt", "true")
    assert (refused.returncode, refused.stderr) == (
        2,
        "multiring run: MULTIRING_ENCRYPT=1 needs a secret that nobody else knows, and the hosts have to know each "
        "other by one: give all ranks the same MULTIRING_SECRET_FILE\n",
    )
