"""A script for torch runs under ``multiring run`` as it is."""

from __future__ import annotations

import forking_launcher
import pytest
from forking_launcher import TORCH
from launching import Launch

pytest.importorskip("torch")


def test_ranks_meet_and_meet_again_after_a_restart(launch: Launch) -> None:
    script = launch.script("""
        import os, time
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        x = torch.ones(1)
        dist.all_reduce(x)
        print(x.item())
        open(f"summed-{dist.get_rank()}", "w").close()
        if os.environ["MULTIRING_RESTART"] == "0" and dist.get_rank() == 1:
            while not os.path.exists("summed-0"):
                time.sleep(0.01)
            os._exit(1)
        dist.barrier()
        dist.destroy_process_group()
    """)
    result = launch.run("-n", "2", "--max-restarts", "1", script)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["2.0", "2.0", "[1] 2.0", "[1] 2.0"]


@pytest.mark.parametrize(
    ("ranks", "odd", "said"),
    [
        (2, "1", "and no side has most of them: rank 0 called {usual}, rank 1 called {other}; "),
        (4, "0", "; rank 0 called {other} where ranks 1, 2 and 3 called {usual}: call number "),
        (5, "4", "; rank 4 called {other} where ranks 0, 1, 2 and 3 called {usual}: call number "),
    ],
)
def test_whose_call_differs_from_most_is_named(launch: Launch, ranks: int, odd: str, said: str) -> None:
    script = launch.script("""
        import sys
        import torch
        import torch.distributed as dist

        dist.init_process_group("multiring")
        x = torch.ones(6)
        dist.all_reduce(x)
        dist.all_reduce(torch.ones(7) if dist.get_rank() == int(sys.argv[1]) else x, dist.ReduceOp.MAX)
        dist.barrier()
    """)
    result = forking_launcher.run(
        *("run", "-n", str(ranks), script, odd),
        imports=TORCH,
        environment=launch.environment,
        directory=launch.directory,
        timeout=120,
    )
    assert result.returncode == 1
    usual, other = (f"all_reduce(dtype=float32, count={count}, op=max)" for count in (6, 7))
    assert said.format(usual=usual, other=other) in result.stderr, result.stderr
