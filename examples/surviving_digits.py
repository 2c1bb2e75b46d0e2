"""Train on handwritten digits and go on without the ranks that are lost, without a restart or a checkpoint.

    multiring run -n 3 --min-ranks 2 examples/surviving_digits.py
    multiring run -n 3 --min-ranks 2 --max-replacements 1 examples/surviving_digits.py

When a rank dies, the others raise an error that names it, agree on who is left, and copy model, optimizer and step from
the lowest of them. With the second line a rank is started in its place, which the others admit at the end of an epoch;
`--wait SECONDS` lets them wait for it there. To see it happen, `--kill STEP` kills the last rank before that step.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist
from digits import WORLD_SIZE, Images, accuracy, batches, digits, network, step
from torch.nn.parallel import DistributedDataParallel

import multiring.torch


def part(batch: Images) -> Images:
    """This rank's share of a batch, in the world as it is now."""
    images, labels = batch
    return images[dist.get_rank() :: dist.get_world_size()], labels[dist.get_rank() :: dist.get_world_size()]


def grown(seconds: int) -> bool:
    """Wait for missing ranks and admit them; True if any came. All ranks make the same number of calls."""
    for _ in range(10 * seconds + 1):
        if dist.get_world_size() == WORLD_SIZE:
            return False
        if multiring.torch.grow() is not None:
            return True
        time.sleep(0.1)
    return False


def main() -> None:
    args = arguments()
    multiring.torch.init()  # init_process_group, but for a rank that the others are to admit
    is_victim = dist.get_rank() == WORLD_SIZE - 1 and os.environ.get("MULTIRING_REPLACEMENT", "0") == "0"
    data, held_out = digits()
    net = network(width=32, blocks=2)
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    steps = [batch for epoch in range(args.epochs) for batch in batches(data, args.batch, epoch)]
    epoch = len(steps) // args.epochs
    parallel, done = None, 0
    while done < len(steps):
        if is_victim and done == args.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if parallel is None:  # at the start, and when ranks were lost or admitted
                multiring.torch.sync_state(net, optimizer)
                done = multiring.torch.broadcast_object(done, multiring.oldest())
                parallel = DistributedDataParallel(net)
            step(parallel, optimizer, part(steps[done]))
            done += 1
            if done % epoch == 0 and done < len(steps) and grown(args.wait):
                parallel = None
        except RuntimeError as error:  # torch may have wrapped PeerLost in it; shrink() raises if no rank was lost
            agreement = multiring.torch.shrink()
            parallel = None
            if dist.get_rank() == 0:
                reason = str(error).partition("\n")[0]
                print(f"{reason}\nranks {agreement.members} go on near step {done} of {len(steps)}", flush=True)
    if dist.get_rank() == 0:
        print(f"Test accuracy {accuracy(net, held_out):.1%} with {dist.get_world_size()} ranks", flush=True)
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="train on digits, whoever is lost")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--kill", type=int, default=-1, metavar="STEP")
    parser.add_argument("--wait", type=int, default=0, metavar="SECONDS")
    return parser.parse_args()


if __name__ == "__main__":
    main()
