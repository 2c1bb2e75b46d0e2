"""The manifests in examples/kubernetes have only fields of their APIs, and their commands run with what is injected."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_ports import free_port
from image_steps import steps

yaml = pytest.importorskip("yaml")
MANIFESTS = Path(__file__).parents[2] / "examples" / "kubernetes"
LAUNCHERS = ("MULTIRING_", "SLURM_", "OMPI_", "PMI", "PET_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "JOB_")
PROGRAM = """
import os
import numpy as np
import multiring as mr

mr.init()
mr.all_reduce(x := np.arange(5) * (mr.rank() + 1))
print("sum", mr.world_size(), x.tolist(), flush=True)
while os.path.exists("endless"):
    mr.barrier()
mr.shutdown()
"""


def documents(name):
    return list(yaml.safe_load_all((MANIFESTS / name).read_text(encoding="utf-8")))


def unknown(value, kind, models, path="") -> list[str]:
    """The paths in ``value`` that the model called ``kind`` does not have."""
    if inner := re.fullmatch(r"list\[(.*)\]", kind, re.IGNORECASE):
        return [p for i, v in enumerate(value) for p in unknown(v, inner[1], models, f"{path}[{i}]")]
    if inner := re.fullmatch(r"dict\([^,]*, *(.*)\)|dict\[[^,]*, *(.*)\]", kind, re.IGNORECASE):
        return [p for k, v in value.items() for p in unknown(v, inner[1] or inner[2], models, f"{path}.{k}")]
    model = next((getattr(m, kind) for m in models if hasattr(m, kind)), None)
    if model is None:
        assert kind in ("str", "int", "bool", "object", "float", "datetime"), f"no model {kind} at {path}"
        plain = {"int": int, "bool": bool, "str": str}.get(kind, object)
        return [] if isinstance(value, plain) else [f"{path}: {value!r} is no {kind}"]
    fields = {key: model.openapi_types[name] for name, key in model.attribute_map.items()}
    return [
        p
        for k, v in value.items()
        for p in (unknown(v, fields[k], models, f"{path}.{k}") if k in fields else [f"{path}.{k}"])
    ]


def test_the_indexed_job_has_only_fields_of_kubernetes() -> None:
    client = pytest.importorskip("kubernetes.client")
    kinds = {"Service": "V1Service", "NetworkPolicy": "V1NetworkPolicy", "Job": "V1Job"}
    found = documents("indexed-job.yaml")
    assert [d["kind"] for d in found] == list(kinds)
    assert [unknown(d, kinds[d["kind"]], [client]) for d in found] == [[], [], []]
    found[2]["spec"]["template"]["spec"]["subDomain"] = "digits"
    assert unknown(found[2], "V1Job", [client]) == [".spec.template.spec.subDomain"]


def pod_specs(value) -> list:
    """All that are pods in a manifest, whichever resource they stand in."""
    if isinstance(value, list):
        return [pod for each in value for pod in pod_specs(each)]
    if not isinstance(value, dict):
        return []
    return [value] if "containers" in value else [pod for each in value.values() for pod in pod_specs(each)]


NO_RIGHTS = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
SECCOMP = {"seccompProfile": {"type": "RuntimeDefault"}}


@pytest.mark.parametrize("path", sorted(MANIFESTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_pods_have_few_rights_and_ask_for_what_they_need(path: Path) -> None:
    """PodSecurity's level "restricted"; in the MPIJob root, with the capabilities of sshd where that runs."""
    pods = [pod for document in documents(path.name) for pod in pod_specs(document)]
    assert len(pods) == {"train-job": 0, "pytorchjob": 2, "mpijob": 2}.get(path.stem, 1)
    for pod in pods:
        (container,) = pod["containers"]
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        rights = container["securityContext"]
        if path.stem == "mpijob":
            sshd = (
                {"add": ["NET_BIND_SERVICE", "SETGID", "SETUID", "SYS_CHROOT"]} if container["name"] == "worker" else {}
            )
            assert rights == NO_RIGHTS | SECCOMP | {"runAsUser": 0, "capabilities": {"drop": ["ALL"], **sshd}}
        else:
            assert rights == NO_RIGHTS
            group = {"fsGroup": 1000} if path.stem == "indexed-job" else {}
            assert pod["securityContext"] == SECCOMP | {"runAsNonRoot": True, "runAsUser": 1000} | group


def test_the_user_of_the_image_reads_the_secret() -> None:
    pod = documents("indexed-job.yaml")[2]["spec"]["template"]["spec"]
    (user,) = (text for word, text in steps((MANIFESTS / "Dockerfile").read_text(encoding="utf-8")) if word == "USER")
    assert user == f"1000:{pod['securityContext']['fsGroup']}"
    assert pod["volumes"][0]["secret"]["defaultMode"] & 0o040  # Kubernetes gives the volume to that group


