"""Train while ranks are killed and replaced: no step is lost, and each sample is trained on once in an epoch.

    multiring run -n 4 --min-ranks 2 --max-replacements 100 examples/under_fire.py --model digits --steps 2000
    multiring run -n 4 --min-ranks 2 --max-replacements 100 examples/under_fire.py --model transformer --steps 2000

Kill ranks while it runs. The others go on without those that were lost, at the same global batches, and admit the
replacements between two steps. With `--standby 1` before the script these are there at once: all that they import is at
its top, with torch._dynamo, which the constructor of an optimizer would import. Digits are those of scikit-learn; the
transformer reads Python's own standard library, byte after byte. benchmarks/goodput.py measures what kills cost this
training: it reads what --events writes.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import sysconfig
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import multiring as mr
import multiring.torch

NUMBER = int(os.environ.get("MULTIRING_REPLACEMENT", "0"))
"""0 for a rank that was there at the start; above 0 it counts those that were started in the place of lost ones."""

AT_START = int(os.environ.get("WORLD_SIZE", "1"))

# --- what is trained ---


class Digits(nn.Module):
    """Three convolutions, whose results do not hang on which images share a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * 64, 10)),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class Transformer(nn.Module):
    """Tells the next byte of a text from those before it."""

    def __init__(self, context: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.layers(self.bytes(text) + self.places, mask=self.mask, is_causal=True))


CONTEXT = 64
TEXT_BYTES = 1 << 20


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to train on and 360 to test, 8x8 pixels in [0, 1]."""
    # `import sklearn.datasets` takes seconds, for which a replacement would be missed.
    folders = find_spec("sklearn").submodule_search_locations
    table = torch.from_numpy(np.loadtxt(Path(folders[0], "datasets/data/digits.csv.gz"), delimiter=","))
    images, labels = table[:, :-1].view(-1, 1, 8, 8) / 16, table[:, -1].long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images = images.to(torch.get_default_dtype())
    return tuple(TensorDataset(images[part], labels[part]) for part in (order[:1437], order[1437:]))


def text() -> tuple[TensorDataset, TensorDataset]:
    """Pieces of the standard library's source, each with the same one byte further on; the last ones are to test."""
    read = bytearray()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        read += file.read_bytes()
        if len(read) > TEXT_BYTES:
            break
    pieces = torch.frombuffer(read, dtype=torch.uint8).long().unfold(0, CONTEXT + 1, CONTEXT)
    inputs, targets = pieces[:, :-1], pieces[:, 1:]
    return TensorDataset(inputs[:-512], targets[:-512]), TensorDataset(inputs[-512:], targets[-512:])


MODELS = {"digits": (Digits, digits), "transformer": (lambda: Transformer(CONTEXT), text)}


