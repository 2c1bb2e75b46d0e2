"""Loss and accuracy of trainings that send less over a thin link: a table, and a picture of the loss over the bytes.

    python examples/imagenet/glyphs.py glyphs --samples 20 --validation-samples 4 --size 16 --plain
    nice python benchmarks/accuracy.py accuracy.json --glyphs glyphs
    python benchmarks/accuracy.py accuracy.json --table --picture accuracy.svg

Ranks on 2 sites of 2 racks train a convolutional network on glyphs of 1,000 classes, and a transformer that continues
the text of Python's help. With one seed, all methods begin with the same weights and see the same samples in the same
order. Each training that has ended is added to the file; the command goes on with those that are missing there.

All ranks are forked on this machine; no result depends on the speed of its links. Bytes are those that the ranks of
one site sent to the other; the larger number counts. PowerSGD is torch's hook, with whole gradients in its warm-up.
``exempt``: parameters of one dimension are averaged apart in float64, which no wire narrows, and counted as float32.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch._dynamo  # optimizers do, which would take each fork a second
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import multiring as mr
import multiring.torch
from multiring import recipes, whole_files
from multiring.bench import curves, report
from multiring.torch import Outer

SITES = {"east": ("a", "b"), "west": ("c", "d")}
"""The hosts of each site, each of which is a rack of its own."""

RACKS = [rack for racks in SITES.values() for rack in racks]

PATIENT = {"timeout": 3600.0, "heartbeat_timeout": 3600.0, "init_timeout": 600.0}
"""Settings of a job whose ranks may get no processor for long."""

CONTEXT = 32
"""Letters that the transformer looks back at."""


class Failed(Exception):
    """No training, or no more of them, could be made; the message is one line, or what a rank raised."""


@dataclass(frozen=True)
class Method:
    """A way to train: by gradients in each step, or by exchanges between the sites ``every`` so many."""

    wire: str = ""
    feedback: bool = False
    exempt: bool = False
    rank: int = 0
    """PowerSGD's rank; 0: no PowerSGD."""
    every: int = 0
    fragments: int = 1
    delay: int = 0
    momentum: bool = False
    """True if the outer optimizer is DiLoCo's (SGD at 0.7, Nesterov momentum 0.9) instead of `Outer`'s own."""


def _outer(every: int) -> Iterator[tuple[str, Method]]:
    for name, momentum in (("averaging", False), ("momentum", True)):
        yield f"{name} {every}", Method(every=every, momentum=momentum)
        yield f"{name} {every}, fragments", Method(every=every, fragments=4, momentum=momentum)
        yield f"{name} {every}, delay", Method(every=every, delay=1, momentum=momentum)
        yield f"{name} {every}, fragments, delay", Method(every=every, fragments=4, delay=1, momentum=momentum)


METHODS = {
    "float32": Method(),
    "bfloat16": Method("bfloat16"),
    "int8": Method("int8"),
    "int8, feedback": Method("int8", feedback=True),
    "int4": Method("int4"),
    "int4, feedback": Method("int4", feedback=True),
    "int2, feedback": Method("int2", feedback=True),
    "PowerSGD rank 4": Method(rank=4),
    "int8, exempt": Method("int8", exempt=True),
    "int4, exempt": Method("int4", exempt=True),
    "int4, feedback, exempt": Method("int4", feedback=True, exempt=True),
    "int2, feedback, exempt": Method("int2", feedback=True, exempt=True),
    **dict(_outer(10)),
    **dict(_outer(50)),
    **dict(_outer(200)),
    "averaging 50, fragments, int8": Method("int8", every=50, fragments=4),
    "averaging 50, fragments, int4": Method("int4", every=50, fragments=4),
}


# --- what is trained ---


@dataclass(frozen=True)
class Task:
    """A network, how it is trained, and its samples.

    Learning rates are those of the least loss on what is held out, by one process with seed 0, among 0.1, 0.2 and 0.4
    for glyphs, and 0.0025, 0.005, 0.01 and 0.02 for text. One process computes what ranks do in float32.
    """

    network: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    batch: int
    """Samples in a step, of all ranks together."""
    count: int
    samples: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Inputs and targets of samples, by their numbers below ``count``."""
    held_out: tuple[Tensor, Tensor]
    digest: str
    """Hash of all samples."""

    def loss(self, net: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the losses, and how many answers are right."""
        answers = net(inputs).flatten(0, -2)
        found = F.cross_entropy(answers, targets.flatten(), reduction="sum")
        return found, (answers.argmax(-1) == targets.flatten()).sum()


