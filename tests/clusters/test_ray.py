"""Ranks in the workers of Ray Train, and groups of actors, all in one Ray cluster on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.util.collective as collective
import ray_ranks
from ray.experimental import internal_kv
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

import multiring as mr
import multiring.ray

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.timeout(400),
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    path = os.pathsep.join([str(HERE), str(EXAMPLES), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MULTIRING_")]:
            patch.delenv(name)
        patch.setenv("PYTHONPATH", path)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
        try:
            yield
        finally:
            ray.shutdown()


def fit(
    function: Any,
    folder: Path,
    backend: Any = None,
    trainer: Any = DataParallelTrainer,
    workers: Any = 2,
    failures: int = 0,
    **scaling: Any,
) -> Any:
    """Train, and return what ``function`` returns on rank 0; it gets the folder if it takes an argument."""
    name = "torch_config" if trainer is TorchTrainer else "backend_config"
    return (
        trainer(
            function,
            train_loop_config={"folder": str(folder)} if function.__code__.co_argcount else None,
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}, **scaling),
            run_config=RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=failures)),
            **{name: backend or multiring.ray.MultiringConfig()},
        )
        .fit()
        .return_value
    )


def found_by(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def actors(cluster: None) -> list[Any]:
    return [ray_ranks.Actor.remote() for _ in range(2)]


@pytest.fixture
def mortals(cluster: None) -> Iterator[list[Any]]:
    """Actors that end as Ray Train ends workers: whatever they are at."""
    actors = [ray_ranks.Actor.remote() for _ in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)


class Workers:
    """Actors as the group of workers that Ray Train hands to a backend, whose processes live on between jobs."""

    def __init__(self, actors: list[Any]) -> None:
        self.actors = actors

    def __len__(self) -> int:
        return len(self.actors)

    def execute_single_async(self, rank: int, function: Any, *args: Any) -> Any:
        return self.actors[rank].execute.remote(function, *args)

    def execute_async(self, function: Any, *args: Any) -> list[Any]:
        return [actor.execute.remote(function, *args) for actor in self.actors]


def test_processes_are_used_again_and_keep_nothing(actors: list[Any]) -> None:
    backend = multiring.ray.MultiringConfig().backend_cls()
    jobs = []
    for number, order in enumerate((actors, actors[::-1])):
        group = Workers(order)
        config = multiring.ray.MultiringConfig(timeout=60, encrypt=number == 1)
        backend.on_start(group, config)
        jobs.append(ray.get(group.execute_async(ray_ranks.sum_of, number + 1)))
        backend.on_shutdown(group, config)
        assert ray.get(group.execute_async(mr.is_initialized)) == [False, False]
    assert [each["sum"] for each in jobs[1]] == [[6 * index for index in range(5)]] * 2
    assert [each["place"] for each in jobs[1]] == [(0, 2), (1, 2)]
    assert [each["process"] for each in jobs[0]] == [each["process"] for each in jobs[1]][::-1]
    assert jobs[0][0]["environment"] == jobs[1][1]["environment"]


@pytest.mark.parametrize("backend", ["multiring.ray", "torch"])
def test_torch_trainer(backend: str, tmp_path: Path) -> None:
    given = TorchConfig(backend="multiring") if backend == "torch" else multiring.ray.MultiringConfig()
    fit(ray_ranks.in_torch, tmp_path, given, TorchTrainer)
    expected = {"backend": "multiring", "size": 2, "sum": [3 * index for index in range(5)]}
    assert found_by(tmp_path, 2) == [expected] * 2


def test_keras_and_jax(tmp_path: Path) -> None:
    """The gradients are -6 times the rows (1, 2) and (2, 2)."""
    assert fit(ray_ranks.in_keras_on_jax, tmp_path) == {"sum": [0.0, 3.0, 6.0], "kernel": [9 / 8, 12 / 8]}


def test_workers_start_again_and_a_killed_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerGroupError, match=r"\[Rank 1 Error Snippet\]") as raised:
        fit(ray_ranks.killed, tmp_path, workers=(2, 3), failures=1)
    assert (tmp_path / "starts").read_text() == "2"
    found = json.loads((tmp_path / "0").read_text())
    size, saw = found["size"], found["saw"]
    assert size in (2, 3)
    assert found["sum"] == [index * size * (size + 1) // 2 for index in range(5)]
    assert re.match(r"rank 1 \(host .*\) ", saw)
    failures = {rank: str(failure) for rank, failure in raised.value.worker_failures.items()}
    assert 1 in failures
    assert saw in failures.get(0, saw)  # unless Ray ended rank 0 before it had looked


def test_two_jobs_at_once_of_which_one_grows_when_the_other_has_ended(tmp_path: Path) -> None:
    folders = [tmp_path / "brief", tmp_path / "elastic"]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor() as pool:
        brief = pool.submit(fit, ray_ranks.brief, folders[0])
        while not (brief.done() or (folders[0] / "0").exists()):
            time.sleep(0.05)
        grown = fit(ray_ranks.elastic, folders[1], workers=(2, 3), elastic_resize_monitor_interval_s=1.0)
    assert brief.result() == ([3 * index for index in range(5)], 2)
    assert grown == [60 * index for index in range(5)]


def test_what_a_rank_raises_is_told_to_the_others(actors: list[Any]) -> None:
    group, config = Workers(actors), multiring.ray.MultiringConfig()
    config.backend_cls().on_start(group, config)
    calls = group.execute_async(ray_ranks.odd, config.train_func_context)
    with pytest.raises(ValueError, match="cell 1 is odd"):
        ray.get(calls[1])
    with pytest.raises(mr.PeerLost, match=r"rank 1 \(host .*ended with ValueError: cell 1 is odd"):
        ray.get(calls[0])


def test_a_script_of_any_launcher_is_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from anywhere import main

    assert fit(main, tmp_path) == (0, 2, 3.0, -2.0)


def test_a_worker_that_cannot_join_ends_fit(tmp_path: Path) -> None:
    with pytest.raises(ControllerError, match=r"could not join: .*MULTIRING_PLAN") as raised:
        fit(ray_ranks.killed, tmp_path, multiring.ray.MultiringConfig(plan="none"))
    assert isinstance(raised.value.controller_failure, mr.RendezvousError)


def test_a_worker_that_is_in_a_job_is_named(mortals: list[Any]) -> None:
    group, config = Workers(mortals), multiring.ray.MultiringConfig()
    ray.get(mortals[1].execute.remote(ray_ranks.join))
    with pytest.raises(mr.RendezvousError, match=r"rank 1 of 2 could not join: .*in a job of multiring already"):
        config.backend_cls().on_start(group, config)
    config.backend_cls().on_shutdown(group, config)  # while rank 0 still waits for rank 1


def test_a_worker_of_another_version_is_named(mortals: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    group, config = Workers(mortals), multiring.ray.MultiringConfig()
    assignment = multiring.ray.RankAssignment
    monkeypatch.setattr("multiring.ray.RankAssignment", lambda *given: assignment(*given, version="99.1"))
    with pytest.raises(mr.RendezvousError, match=rf"rank \d of 2 .* multiring {mr.__version__}, .* multiring 99.1"):
        config.backend_cls().on_start(group, config)


def test_a_worker_that_dies_while_it_joins_is_named(mortals: list[Any]) -> None:
    group, config = Workers(mortals), multiring.ray.MultiringConfig()
    ray.kill(mortals[1])
    with pytest.raises(mr.RendezvousError, match="rank 1 of 2 could not join: its process was lost"):
        config.backend_cls().on_start(group, config)


def test_a_function_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    lock = threading.Lock()

    def train() -> None:
        lock.acquire()

    with pytest.raises(TypeError, match=r"(?s)lock.*train"):
        fit(train, tmp_path)


def test_without_ray_the_extra_is_named() -> None:
    program = "import sys; sys.modules['ray'] = None; import multiring.ray"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    last = ended.stderr.splitlines()[-1]
    assert re.match(r"ImportError: multiring.ray needs ray\[train\] .*: pip install 'multiring\[ray\]'$", last)


@pytest.mark.parametrize(
    ("settings", "words"), [({"host": "a"}, "host='a': Ray says on which host"), ({"colour": "red"}, "colour")]
)
def test_wrong_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        multiring.ray.MultiringConfig(**settings)


def test_a_member_that_does_not_come_is_named(mortals: list[Any]) -> None:
    ray.get([actor.execute.remote(ray_ranks.wait_at_most, 2) for actor in mortals])
    for rank, words in enumerate(("rank 1 did not arrive", "rank 0 did not make it within 2 s: call init_collective_")):
        with pytest.raises(mr.RendezvousError) as raised:
            ray.get(mortals[rank].execute.remote(ray_ranks.enter, 2, rank, "late"))
        told = raised.value.cause
        assert re.match(f"group 'late' of 2 actors: {words}.*$", str(told))
        assert told.rank == 1 - rank


def check_twice(entering: list[Any], actors: list[Any], rank: int, size: int) -> None:
    """All that enter are told of the two that say they are the rank."""
    processes = ray.get([actor.execute.remote(os.getpid) for actor in actors], timeout=200)
    for entered in entering:
        with pytest.raises(mr.RendezvousError) as raised:
            ray.get(entered, timeout=200)
        told = raised.value.cause
        assert re.match(
            rf"group 'twice' of {size} actors: two \w+ say that they are rank {rank} of {size}, ", str(told)
        )
        assert all(f"process {process} on host " in str(told) for process in processes)
        assert told.rank == rank


def test_rank_0_that_waits_is_told_of_two_actors_of_another_rank(mortals: list[Any], actors: list[Any]) -> None:
    ray.get([actor.execute.remote(ray_ranks.wait_at_most, 3600) for actor in [*mortals, actors[0]]])
    entering = [actors[0].execute.remote(ray_ranks.enter, 3, 0, "twice")]
    key = f"{ray.get_runtime_context().get_job_id()}/twice/0"
    while not internal_kv._internal_kv_exists(key, namespace=multiring.ray.NAMESPACE):
        time.sleep(0.05)
    entering += [actor.execute.remote(ray_ranks.enter, 3, 1, "twice") for actor in mortals]
    check_twice(entering, mortals, 1, 3)
    ray.get(actors[0].execute.remote(ray_ranks.wait_at_most, 120))


@pytest.mark.parametrize("ranks", [(0, 0), (1, 1)])
def test_two_actors_of_one_rank_are_named_at_once(ranks: tuple[int, int], mortals: list[Any]) -> None:
    """Long before the time limit, which is longer than a test's; a right pair then makes the group all the same."""
    ray.get([actor.execute.remote(ray_ranks.wait_at_most, 3600) for actor in mortals])
    entering = [
        actor.execute.remote(ray_ranks.enter, 2, rank, "twice") for actor, rank in zip(mortals, ranks, strict=True)
    ]
    check_twice(entering, mortals, ranks[0], 2)
    ray.get([actor.execute.remote(ray_ranks.enter, 2, rank, "twice") for rank, actor in enumerate(mortals)])
    sums = [actor.execute.remote(ray_ranks.sum_in, "twice") for actor in mortals]
    assert ray.get(sums) == [[3 * index for index in range(5)]] * 2
    ray.get([actor.execute.remote(collective.destroy_collective_group, "twice") for actor in mortals])


