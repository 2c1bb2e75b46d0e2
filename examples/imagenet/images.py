"""Images of a data set by number, from tar files or folders of classes, cut and scaled as a preset says."""

from __future__ import annotations

import io
import math
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from presets import Preset
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from multiring.data import DataError, Dataset

PARTS = ("train", "validation")
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Means and deviations of the colours of ImageNet, from 0 to 1."""


class Folder:
    """A folder that has one for each class; the label is the place of its name among all, sorted."""

    def __init__(self, folder: Path) -> None:
        self.classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
        if not self.classes:
            raise DataError(f"{folder}: it has no folder for any class, and no index of tar files: pack or unpack it")
        self._files: list[tuple[str, int]] = []
        for label, name in enumerate(self.classes):
            files = sorted(
                os.path.join(where, file)
                for where, _, files in os.walk(folder / name)
                for file in files
                if file.lower().endswith(SUFFIXES)
            )
            if not files:
                raise DataError(f"{folder / name}: no file in this class is an image ({', '.join(SUFFIXES)})")
            self._files += [(file, label) for file in files]

    def __len__(self) -> int:
        return len(self._files)

    def sample(self, number: int) -> tuple[bytes, int, str]:
        """The bytes of an image, its label, and what it is called in messages."""
        file, label = self._files[number]
        return Path(file).read_bytes(), label, file


class Packed:
    """The tar files of `multiring data pack`."""

    def __init__(self, folder: Path) -> None:
        self._samples = Dataset(folder)
        self.classes = self._samples.classes
        if not self.classes:
            raise DataError(f"{folder}: classes.json is missing, which names the classes in the order of their labels")

    def __len__(self) -> int:
        return len(self._samples)

    def sample(self, number: int) -> tuple[bytes, int, str]:
        """The bytes of an image, its label, and what it is called in messages."""
        members = self._samples[number]
        name = f"{self._samples.folder}: sample {number} ({self._samples.name(number)})"
        label = int(members.pop("cls"))
        if len(members) != 1 or not 0 <= label < len(self.classes):
            raise DataError(f"{name}: it has label {label} and members {sorted(members)}; one image is needed")
        return *members.values(), label, name


class Images(TorchDataset[tuple[Tensor, int]]):
    """Pairs of an image, uint8 in the order colour, row, column, and its label.

    What is random in a training image follows from seed, epoch and number alone, whoever draws it.
    """

    def __init__(self, folder: Path, preset: Preset, seed: int, train: bool) -> None:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder; --data names one that has {' and '.join(PARTS)} in it")
        packed = (folder / "index.multiring").exists() or any(folder.glob("*.tar"))
        self._source = Packed(folder) if packed else Folder(folder)
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
        content, label, name = self._source.sample(number)
        try:
            with Image.open(io.BytesIO(content)) as image:
                pixels = self._cut(image, number)
        except (OSError, SyntaxError) as error:  # what Pillow raises for what is no image, or half of one
            raise DataError(f"{name}: it cannot be decoded: {error}") from None
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), label

    def _cut(self, image: Image.Image, number: int) -> np.ndarray:
        preset = self._preset
        dice = np.random.default_rng([self._seed, self.epoch, number]) if self.augments else None
        if dice is not None:
            size, box = preset.train_size, random_box(*image.size, preset.smallest_crop, dice)
        else:
            size = preset.train_size if self._trains else preset.validation_size
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


def parts(folder: Path, preset: Preset, seed: int) -> tuple[Images, Images]:
    """Return training and validation images; DataError if something is missing, or the classes differ."""
    train, validation = (Images(folder / part, preset, seed, part == "train") for part in PARTS)
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
