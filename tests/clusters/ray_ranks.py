"""Functions that ranks run in Ray's workers and actors."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.util.collective as collective

import multiring as mr
import multiring.ray


def note(folder: str, **found: Any) -> None:
    """Tell the test what this rank found."""
    unfinished = Path(folder, f".{mr.rank()}")
    unfinished.write_text(json.dumps(found))
    unfinished.rename(Path(folder, str(mr.rank())))


def in_torch(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    import multiring.torch

    if not dist.is_initialized():  # MultiringConfig leaves it to the function
        multiring.torch.init()
    x = torch.arange(5) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    note(config["folder"], backend=dist.get_backend(), size=dist.get_world_size(), sum=x.tolist())


def in_keras_on_jax(config: dict[str, Any]) -> dict[str, list[float]]:
    os.environ["KERAS_BACKEND"] = "jax"
    import jax
    import keras

    import multiring.jax
    import multiring.keras

    found = jax.jit(multiring.jax.all_reduce)(jax.numpy.arange(3.0) * (mr.rank() + 1))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(multiring.keras.DistributedOptimizer(keras.optimizers.SGD(0.125)), "mse")
    model.train_on_batch(np.array([[mr.rank() + 1.0, 2.0]]), np.array([[3.0]]))
    return {"sum": found.tolist(), "kernel": model.get_weights()[0].ravel().tolist()}


def killed(config: dict[str, Any]) -> None:
    """Rank 1 is killed while the others are in an all_reduce, as often as this is started; rank 0 tells what it saw."""
    starts = Path(config["folder"], "starts")
    if mr.rank() == 0:
        starts.write_text(str(int(starts.read_text()) + 1 if starts.exists() else 1))
    mr.all_reduce(x := np.arange(5) * (mr.rank() + 1))
    if mr.rank() == 1:
        time.sleep(1)  # its peers have left the all_reduce then
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        mr.all_reduce(np.arange(3))
    except mr.PeerLost as lost:
        note(config["folder"], size=mr.world_size(), sum=x.tolist(), saw=str(lost))
        raise


def brief(config: dict[str, Any]) -> tuple[list[int], int]:
    """End when the other job, beside this one, has begun; its size."""
    mr.all_reduce(x := np.arange(5) * (mr.rank() + 1))
    note(config["folder"])
    other = Path(config["folder"]).with_name("elastic") / "0"
    while not other.exists():
        time.sleep(0.05)
    return x.tolist(), json.loads(other.read_text())["size"]


def elastic(config: dict[str, Any]) -> list[int]:
    """End when there are three ranks: Ray ends two, and starts all anew."""
    mr.all_reduce(x := np.arange(5) * 10 * (mr.rank() + 1))
    note(config["folder"], size=mr.world_size())
    while mr.world_size() < 3:
        time.sleep(0.05)
        mr.barrier()
    return x.tolist()


def odd(context: Any) -> None:
    """Rank 1 raises in what Ray Train runs a training function in, while the others are in an all_reduce."""
    with context():
        mr.barrier()
        if mr.rank() == 1:
            time.sleep(1)
            raise ValueError(f"cell {mr.rank()} is odd")
        mr.all_reduce(np.arange(3))


@ray.remote(num_cpus=0)
class Actor:
    """A process that runs what it is given."""

    def execute(self, function: Any, *args: Any) -> Any:
        return function(*args)


def join() -> None:
    """Be in a job, as code that leaves it to others to leave."""
    mr.init()


def sum_of(factor: int) -> dict[str, Any]:
    x = np.arange(5) * (mr.rank() + 1) * factor
    mr.all_reduce(x)
    return {
        "place": (mr.rank(), mr.world_size()),
        "sum": x.tolist(),
        "process": os.getpid(),
        "environment": sorted(os.environ.items()),
    }


def wait_at_most(seconds: float) -> None:
    os.environ["MULTIRING_INIT_TIMEOUT"] = str(seconds)


def enter(size: int, rank: int, name: str) -> None:
    multiring.ray.register_collectives()
    collective.init_collective_group(size, rank, "multiring", name)


def sum_in(name: str) -> list[int]:
    collective.allreduce(x := np.arange(5) * (collective.get_rank(name) + 1), name)
    return x.tolist()


def all_collectives(kind: str, size: int, rank: int) -> dict[str, Any]:
    """Each function of ray.util.collective once, in a group of all actors and in one with their ranks reversed."""
    multiring.ray.register_collectives()

    def tensor(values: Any) -> Any:
        array = np.asarray(values, dtype="float64")
        if kind == "numpy":
            return array
        import torch

        return torch.from_numpy(array)

    def zeros(count: int) -> Any:
        return tensor(np.zeros(count))

    collective.init_collective_group(size, rank, "multiring", "all")
    collective.init_collective_group(size, size - 1 - rank, "multiring", "reversed")
    group = "all"
    mine = tensor(np.arange(3) + 10 * rank)
    found: dict[str, Any] = {"rank": collective.get_rank("reversed")}
    for op in (collective.types.ReduceOp.SUM, collective.types.ReduceOp.MAX):
        collective.allreduce(x := tensor(np.arange(3) + 10 * rank), group, op)
        found[f"allreduce {op.name}"] = x.tolist()
    collective.reduce(x := tensor(np.arange(3) + 10 * rank), 1, group)
    found["reduce"] = x.tolist()
    collective.broadcast(x := tensor(np.arange(3) + 10 * rank), 0, "reversed")
    found["broadcast"] = x.tolist()
    collective.allgather(rows := [zeros(3) for _ in range(size)], mine, group)
    found["allgather"] = [row.tolist() for row in rows]
    collective.reducescatter(x := zeros(2), [tensor([rank, 10 * index]) for index in range(size)], group)
    found["reducescatter"] = x.tolist()
    if rank == 0:
        collective.send(mine + 1, 1, group)
    elif rank == 1:
        collective.recv(x := zeros(3), 0, group)
        found["recv"] = x.tolist()
    try:
        collective.allgather([zeros(2) for _ in range(size)], mine, group)
    except ValueError as error:
        found["refused"] = str(error)
    collective.barrier(group)
    for name in (group, "reversed"):
        collective.destroy_collective_group(name)
    return found
