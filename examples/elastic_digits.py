"""Train on handwritten digits with checkpoints: a job that loses a rank starts again where it was.

    multiring run -n 2 --max-restarts 3 examples/elastic_digits.py
    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic_digits.py

Rank 0 writes a checkpoint every --every steps. When a rank dies, the others raise an error that names it; the launcher
ends them and starts all ranks again, and these go on from the checkpoint. `--kill STEP` kills the last rank before that
step, with SIGKILL, if the job has not been restarted yet: to see it happen.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digits import accuracy, batches, digits, network, part, step
from torch.nn.parallel import DistributedDataParallel

RESTARTS = int(os.environ.get("MULTIRING_RESTART") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def load(path: Path) -> dict[str, Any] | None:
    """The checkpoint that rank 0 has, on all ranks; None if there is none."""
    found = [torch.load(path, weights_only=True) if dist.get_rank() == 0 and path.exists() else None]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def save(path: Path, state: dict[str, Any]) -> None:
    """Whoever is killed meanwhile leaves the old checkpoint or the new one."""
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def main() -> None:
    args = arguments()
    dist.init_process_group(args.backend)
    data, held_out = digits()
    net = network(width=32, blocks=2)
    steps_per_epoch = len(data[0]) // args.batch
    steps = args.epochs * steps_per_epoch
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    done = 0
    checkpoint = load(args.checkpoint)
    if checkpoint:
        done = checkpoint["done"]
        net.load_state_dict(checkpoint["net"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedule.load_state_dict(checkpoint["schedule"])
    if dist.get_rank() == 0:
        print(f"restart {RESTARTS}: begins at step {done} of {steps}", flush=True)
    parallel = DistributedDataParallel(net)
    for epoch in range(done // steps_per_epoch, args.epochs):
        for number, batch in enumerate(batches(data, args.batch, epoch), epoch * steps_per_epoch):
            if number < done:
                continue
            if number == args.kill and RESTARTS == 0 and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            step(parallel, optimizer, part(batch))
            schedule.step()
            if (number + 1) % args.every == 0 and dist.get_rank() == 0:
                states = {"net": net, "optimizer": optimizer, "schedule": schedule}
                save(args.checkpoint, {"done": number + 1, **{name: of.state_dict() for name, of in states.items()}})
    if dist.get_rank() == 0:
        print(f"Test accuracy {accuracy(net, held_out):.1%}", flush=True)
        args.checkpoint.unlink(missing_ok=True)
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="train on digits, with checkpoints")
    parser.add_argument("--backend", default="multiring")
    parser.add_argument("--checkpoint", type=Path, default=Path("elastic_digits.pt"), help="file, on rank 0's host")
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--kill", type=int, default=-1, metavar="STEP")
    return parser.parse_args()


if __name__ == "__main__":
    main()
