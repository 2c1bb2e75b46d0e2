"""MULTIRING_ENGINE=mpi: the same schedules and bits as by the native engine, over Open MPI and MPICH."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import collectives
import jobs
import mpi_programs
import pytest
import tuning_ranks
from mpi_jobs import run_ranks, start_ranks

SAME_PLANS = {"MULTIRING_PROBE": "off"}


@pytest.mark.parametrize(("implementation", "size"), [("Open MPI", 3), ("MPICH", 2), ("MPICH", 4)])
def test_every_collective_with_the_bits_of_the_native_engine(implementation: str, size: int) -> None:
    bits = run_ranks(collectives.grid, size, 20_011, implementation=implementation, **SAME_PLANS)
    assert set(bits) == set(jobs.run(collectives.grid, size, 20_011, environment=SAME_PLANS))


@pytest.mark.parametrize(
    ("hosts", "program", "wire"),
    [
        ("aba", ("grid", 5_003), ""),
        ("aab", ("narrow",), "host=bfloat16"),
        ("aab", ("narrow_blocks",), "host=int8"),
        ("aab", ("narrow_blocks", 64, 0.15), "host=int4"),
        ("aab", ("two_bits",), "host=int2"),
        ("aabb", ("keeping", 6), "host=int8"),
        ("aab", ("keeping", 6), "host=bfloat16"),
    ],
)
def test_plans_of_several_levels(hosts: str, program: tuple[str | float, ...], wire: str) -> None:
    settings = {**SAME_PLANS, "MULTIRING_WIRE": wire}
    native = jobs.run(mpi_programs.on_hosts, len(hosts), hosts, *program, environment=settings)
    assert run_ranks(mpi_programs.on_hosts, len(hosts), hosts, *program, **settings) == native


@pytest.mark.parametrize("implementation", ["Open MPI", "MPICH"])
def test_what_is_not_one_plan_and_what_is_refused(implementation: str) -> None:
    said = run_ranks(mpi_programs.what_is_not_one_plan, 4, implementation=implementation)
    assert set(said) == {
        "MULTIRING_ENGINE=mpi cannot be called from compiled code, such as jitted functions of JAX and C programs: "
        "unset it, and the native engine moves the data"
    }


def test_plans_are_tried_and_one_is_kept(tmp_path: Path) -> None:
    found = run_ranks(tuning_ranks.reduce_until_tuned, 3, MULTIRING_TUNE="1", XDG_CACHE_HOME=str(tmp_path))
    for one in found:
        assert one["plan"] in one["tried"]
        assert (one["plan"], one["tuned_at"], one["tried"]) == (
            found[0]["plan"],
            found[0]["tuned_at"],
            found[0]["tried"],
        )
    assert found[0]["tuned_at"] > 0
    assert len(list(tmp_path.rglob("*.json"))) == 1


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_torch() -> None:
    rows = [[10.0 * rank + index for index in range(3)] for rank in range(3)]
    assert run_ranks(mpi_programs.torch_training, 3) == [rows] * 3


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "PeerLost: rank 1 (host {host}) ended with KeyError: 'no such sample'"),
        ("kill", "rank 1 (host {host}) was lost: its process has ended"),
        ("leave", "PeerLost: rank 1 (host {host}) has left the job, and all_reduce(dtype="),
        (
            "differ",
            "rank 1 called all_reduce(count=10)",
        ),
        ("differ", "{host} all_reduce 1\n"),
        ("rename", ": 2 gradients: bias, kernel"),
    ],
)
def test_a_failure_ends_the_job_with_a_line_that_names_the_rank(how: str, said: str) -> None:
    process = start_ranks(mpi_programs.fail, 3, how, MULTIRING_HOST="here", MULTIRING_TIMEOUT="60")
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    assert said.format(host="here") in output


def test_ranks_that_no_mpi_started_are_refused() -> None:
    outcomes = jobs.start(collectives.grid, 2, 10, environment={"MULTIRING_ENGINE": "mpi"}).wait()
    for outcome in outcomes:
        assert outcome.code == 1
        assert "multiring run started rank " in outcome.error
        assert "without MPI, which MULTIRING_ENGINE=mpi needs: start the ranks by mpirun" in outcome.error
