"""Jobs that encrypt: they compute, lose ranks and get others as in clear, and nobody in clear is one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from free_ports import free_port
from launching import Launch

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


def test_a_rank_is_lost_and_replaced(launch: Launch) -> None:
    """All that ranks say to each other: in collectives, while they agree on who is left, and in the join queue."""
    words = ("-n", "4", "--encrypt", "--min-ranks", "3", "--max-replacements", "1", "--no-summary")
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
    its, ours = ("encrypts (MULTIRING_ENCRYPT=1)", "does not")[:: 1 if encrypts else -1]
    words = (
        f"it {its}, and this process {ours}: set MULTIRING_ENCRYPT=1 for all ranks and what starts them, or for none"
    )
    assert "the job's store cannot be used: " in result.stderr
    assert words in result.stderr


def test_where_the_command_is_typed_a_secret_is_given(launch: Launch, tmp_path: Path) -> None:
    port = free_port()
    words = [("--hosts", "2", "--host-index", index, "--rendezvous", f"127.0.0.1:{port}", "-n", "2") for index in "01"]
    refused = launch.run(*words[0], "--encrypt", "true")
    assert (refused.returncode, refused.stderr) == (
        2,
        "multiring run: MULTIRING_ENCRYPT=1 needs a secret that nobody else knows, and host 0 would tell it to the "
        "others in clear: give all ranks the same MULTIRING_SECRET_FILE\n",
    )
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret of a test's job")
    secret.chmod(0o600)
    script = launch.script("""
        import numpy as np
        import multiring as mr

        mr.init()
        x = np.arange(3) + mr.rank()
        mr.all_reduce(x)
        print(*x, mr.local_world_size())
    """)
    given = {"MULTIRING_SECRET_FILE": str(secret), "MULTIRING_ENCRYPT": "1"}
    with (
        launch.start(*words[1], script, **given, MULTIRING_HOST="b") as second,
        launch.start(*words[0], script, **given, MULTIRING_HOST="a") as first,
    ):
        output, errors = first.communicate(timeout=60)
        assert (first.returncode, second.wait(30)) == (0, 0), errors
        assert [line.rpartition("] ")[2] for line in output.splitlines()] == ["1 3 5 1"] * 2
