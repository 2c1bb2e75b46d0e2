"""The networks of train.py, with batch norms whose statistics are those of one rank or of all, and averages of them."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

RESNET_CHANNELS = 64
"""Channels inside the first blocks of a ResNet, by which torchvision and timm say how wide all are."""


def build(name: str, classes: int, *, width: int, zero_gamma: bool, statistics: str) -> nn.Module:
    """A network by its name in a preset; ValueError where its library is missing, or knows none of that name or width.

    Weights of convolutions as by He, those of the classifier with a deviation of 0.01.
    """
    library, _, model = name.rpartition(":")
    if name == "small":
        network: Any = Small(classes, width)
    elif library in ("torchvision", "timm"):
        try:
            importlib.import_module(library)
        except ModuleNotFoundError:
            raise ValueError(f"model={name}: pip install {library}, or choose another by --set model=small") from None
        if library == "timm":
            create, options, channels = importlib.import_module("timm").create_model, {}, "base_width"
        else:
            create, options = importlib.import_module("torchvision.models").get_model, {"weights": None}
            channels = "width_per_group"
        if width > 1:
            options[channels] = RESNET_CHANNELS * width
        try:
            network = create(model, num_classes=classes, **options)
        except (ValueError, RuntimeError) as error:  # torchvision raises the one for an unknown name, timm the other
            raise ValueError(f"model={name}: {error}") from None
        except TypeError as error:  # the model has no such option
            if width == 1:
                raise
            raise ValueError(f"model={name}: no width={width}: {error}") from None
    else:
        raise ValueError(f"model={name}: known are small, torchvision:NAME and timm:NAME")
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear) and module.out_features == classes:
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
        # The last norms of torchvision's blocks are bn2 in short ones and bn3 in long ones.
        last = getattr(module, "bn3", getattr(module, "bn2", None))
        if zero_gamma and isinstance(last, nn.BatchNorm2d):
            nn.init.zeros_(last.weight)
    return over_all_ranks(network) if statistics == "world" else network


def check(name: str, classes: int, sizes: Collection[int], samples: int, *, width: int) -> None:
    """ValueError where a network does not answer a training pass of ``samples`` images of each size as is needed.

    It takes no memory and computes nothing; a network that asks for values of tensors is not checked.
    """
    with torch.device("meta"):
        try:
            network = build(name, classes, width=width, zero_gamma=False, statistics="rank")
        except ValueError as error:
            if _asks_for_values(error):
                return
            raise
        for size in sizes:
            try:
                answers = network(torch.empty(samples, 3, size, size))
            except Exception as error:
                if _asks_for_values(error):
                    return
                reason = " ".join(str(error).split())
                raise ValueError(
                    f"model={name}: it cannot train on {samples} image{'s' * (samples > 1)} of {size}x{size} at once, "
                    f"which a pass may have: {type(error).__name__}: {reason}: choose larger images, or a larger batch"
                ) from None
            if not isinstance(answers, Tensor) or answers.shape != (samples, classes):
                found = tuple(answers.shape) if isinstance(answers, Tensor) else f"a {type(answers).__name__}"
                raise ValueError(f"model={name}: it answers with {found}, and {(samples, classes)} is needed")


def _asks_for_values(error: Exception) -> bool:
    """True if an error is that of a tensor without memory."""
    return isinstance(error, NotImplementedError) or "meta tensor" in str(error)


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the size changes."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Identity() if stride == 1 and before == width else nn.Conv2d(before, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.shortcut(x))


class Small(nn.Module):
    """A residual network for images of 32x32: 14 layers, 0.4 M weights and 384 for each class.

    The classifier sees four quarters of the image: where strokes are tells characters apart. The weights are those of
    ``width`` 1; a block has as many times the channels, and weights by the square.
    """

    def __init__(self, classes: int, width: int = 1) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU())
        channels = [24, *(each * width for each in (24, 24, 48, 48, 96, 96))]
        shapes = zip(channels, channels[1:], (1, 1, 2, 1, 2, 1), strict=False)
        self.blocks = nn.Sequential(*(Block(*shape) for shape in shapes))
        self.head = nn.Linear(4 * channels[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 2).flatten(1))


class WorldBatchNorm(nn.BatchNorm2d):
    """A batch norm whose mean and variance are those of the samples of all ranks in a pass.

    All ranks pass equally often, in the same order. It works on the CPU too, which torch's SyncBatchNorm does not.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        count = x.numel() // x.shape[1]
        given = x.detach().float()
        each = (0, 2, 3)
        summed = given.sum(each, dtype=torch.float64), given.square().sum(each, dtype=torch.float64)
        sums = torch.stack([*summed, torch.full_like(summed[0], count)])
        dist.all_reduce(sums)
        total = sums[2, 0]
        mean = sums[0] / total
        variance = (sums[1] / total - mean.square()).clamp(min=0)
        with torch.no_grad():
            self.num_batches_tracked += 1
            unbiased = variance * total / (total - 1).clamp(min=1)
            self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var), self.momentum)
        scale = (variance + self.eps).rsqrt()
        return _Normalised.apply(x, mean.float(), scale.float(), total.float(), self.weight, self.bias)