def convolutional(classes: int, pixels: int) -> nn.Module:
    first = nn.Conv2d(1, 16, 5, stride=2, padding=2, bias=False), nn.GroupNorm(8, 16), nn.ReLU()
    second = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.GroupNorm(8, 32), nn.ReLU()
    side = math.ceil(pixels / 4)
    third = nn.Linear(32 * side * side, 128), nn.LayerNorm(128), nn.Linear(128, classes)
    return nn.Sequential(*first, *second, nn.Flatten(), *third)


class Block(nn.Module):
    """A layer of a transformer: attention to what was before, and a network for each place."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.each = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.mixed(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        mapped: Tensor = x + self.each(self.between(x))
        return mapped


class Transformer(nn.Module):
    """Scores of the next letter at each place."""

    def __init__(self, letters: int, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(CONTEXT, width)
        for table in (self.letters, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.block = Block(width, heads)
        self.scores = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, letters))

    def forward(self, letters: Tensor) -> Tensor:
        found: Tensor = self.scores(self.block(self.letters(letters) + self.places.weight))
        return found


def glyphs(folder: Path) -> Task:
    """A set that examples/imagenet/glyphs.py has drawn as images; Failed where there is none."""
    from PIL import Image

    def part(name: str) -> tuple[Tensor, Tensor]:
        files = [sorted((folder / name / each).iterdir()) for each in classes]
        shades = np.stack([np.asarray(Image.open(file).convert("L"), np.float32) for each in files for file in each])
        counts = torch.tensor([len(each) for each in files])
        return torch.from_numpy(shades)[:, None], torch.arange(len(files)).repeat_interleave(counts)

    try:
        classes = sorted(each.name for each in (folder / "train").iterdir())
        (images, labels), (others, their_labels) = part("train"), part("validation")
    except (OSError, ValueError) as error:
        raise Failed(
            f"--glyphs {folder}: {error}: name a folder that examples/imagenet/glyphs.py has made, without --packed"
        ) from None
    deviation, mean = torch.std_mean(images)
    images, others = (images - mean) / deviation, (others - mean) / deviation
    return Task(
        network=lambda: convolutional(len(classes), images.shape[-1]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.2, momentum=0.9, nesterov=True, fused=True),
        batch=256,
        count=len(images),
        samples=lambda chosen: (images[chosen], labels[chosen]),
        held_out=(others, their_labels),
        digest=hashlib.sha256(images.numpy().tobytes() + others.numpy().tobytes()).hexdigest(),
    )


def text() -> Task:
    """Python's help on its own words, of which the last tenth is held out."""
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))
    known = {letter: number for number, letter in enumerate(sorted(set(whole)))}
    numbers = torch.tensor([known[letter] for letter in whole])
    own, others = numbers[: len(numbers) * 9 // 10], numbers[len(numbers) * 9 // 10 :]

    def samples(chosen: Tensor) -> tuple[Tensor, Tensor]:
        found = own[chosen[:, None] + torch.arange(CONTEXT + 1)]
        return found[:, :-1], found[:, 1:]

    held_out = others[: (len(others) - 1) // CONTEXT * CONTEXT + 1]
    return Task(
        network=lambda: Transformer(len(known)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 5e-3, betas=(0.9, 0.99), fused=True),
        batch=32,
        count=len(own) - CONTEXT,
        samples=samples,
        held_out=(held_out[:-1].view(-1, CONTEXT), held_out[1:].view(-1, CONTEXT)),
        digest=hashlib.sha256(whole.encode()).hexdigest(),
    )


# --- a training ---


@dataclass(frozen=True)
class Run:
    """One training, the same on all ranks."""

    task: Task
    method: Method
    seed: int
    steps: int
    ranks: int
    topology: Path


class Gradients:
    """The gradients of some parameters, one after the other in one buffer, which is averaged over the ranks of a group.

    With ``narrow`` it may travel in the format of the wire, what that loses being kept with ``feedback``.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], narrow: bool, feedback: bool) -> None:
        self.flat = torch.zeros(sum(each.numel() for each in parameters))
        self._owed = torch.zeros_like(self.flat) if feedback else None
        self._narrow = narrow
        places = self.flat.split([each.numel() for each in parameters])
        for parameter, place in zip(parameters, places, strict=True):
            parameter.grad = place.view_as(parameter)

    def average(self, group: mr.Communicator | None) -> None:
        if self._narrow:
            mr.all_reduce(self.flat, "avg", residual=self._owed, group=group)
        else:
            exact = self.flat.double()
            mr.all_reduce(exact, "avg", group=group)
            self.flat.copy_(exact)


def train(run: Run) -> dict[str, Any]:
    """Train on all ranks; what came out, the same on each. Failed where ranks differ or wires are not as asked for."""
    method, task, size = run.method, run.task, mr.world_size()
    torch.manual_seed(run.seed)
    net = task.network()
    outer, group, forward = None, None, net
    if method.every:
        make = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True) if method.momentum else None
        outer = Outer(net, method.every, groups="site", fragments=method.fragments, delay=method.delay, optimizer=make)
        group = outer.group
    parameters = list(net.parameters())
    warm_up = run.steps // 20
    gradients = []
    if method.rank:
        forward = DistributedDataParallel(net)
        state = PowerSGDState(None, method.rank, start_powerSGD_iter=max(2, warm_up), random_seed=run.seed)
        forward.register_comm_hook(state, powerSGD_hook)
    else:
        apart = [each for each in parameters if method.exempt and each.dim() == 1]
        others = [each for each in parameters if not method.exempt or each.dim() > 1]
        gradients = [Gradients(others, True, method.feedback), *([Gradients(apart, False, False)] if apart else [])]
    optimizer = task.optimizer(parameters)
    schedule = LambdaLR(optimizer, recipes.warm_up(recipes.cosine(run.steps), warm_up, 1 / run.steps))
    order = torch.randint(
        task.count, (run.steps, task.batch), generator=torch.Generator().manual_seed(1_000_000 + run.seed)
    )
    before = sent_to_the_other_site()
    for chosen in order:
        inputs, targets = task.samples(chosen[mr.rank() :: size])
        optimizer.zero_grad(set_to_none=False)
        (task.loss(forward, inputs, targets)[0] / targets.numel()).backward()
        for each in gradients:
            each.average(group)
        optimizer.step()
        schedule.step()
        if outer is not None:
            outer.step(len(inputs))
    if outer is not None:
        outer.finish()
    sent = np.zeros(len(SITES))
    sent[mr.rank() * len(sent) // size] = sent_to_the_other_site() - before
    mr.all_reduce(sent)
    sent -= 4 * run.steps * sum(each.flat.numel() for each in gradients[1:])

    check_wires(method)
    weights = b"".join(each.detach().numpy().tobytes() for each in parameters)
    if len(set(mr.all_gather_object(hashlib.sha256(weights).hexdigest()))) > 1:
        raise Failed("ranks have different weights at the end")
    inputs, targets = (each[mr.rank() :: size] for each in task.held_out)
    with torch.no_grad():
        found = torch.stack([*task.loss(net, inputs, targets), torch.tensor(targets.numel())]).double()
    mr.all_reduce(found)
    loss, right, answers = found.tolist()
    return {
        "loss": loss / answers,
        "accuracy": right / answers,
        "bytes": float(sent.max()),
        "parameters": sum(each.numel() for each in parameters),
    }


def sent_to_the_other_site() -> float:
    """Bytes that this rank has sent there so far."""
    half = mr.world_size() // 2
    peers = mr.stats()["peers"].items()
    return sum(counted["bytes_sent"] for rank, counted in peers if rank // half != mr.rank() // half)


def check_wires(method: Method) -> None:
    """Failed unless the largest sums have gone between racks and sites, and there in the format asked for."""
    sums = [choice for choice in mr.init().plans_used() if choice.plan.collective == "all_reduce"]
    phases = max(sums, key=lambda choice: choice.nbytes).plan.phases
    between = {phase.level: phase.wire for phase in phases if phase.level not in ("rank", "host")}
    levels = {level for joined in between for level in joined.split("+")}
    if levels != {"rack", "site"} or set(between.values()) != {method.wire}:
        raise Failed(f"sums went by levels and formats {between}, and not between racks and sites as {method.wire!r}")


def on_a_rank(rank: int, run: Run, pipes: Sequence[tuple[Connection, Connection]]) -> None:
    """A rank's process: it hears where the ranks meet, and answers with what came out, or with what failed it."""
    parent = pipes[rank][1]
    for number, (theirs, others) in enumerate(pipes):  # a pipe that is open elsewhere does not end with its rank
        theirs.close()
        if number != rank:
            others.close()
    try:
        store, secret = parent.recv()
        os.environ["MULTIRING_HOST"] = RACKS[rank * len(RACKS) // run.ranks]
        wire = {level: run.method.wire for level in ("rack", "site") if run.method.wire}
        options: dict[str, Any] = {"wire": wire} if wire else {}
        start = multiring.torch.init if run.method.rank else mr.init
        start(
            rank=rank,
            world_size=run.ranks,
            store=store,
            secret=secret,
            topology=str(run.topology),
            **options,
            **PATIENT,
        )
        parent.send((train(run), ""))
        if run.method.rank:
            torch.distributed.destroy_process_group()
        mr.shutdown()
    except (Failed, mr.MultiringError) as error:
        parent.send(({}, str(error)))
    except Exception:
        parent.send(({}, traceback.format_exc()))


def job(run: Run) -> dict[str, Any]:
    """Return the result of a training on forked ranks; Failed if one fails, and no rank is then left running."""
    forks = multiprocessing.get_context("fork")
    pipes = [forks.Pipe() for _ in range(run.ranks)]
    ranks = [forks.Process(target=on_a_rank, args=(rank, run, pipes)) for rank in range(run.ranks)]
    try:
        for each in ranks:  # before the store, whose thread no fork is to see
            each.start()
        with mr.StoreServer() as store:
            for ours, theirs in pipes:
                theirs.close()
                ours.send((store.addresses, store.secret))
            results = [{}] * run.ranks
            waiting = {ours: rank for rank, (ours, _) in enumerate(pipes)}
            while waiting:
                for ours in wait(list(waiting)):
                    rank = waiting.pop(ours)
                    try:
                        results[rank], why = ours.recv()
                    except EOFError:
                        ranks[rank].join()
                        why = f"it ended with {ranks[rank].exitcode}"
                    if why:
                        raise Failed(f"rank {rank}: {why}")
        for each in ranks:
            each.join()
    finally:
        for each in ranks:
            if each.pid is not None and each.exitcode is None:
                each.kill()
                each.join()
        for ours, _ in pipes:
            ours.close()
    return results[0]


def places(ranks: int) -> str:
    """A topology file of the racks, with as many ranks each, and a thin link out of each site."""
    lines = ['links.rack = { rate = "1 Gbit/s" }', 'links.site = { rate = "100 Mbit/s", latency = "5 ms" }']
    for site, racks in SITES.items():
        lines.append(f'[[site]]\nname = "{site}"')
        for rack in racks:
            host = f'{{ name = "{rack}", ranks = {ranks // len(RACKS)} }}'
            lines.append(f'[[site.rack]]\nname = "rack-of-{rack}"\nhost = [{host}]')
    return "\n".join(lines) + "\n"


# --- all trainings ---


def measure(args: argparse.Namespace, tasks: dict[str, Task]) -> None:
    """Run what is missing in the file, seed after seed, and add each to it; Failed if a training fails."""
    kept = read(args.file) if args.file.exists() else {"rows": []}
    about = {
        "ranks": args.ranks,
        "steps": args.steps,
        **{f"samples of {name}": task.digest for name, task in tasks.items()},
    }
    about = {**{name: value for name, value in kept.items() if name.startswith("samples of ")}, **about}
    for name, value in about.items():
        if kept.get(name, value) != value:
            raise Failed(f"{args.file}: it is of {name} {kept[name]}, and these are {value}: name another file")
    rows: list[dict[str, Any]] = kept["rows"]
    ran = shlex.join(["python", "benchmarks/accuracy.py", *sys.argv[1:]])
    done = {(row["model"], row["method"], row["seed"]) for row in rows}
    wanted = ((model, method, seed) for seed in args.seeds for method in args.methods for model in args.models)
    until = time.monotonic() + 60 * args.minutes
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends this ends its ranks
    with tempfile.TemporaryDirectory() as directory:
        topology = Path(directory, "topology.toml")
        topology.write_text(places(args.ranks))
        for model, method, seed in wanted:
            if (model, method, seed) in done:
                continue
            if time.monotonic() >= until:
                break
            try:
                found = job(Run(tasks[model], METHODS[method], seed, args.steps, args.ranks, topology))
            except Failed as error:
                raise Failed(f"{model}, {method}, seed {seed}: {error}") from None
            rows.append({"model": model, "method": method, "seed": seed, **found})
            told = report.record(rows, command=ran, **about)
            whole_files.replace(args.file, [json.dumps(told, indent=1).encode() + b"\n"])
            shown = f"loss {found['loss']:.4f}, accuracy {found['accuracy']:.2%}, {found['bytes'] / 1e6:.3f} MB"
            print(f"{model}, {method}, seed {seed}: {shown}", flush=True)


def read(file: Path) -> dict[str, Any]:
    """A file with its ``rows``, the trainings; Failed where it has none."""
    try:
        told: dict[str, Any] = json.loads(file.read_text())
        if not told["rows"]:
            raise ValueError("no rows")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Failed(f"{file}: it has no trainings ({error!r}): name another file") from None
    return told


# --- what is shown ---


@dataclass(frozen=True)
class Mean:
    """A mean with the half of its interval of 95 % confidence by Student's t, NaN for one value."""

    value: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        from scipy.stats import t

        if len(values) < 2:
            return cls(values[0], math.nan)
        error = statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.mean(values), float(t.ppf(0.975, len(values) - 1)) * error)

    def text(self, form: str, scale: float = 1.0) -> str:
        half = "" if math.isnan(self.half) else f" ± {scale * self.half:{form.replace('+', '')}}"
        return f"{scale * self.value:{form}}{half}"


@dataclass(frozen=True)
class Summary:
    """A method's results on one model: of all seeds, and by how much they differ from float32 with the same seed."""

    method: str
    seeds: int
    megabytes: float
    loss: Mean
    accuracy: Mean
    more_loss: Mean | None
    more_accuracy: Mean | None


def summaries(rows: Sequence[dict[str, Any]], model: str) -> list[Summary]:
    """Return a summary of each trained method; differences from float32 are None without a seed in common."""
    by_seed = {
        method: {row["seed"]: row for row in rows if (row["model"], row["method"]) == (model, method)}
        for method in METHODS
    }
    found = []
    for method, mine in by_seed.items():
        if not mine:
            continue
        both = [(row, by_seed["float32"][seed]) for seed, row in mine.items() if seed in by_seed["float32"]]
        more = {
            name: Mean.of([row[name] - theirs[name] for row, theirs in both]) if both and method != "float32" else None
            for name in ("loss", "accuracy")
        }
        means = {name: Mean.of([row[name] for row in mine.values()]) for name in ("loss", "accuracy")}
        sent = statistics.mean(row["bytes"] for row in mine.values()) / 1e6
        found.append(Summary(method, len(mine), sent, means["loss"], means["accuracy"], more["loss"], more["accuracy"]))
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, a table for each model."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        lines += [
            f"\n| {model} | seeds | MB | loss | from float32 | accuracy, % | from float32 |",
            "|---|---|---|---|---|---|---|",
        ]
        for each in summaries(rows, model):
            loss, accuracy = each.loss.text(".3f"), each.accuracy.text(".2f", 100)
            more_loss = each.more_loss.text("+.3f") if each.more_loss else ""
            more_accuracy = each.more_accuracy.text("+.2f", 100) if each.more_accuracy else ""
            first = f"| {each.method} | {each.seeds} | {each.megabytes:.2f}"
            lines.append(f"{first} | {loss} | {more_loss} | {accuracy} | {more_accuracy} |")
    return "\n".join(lines).strip()


def best(found: Sequence[Summary]) -> list[Summary]:
    """Return the summaries that no other beats in both bytes and loss, most bytes first."""
    ordered = sorted(found, key=lambda each: (each.megabytes, _loss(each)))
    kept: list[Summary] = []
    for each in ordered:
        if not kept or _loss(each) < _loss(kept[-1]):
            kept.append(each)
    return kept[::-1]


def family(name: str) -> str:
    """Return a method's kind, in the words of the picture."""
    method = METHODS[name]
    if method.every:
        return "parameters, outer momentum" if method.momentum else "parameters, averaged"
    if method.rank:
        return "PowerSGD"
    return "gradients, with feedback" if method.feedback else "gradients"


FAMILIES = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(map(family, METHODS)))}
"""Colours."""