def test_the_pytorchjob_has_only_fields_of_its_operator() -> None:
    client = pytest.importorskip("kubernetes.client")
    models = pytest.importorskip("kubeflow.training.models")
    (job,) = documents("pytorchjob.yaml")
    assert unknown(job, "KubeflowOrgV1PyTorchJob", [models, client]) == []


def test_the_pods_of_the_mpijob_have_only_fields_of_kubernetes() -> None:
    client = pytest.importorskip("kubernetes.client")
    (job,) = documents("mpijob.yaml")
    replicas = job["spec"]["mpiReplicaSpecs"]
    assert list(replicas) == ["Launcher", "Worker"]
    assert [unknown(r["template"], "V1PodTemplateSpec", [client]) for r in replicas.values()] == [[], []]


@pytest.mark.parametrize(
    ("name", "kind"), [("cluster-training-runtime", "ClusterTrainingRuntime"), ("train-job", "TrainJob")]
)
def test_the_manifests_of_the_trainer_come_back_whole(name: str, kind: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (document,) = documents(f"{name}.yaml")
    assert getattr(models, f"TrainerV1alpha1{kind}").from_dict(document).to_dict() == document


@contextlib.contextmanager
def started(tmp_path, command, environments) -> Iterator[list[subprocess.Popen[str]]]:
    """``command`` once per environment, at once, as process 1 of each pod."""
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    assert command[0] == "multiring"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    with contextlib.ExitStack() as stack:
        processes = []
        for injected in environments:
            words = [re.sub(r"\$\((\w+)\)", lambda found, env=injected: env[found[1]], word) for word in command[1:]]
            process = subprocess.Popen(
                [sys.executable, "-m", "multiring", *words],
                cwd=tmp_path,
                env={**clean, **injected},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def pods(tmp_path, command, environments) -> None:
    """Expect the sums of four ranks in the output of the first of the pods."""
    with started(tmp_path, command, environments) as processes:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert [output.count("sum 4 [0, 10, 20, 30, 40]") for output in outputs] == [4, 0], outputs


@pytest.mark.timeout(180)
def test_the_train_job_runs_with_the_variables_of_the_torch_plugin(tmp_path) -> None:
    trainer = documents("train-job.yaml")[0]["spec"]["trainer"]
    shared = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
    }
    pods(tmp_path, trainer["command"], [{**shared, "PET_NODE_RANK": str(i)} for i in range(trainer["numNodes"])])


@pytest.mark.timeout(180)
def test_a_pod_of_the_pytorchjob_that_is_evicted_is_named(tmp_path) -> None:
    replicas = documents("pytorchjob.yaml")[0]["spec"]["pytorchReplicaSpecs"]
    containers = [replicas[kind]["template"]["spec"]["containers"][0] for kind in ("Master", "Worker")]
    assert containers[0] == containers[1]
    size = sum(replica["replicas"] for replica in replicas.values())
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        "PET_NNODES": str(size),
        "PET_NPROC_PER_NODE": "auto",
    }
    environments = [
        {**shared, "RANK": str(i), "PET_NODE_RANK": str(i), "MULTIRING_HOST": f"pod-{i}"} for i in range(size)
    ]
    (tmp_path / "endless").touch()
    with started(tmp_path, containers[0]["command"], environments) as (first, second):
        seen = []
        while sum("sum 2 [0, 3, 6, 9, 12]" in line for line in seen) < 2:
            seen.append(first.stdout.readline())
            assert seen[-1], seen
        second.terminate()
        rest = first.communicate(timeout=120)[0]
        second.communicate(timeout=120)
    assert second.returncode == 128 + signal.SIGTERM
    assert first.returncode == 1, rest
    assert "host pod-1: ended by SIGTERM, with rank 1" in rest


@pytest.mark.timeout(180)
def test_the_indexed_job_runs_with_its_index(tmp_path) -> None:
    job = documents("indexed-job.yaml")[2]["spec"]
    container = job["template"]["spec"]["containers"][0]
    (tmp_path / "secret").write_text("of this job, 16 bytes or more", encoding="utf-8")
    (tmp_path / "secret").chmod(job["template"]["spec"]["volumes"][0]["secret"]["defaultMode"])
    env = {e["name"]: e["value"] for e in container["env"]}
    assert env["MULTIRING_SECRET_FILE"] == container["volumeMounts"][0]["mountPath"] + "/secret"
    env["MULTIRING_SECRET_FILE"] = str(tmp_path / "secret")
    command = [w.replace("digits-0.digits:29400", f"127.0.0.1:{free_port()}") for w in container["command"]]
    pods(tmp_path, command, [{**env, "JOB_COMPLETION_INDEX": str(i)} for i in range(job["completions"])])