def test_a_group_that_has_met_is_named_to_another_actor_of_one_of_its_ranks(
    mortals: list[Any], actors: list[Any]
) -> None:
    third = actors[0]
    ray.get([actor.execute.remote(ray_ranks.enter, 2, rank, "full") for rank, actor in enumerate(mortals)])
    process = ray.get(mortals[1].execute.remote(os.getpid))
    ray.get(third.execute.remote(ray_ranks.wait_at_most, 1))
    try:
        with pytest.raises(
            mr.RendezvousError, match=rf"rank 0 did not .*; process {process} on host .* become rank 1 "
        ):
            ray.get(third.execute.remote(ray_ranks.enter, 2, 1, "full"))
        ray.get([actor.execute.remote(collective.destroy_collective_group, "full") for actor in mortals])
        with pytest.raises(mr.RendezvousError) as raised:
            ray.get(third.execute.remote(ray_ranks.enter, 2, 1, "full"))
        assert "before" not in str(raised.value.cause)
    finally:
        ray.get(third.execute.remote(ray_ranks.wait_at_most, 120))


def test_groups_are_made_anew_after_members_were_killed(mortals: list[Any], actors: list[Any]) -> None:
    first, second = mortals
    waiting = ray_ranks.Actor.remote()
    waiting.execute.remote(ray_ranks.enter, 2, 0, "pair")
    key = f"{ray.get_runtime_context().get_job_id()}/pair/0"
    while not internal_kv._internal_kv_exists(key, namespace=multiring.ray.NAMESPACE):
        time.sleep(0.05)
    ray.kill(waiting)
    late = second.execute.remote(ray_ranks.enter, 2, 1, "pair")
    time.sleep(0.5)  # it finds what the killed one has said
    ray.get([first.execute.remote(ray_ranks.enter, 2, 0, "pair"), late])
    sums = [actor.execute.remote(ray_ranks.sum_in, "pair") for actor in mortals]
    assert ray.get(sums) == [[3 * index for index in range(5)]] * 2
    alone = first.execute.remote(ray_ranks.sum_in, "pair")
    ray.kill(second)
    with pytest.raises(mr.PeerLost, match=r"rank 1 \(host "):
        ray.get(alone)
    ray.get(first.execute.remote(collective.destroy_collective_group, "pair"))
    pair = [first, actors[0]]
    ray.get([actor.execute.remote(ray_ranks.enter, 2, rank, "pair") for rank, actor in enumerate(pair)])
    sums = [actor.execute.remote(ray_ranks.sum_in, "pair") for actor in pair]
    assert ray.get(sums) == [[3 * index for index in range(5)]] * 2
    ray.get([actor.execute.remote(collective.destroy_collective_group, "pair") for actor in pair])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_groups_of_actors(kind: str, actors: list[Any]) -> None:
    calls = [actor.execute.remote(ray_ranks.all_collectives, kind, 2, rank) for rank, actor in enumerate(actors)]
    for rank, found in enumerate(ray.get(calls)):
        refused = found.pop("refused")
        assert re.search(r"allgather: tensor 0 of the list is .* shape \(2,\).* shape \(3,\): make them alike", refused)
        assert found.pop("recv", None) == (None if rank == 0 else [1.0, 2.0, 3.0])
        assert found == {
            "rank": 1 - rank,
            "allreduce SUM": [10.0, 12.0, 14.0],
            "allreduce MAX": [10.0, 11.0, 12.0],
            "reduce": [10.0, 12.0, 14.0] if rank == 1 else [0.0, 1.0, 2.0],
            "broadcast": [10.0, 11.0, 12.0],
            "allgather": [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]],
            "reducescatter": [1.0, 20.0 * rank],
        }