SIDES = {"gradients, with feedback": ("center", "top"), "PowerSGD": ("left", "center")}
"""Alignment of names with their points, for families whose names are not above them."""


def draw(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Loss beside float32 over bytes, a panel for each model, with the line of those that nothing beats in both.

    In each family the best of those that send about as much has its name beside it, unless parameters are exempt.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = pyplot.subplots(
        1, len(models), figsize=(6.5 * len(models), 6), layout="constrained", squeeze=False
    )
    for model, axes in zip(models, panels[0], strict=True):
        found = [each for each in summaries(rows, model) if each.more_loss or each.method == "float32"]
        front = best(found)
        axes.step([each.megabytes for each in front], [_loss(each) for each in front], where="pre", color="0.8")
        full = [each for each in sorted(found, key=_loss, reverse=True) if not METHODS[each.method].exempt]
        named = {(family(each.method), round(4 * math.log2(each.megabytes))): each for each in full}
        for each in found:
            half = None if each.more_loss is None or math.isnan(each.more_loss.half) else each.more_loss.half
            colour = FAMILIES[family(each.method)]
            fill = "white" if METHODS[each.method].exempt else colour
            axes.errorbar(each.megabytes, _loss(each), half, fmt="o", color=colour, markerfacecolor=fill, capsize=2)
        for each in named.values():
            name = family(each.method)
            side, height = SIDES.get(name, ("center", "bottom"))
            axes.annotate(
                each.method.replace(", ", "\n"),
                (each.megabytes, _loss(each)),
                xytext=({"left": 6, "center": 0}[side], {"bottom": 6, "center": 0, "top": -6}[height]),
                textcoords="offset points",
                ha=side,
                va=height,
                fontsize=7,
                color=FAMILIES[name],
            )
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=0.1)
        axes.margins(0.1)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.set_xlabel("MB that a site sends to the other in the whole training")
        seeds = " or ".join(map(str, sorted({each.seeds for each in found})))
        axes.set_title(f"{model}: loss above that of float32, mean of {seeds} seeds", loc="left")
    marks = [pyplot.Line2D([], [], marker="o", linestyle="", color=colour) for colour in FAMILIES.values()]
    hollow = pyplot.Line2D([], [], marker="o", linestyle="", color="0.5", markerfacecolor="white")
    words = [*FAMILIES, "exempt"]
    figure.legend([*marks, hollow], words, loc="outside lower center", ncols=3, frameon=False)
    curves.save(figure, file)
    pyplot.close(figure)