class _Normalised(torch.autograd.Function):
    """A gradient that passes through the mean and variance of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, scale: Tensor, total: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        wide = (1, -1, 1, 1)
        normal = (x.float() - mean.view(wide)) * scale.view(wide)
        ctx.save_for_backward(normal, scale, total, weight)
        return (normal * weight.view(wide) + bias.view(wide)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale, total, weight = ctx.saved_tensors
        wide = (1, -1, 1, 1)
        given = gradient.float()
        each = (0, 2, 3)
        mine = torch.stack([given.sum(each, dtype=torch.float64), (given * normal).sum(each, dtype=torch.float64)])
        everybody = mine.clone()
        dist.all_reduce(everybody)
        means = (everybody / total).float()
        through = given - means[0].view(wide) - normal * means[1].view(wide)
        backward = (through * (scale * weight).view(wide)).to(gradient.dtype)
        return backward, None, None, None, mine[1].float(), mine[0].float()


def over_all_ranks(network: nn.Module) -> nn.Module:
    """The network with each batch norm over all ranks, with the same parameters; ValueError for a subclass of it."""
    for name, module in network.named_children():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and type(module) is not nn.BatchNorm2d:
            # It may do more than normalise, as timm's BatchNormAct2d does, whose activation would be lost.
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            raise ValueError(
                f"statistics=world: {name} is a {kind}, and only BatchNorm2d of torch itself is known: "
                "choose statistics=rank or another model"
            )
        if type(module) is nn.BatchNorm2d:
            replaced = WorldBatchNorm(module.num_features, module.eps, module.momentum)
            replaced.load_state_dict(module.state_dict())
            setattr(network, name, replaced)
        else:
            over_all_ranks(module)
    return network


def agree_on_statistics(network: nn.Module) -> None:
    """Give all ranks the mean of the running statistics of their batch norms; all ranks call it."""
    buffers = [buffer for buffer in network.buffers() if buffer.is_floating_point()]
    if buffers:
        together = torch.cat([buffer.flatten() for buffer in buffers])
        dist.all_reduce(together, dist.ReduceOp.AVG)
        for buffer, part in zip(buffers, together.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))


class MovingAverage:
    """A network whose weights and statistics are averages of another one's over the last steps."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.network = copy.deepcopy(network).requires_grad_(False).eval()
        self._decay = decay

    @torch.no_grad()
    def follow(self, network: nn.Module) -> None:
        """Take a step's result in."""
        for mine, theirs in zip(self.network.state_dict().values(), network.state_dict().values(), strict=True):
            if mine.is_floating_point():
                mine.lerp_(theirs, 1 - self._decay)
            else:
                mine.copy_(theirs)
