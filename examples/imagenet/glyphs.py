"""Draw an image set with the shape of ImageNet: characters of many fonts, distorted, some fonts for validation alone.

    python examples/imagenet/glyphs.py glyphs --classes 1000 --samples 100 --size 32 --packed

Each class is a character that all fonts have or, with --fonts-each, some of them. The fonts are those of Debian's
packages fonts-noto-cjk, fonts-arphic-uming, fonts-arphic-ukai, fonts-wqy-microhei and, for validation,
fonts-wqy-zenhei, which share over 18,000 characters, and two of the first with the last over 27,000; others are named
by --train-fonts and --validation-fonts. The same seed gives the same images. glyphs/train and glyphs/validation become
folders of classes or, with --packed, tar files as by `multiring data pack`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import sys
import tempfile
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from fontTools.ttLib import TTFont, TTLibError
from PIL import Image, ImageDraw, ImageFilter, ImageFont, ImageOps

from multiring.data import pack

ROOT = Path("/usr/share/fonts")
TRAIN_FONTS = (
    f"{ROOT}/opentype/noto/NotoSansCJK-Regular.ttc:2",  # face 2 has the forms of mainland China, as the others do
    f"{ROOT}/opentype/noto/NotoSerifCJK-Regular.ttc:2",
    f"{ROOT}/truetype/arphic/uming.ttc",
    f"{ROOT}/truetype/arphic/ukai.ttc",
    f"{ROOT}/truetype/wqy/wqy-microhei.ttc",
)
VALIDATION_FONTS = (f"{ROOT}/truetype/wqy/wqy-zenhei.ttc",)
PACKAGES = "fonts-noto-cjk fonts-arphic-uming fonts-arphic-ukai fonts-wqy-microhei fonts-wqy-zenhei"


RANGES = {
    "classes": (1, 1_000_000),
    "samples": (1, 1_000_000),
    "validation_samples": (1, 1_000_000),
    "size": (8, 1024),
    "seed": (0, 2**63 - 1),
    "processes": (1, 1024),
}
"""Least and most of each option that is a number; pictures are drawn at twice their size, in float64."""


class Mistake(ValueError):
    """A request that cannot be drawn; the message says why, and what to do."""


@dataclass(frozen=True)
class Face:
    """One font of a file; a collection (.ttc) has several."""

    path: str
    number: int = 0

    @classmethod
    def named(cls, text: str) -> Face:
        """A face written as FILE or FILE:NUMBER; Mistake if there is no such font."""
        path, colon, number = text.rpartition(":")
        face = cls(path, int(number)) if colon and number.isdecimal() else cls(text)
        if not os.path.isfile(face.path):
            raise Mistake(f"{face.path}: no such font; apt-get install {PACKAGES}, or name others by --train-fonts")
        return face

    @property
    def name(self) -> str:
        return f"{Path(self.path).stem}-{self.number}" if self.number else Path(self.path).stem

    def characters(self) -> set[int]:
        try:
            with TTFont(self.path, fontNumber=self.number, lazy=True) as font:
                return set(font.getBestCmap() or ())
        except (TTLibError, OSError) as error:
            raise Mistake(f"{self.path}: it has no font {self.number} that can be read: {error}") from None


@dataclass(frozen=True)
class Pictures:
    """The pictures of each class in one part of the set."""

    part: str
    faces: tuple[Face, ...]
    samples: int
    size: int
    seed: int
    suffix: str
    plain: bool


def han(code: int) -> bool:
    return 0x3400 <= code <= 0x9FFF or 0x20000 <= code < 0x30000


def letter(code: int) -> bool:
    return unicodedata.category(chr(code))[0] == "L"


SCRIPTS = {"han": han, "letters": letter}


@dataclass(frozen=True)
class Class:
    """A character, and the faces of each part that have it."""

    character: str
    train: tuple[Face, ...]
    validation: tuple[Face, ...]


def candidates(
    train: Sequence[Face], validation: Sequence[Face], seed: int, script: str, least: int | None
) -> list[Class]:
    """Characters that all faces have or, with ``least``, so many of those for training and one for validation."""
    needed = (len(train), len(validation)) if least is None else (least, 1)
    having = {face: face.characters() for face in (*train, *validation)}
    shared = sorted(filter(SCRIPTS[script], set.union(*having.values())))
    of = {
        code: tuple(tuple(face for face in part if code in having[face]) for part in (train, validation))
        for code in shared
    }
    shared = [code for code in shared if all(len(faces) >= some for faces, some in zip(of[code], needed, strict=True))]
    random.Random(seed).shuffle(shared)
    return [Class(chr(code), *of[code]) for code in shared]


def choose(
    train: Sequence[Face], validation: Sequence[Face], classes: int, seed: int, script: str, least: int | None
) -> list[Class]:
    """The first of the candidates that look different and nowhere are empty; Mistake if there are too few.

    The first face alone tells what looks different, where all have a character; else each that has it.
    """
    chosen: list[Class] = []
    looks: set[tuple[Face, bytes]] = set()
    for each in candidates(train, validation, seed, script, least):
        if len(chosen) == classes:
            break
        faces = (*each.train, *each.validation)
        drawn = [stencil(face, each.character, 32) for face in faces]
        compared = 1 if least is None else len(faces)
        # Latin A, Greek Alpha and Cyrillic A may look alike.
        seen = {(face, image.tobytes()) for face, image in zip(faces[:compared], drawn[:compared], strict=True)}
        if not seen & looks and all(image.getbbox() for image in drawn):
            looks |= seen
            chosen.append(each)
    if len(chosen) < classes:
        fonts = (
            f"{len(train) + len(validation)} fonts share"
            if least is None
            else f"{least} fonts for training and 1 for validation share"
        )
        fewer = (
            "" if least == 1 else f", or --fonts-each {(least or len(train)) - 1} if that is enough" * (len(train) > 1)
        )
        raise Mistake(
            f"--classes {classes}: {fonts} {len(chosen)} characters of --script {script} that look different; ask for "
            f"fewer classes, or name other fonts{fewer}"
        )
    return chosen


@functools.lru_cache(maxsize=64)
def loaded(face: Face, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(face.path, size, index=face.number, layout_engine=ImageFont.Layout.BASIC)


def stencil(face: Face, character: str, size: int) -> Image.Image:
    """A character, white on black, in the middle of a square."""
    image = Image.new("L", (size, size))
    ImageDraw.Draw(image).text((size / 2, size / 2), character, 255, loaded(face, size * 7 // 8), anchor="mm")
    return image


def picture(face: Face, character: str, size: int, plain: bool, dice: np.random.Generator) -> Image.Image:
    """A character turned, sheared, scaled, moved and blurred, in one colour on a background of two others.

    A ``plain`` one is black on white.
    """
    high = 2 * size  # drawn larger, so that the strokes stay smooth
    angle, shear = dice.uniform(-0.25, 0.25), dice.uniform(-0.2, 0.2)
    wide, tall = dice.uniform(0.95, 1.4, 2)  # what is looked at, so 1.4 makes it smaller
    left, top = dice.uniform(-0.08, 0.08, 2) * high
    a, b = wide * np.cos(angle), wide * (shear - np.sin(angle))
    d, e = tall * np.sin(angle), tall * np.cos(angle)
    middle = high / 2
    matrix = (a, b, middle - a * middle - b * middle + left, d, e, middle - d * middle - e * middle + top)
    mask = stencil(face, character, high).transform((high, high), Image.Transform.AFFINE, matrix, Image.BILINEAR)
    mask = mask.filter(ImageFilter.GaussianBlur(dice.uniform(0.0, high / 64))).resize((size, size), Image.BOX)

    if plain:
        return ImageOps.invert(mask).convert("RGB")
    colours = dice.uniform(0, 255, (3, 3))
    light = colours.mean(1)
    if abs(light[0] - light[1:].mean()) < 90:  # else nobody could read it
        colours[0] = dice.uniform(0, 40, 3) if light[1:].mean() > 127 else dice.uniform(215, 255, 3)
    direction = dice.uniform(0, 2 * np.pi)
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    slope = ((x * np.cos(direction) + y * np.sin(direction)) / 2 + 0.5).clip(0, 1)[..., None]
    background = slope * colours[1] + (1 - slope) * colours[2]
    cover = np.asarray(mask, np.float64)[..., None] / 255
    pixels = cover * colours[0] + (1 - cover) * background + dice.normal(0, 8, (size, size, 3))
    return Image.fromarray(pixels.clip(0, 255).round().astype(np.uint8))


def draw(character: str, faces: Sequence[Face], pictures: Pictures, folder: Path) -> None:
    """All pictures of a class, the faces in turns."""
    target = folder / f"u{ord(character):05x}"
    target.mkdir(parents=True)
    for number in range(pictures.samples):
        face = faces[number % len(faces)]
        validates = int(pictures.part == "validation")
        dice = np.random.default_rng([pictures.seed, validates, ord(character), number])
        image = picture(face, character, pictures.size, pictures.plain, dice)
        image.save(target / f"{number:05d}-{face.name}.{pictures.suffix}", quality=90)


def write(out: Path, parts: Sequence[Pictures], classes: Sequence[Class], packed: bool, processes: int) -> None:
    """Draw all parts, beside ``out`` first: who is interrupted leaves nothing that looks like a whole set."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch,
        ProcessPoolExecutor(processes) as pool,
    ):
        drawn, whole = Path(scratch, "drawn"), Path(scratch, "whole")
        for pictures in parts:
            folder = (drawn if packed else whole) / pictures.part
            job = functools.partial(draw, pictures=pictures, folder=folder)
            characters = [each.character for each in classes]
            for _ in pool.map(job, characters, [getattr(each, pictures.part) for each in classes], chunksize=8):
                pass  # what failed is raised here
            if packed:
                pack(folder, whole / pictures.part)
                shutil.rmtree(folder)
        about = {"characters": characters, **{each.part: [face.name for face in each.faces] for each in parts}}
        Path(whole, "glyphs.json").write_text(json.dumps(about, ensure_ascii=False, indent=1) + "\n", "utf-8")
        whole.rename(out)


