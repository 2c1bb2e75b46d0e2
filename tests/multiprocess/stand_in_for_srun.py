"""Stands for Slurm's srun on one host: starts ``-n`` tasks with the variables that srun gives each of a step."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--version", action="version", version="slurm 24.05.4")
    parser.add_argument("-n", "--ntasks", type=int, default=1)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    size = str(asked.ntasks)
    step = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_STEP_TASKS_PER_NODE": size,
        "SLURM_NTASKS": size,
        "SLURM_NODEID": "0",
    }
    tasks = [
        subprocess.Popen(asked.program, env={**os.environ, **step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
        for rank in map(str, range(asked.ntasks))
    ]
    return max(abs(task.wait()) for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
