"""Stands for Slurm's srun on one host: starts ``-n`` tasks with the variables that srun 22.05 gives each of a step.

``--mpi pmi2`` adds those of its PMI server; with ``-m arbitrary`` another host than that of task 0 is listed first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--version", action="version", version="slurm-wlm 22.05.8")
    parser.add_argument("-n", "--ntasks", type=int, default=1)
    parser.add_argument("-m", "--distribution", choices=["block", "arbitrary"])
    parser.add_argument("--mpi", choices=["none", "pmi2"], default="none")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    environment = {**os.environ, **step(str(asked.ntasks), arbitrary=asked.distribution == "arbitrary")}
    tasks = [
        subprocess.Popen(asked.program, env={**environment, **task(rank, str(asked.ntasks), asked.mpi)})
        for rank in map(str, range(asked.ntasks))
    ]
    return max(abs(each.wait()) for each in tasks)


def step(size: str, *, arbitrary: bool) -> dict[str, str]:
    unreachable = "255.255.255.255"  # refused by the system itself, at once
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NODELIST": f"{unreachable},localhost" if arbitrary else "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_STEP_TASKS_PER_NODE": size,
        "SLURM_NTASKS": size,
        "SLURM_NODEID": "0",
        **({"SLURM_DISTRIBUTION": "arbitrary"} if arbitrary else {}),
    }


def task(rank: str, size: str, mpi: str) -> dict[str, str]:
    pmi2 = {"PMI_FD": "13", "PMI_JOBID": "4711.3", "PMI_RANK": rank, "PMI_SIZE": size}
    return {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, **(pmi2 if mpi == "pmi2" else {})}


if __name__ == "__main__":
    sys.exit(main())
