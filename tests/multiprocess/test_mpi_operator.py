"""The launcher's command in the manifest of the MPIJob, with what Kubeflow's operator writes, over OpenSSH itself."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import jobs
import pytest
import yaml
from loopback_sshd import SSHD, serving
from mpi_jobs import clean_environment, directory_of

EXAMPLES = Path(__file__).parents[2] / "examples"
DOOMED = """
import os
import signal

import multiring as mr
import numpy as np

mr.init()
mr.all_reduce(x := np.arange(3) * (mr.rank() + 1))
print("rank", mr.rank(), "of", os.environ["MULTIRING_HOST"], "has", x.tolist(), flush=True)
mr.barrier()
if mr.rank() == 3:
    os.kill(os.getpid(), signal.SIGKILL)
mr.all_reduce(x)
"""

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(SSHD is None, reason="no sshd here: apt-get install openssh-server"),
]


def test_the_mpijob_runs_on_its_workers_and_a_killed_rank_is_named(tmp_path: Path) -> None:
    mpi = directory_of("Open MPI")
    (job,) = yaml.safe_load_all((EXAMPLES / "kubernetes" / "mpijob.yaml").read_text(encoding="utf-8"))
    replicas, slots = job["spec"]["mpiReplicaSpecs"], job["spec"]["slotsPerWorker"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    pods = [f"{job['metadata']['name']}-worker-{i}" for i in range(replicas["Worker"]["replicas"])]
    workers = {f"{pod}.digits.default.svc": pod for pod in pods}
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{name} slots={slots}\n" for name in workers))
    given = {each["name"]: each["value"].replace("/etc/mpi/hostfile", str(hostfile)) for each in launcher["env"]}
    operators = {  # mpi-operator 0.8.2, newLauncherPodTemplate
        "K_MPI_JOB_ROLE": "launcher",
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": str(hostfile),
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_MCA_orte_set_default_slots": str(slots),
    }
    client = tmp_path / "bin" / "ssh"
    client.parent.mkdir()
    client.write_text(f'#!/bin/sh\nPATH={os.environ["PATH"]} exec ssh -F {tmp_path}/ssh "$@"\n')
    client.chmod(0o755)
    # What an image has by its ENV, which sshd does not hand on; the worker's name stands for that of its pod.
    image = f"PATH={mpi}:$PATH PYTHONPATH={jobs.SOURCE} OMP_NUM_THREADS=1"
    options = {
        name: f'ForceCommand MULTIRING_HOST={pod} {image} /bin/sh -c "$SSH_ORIGINAL_COMMAND"'
        for name, pod in workers.items()
    }
    # Both workers are this machine, by whose name and the ranks' numbers on it Open MPI names their shared memory.
    apart = {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}
    path = os.pathsep.join([str(client.parent), str(mpi), os.environ["PATH"]])

    def trained(program: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(program, encoding="utf-8")
        return subprocess.run(
            launcher["command"],
            cwd=tmp_path,
            env={**clean_environment(), "PATH": path, **operators, **given, **apart},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=80,
        )

    with serving(tmp_path, options):
        whole = trained((EXAMPLES / "anywhere.py").read_text(encoding="utf-8"))
        lost = trained(DOOMED)
    assert whole.returncode == 0, whole.stdout
    assert lost.returncode == 128 + 9, lost.stdout
    for rank in range(4):
        assert f"rank {rank} of 4: y = 3.0 x + -2.0" in whole.stdout, whole.stdout
        assert f"rank {rank} of {pods[rank // slots]} has [0, 10, 20]" in lost.stdout, lost.stdout
    assert "prterun noticed that process rank 3 " in lost.stdout, lost.stdout
