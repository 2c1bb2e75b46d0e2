"""Ranks in the workers of Ray Train, and groups of actors, all in one Ray cluster on this machine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray_ranks
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import WorkerGroupError

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
        ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False, configure_logging=False)
        try:
            yield
        finally:
            ray.shutdown()


def fit(function: Any, folder: Path, backend: Any, trainer: Any = DataParallelTrainer) -> None:
    name = "torch_config" if trainer is TorchTrainer else "backend_config"
    trainer(
        function,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(folder / "ray")),
        **{name: backend},
    ).fit()


def found_by(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def actors(cluster: None) -> list[Any]:
    return [ray_ranks.Actor.remote() for _ in range(2)]


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
    backend, config = multiring.ray.MultiringConfig().backend_cls(), multiring.ray.MultiringConfig(timeout=60)
    jobs = []
    for number, order in enumerate((actors, actors[::-1])):
        group = Workers(order)
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


def test_a_killed_worker_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerGroupError, match=r"\[Rank 1 Error Snippet\]") as raised:
        fit(ray_ranks.killed, tmp_path, multiring.ray.MultiringConfig())
    assert 1 in raised.value.worker_failures


def test_what_a_rank_raises_is_told_to_the_others(actors: list[Any]) -> None:
    group, config = Workers(actors), multiring.ray.MultiringConfig()
    config.backend_cls().on_start(group, config)
    calls = group.execute_async(ray_ranks.odd, config.train_func_context)
    with pytest.raises(ValueError, match="cell 1 is odd"):
        ray.get(calls[1])
    with pytest.raises(mr.PeerLost, match=r"rank 1 \(host .*ended with ValueError: cell 1 is odd"):
        ray.get(calls[0])


def test_a_script_of_any_launcher_is_handed_over(actors: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from anywhere import main

    group, config = Workers(actors), multiring.ray.MultiringConfig()
    config.backend_cls().on_start(group, config)
    assert ray.get(group.execute_async(main)) == [(rank, 2, 3.0, -2.0) for rank in range(2)]
    config.backend_cls().on_shutdown(group, config)


def test_a_worker_that_cannot_join_is_named(actors: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    group, config = Workers(actors), multiring.ray.MultiringConfig(init_timeout=30)
    backend = config.backend_cls()
    ray.get(actors[1].execute.remote(ray_ranks.join))
    with pytest.raises(mr.RendezvousError, match=r"rank 1 of 2 could not join: .*in a job of multiring already"):
        backend.on_start(group, config)
    ray.get(actors[1].execute.remote(mr.shutdown))
    ray.get(actors[0].execute.remote(mr.shutdown))
    assignment = multiring.ray.RankAssignment
    monkeypatch.setattr("multiring.ray.RankAssignment", lambda *given: assignment(*given, version="99.1"))
    with pytest.raises(mr.RendezvousError, match=rf"rank \d of 2 .* multiring {mr.__version__}, .* multiring 99.1"):
        backend.on_start(group, config)
    monkeypatch.undo()
    ray.get(group.execute_async(mr.shutdown))


def test_a_worker_that_dies_while_it_joins_is_named(actors: list[Any]) -> None:
    mortal = ray_ranks.Actor.remote()
    group, config = Workers([actors[0], mortal]), multiring.ray.MultiringConfig()
    ray.kill(mortal)
    with pytest.raises(mr.RendezvousError, match="rank 1 of 2 could not join: its process was lost"):
        config.backend_cls().on_start(group, config)
    config.backend_cls().on_shutdown(group, config)  # with a worker that is gone


@pytest.mark.parametrize(
    ("settings", "words"), [({"host": "a"}, "host='a': Ray says on which host"), ({"colour": "red"}, "colour")]
)
def test_wrong_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        multiring.ray.MultiringConfig(**settings)


def test_groups_of_actors(actors: list[Any]) -> None:
    calls = [actor.execute.remote(ray_ranks.all_collectives, 2, rank) for rank, actor in enumerate(actors)]
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