def loss_sum(net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The sum of the losses of some samples."""
    return F.cross_entropy(net(inputs).flatten(0, -2), targets.flatten(), reduction="sum")


# --- what is told of it ---


class Events:
    """Lines of JSON about what this process does, with the seconds of the clock that all processes of a host share."""

    def __init__(self, folder: Path | None) -> None:
        file = folder / f"{os.getpid()}.jsonl" if folder else None
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if file else None
        self("started", at=process_start(), rank=int(os.environ.get("RANK", "0")), replacement=NUMBER)

    def __call__(self, event: str, **said: Any) -> None:
        if self._descriptor is not None:
            said = {"event": event, "at": time.monotonic(), "pid": os.getpid(), **said}
            os.write(self._descriptor, json.dumps(said).encode() + b"\n")  # no buffer that a kill would empty


def process_start() -> float:
    """Return the time at which this process started, by the events' clock, which stops while a machine sleeps."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    suspended = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return int(ticks) / os.sysconf("SC_CLK_TCK") - suspended


# --- the training ---


class Training:
    """One rank's part of a training that goes on, whoever is lost."""

    def __init__(self, args: argparse.Namespace, events: Events) -> None:
        self.args, self.tell = args, events
        make, data = MODELS[args.model]
        torch.manual_seed(args.seed)
        self.net = make()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-3)
        self.data, self.held_out = data()
        self.targets = self.data.tensors[1][0].numel()
        self.steps = 0
        self.whole = NUMBER == 0
        """True if this rank has all that a training goes on from."""
        self.generation = 0
        self.pids: list[int | None] = []
        """The processes of the ranks, as far as this one has heard of them."""
        self.parallel: DistributedDataParallel | None = None
        if NUMBER:
            self.warm_up()

    def warm_up(self) -> None:
        """A step on copies, before the others admit this rank: what the first step loads and builds is not awaited."""
        net = copy.deepcopy(self.net)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        loss_sum(net, *self.data[: self.args.batch // AT_START]).backward()
        optimizer.step()

    def join(self) -> None:
        """Meet the others, as a member from the start or one that is admitted."""
        self.tell("ready")
        multiring.torch.init()
        self.tell("joined")
        try:
            self.loader = multiring.torch.Loader(self.data, self.args.batch, seed=self.args.seed)
        except ValueError as error:  # the last batch of an epoch has too few samples for so many ranks
            leave(str(error))
        self.position = self.loader.state_dict()

    def synchronise(self) -> None:
        """Let all ranks go on from the one that has taken most steps: at the start, after a loss, with newcomers."""
        known = mr.all_gather_object((self.steps if self.whole else -1, self.generation, os.getpid()))
        steps = [each[0] for each in known]
        self.generation = max(each[1] for each in known)
        self.pids = [each[2] for each in known]
        self.tell("world", generation=self.generation, rank=dist.get_rank(), pids=self.pids)
        most = max(steps)
        if most < 0:
            leave("all ranks that had the training's state were lost: start it again")
        if self.steps != most:
            self.whole = False  # what follows may arrive in part
        root = steps.index(most)
        self.steps, self.position = multiring.torch.broadcast_object((self.steps, self.position), root)
        multiring.torch.sync_state(self.net, self.optimizer, root)
        self.whole = True
        self.loader.load_state_dict(self.position)
        self.tell("synchronised")
        self.parallel = DistributedDataParallel(self.net, init_sync=False)  # all have the same already
        self.tell("wrapped")

    def run(self) -> None:
        """Train until all steps are taken, or --stop is there."""
        ended = False
        while not ended:
            try:
                if self.parallel is None:
                    self.synchronise()
                ended = self.train_epoch()
            except RuntimeError as error:  # torch may have wrapped PeerLost in it
                self.tell("failed", reason=str(error).partition("\n")[0])
                self.go_on_without_the_lost(error)

    def go_on_without_the_lost(self, error: RuntimeError) -> None:
        try:
            agreement = multiring.torch.shrink()
        except mr.MultiringError as refused:
            # This very class says that no rank was lost: memory is short, say.
            if type(refused) is mr.MultiringError:
                raise error from None
            raise
        self.tell("shrunk", generation=agreement.generation, lost=self.go_on(agreement))

    def go_on(self, agreement: Any) -> list[int]:
        """Be one of those who have agreed; the processes that are not among them any more."""
        lost = [pid for rank, pid in enumerate(self.pids) if pid is not None and rank not in agreement.members]
        self.pids = [self.pids[rank] if 0 <= rank < len(self.pids) else None for rank in agreement.members]
        self.generation = agreement.generation
        self.parallel = None
        return lost

    def train_epoch(self) -> bool:
        """Train until the epoch ends or ranks are admitted; True if the training has ended."""
        for inputs, targets in self.loader:
            self.step(inputs, targets)
            if self.steps == self.args.steps:
                return True
            if self.steps % self.args.look == 0:
                if multiring.torch.broadcast_object(bool(self.args.stop) and self.args.stop.exists()):
                    return True
                if self.admitted():
                    return False
        return False

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """One step on this rank's part of a global batch."""
        self.optimizer.zero_grad()
        together = min(self.args.batch, len(self.data) - self.position["consumed"] % len(self.data))
        # A sum over this rank's samples; the mean over the ranks is the loss of the global batch.
        loss = loss_sum(self.parallel, inputs, targets) * (dist.get_world_size() / (together * self.targets))
        loss.backward()
        self.optimizer.step()
        self.position = self.loader.state_dict()  # what the model has had, not what was handed out
        self.steps += 1
        self.tell("step", step=self.steps, generation=self.generation, samples=len(inputs))

    def admitted(self) -> bool:
        """Admit ranks in the place of lost ones; True if any came. All ranks make the same number of calls."""
        if dist.get_world_size() >= AT_START:
            return False
        began = time.monotonic()
        try:
            agreement = multiring.torch.grow()
        except mr.RendezvousError as refused:
            if not mr.is_initialized():
                raise
            self.tell("not grown", reason=str(refused))  # all ranks are as they were, and try again later
            return False
        if agreement is None:
            return False
        if lost := self.go_on(agreement):  # when they had admitted others
            self.tell("shrunk", generation=self.generation, lost=lost)
        self.tell("grown", generation=self.generation, began=began)
        return True

    @torch.no_grad()
    def result(self) -> dict[str, float]:
        """Loss and accuracy on what was not trained on."""
        inputs, targets = self.held_out.tensors
        answers = self.net(inputs)
        loss = F.cross_entropy(answers.flatten(0, -2), targets.flatten()).item()
        return {"loss": loss, "accuracy": (answers.argmax(-1) == targets).double().mean().item()}


def leave(message: str) -> NoReturn:
    """End this rank; one of them says why."""
    speaks = dist.get_rank() == 0
    dist.destroy_process_group()
    sys.exit(f"under_fire: {message}" if speaks else 1)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"under_fire: {message}\n")


def positive(given: str) -> int:
    if not given.isdecimal() or int(given) < 1:
        raise argparse.ArgumentTypeError(f"{given!r}: a whole number of 1 or more is needed")
    return int(given)


def folder(given: str) -> Path:
    if not Path(given).is_dir():
        raise argparse.ArgumentTypeError(f"{given!r}: a folder that is there is needed")
    return Path(given)


def arguments() -> argparse.Namespace:
    parser = Parser(description="Train while ranks are killed and replaced.")
    parser.add_argument("--model", choices=MODELS, default="digits")
    parser.add_argument("--steps", type=positive, required=True, help="after which the training ends")
    parser.add_argument("--batch", type=positive, default=64, help="samples in a step, of all ranks together")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the order of samples")
    parser.add_argument("--look", type=positive, default=10, help="steps between two looks for replacements")
    parser.add_argument("--stop", type=Path, metavar="FILE", help="end when this file is there")
    parser.add_argument("--events", type=folder, metavar="DIR", help="write there what each rank does, and when")
    parser.add_argument("--float64", action="store_true", help="compute in it: sums hardly hang on the number of ranks")
    args = parser.parse_args()
    if args.batch < 2 * AT_START:
        parser.error(f"--batch {args.batch}: {2 * AT_START} samples or more are needed, two for each rank")
    if args.model == "digits" and find_spec("sklearn") is None:
        parser.error("--model digits needs scikit-learn, which has the images: pip install scikit-learn")
    return args


def main() -> None:
    args = arguments()
    if args.float64:
        torch.set_default_dtype(torch.float64)
    tell = Events(args.events)
    training = Training(args, tell)
    training.join()
    training.run()
    result = training.result()
    tell("ended", step=training.steps, **result)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(
            f"{training.steps} steps: test loss {result['loss']:.4f}, accuracy {result['accuracy']:.1%}, {ranks} ranks"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
