"""A script for torch runs under ``multiring run`` as it is."""

from __future__ import annotations

import pytest
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
