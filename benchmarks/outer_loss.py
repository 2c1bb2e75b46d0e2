"""Trainings by `Outer` on two groups of ranks, of which one may be slower, or lose a rank in the middle of a round.

    multiring run -n 4 --min-ranks 3 benchmarks/outer_loss.py
    multiring run -n 4 --min-ranks 3 benchmarks/outer_loss.py --kill 225
    multiring run -n 4 benchmarks/outer_loss.py --every 10 --sleep 50 100 --unequal --seed 0 1 2

The network and the images are those of examples/far_groups.py. Printed by the rank that is lowest at the end: loss and
accuracy on the images held out, the samples of all ranks in a second, the median time from one of its steps to the
next, and the longest one: that is the time for which it has stopped when the rank was killed. All trainings end after
as many samples; with ``--unequal`` after the first exchange that has come to these.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import multiring as mr
import multiring.torch
from multiring import recipes
from multiring.torch import DistributedOptimizer, Outer, broadcast_parameters, sync_state

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from large_batch import digits, network

BATCH, RATE = 64, 0.02


def train(args: argparse.Namespace, delay: int, seed: int) -> None:
    rank, size = int(os.environ["MULTIRING_RANK"]), int(os.environ["MULTIRING_WORLD_SIZE"])
    images, labels, test_images, test_labels = digits()
    torch.manual_seed(seed)
    net = network()
    broadcast_parameters(net.state_dict())
    outer = Outer(net, args.every, groups="host", delay=delay, unequal=args.unequal)
    inner = torch.optim.SGD(net.parameters(), RATE, momentum=0.9, nesterov=True)
    optimizer = DistributedOptimizer(inner, net.named_parameters(), group=outer.group)
    each = len(images) // BATCH
    rates = LambdaLR(inner, recipes.cosine(args.epochs * each))
    mr.barrier()  # a rank that is killed before others have made their Outer would end them there
    ended = [time.monotonic()]
    while True:
        epoch, part = divmod(outer.steps, each)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        chosen = order[part * BATCH : (part + 1) * BATCH][mr.rank() :: mr.world_size()]
        if rank == size - 1 and outer.steps == args.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        done = int(outer.samples / BATCH) if args.unequal else outer.steps
        try:
            if done >= args.epochs * each:
                outer.finish()
                break
            optimizer.zero_grad()
            F.cross_entropy(net(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            time.sleep(args.sleep[rank * 2 // size] / 1e3)
            outer.step(len(chosen))
        except mr.PeerLost:
            outer.rebuild(multiring.torch.shrink())
            sync_state(net, inner, group=outer.group)
            optimizer = DistributedOptimizer(inner, net.named_parameters(), group=outer.group)
        rates.last_epoch = (int(outer.samples / BATCH) if args.unequal else outer.steps) - 1
        rates.step()
        ended.append(time.monotonic())
    if mr.rank() == 0:
        steps = [after - before for before, after in itertools.pairwise(ended)]
        with torch.no_grad():
            scores = net(test_images)
        print(
            f"seed {seed}, delay {delay}: loss {F.cross_entropy(scores, test_labels):.4f}   "
            f"accuracy {(scores.argmax(1) == test_labels).double().mean():.2%}   {mr.world_size()} ranks   "
            f"{outer.samples:.0f} samples, {outer.samples / (time.monotonic() - ended[0]):.0f} a second   "
            f"step {statistics.median(steps) * 1e3:.1f} ms   longest {max(steps):.2f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kill", type=int, metavar="STEP", help="kill the last rank before this step")
    parser.add_argument("--every", type=int, default=50, help="steps between exchanges")
    parser.add_argument("--delay", type=int, nargs="+", default=[0], help="steps until an average is applied")
    parser.add_argument("--unequal", action="store_true", help="groups make unequal numbers of steps")
    parser.add_argument(
        "--sleep", type=float, nargs=2, default=[0.0, 0.0], metavar="MS", help="in each step, on each of two hosts"
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    if args.kill is not None and len(args.seed) * len(args.delay) > 1:
        parser.error(f"--kill {args.kill}: a rank is killed once: give one seed and one delay")
    rank, size = int(os.environ["MULTIRING_RANK"]), int(os.environ["MULTIRING_WORLD_SIZE"])
    os.environ["MULTIRING_HOST"] = f"host{rank * 2 // size}"
    mr.init()
    for delay, seed in itertools.product(args.delay, args.seed):
        train(args, delay, seed)
    mr.shutdown()


if __name__ == "__main__":
    main()
