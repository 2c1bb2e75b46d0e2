"""Train on ImageNet, or on any set of images in classes, by a published recipe.

    one process     python examples/imagenet/train.py --preset glyphs --data glyphs
    one host        multiring run -n 4 examples/imagenet/train.py --preset ibm-resnet50 --data imagenet
    whoever is lost multiring run -n 4 --min-ranks 3 --max-replacements 9 examples/imagenet/train.py --preset ...

DIR/train and DIR/validation, of --data DIR, are folders of classes or what `multiring data pack` made of them. Rank 0
writes --checkpoint FILE every --every steps; where there is one, the job goes on from it, be it in the middle of an
epoch. At these steps, and at the end of each epoch, ranks that were started in the place of lost ones are taken in.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import hashlib
import math
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import account
import checkpoints
import curves
import torch
import torch.distributed as dist
from agreement import agree, leave
from images import DEVIATION, MEAN, parts
from networks import MovingAverage, agree_on_statistics, build, check
from presets import PRESETS, changed, collapses, rates, training_size, training_sizes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

import multiring as mr
import multiring.torch
from multiring import recipes
from multiring.data import DataError, cuts

MISTAKES = (ValueError, OSError, DataError)
"""Errors that wrong arguments and wrong data raise."""

BROKEN = ("raise", "skip")

STEPS_ALONE = 3
"""Steps that each rank takes by itself, to know what it would reach without the others."""


class Training:
    """One rank's part of a training. Nothing is sent before `run`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.preset = changed(PRESETS[args.preset], args.set)
        for path in filter(None, (args.checkpoint, args.page)):
            if mr.rank() == 0 and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise ValueError(f"{path}: a file in a folder that is there is needed")
        if args.tensorboard:
            curves.check(args.tensorboard, mr.rank() == 0)
        if self.preset.cycles and not args.checkpoint:
            ends = ",".join(map(str, self.preset.cycles))
            raise ValueError(
                f"cycles={ends}: --checkpoint FILE is needed, beside which the networks of their ends are kept"
            )
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", mr.local_rank() % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.images, self.validation = parts(args.data, self.preset, args.seed, args.broken)
        self.loader = self._loader()
        self.each = len(self.loader)
        if not self.each:
            raise ValueError(
                f"batch={self.preset.batch}: no batch is left of {len(self.images)} images: choose a smaller one, or "
                "--uneven keep or pad"
            )
        self.rate = rates(self.preset, self.each)
        self.net = self._network()
        self.average = MovingAverage(self.net, self.preset.average) if self.preset.average else None
        self.optimizer = self._optimizer()
        self.parallel: DistributedDataParallel | None = None
        self.factors: multiring.torch.Factors | None = None
        self.world = mr.world_size()
        self.at_start = self.world
        self.state: dict[str, Any] = {"loader": self.loader.state_dict(), "best": 0.0, "result": {}, "ensemble": {}}
        self.history = account.begun()
        self.curves: curves.Curves | None = None
        self.waited = 0.0  # seconds that this rank had waited for others when the last line was told
        self.alone = 0.0  # images/s that this rank computes by itself, once they are measured
        self.whole = False  # whether this rank has all that a training goes on from
        self.may_begin = not replaces()
        self.waited_in_vain = False
        self.sums = [0.0, 0, 0.0]  # losses, samples and seconds of all ranks' steps since the last line
        self.pace = account.Pace()
        self.began = self.clocked = time.perf_counter()
        self.trained = 0
        self.since = (self.began, 0)  # when the epoch began, or ranks changed; what had been trained on

    def _loader(self) -> multiring.torch.Loader:
        workers: dict[str, Any] = {"num_workers": self.args.workers, "pin_memory": self.device.type == "cuda"}
        uneven, seed, batch, world = self.args.uneven, self.args.seed, self.preset.batch, mr.world_size()
        if batch < world:
            raise ValueError(f"batch={batch}: each of {world} ranks needs a sample of it: --set batch={world} or more")
        left = len(self.images) % batch
        if uneven == "keep" and 0 < left < world:
            raise ValueError(
                f"batch={batch}: the last batch of {len(self.images)} images has {left}, and each of {world} ranks "
                "needs a sample of it: choose --uneven drop or pad, or another batch"
            )
        return multiring.torch.Loader(self.images, self.preset.batch, seed=seed, uneven=uneven, **workers)

    def _network(self) -> nn.Module:
        preset = self.preset
        least = 2 if preset.statistics == "world" else self.smallest_pass()
        check(preset.model, len(self.images.classes), training_sizes(preset), least, width=preset.width)
        torch.manual_seed(self.args.seed)
        options = {"width": preset.width, "zero_gamma": preset.zero_gamma, "statistics": preset.statistics}
        layout = torch.channels_last if preset.channels_last else torch.contiguous_format
        network = build(preset.model, len(self.images.classes), **options)
        return network.to(self.device, memory_format=layout)

    def smallest_pass(self) -> int:
        """The samples of the smallest pass of a rank, also in the smaller worlds that there may be."""
        if self.args.broken == "skip":
            return 1
        whole, rest = self.preset.batch, len(self.images) % self.preset.batch
        sizes = {whole, rest} - {0} if self.args.uneven == "keep" else {whole}
        parts = [(size, world) for size in sizes for world in range(1, mr.world_size() + 1)]
        return min(size // world // self.passes(size, world, size // world) for size, world in parts)

    def passes(self, planned: int, world: int, most: int) -> int:
        """The number of passes of a rank in a step of ``planned`` samples of all ranks, ``most`` at most."""
        return max(1, min(math.ceil(math.ceil(planned / world) / self.preset.micro), most))

    def _optimizer(self) -> torch.optim.Optimizer:
        preset = self.preset
        decayed = [weight for weight in self.net.parameters() if recipes.decays(weight.shape)]
        others = [weight for weight in self.net.parameters() if not recipes.decays(weight.shape)]
        groups = [{"params": decayed, "weight_decay": preset.decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=preset.momentum, nesterov=preset.nesterov)
        return multiring.torch.use_lars(optimizer, preset.lars) if preset.lars else optimizer

    # --- where the training is ---

    @property
    def epoch(self) -> int:
        return self.state["loader"]["epoch"]

    @property
    def done(self) -> int:
        """Steps of this epoch that the model has taken."""
        return math.ceil(self.state["loader"]["consumed"] / self.preset.batch)

    def facts(self) -> dict[str, Any]:
        """Return the values that must be the same on all ranks."""
        preset = dataclasses.asdict(self.preset)
        del preset["source"]  # a comment, which may be worded anew
        return {
            "preset": self.args.preset,
            "seed": self.args.seed,
            "number of training images": len(self.images),
            "number of validation images": len(self.validation),
            "number of classes": len(self.images.classes),
            "hash of the names of classes": hashlib.sha256("\0".join(self.images.classes).encode()).hexdigest()[:16],
            **preset,
            **{f"--{name}": getattr(self.args, name) for name in ("uneven", "broken", "every", "report", "wait")},
            "a --checkpoint": self.args.checkpoint is not None,
            "a --page": self.args.page is not None,
            "a --tensorboard": self.args.tensorboard is not None,
        }

    def synchronise(self) -> None:
        """Let all ranks go on from what the oldest has: at the start, and when ranks were lost or admitted."""
        oldest = mr.oldest()
        newcomer = replaces() and not self.whole
        agree(self._begin() if mr.rank() == oldest and not self.whole else None, self.facts(), newcomer)
        held = (self.state, self.at_start, self.history)
        state, self.at_start, self.history = multiring.torch.broadcast_object(held, oldest)
        if state != self.state:
            self.may_begin = False  # what follows may arrive in part, which is no beginning
        self.state = state
        multiring.torch.sync_state(self.net, self.optimizer, oldest)
        if self.average:
            multiring.torch.sync_state(self.average.network, root=oldest)
        self.whole = True
        self.loader.load_state_dict(self.state["loader"])
        self.world = dist.get_world_size()
        self.sums = [0.0, 0, 0.0]
        self.pace = account.Pace()
        if self.args.page and not self.alone and self.preset.statistics == "rank":
            self.alone = self.speed_alone()
        self.open_curves()
        self.restart_clock()
        self.factors = multiring.torch.Factors(self.net) if self.preset.factors else None
        # Statistics of batch norms stay those of each rank until they are averaged.
        self.parallel = DistributedDataParallel(self.net, forward_sync_buffers=False)

    def open_curves(self) -> None:
        """Let rank 0 write curves from here on; another one may have done so, and come further than all go on from."""
        if self.curves:
            self.curves.close()
        validates = self.done == self.each  # again, if it has been lost
        first_step = self.epoch * self.each + self.done + (0 if validates else 1)
        writes = self.args.tensorboard and dist.get_rank() == 0
        self.curves = curves.Curves(self.args.tensorboard, first_step) if writes else None
        self.waited = seconds_waited()

    def restart_clock(self) -> None:
        """Begin to measure an epoch's speed."""
        self.clocked = time.perf_counter()
        self.since = (self.clocked, self.trained)

    def speed_alone(self) -> float:
        """Images/s of steps on this rank's part of a batch, without reading images or waiting for others.

        The steps are those of a copy. Other ranks measure at the same time where they begin together, and share cores.
        """
        net = copy.deepcopy(self.net).train()
        some = min(math.ceil(self.preset.batch / self.world), self.preset.micro)
        size = training_size(self.preset, self.epoch)
        batch, labels = torch.zeros(some, 3, size, size, dtype=torch.uint8), torch.zeros(some, dtype=torch.long)
        for step in range(1 + STEPS_ALONE):
            if step == 1:  # the first is slower
                began = time.perf_counter()
            net.zero_grad()
            self.loss(net, batch, labels, self.preset.smoothing).backward()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return some * STEPS_ALONE / (time.perf_counter() - began)

    def _begin(self) -> str | None:
        """Take the checkpoint up, if there is one, or begin anew; what is wrong if neither can be done.

        The oldest does it, when all who had more were lost, too.
        """
        path = self.args.checkpoint
        try:
            if path and path.exists():
                self._load(path)
            elif not self.may_begin:
                what = f"there is no {path}" if path else "there is no --checkpoint"
                return f"all ranks that had trained were lost, and {what} to go on from: start the job again"
        except MISTAKES as error:
            return str(error)
        self.whole = True
        return None

    def run(self) -> None:
        """Train until the last epoch is validated, and the ensemble of the cycles' ends."""
        # At first the oldest alone knows of a checkpoint, which may be of the end.
        while self.parallel is None or self.epoch < self.preset.epochs or self.lacks_ensemble():
            try:
                if self.parallel is None:
                    self.synchronise()
                elif self.epoch == self.preset.epochs:
                    self.validate_ensemble()
                elif self.train_epoch():
                    self.end_epoch()
            except DataError:  # nobody was lost
                raise
            except RuntimeError as error:  # torch may have wrapped PeerLost in it
                try:
                    agreement = multiring.torch.shrink()
                except mr.MultiringError as refused:
                    # This very class says that no rank was lost: memory is short, say, or a loader's worker died.
                    if type(refused) is mr.MultiringError:
                        raise error from None
                    raise
                self.parallel, self.waited_in_vain = None, False
                first = str(error).partition("\n")[0]
                lost = f"{first}; {len(agreement.members)} ranks go on"
                self.history["changes"].append([self.epoch, self.done, lost])
                where = f"go on in epoch {self.epoch} near step {self.done}" if self.whole else "begin"
                self.tell(f"{first}; {len(agreement.members)} ranks {where}")

    # --- steps ---

    def train_epoch(self) -> bool:
        """Train until the epoch ends, which is True, or ranks are admitted."""
        if self.done == self.each:
            return True
        self.images.epoch, self.images.augments = self.epoch, not collapses(self.preset, self.epoch)
        for pixels, labels in self.loader:
            self.step(pixels, labels)
            steps = self.epoch * self.each + self.done
            if steps % self.args.report == 0:
                self.report()
            if steps % self.args.every == 0 and self.done < self.each:
                self.save()
                if self.admitted():
                    return False
        return True

    def step(self, pixels: Tensor, labels: Tensor) -> None:
        """One step on this rank's part of a global batch."""
        preset, rank = self.preset, dist.get_rank()
        consumed, length = self.state["loader"]["consumed"], len(self.images)
        planned = preset.batch if self.args.uneven == "pad" else min(preset.batch, length - consumed)
        skips = self.args.broken == "skip"
        ends = cuts(planned, [1] * self.world)
        counts = self.of_ranks(len(labels)) if skips else [ends[i + 1] - ends[i] for i in range(self.world)]
        together = int(sum(counts))
        # Norms over the world need as many passes on all ranks, with a sample each, if only of one rank.
        most = (max(counts) if skips else min(counts)) if preset.statistics == "world" else len(labels)
        passes = self.passes(planned, self.world, int(most))
        step = self.epoch * self.each + self.done
        collapse = preset.collapse_decay if collapses(preset, self.epoch) else 1.0
        for group, decay in zip(self.optimizer.param_groups, (preset.decay * collapse, 0.0), strict=True):
            group["lr"], group["weight_decay"] = self.rate(step), decay
        torch.manual_seed((self.args.seed + step) * self.world + rank)  # what is random does not hang on the past
        self.net.train()
        self.optimizer.zero_grad()
        pieces = list(zip(pixels.tensor_split(passes), labels.tensor_split(passes), strict=True)) if together else []
        mine = 0.0
        for number, (part, expected) in enumerate(pieces):
            last = number == len(pieces) - 1
            with contextlib.ExitStack() as waiting:
                for averages in (self.parallel, self.factors):
                    if averages and not last:
                        waiting.enter_context(averages.no_sync())
                # A sum over this rank's samples; the mean over the ranks is the loss of the global batch.
                loss = self.loss(self.parallel, part, expected, preset.smoothing)
                (loss * (self.world / together)).backward()
            mine += loss.item()
        losses = self.of_ranks(mine)
        if wrong := [other for other, loss in enumerate(losses) if not math.isfinite(loss)]:
            what = f"the loss of rank {wrong[0]} is {losses[wrong[0]]} at a rate of {self.rate(step):.6g}"
            self.diverged(f"step {self.done} of epoch {self.epoch}: {what}")
        if together:
            self.optimizer.step()
            if self.average:
                self.average.follow(self.net)
        self.trained += together
        self.state["loader"] = self.loader.state_dict()  # what the model has had, not what was handed out
        now = time.perf_counter()
        account.add_step(self.history, sum(losses), together, planned - together, now - self.clocked)
        self.sums = [a + b for a, b in zip(self.sums, (sum(losses), together, now - self.clocked), strict=True)]
        self.pace.add(now - self.clocked)
        self.clocked = now

    def of_ranks(self, mine: float) -> list[float]:
        """A number of each rank; all ranks call it."""
        numbers = torch.zeros(self.world, dtype=torch.float64)
        numbers[dist.get_rank()] = mine
        dist.all_reduce(numbers)
        return numbers.tolist()

    def diverged(self, what: str) -> NoReturn:
        """End all ranks, as training has come to numbers that are none; all ranks call it."""
        where = f", and {self.args.checkpoint} is of before" if self.args.checkpoint else ""
        leave(0, f"{what}: lower it by --set rate=, or warm up for longer{where}")

    def loss(self, net: nn.Module, pixels: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        """The sum of the losses of some samples."""
        return F.cross_entropy(
            self.answers(net, pixels), labels.to(self.device), reduction="sum", label_smoothing=smoothing
        )

    def answers(self, net: nn.Module, pixels: Tensor) -> Tensor:
        mean, deviation = (torch.tensor(each, device=self.device).view(1, 3, 1, 1) for each in (MEAN, DEVIATION))
        layout = torch.channels_last if self.preset.channels_last else torch.contiguous_format
        scaled = (pixels.to(self.device, non_blocking=True).float() / 255 - mean) / deviation
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.preset.bfloat16):
            return net(scaled.contiguous(memory_format=layout)).float()

    # --- between steps ---

    def report(self) -> None:
        """Tell of the steps since the last line."""
        steps = self.epoch * self.each + self.done
        if self.args.tensorboard:
            before, self.waited = self.waited, seconds_waited()
            waited = self.of_ranks(self.waited - before)
        account.close_point(self.history, steps)
        losses, images, seconds = self.sums
        self.sums = [0.0, 0, 0.0]
        left = self.pace.left(self.preset.epochs * self.each - steps, self.preset.epochs - self.epoch, self.history)
        loss = losses / images if images else math.nan
        self.tell(
            f"epoch {self.epoch} step {self.done} of {self.each}  loss {loss:.6f}  rate "
            f"{self.rate(steps - 1):.4g}  {images / seconds:.0f} images/s  {clock(left)} left"
        )
        if self.curves:
            values = {"loss": loss, "rate": self.rate(steps - 1), "images per second": images / seconds}
            share = {"mean of ranks": sum(waited) / self.world / seconds, "longest": max(waited) / seconds}
            self.curves.add(
                steps,
                {
                    **{f"training/{name}": value for name, value in values.items()},
                    **{f"share of time waiting for other ranks/{name}": value for name, value in share.items()},
                },
            )

    def end_epoch(self) -> None:
        """Validate, and go to the next epoch."""
        ended, (began, trained) = self.clocked, self.since
        waited = seconds_waited()
        account.close_point(self.history, (self.epoch + 1) * self.each)
        losses, images, broken = self.history["sums"]
        alone = torch.tensor([self.alone], dtype=torch.float64)
        dist.all_reduce(alone, dist.ReduceOp.MIN)
        validating = time.perf_counter()
        agree_on_statistics(self.validated)
        result, worst = self.validate([self.validated])
        if not math.isfinite(result["loss"]):
            self.diverged(
                f"epoch {self.epoch}: the loss of validation is {result['loss']} after a rate of {self.last()}"
            )
        # Nothing below is undone where a rank is lost meanwhile; until here all of it is repeated.
        number = self.keep(result)
        self.history["worst"] = worst
        if number:
            self.history["cycles"].append({"cycle": number, "epoch": self.epoch, **result})
        best = max(self.state["best"], result["top1"])
        unseen = len(self.validation) - int(result["images"])
        self.history["epochs"].append(
            {
                "epoch": self.epoch,
                "step": (self.epoch + 1) * self.each,
                "ranks": self.world,
                "loss": losses / images if images else None,
                "speed": (self.trained - trained) / (ended - began) if self.trained > trained else None,
                "expected": self.world * alone.item() or None,
                "top-1": result["top1"],
                "top-5": result["top5"],
                "validation loss": result["loss"],
                "broken": broken,
                "broken in validation": unseen,
                "validated in": time.perf_counter() - validating,
            }
        )
        self.history["sums"] = [0.0, 0, 0]
        self.loader.set_epoch(self.epoch + 1)
        if broken or unseen:
            self.tell(f"epoch {self.epoch} left out: {broken} broken images in training, {unseen} in validation")
        self.tell(f"epoch {self.epoch} validated: {told(result)}")
        self.state = {"loader": self.loader.state_dict(), "best": best, "result": result, "ensemble": {}}
        if self.curves:
            of_names = {"loss": result["loss"], "top-1": result["top1"], "top-5": result["top5"]}
            values = {f"validation/{name}": value for name, value in of_names.items()}
            self.curves.add(self.epoch * self.each, values)
        self.save()
        if self.epoch < self.preset.epochs:
            self.admitted()
        self.restart_clock()  # validation is no part of the images/s of a line, nor of the time waited
        self.waited += seconds_waited() - waited

    def last(self) -> str:
        """The rate of the last step."""
        return f"{self.rate(self.epoch * self.each + self.done - 1):.6g}"

    @property
    def validated(self) -> nn.Module:
        """The network that is validated: the moving average, if there is one."""
        return self.average.network if self.average else self.net

    def keep(self, result: dict[str, float]) -> int:
        """Write the network of a cycle's end on rank 0; its number, counted from 1, or 0 where no cycle ends.

        All ranks call it, and none goes on before the file is written: if rank 0 is lost, the others write it.
        """
        if self.epoch + 1 not in self.preset.cycles:
            return 0
        number = self.preset.cycles.index(self.epoch + 1) + 1
        whole = {"facts": self.facts(), "epoch": self.epoch, "result": result, "net": self.validated.state_dict()}
        self.write(checkpoints.of_cycle(self.args.checkpoint, number), whole)
        return number

    def write(self, path: Path, whole: dict[str, Any]) -> None:
        """Write a checkpoint on rank 0, and end all ranks where it cannot be written; all call it."""
        mistake = ""
        if dist.get_rank() == 0:
            try:
                checkpoints.save(path, whole)
            except ValueError as error:
                mistake = str(error)
        if any(self.of_ranks(float(bool(mistake)))):
            leave(0, mistake)

    def lacks_ensemble(self) -> bool:
        """True if there are cycles, and the ensemble of their ends has not been validated."""
        return bool(self.preset.cycles) and not self.state["ensemble"]

    def validate_ensemble(self) -> None:
        """Validate the networks of the cycles' ends as one, which the oldest rank reads for all."""
        oldest, networks, mistake = mr.oldest(), [copy.deepcopy(self.validated) for _ in self.preset.cycles], None
        if mr.rank() == oldest:
            try:
                for number, network in enumerate(networks, 1):
                    file = checkpoints.of_cycle(self.args.checkpoint, number)
                    if not file.exists():
                        raise ValueError(
                            f"{file}: the network of cycle {number} is not there, which rank 0 wrote on its host: put "
                            "it there, and give this command again"
                        )
                    network.load_state_dict(checkpoints.load(file, self.facts(), self.device)["net"])
            except MISTAKES as error:
                mistake = str(error)
        agree(mistake, {})
        for network in networks:
            multiring.torch.sync_state(network, root=oldest)
        result, _ = self.validate(networks)
        self.tell(f"ensemble of {len(networks)} cycles validated: {told(result)}")
        self.state = {**self.state, "ensemble": result}
        self.save()

    @torch.no_grad()
    def validate(self, networks: list[nn.Module]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Look at each validation image once, on one rank or another; results, and the worst classes.

        Several networks answer with the mean of their probabilities.
        """
        for network in networks:
            network.eval()
        ends = cuts(len(self.validation), [1] * self.world)
        mine = Subset(self.validation, range(ends[dist.get_rank()], ends[dist.get_rank() + 1]))
        classes = len(self.images.classes)
        counts = torch.zeros(2, dtype=torch.float64)
        of_class = torch.zeros(2, classes, dtype=torch.float64)  # images, and those that were right
        mistakes = []  # pairs of a class and another one that it was taken for
        options: dict[str, Any] = {"num_workers": self.args.workers, "collate_fn": self.loader.collate_fn}
        for pixels, labels in DataLoader(mine, self.preset.micro, **options):
            answers = self.answers_together(networks, pixels).cpu()
            guessed = answers.topk(min(5, answers.shape[1])).indices
            hits = guessed == labels[:, None]
            right = hits[:, 0]
            of_class += torch.stack([torch.bincount(each, minlength=classes) for each in (labels, labels[right])])
            mistakes.append(torch.stack([labels, guessed[:, 0]])[:, ~right])
            lost = F.cross_entropy(answers, labels, reduction="sum")
            counts += torch.stack([hits.sum(), lost]).double()
        dist.all_reduce(counts)
        dist.all_reduce(of_class)
        worst = self.confused(*of_class, torch.cat(mistakes, 1) if mistakes else torch.empty(2, 0))
        (seen, exact), (near, lost) = of_class.sum(1).tolist(), counts.tolist()
        if seen != len(self.validation) and self.args.broken == "raise":
            raise ValueError(f"{seen:.0f} of {len(self.validation)} validation images were seen")
        if not seen:
            leave(0, f"all {len(self.validation)} validation images are broken")
        result = {"images": seen, "right": exact, "top1": exact / seen, "top5": near / seen, "loss": lost / seen}
        return result, worst

    def answers_together(self, networks: list[nn.Module], pixels: Tensor) -> Tensor:
        """The answers of a network; of several, logarithms of the mean of their probabilities."""
        if len(networks) == 1:
            return self.answers(networks[0], pixels)
        each = torch.stack([self.answers(network, pixels).log_softmax(1) for network in networks])
        return each.logsumexp(0) - math.log(len(networks))

    def confused(self, seen: Tensor, right: Tensor, mistakes: Tensor) -> list[dict[str, Any]]:
        """Return the worst classes' mistakes without a matrix of all classes by all, of which there may be 22,000."""
        worst = account.worst_classes(seen, right)
        taken = torch.zeros(len(worst), len(seen), dtype=torch.float64)
        for row, label in enumerate(worst):
            taken[row] = torch.bincount(mistakes[1][mistakes[0] == label].long(), minlength=len(seen))
        if worst:
            dist.all_reduce(taken)
        return account.confused(self.images.classes, worst, seen, right, taken)

    def admitted(self) -> bool:
        """Admit ranks in the place of lost ones; True if any came. All ranks make the same number of calls.

        The others wait only once after a loss: if nobody comes, nobody may be left to come.
        """
        if self.world >= self.at_start:
            return False
        waits = 0 if self.waited_in_vain else 10 * self.args.wait
        for wait in range(waits + 1):
            if multiring.torch.grow() is not None:
                self.parallel, self.waited_in_vain = None, False
                admitted = f"ranks were admitted; {dist.get_world_size()} ranks go on"
                self.history["changes"].append([self.epoch, self.done, admitted])
                self.tell(f"{dist.get_world_size()} ranks go on in epoch {self.epoch} at step {self.done}")
                return True
            time.sleep(0.1 if wait < waits else 0)
        self.waited_in_vain = True
        return False

    def tell(self, line: str) -> None:
        if dist.get_rank() == 0:
            print(line, flush=True)

    def save(self) -> None:
        """Write a checkpoint on rank 0; all ranks call it."""
        if not self.args.checkpoint:
            return
        steps = self.epoch * self.each + self.done
        if not all(bool(weight.isfinite().all()) for weight in self.net.parameters()):
            self.diverged(f"after {steps} steps there are weights that are no numbers, at a rate of {self.last()}")
        account.close_point(self.history, steps)
        # Each rank has statistics of its own; who resumes from this has the mean of them, so the others take it too.
        agree_on_statistics(self.net)
        if self.average:
            agree_on_statistics(self.average.network)
        average = self.average.network.state_dict() if self.average else None
        states = {"net": self.net.state_dict(), "average": average, "optimizer": self.optimizer.state_dict()}
        whole = {"facts": self.facts(), "state": self.state, "history": self.history, **states}
        self.write(self.args.checkpoint, whole)

    def _load(self, path: Path) -> None:
        whole = checkpoints.load(path, self.facts(), self.device)
        self.net.load_state_dict(whole["net"])
        self.optimizer.load_state_dict(whole["optimizer"])
        if self.average:
            self.average.network.load_state_dict(whole["average"])
        self.state, self.history = whole["state"], whole["history"]

    def page(self, path: Path) -> None:
        """Write a page about the whole training on rank 0; all ranks call it."""
        answer = f"{self.args.preset}: {told(self.state['result'])}"
        title = f"{self.args.preset} on {self.args.data}: {self.preset.epochs} epochs, batch {self.preset.batch}"
        mr.report(path, title, answer=answer, sections=account.sections(self.history, self.state["ensemble"]))

    def result(self) -> str:
        """One line about the whole training."""
        seconds = time.perf_counter() - self.began
        what = f"{self.args.preset}: {self.preset.epochs} epochs, batch {self.preset.batch}, world {self.world}"
        speed = f"{self.trained} images in {clock(seconds)}, {self.trained / seconds:.0f} images/s with validation"
        epochs = self.history["epochs"]
        broken = sum(each["broken"] for each in epochs), max(each["broken in validation"] for each in epochs)
        ensemble = self.state["ensemble"]
        together = f"; ensemble of {len(self.preset.cycles)} cycles {told(ensemble)}" if ensemble else ""
        left_out = f"; left out {broken[0]} times a broken image, and {broken[1]} of validation" if any(broken) else ""
        return f"{what}: {told(self.state['result'])}, best {self.state['best']:.2%}{together}; here {speed}{left_out}"


def told(result: dict[str, float]) -> str:
    right, seen = result["right"], result["images"]
    return (
        f"top-1 {result['top1']:.2%} ({right:.0f} of {seen:.0f}), top-5 {result['top5']:.2%}, loss {result['loss']:.6f}"
    )


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def seconds_waited() -> float:
    """Seconds that this rank has waited for others in calls, since the start of the job or the last change of ranks."""
    return sum(peer["seconds_waited"] for peer in mr.stats()["peers"].values())


def replaces() -> bool:
    """True if this process was started in the place of a lost rank."""
    return os.environ.get("MULTIRING_REPLACEMENT", "0") != "0"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"train: {message}; --help tells more\n")


def at_least(least: int) -> Any:
    def number(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number of {least} or more is needed")
        return int(text)

    return number


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = Parser(description="Train on images in classes by a published recipe.")
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--data", type=Path, metavar="DIR", help="needed; it has train and validation in it")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="change values of the preset")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--uneven", choices=("keep", "pad", "drop"), default="keep", help="the last batch of an epoch")
    parser.add_argument(
        "--broken", choices=BROKEN, default="raise", help="what becomes of images that cannot be read or decoded"
    )
    parser.add_argument("--workers", type=at_least(0), default=min(max(cores - 1, 1), 16), help="that read, a rank")
    parser.add_argument("--reproducible", action="store_true", help="the same bits in each run of a number of ranks")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="on rank 0's host; of a job that may lose it: shared"
    )
    parser.add_argument("--every", type=at_least(1), default=500, metavar="STEPS", help="between two checkpoints")
    parser.add_argument("--report", type=at_least(1), default=50, metavar="STEPS", help="between two lines")
    parser.add_argument(
        "--wait", type=at_least(0), default=0, metavar="SECONDS", help="for replacements, once after a loss"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="a page about the training, for a browser")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="curves for TensorBoard, which rank 0 writes")
    parsed = parser.parse_args(words)
    if parsed.data is None:
        parser.error("--data DIR is needed, a folder that has train and validation in it")
    return parsed


def main(kind: type[Training] = Training) -> None:
    args = arguments()
    # A rank that another one fails must hear of it before its optimizer takes a step, on a CUDA device too.
    multiring.torch.init(reproducible=args.reproducible, blocking_wait=torch.cuda.is_available())
    if args.reproducible:
        torch.use_deterministic_algorithms(True)
    try:
        training = kind(args)
    except MISTAKES as error:
        agree(str(error), {}, replaces())
        raise  # not reached: this rank has left
    try:
        training.run()
    except DataError as error:  # a worker wraps it in what it was doing
        told_last = str(error).strip().splitlines()[-1]
        sys.exit(f"train: {re.sub(r'^[a-z_.]+[A-Z][A-Za-z]+: ', '', told_last)}")
    if training.curves:
        training.curves.close()
    training.tell(training.result())
    if args.page:
        try:
            training.page(args.page)
        except OSError as error:
            sys.exit(f"train: {args.page}: it cannot be written: {error.strerror}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
