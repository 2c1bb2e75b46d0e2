"""The recipes that train.py knows, as data, and what follows from them: the learning rate of each step.

Where a number was not published, or we do not know it, the row says so.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multiring import recipes


@dataclass(frozen=True)
class Preset:
    """The settings of a training; `train.py --set NAME=VALUE` changes any of them."""

    source: str
    """Origin of the numbers."""
    model: str
    """"small", or the name of a library and of its model, as in "torchvision:resnet50"."""
    epochs: int
    batch: int
    """Samples of a step, of all ranks together."""
    rate: float
    """The learning rate that suits ``base_batch``; it is scaled in proportion to ``batch``."""
    base_batch: int = 256
    warm_up: float = 5.0
    """Epochs in which the rate grows from ``start_rate`` in equal increments."""
    start_rate: float = 0.1
    schedule: str = "steps"
    """"steps" divides the rate by 10 at ``drops``; "linear" and "cosine" fall to zero from the end of the warm-up, and
    begin anew at ``rate`` with each cycle but the first; "points" joins ``points``, and nothing else sets the rate."""
    drops: tuple[int, ...] = (30, 60, 80)
    points: tuple[tuple[float, float], ...] = ()
    """Pairs of an epoch and the rate for ``base_batch`` there; from each to the next the rate rises evenly or falls
    with power 2, and of two at the same epoch the second counts."""
    cycles: tuple[int, ...] = ()
    """Epochs that end a cycle; the network is kept at each, and all together are validated as one at the end."""
    collapse_epochs: int = 0
    """Last epochs, of each cycle if there are any, that begin at ``collapse_rate``, fall with power 2, and have no
    augmentation."""
    collapse_rate: float = 0.0
    """Learning rate for ``base_batch``; it is scaled like ``rate``, and 0 where ``points`` has the rate."""
    collapse_decay: float = 1.0
    """Factor on the weight decay in these epochs."""
    momentum: float = 0.9
    nesterov: bool = False
    decay: float = 1e-4
    """Weight decay, which biases and norms have none of."""
    smoothing: float = 0.0
    """Label smoothing."""
    average: float = 0.0
    """Decay of the moving average of weights that is validated; 0: none."""
    lars: float = 0.0
    """Trust of layer-wise adaptive rates; 0: none."""
    statistics: str = "rank"
    """The samples that batch norms look at: those of one pass on a "rank", or of one on all ranks of the "world"."""
    factors: bool = False
    """Gather the factors of large linear layers instead of summing their gradients, where that is faster."""
    micro: int = 32
    """Most samples of a forward and backward pass of a rank; more are several passes in one step."""
    zero_gamma: bool = True
    """True if the last norm of each residual block begins with a scale of 0."""
    width: int = 1
    """Channels inside the blocks, over what the model has by itself."""
    train_size: int = 224
    sizes: tuple[int, ...] = ()
    """Pixels of training images in as many equal parts of the epochs; none: ``train_size`` throughout."""
    resize: int = 256
    """The shorter side that a validation image is scaled to, before its middle is cut out."""
    validation_size: int = 224
    smallest_crop: float = 0.08
    """Share of a training image that is looked at, at least."""
    flip: bool = True
    bfloat16: bool = False
    channels_last: bool = False


FACEBOOK = Preset(
    source="Goyal et al. 2017, arXiv 1706.02677: 256 GPUs with 32 samples each",
    model="torchvision:resnet50",
    epochs=90,
    batch=8192,
    rate=0.1,
    nesterov=True,
)

SURFSARA = Preset(
    source="Codreanu et al. 2017, arXiv 1711.04291: 448 hosts with 32 samples each, with the final collapse",
    model="torchvision:resnet50",
    epochs=90,
    batch=14336,
    rate=4.8,
    base_batch=14336,
    schedule="linear",
    collapse_epochs=5,
    collapse_rate=0.254,
    collapse_decay=2.0,
    decay=5e-5,
)

PRESETS = {
    "facebook": FACEBOOK,
    "ibm-resnet50": dataclasses.replace(
        FACEBOOK,
        source="Cho et al. 2017, arXiv 1708.02188: model, batch and epochs; all else assumed to be as in facebook",
    ),
    "ibm-resnet101-22k": dataclasses.replace(
        FACEBOOK,
        source="the same: model, batch, 20 samples a GPU; epochs and all else assumed",
        model="torchvision:resnet101",
        batch=5120,
        micro=20,
        factors=True,  # the layer of 22,000 classes has half of all weights
        epochs=50,
        drops=(17, 33, 44),
    ),
    "surfsara": SURFSARA,
    "surfsara-ensemble": dataclasses.replace(
        SURFSARA,
        source=(
            "the authors' github.com/sara-nl/caffe, models/intel_optimized_models/multinode/resnet50_custom_lr: 64 "
            "hosts with 64 samples each; rates that their files name, joined; assumed: a collapse of each cycle from "
            "the rate that it has come to, where the files have one after the last, and that the next begins with it"
        ),
        epochs=82,
        batch=4096,
        rate=1.6,  # the highest of points
        base_batch=4096,
        schedule="points",
        points=(
            *((0, 0.1), (5, 1.6), (15, 1.31), (25, 1.02), (37, 0.255), (42, 0.0)),  # to epoch 25 evenly, within 0.3 %
            *((42, 0.255), (45, 0.764), (57, 0.19), (62, 0.0)),
            *((62, 0.19), (65, 0.572), (77, 0.143), (82, 0.0)),
        ),
        cycles=(42, 62, 82),
        collapse_rate=0.0,
        collapse_decay=4.0,
    ),
    "surfsara-wide": dataclasses.replace(
        SURFSARA,
        source="the paper of surfsara: 16 samples a pass, as memory is short; the width of 2 and all else assumed",
        width=2,
        micro=16,
    ),
    "modern": Preset(
        source="torchvision's recipe of 2021 without mixing and without its 600 epochs; average and epochs are ours",
        model="torchvision:resnet50",
        epochs=100,
        batch=1024,
        rate=0.5,
        base_batch=1024,
        start_rate=0.005,
        schedule="cosine",
        decay=2e-5,
        smoothing=0.1,
        average=0.9998,
        micro=128,
        train_size=176,
        resize=232,
        bfloat16=True,
        channels_last=True,
    ),
    "glyphs": Preset(
        source="ours, for the sets of glyphs.py on a few cores",
        model="small",
        epochs=20,
        batch=32,
        rate=0.05,
        base_batch=32,
        warm_up=1.0,
        start_rate=0.0,
        schedule="cosine",
        nesterov=True,
        decay=5e-4,
        smoothing=0.1,
        micro=128,
        train_size=32,
        resize=32,
        validation_size=32,
        smallest_crop=0.7,
        flip=False,
        channels_last=True,
    ),
}

MOST = 2**31
"""No number of a preset is as large; what follows from smaller ones is finite."""

LEAST_RATE = 1e-12
"""A rate by which others may be divided."""

CHOICES = {"schedule": ("steps", "linear", "cosine", "points"), "statistics": ("rank", "world")}


def changed(preset: Preset, changes: Sequence[str]) -> Preset:
    """A preset with values replaced, each written as NAME=VALUE; ValueError for no such value, or one of no effect."""
    before = preset
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"--set {change}: NAME=VALUE is needed, such as batch=256")
        fields = {field.name: field.default for field in dataclasses.fields(Preset) if field.name != "source"}
        if name not in fields:
            raise ValueError(f"--set {change}: a preset has no {name!r}, but {', '.join(fields)}")
        preset = dataclasses.replace(preset, **{name: _value(change, getattr(preset, name), text)})
    checked(preset)
    _check_used(before, preset)
    return preset


def checked(preset: Preset) -> Preset:
    """The preset; ValueError where a value is out of range."""
    for name, value in dataclasses.asdict(preset).items():
        for number in _flat(value):
            if isinstance(number, (int, float)) and not abs(number) < MOST:
                raise ValueError(f"{name}={number}: a number below 2**31 is needed")
    for name, known in CHOICES.items():
        if getattr(preset, name) not in known:
            raise ValueError(f"{name}={getattr(preset, name)}: known are {', '.join(known)}")
    for name in ("epochs", "batch", "rate", "base_batch", "micro", "width", "train_size", "resize", "validation_size"):
        if not getattr(preset, name) > 0:
            raise ValueError(f"{name}={getattr(preset, name)}: a number above 0 is needed")
    for name in ("smoothing", "average", "momentum"):
        if not 0 <= getattr(preset, name) < 1:
            raise ValueError(f"{name}={getattr(preset, name)}: a number from 0 to below 1 is needed")
    for name in ("warm_up", "start_rate", "decay", "lars", "collapse_rate", "collapse_decay"):
        if not getattr(preset, name) >= 0:
            raise ValueError(f"{name}={getattr(preset, name)}: a number of 0 or more is needed")
    if preset.rate < LEAST_RATE:
        raise ValueError(f"rate={preset.rate}: a rate of {LEAST_RATE} or more is needed")
    if list(preset.drops) != sorted(set(preset.drops)) or min(preset.drops, default=0) < 0:
        raise ValueError(f"drops={','.join(map(str, preset.drops))}: epochs of 0 or more are needed, in their order")
    if min(preset.sizes, default=1) < 1 or len(preset.sizes) > preset.epochs:
        sizes = ",".join(map(str, preset.sizes))
        raise ValueError(f"sizes={sizes}: numbers above 0 are needed, of which {preset.epochs} epochs have parts")
    if not 0 < preset.smallest_crop <= 1:
        raise ValueError(f"smallest_crop={preset.smallest_crop}: a share above 0, 1 at most, is needed")
    if not 0 <= preset.collapse_epochs <= preset.epochs:
        raise ValueError(f"collapse_epochs={preset.collapse_epochs}: the training has {preset.epochs} epochs")
    _check_cycles(preset)
    _check_points(preset)
    if preset.schedule == "steps" and max(preset.drops, default=0) >= preset.epochs:
        drops = ",".join(map(str, preset.drops))
        raise ValueError(f"drops={drops}: the training ends after epochs={preset.epochs}: give it drops before that")
    if preset.validation_size > preset.resize:
        raise ValueError(f"validation_size={preset.validation_size}: more than is left by resize={preset.resize}")
    return preset


def _flat(value: Any) -> list[Any]:
    """The parts of a value, be they in tuples of tuples."""
    return [part for each in value for part in _flat(each)] if isinstance(value, tuple) else [value]


def _check_used(before: Preset, preset: Preset) -> None:
    """ValueError where a value has become another one that nothing reads."""
    schedule = f"schedule={preset.schedule}"
    unread = (
        (preset.schedule == "points", ("rate", "warm_up", "start_rate"), schedule, "points= has all rates"),
        (preset.schedule != "steps", ("drops",), schedule, "give schedule=steps, too"),
        (not preset.collapse_epochs, ("collapse_rate", "collapse_decay"), "collapse_epochs=0", "give more of these"),
        (bool(preset.sizes), ("train_size",), "sizes", "sizes= has all sizes of training images"),
    )
    for is_unread, names, why, remedy in unread:
        for name in names if is_unread else ():
            value = getattr(preset, name)
            if value and value not in (getattr(before, name), getattr(Preset, name, None)):
                shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
                raise ValueError(f"{name}={shown}: it has no effect with {why}: {remedy}")


def _check_cycles(preset: Preset) -> None:
    """ValueError where cycles do not end in order, with the training, and after their collapse."""
    if not preset.cycles:
        return
    ends = ",".join(map(str, preset.cycles))
    if preset.cycles[-1] != preset.epochs or len(preset.cycles) < 2:
        raise ValueError(f"cycles={ends}: the ends of two or more are needed, the last at epochs={preset.epochs}")
    shortest = max(preset.collapse_epochs, 1)
    if any(end - begin < shortest for begin, end in spans(preset)):
        raise ValueError(f"cycles={ends}: epochs in their order are needed, {shortest} or more apart")
    if preset.schedule == "steps":
        raise ValueError(f"cycles={ends}: schedule=steps does not begin anew: choose linear, cosine or points")


def _check_points(preset: Preset) -> None:
    """ValueError where points are no rates over the whole training, or another schedule has some."""
    if preset.schedule != "points":
        if preset.points:
            raise ValueError(
                f"schedule={preset.schedule}: it has no points: choose schedule=points, or points= for none"
            )
        return
    points = ",".join(f"{epoch:g}:{rate:g}" for epoch, rate in preset.points)
    epochs = [epoch for epoch, _ in preset.points]
    if not epochs or epochs != sorted(epochs) or (epochs[0], epochs[-1]) != (0, preset.epochs):
        raise ValueError(
            f"points={points}: pairs of an epoch and its rate are needed, from 0 to epochs={preset.epochs}"
        )
    if min(rate for _, rate in preset.points) < 0:
        raise ValueError(f"points={points}: rates of 0 or more are needed")
    if preset.collapse_rate:
        raise ValueError(f"collapse_rate={preset.collapse_rate}: schedule=points has the rates of a collapse in points")


def _value(change: str, before: Any, text: str) -> Any:
    """A text as a value of the kind of the one before."""
    try:
        if not isinstance(before, str) and (set(text) & set("_ \t\n") or not text.isascii()):
            raise ValueError  # Python takes such digits
        if change.startswith("points="):
            return tuple(
                (float(epoch), float(rate)) for epoch, rate in (each.split(":") for each in text.split(",") if each)
            )
        if isinstance(before, bool):
            return {"yes": True, "no": False, "True": True, "False": False}[text]
        if isinstance(before, tuple):
            return tuple(int(number) for number in text.split(",") if number)
        return type(before)(text)
    except (ValueError, KeyError):
        listed = "pairs such as 0:0.1,5:1.6,30:0" if change.startswith("points=") else "a list such as 30,60,80"
        kinds = {bool: "yes or no", tuple: listed, int: "a whole number", float: "a number"}
        raise ValueError(f"--set {change}: {kinds[type(before)]} is needed") from None


def spans(preset: Preset) -> list[tuple[int, int]]:
    """First and last epoch, the latter not in it, of each cycle; the whole training where there are none."""
    ends = preset.cycles or (preset.epochs,)
    return list(zip((0, *ends[:-1]), ends, strict=True))


def rates(preset: Preset, each: int) -> recipes.Schedule:
    """The learning rate at a step, counted from 0 over the whole training, with ``each`` steps in an epoch."""
    if preset.schedule == "points":
        return recipes.scaled(_joined(preset.points, each), preset.batch / preset.base_batch)
    peak = recipes.linear_scaling(preset.rate, preset.batch, preset.base_batch)
    whole = recipes.constant()
    for begin, end in spans(preset):
        cycle = _cycle(preset, peak, (end - begin) * each, 0 if begin else round(preset.warm_up * each), each)
        whole = recipes.chain(whole, begin * each, cycle)
    return recipes.scaled(whole, peak)


def _cycle(preset: Preset, peak: float, total: int, rising: int, each: int) -> recipes.Schedule:
    """Factors of the peak in the steps of a cycle."""
    if preset.schedule == "steps":
        shape = recipes.steps([epoch * each for epoch in preset.drops])
    else:
        falling = {"linear": recipes.polynomial, "cosine": recipes.cosine}[preset.schedule]
        shape = recipes.chain(recipes.constant(), rising, falling(max(total - rising, 1)))
    shape = recipes.warm_up(shape, rising, min(preset.start_rate / peak, 1.0))
    if preset.collapse_epochs:
        collapse = recipes.polynomial(preset.collapse_epochs * each, power=2)
        collapse = recipes.scaled(collapse, preset.collapse_rate / preset.rate)
        shape = recipes.chain(shape, total - preset.collapse_epochs * each, collapse)
    return shape


def _joined(points: Sequence[tuple[float, float]], each: int) -> recipes.Schedule:
    """Rates at steps between points."""
    epochs = [epoch for epoch, _ in points]

    def rate(step: int) -> float:
        later = bisect.bisect_right(epochs, step / each)
        if later == len(points):
            return points[-1][1]
        (begin, first), (end, last) = points[later - 1], points[later]
        part = (step / each - begin) / (end - begin)
        if last >= first:
            return first + (last - first) * part
        return (math.sqrt(first) + (math.sqrt(last) - math.sqrt(first)) * part) ** 2

    return rate


def training_sizes(preset: Preset) -> tuple[int, ...]:
    """Pixels of a side of training images, in as many equal parts of the epochs."""
    return preset.sizes or (preset.train_size,)


def training_size(preset: Preset, epoch: int) -> int:
    """Pixels of a side of training images in an epoch, counted from 0."""
    parts = training_sizes(preset)
    return parts[min(epoch * len(parts) // preset.epochs, len(parts) - 1)]


def collapses(preset: Preset, epoch: int) -> bool:
    """True if an epoch, counted from 0, is in the collapse at the end of the training or of a cycle."""
    return any(end - preset.collapse_epochs <= epoch < end for _, end in spans(preset))