def make(args: argparse.Namespace) -> str:
    """Draw the set, and say what there is; Mistake if that cannot be done."""
    for name, (least, most) in RANGES.items():
        if not least <= getattr(args, name) <= most:
            raise Mistake(
                f"--{name.replace('_', '-')} {getattr(args, name)}: a number from {least} to {most} is needed"
            )
    if args.out.exists():
        raise Mistake(f"{args.out}: it exists already: name another folder, or remove it")
    train, validation = (tuple(map(Face.named, names)) for names in (args.train_fonts, args.validation_fonts))
    if both := sorted(face.name for face in set(train) & set(validation)):
        raise Mistake(f"{', '.join(both)}: a font is for training or for validation, not both")
    if args.fonts_each is not None and not 1 <= args.fonts_each <= len(train):
        raise Mistake(
            f"--fonts-each {args.fonts_each}: a number from 1 to {len(train)}, the fonts for training, is needed"
        )
    classes = choose(train, validation, args.classes, args.seed, args.script, args.fonts_each)
    rest = (args.size, args.seed, args.format, args.plain)
    parts = (
        Pictures("train", train, args.samples, *rest),
        Pictures("validation", validation, args.validation_samples, *rest),
    )
    write(args.out, parts, classes, args.packed, args.processes)
    counts = [f"{args.classes * each.samples} of {len(each.faces)} font{'s' * (len(each.faces) > 1)}" for each in parts]
    of = f"{args.classes} classes of {args.size}x{args.size} pixels"
    return f"{args.out}: {of}: {counts[0]} for training, {counts[1]} for validation"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"glyphs: {message}; --help tells more\n")


def arguments() -> argparse.Namespace:
    parser = Parser(description="Draw an image set of characters in many fonts.")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=100, help="training images of each class, the fonts in turns")
    parser.add_argument("--validation-samples", type=int, default=10, help="validation images of each class")
    parser.add_argument("--size", type=int, default=32, help="pixels on each side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=("png", "jpg"), default="png")
    parser.add_argument("--script", choices=sorted(SCRIPTS), default="han", help="which characters are classes")
    parser.add_argument("--train-fonts", nargs="+", default=TRAIN_FONTS, metavar="FILE[:FACE]")
    parser.add_argument("--validation-fonts", nargs="+", default=VALIDATION_FONTS, metavar="FILE[:FACE]")
    parser.add_argument(
        "--fonts-each",
        type=int,
        metavar="N",
        help="of the fonts for training that have a class, at least; else all have",
    )
    parser.add_argument("--plain", action="store_true", help="black on white, which takes far fewer steps to learn")
    parser.add_argument("--packed", action="store_true", help="write tar files in the place of folders of classes")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        print(make(arguments()))
    except Mistake as mistake:
        sys.exit(f"glyphs: {mistake}")