def _loss(each: Summary) -> float:
    """The loss above that of float32 with the same seeds."""
    return 0.0 if each.more_loss is None else each.more_loss.value


# --- what is asked ---


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"accuracy: {message}\n")


def whole(least: int) -> Callable[[str], int]:
    def number(given: str) -> int:
        if not given.isdecimal() or int(given) < least:
            raise argparse.ArgumentTypeError(f"{given!r}: a whole number of {least} or more is needed")
        return int(given)

    return number


def file_to_write(given: str) -> Path:
    file = Path(given)
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{given!r}: a file in a folder that is there is needed")
    return file


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=str(__doc__).splitlines()[0])
    parser.add_argument("file", type=file_to_write, metavar="FILE.json", help="where trainings are kept")
    parser.add_argument("--glyphs", type=Path, metavar="DIR", help="what examples/imagenet/glyphs.py has drawn")
    parser.add_argument("--models", nargs="+", choices=("glyphs", "text"), default=["glyphs", "text"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", type=whole(0), nargs="+", default=list(range(10)), metavar="SEED")
    parser.add_argument("--steps", type=whole(1), default=400)
    parser.add_argument("--ranks", type=whole(len(RACKS)), default=8, help=f"a multiple of {len(RACKS)}")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no training is begun")
    parser.add_argument("--table", action="store_true", help="train nothing, and show what the file has")
    parser.add_argument(
        "--picture", type=file_to_write, metavar="FILE.svg", help="train nothing, and draw what the file has"
    )
    args = parser.parse_args(words)
    if args.ranks % len(RACKS):
        parser.error(f"--ranks {args.ranks}: {len(RACKS)} racks have as many ranks each: give a multiple of that")
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes}: a number above 0 is needed")
    if args.picture:
        try:
            curves.check(args.picture, "--picture")
        except (ImportError, ValueError) as error:
            parser.error(str(error))
    elif "glyphs" in args.models and not args.table and args.glyphs is None:
        parser.error("--models glyphs needs --glyphs DIR, which examples/imagenet/glyphs.py draws")
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    try:
        if args.table or args.picture:
            rows = read(args.file)["rows"]
            if args.table:
                print(table(rows))
            if args.picture:
                draw(args.picture, rows)
        else:
            makers = {"glyphs": lambda: glyphs(args.glyphs), "text": text}
            measure(args, {model: makers[model]() for model in args.models})
    except Failed as error:
        sys.exit(f"accuracy: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
