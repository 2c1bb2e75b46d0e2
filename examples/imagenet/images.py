"""Images of a data set by number, from tar files or folders of classes, cut and scaled as a preset says."""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from presets import Preset, training_size
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from multiring.data import BrokenSample, ClassFolders, DataError, Dataset, Skipping

PARTS = ("train", "validation")
OTHER_NAMES = {"train": ("training",), "validation": ("val", "valid")}
"""Names that other programs have for these folders."""

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Means and deviations of the colours of ImageNet, from 0 to 1."""


class Folder:
    """A folder that has one for each class, read as `multiring data pack` reads it."""

    def __init__(self, folder: Path) -> None:
        found = ClassFolders(folder)
        self.classes = found.classes
        self._files = [(str(file), label) for label in range(len(self.classes)) for file in found.samples(label)]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: int) -> tuple[bytes, int]:
        """The bytes of an image, and its label."""
        file, label = self._files[number]
        try:
            return Path(file).read_bytes(), label
        except OSError as error:
            raise DataError(f"{file}: it cannot be read: {error.strerror}", file=file, sample=number) from None

    def fault(self, number: int, fault: str) -> DataError:
        """An error that names a file."""
        file, _ = self._files[number]
        return BrokenSample(f"{file}: {' '.join(fault.split())}", file=file, sample=number)


def packed(folder: Path, broken: str) -> Dataset:
    """The tar files of `multiring data pack`, whose samples are the bytes of an image, and its label."""
    data = Dataset(folder, broken=broken)
    classes = len(data.classes)
    if not classes:
        raise DataError(f"{folder}: classes.json is missing, which names the classes in the order of their labels")
    return Dataset(folder, functools.partial(labelled, classes), broken)


def labelled(classes: int, members: dict[str, bytes]) -> tuple[bytes, int]:
    """The bytes of an image, and its label; ValueError where there is none."""
    label = members.pop("cls", None)
    if label is None:
        raise ValueError("there is no member cls, whose content is the number of the class")
    if not re.fullmatch(rb"[0-9]{1,9}", label.strip()) or int(label) >= classes:
        raise ValueError(f"the member cls is {label[:20]!r}, and not a number from 0 to {classes - 1}")
    if len(members) != 1:
        raise ValueError(f"beside cls there are {len(members)} members, and one image is needed")
    return *members.values(), int(label)


class Images(TorchDataset[tuple[Tensor, int]]):
    """Pairs of an image, uint8 in the order colour, row, column, and its label.

    What is random in a training image follows from seed, epoch and number alone, whoever draws it. ``broken`` says, as
    for `multiring.data.Dataset`, what becomes of an image that cannot be read.
    """

    def __init__(self, folder: Path, preset: Preset, seed: int, train: bool, broken: str) -> None:
        if not folder.is_dir():
            others = [other for other in OTHER_NAMES.get(folder.name, ()) if (folder.parent / other).is_dir()]
            remedy = f"; rename {folder.parent / others[0]}" if others else ""
            raise DataError(f"{folder}: no such folder; --data names one that has {' and '.join(PARTS)} in it{remedy}")
        is_packed = (folder / "index.multiring").exists() or any(folder.glob("*.tar"))
        self._source = packed(folder, broken) if is_packed else Folder(folder)
        self._skipping = Skipping(broken)
        self._preset, self._seed = preset, seed
        self.augments = train
        self._trains = train
        self.epoch = 0

    @property
    def classes(self) -> list[str]:
        return self._source.classes

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        content, label = self._source[number]
        try:
            with Image.open(io.BytesIO(content)) as image:
                pixels = self._cut(image, number)
        except MemoryError:
            raise  # the image need not be broken
        except UnidentifiedImageError:
            raise self._source.fault(number, "it cannot be decoded: it is no image that Pillow knows") from None
        except Exception as error:  # Pillow's readers raise what comes, some of it struct's
            raise self._source.fault(number, f"it cannot be decoded: {type(error).__name__}: {error}") from None
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), label

    def __getitems__(self, numbers: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Several images, for torch's loaders, without those that are broken where these are to be skipped."""
        return self._skipping(self.__getitem__, numbers)

    def _cut(self, image: Image.Image, number: int) -> np.ndarray:
        preset = self._preset
        dice = np.random.default_rng([self._seed, self.epoch, number]) if self.augments else None
        if dice is not None:
            size, box = training_size(preset, self.epoch), random_box(*image.size, preset.smallest_crop, dice)
        else:
            size = training_size(preset, self.epoch) if self._trains else preset.validation_size
            box = middle_box(*image.size, preset.validation_size / preset.resize)
        # A JPEG is decoded no larger than is needed, which takes less time.
        wide, high = image.size
        image.draft("RGB", (math.ceil(wide * size / (box[2] - box[0])), math.ceil(high * size / (box[3] - box[1]))))
        scale = (image.size[0] / wide, image.size[1] / high) * 2
        box = tuple(min(edge * by, limit) for edge, by, limit in zip(box, scale, image.size * 2, strict=True))
        cut = np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box))
        return cut[:, ::-1] if dice is not None and preset.flip and dice.random() < 0.5 else cut


def random_box(wide: int, high: int, smallest: float, dice: np.random.Generator) -> tuple[float, ...]:
    """A part of an image, at least ``smallest`` of it, at most a third longer than wide or the other way round."""
    for _ in range(10):
        area = wide * high * dice.uniform(smallest, 1)
        ratio = math.exp(dice.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if across <= wide and down <= high:
            left, top = dice.uniform(0, wide - across), dice.uniform(0, high - down)
            return left, top, left + across, top + down
    return middle_box(wide, high, 1)


def middle_box(wide: int, high: int, share: float) -> tuple[float, ...]:
    """The square in the middle, with a share of the shorter side."""
    edge = min(wide, high) * share
    left, top = (wide - edge) / 2, (high - edge) / 2
    return left, top, left + edge, top + edge


def parts(folder: Path, preset: Preset, seed: int, broken: str) -> tuple[Images, Images]:
    """Return training and validation images; DataError if something is missing, or the classes differ."""
    train, validation = (Images(folder / part, preset, seed, part == "train", broken) for part in PARTS)
    for one, other in ((validation, train), (train, validation)):
        if unknown := sorted(set(one.classes) - set(other.classes)):
            lacking, having = (PARTS[each is validation] for each in (other, one))
            raise DataError(
                f"{folder / having}: it has the class {unknown[0]}, and {len(unknown)} in all, that {lacking} has not: "
                "both need the same classes"
            )
    if train.classes != validation.classes:
        raise DataError(f"{folder}: train and validation have the same classes in different orders: pack both anew")
    return train, validation
