"""Tests of ranks that share a real device, if there is one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(400),
]


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("program", ["cuda_collectives.py", "cuda_training.py", "cuda_losses.py"])
def test_ranks_that_share_a_device(program: str, hosts: int, streams: int) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "2"}
    given |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MULTIRING_INTERFACE": "lo", "MULTIRING_STREAMS": str(streams)}
    ranks = [
        subprocess.Popen(
            [sys.executable, HERE / program],
            env={**os.environ, **given, "RANK": str(rank), "MULTIRING_HOST": f"host{rank % hosts}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    expected = [0, -signal.SIGKILL] if program == "cuda_losses.py" else [0, 0]
    assert [rank.returncode for rank in ranks] == expected, "\n".join(outputs)
