"""The ImageNet application: its image set, its recipes, and its training in real processes."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import types
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, opened, table_of
from forking_launcher import TORCH
from framework_jobs import alone, job, needs

from multiring.data import BrokenSample, Dataset, index, pack

torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")
ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KILLS", "3"))
APPLICATION = ROOT / "examples" / "imagenet"
sys.path.insert(0, str(APPLICATION))

import account  # noqa: E402
import agreement  # noqa: E402
import checkpoints  # noqa: E402
import curves  # noqa: E402
import glyphs as drawing  # noqa: E402
import images  # noqa: E402
import networks  # noqa: E402
import presets  # noqa: E402

pytestmark = needs("torch", "PIL", "fontTools", "matplotlib", seconds=600)


def ends(
    program: str, *arguments: str, ranks: int = 1, patience: float = 250, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program of the application, several ranks as one job, and return how it ended."""
    path = APPLICATION / program
    if ranks > 1:
        return job(path, *arguments, ranks=ranks, imports=TORCH, timeout=patience, **options)
    return alone(path, *arguments, imports=TORCH, timeout=patience, **options)


def draws(out: Path, *options: str) -> str:
    """Draw letters of the fonts that matplotlib brings, those without serifs and of one width for validation."""
    import matplotlib

    fonts = Path(matplotlib.get_data_path(), "fonts", "ttf")
    train = [f"{fonts}/DejaVu{name}.ttf" for name in ("Sans", "Serif", "Serif-Italic")]
    sizes = ["--classes", "5", "--samples", "8", "--validation-samples", "3", "--size", "32", "--script", "letters"]
    named = ["--train-fonts", *train, "--validation-fonts", f"{fonts}/DejaVuSansMono.ttf"]
    done = ends("glyphs.py", str(out), *sizes, *named, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def glyphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five letters as folders of classes: 8 pictures each to train on, 3 to validate with."""
    out = tmp_path_factory.mktemp("set") / "glyphs"
    printed = draws(out, "--seed", "7")
    assert printed.endswith("5 classes of 32x32 pixels: 40 of 3 fonts for training, 15 of 1 font for validation\n"), (
        printed
    )
    return out


def test_glyphs_are_the_same_by_seed_and_as_tar_files(glyphs: Path, tmp_path: Path) -> None:
    drawn = contents(glyphs)
    images = [name for name in drawn if name.endswith(".png")]
    assert len({drawn[name] for name in images}) == len(images) == 55
    draws(tmp_path / "packed", "--seed", "7", "--packed", "--processes", "1")
    for part in ("train", "validation"):
        packed = Dataset(tmp_path / "packed" / part)
        of_class = packed.classes[int(packed[1]["cls"])]
        assert of_class == sorted(packed.classes)[0]
        found = [packed[sample]["png"] for sample in range(len(packed))]
        assert found == [drawn[name] for name in sorted(images) if name.startswith(part)]
    draws(tmp_path / "plain", "--seed", "7", "--plain")
    with Image.open(next((tmp_path / "plain" / "train").rglob("*.png"))) as image:
        plain = np.asarray(image)
    assert (plain == plain[:, :, :1]).all()
    assert plain.max() == 255
    assert plain.min() < 128
    draws(tmp_path / "other", "--seed", "8")
    assert not set(contents(tmp_path / "other").values()) & {drawn[name] for name in images}


def test_glyphs_of_one_font_are_in_one_part(glyphs: Path) -> None:
    fonts = {
        part: {path.stem.partition("-")[2] for path in (glyphs / part).rglob("*.png")}
        for part in ("train", "validation")
    }
    assert fonts == {
        "train": {"DejaVuSans", "DejaVuSerif", "DejaVuSerif-Italic"},
        "validation": {"DejaVuSansMono"},
    }
    about = json.loads((glyphs / "glyphs.json").read_text("utf-8"))
    assert {part: set(about[part]) for part in fonts} == fonts
    named = {f"u{ord(character):05x}" for character in about["characters"]}
    assert named == {path.name for path in (glyphs / "train").iterdir()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train-fonts", "/nowhere/font.ttf"], "/nowhere/font.ttf: no such font; apt-get install fonts-noto-cjk"),
        (["--train-fonts", "{font}", "--validation-fonts", "{font}"], "DejaVuSans: a font is for training or for"),
        (["--script", "han", *(both := ["--train-fonts", "{font}", "--validation-fonts", "{mono}"])], "share 0 char"),
        ([*both, "--size", "4"], "--size 4: a number from 8 to 1024 is needed"),
        ([*both, "--size", "100000"], "--size 100000: a number from 8 to 1024 is needed"),
        ([*both, "--seed", "-1"], "--seed -1: a number from 0 to 9223372036854775807 is needed"),
        ([*both, "--classes", "0"], "--classes 0: a number from 1 to 1000000 is needed"),
        (["--train-fonts", "{text}", "--validation-fonts", "{mono}"], "it has no font 0 that can be read"),
    ],
)
def test_glyphs_that_cannot_be_drawn(options: list[str], message: str, tmp_path: Path) -> None:
    import matplotlib

    fonts = Path(matplotlib.get_data_path(), "fonts", "ttf")
    names = {"{font}": "DejaVuSans.ttf", "{mono}": "DejaVuSansMono.ttf", "{text}": "LICENSE_DEJAVU"}
    words = [str(fonts / names[option]) if option in names else option for option in options]
    done = ends("glyphs.py", str(tmp_path / "glyphs"), *words)
    assert done.returncode == 1
    assert done.stderr.startswith("glyphs: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def font(path: Path, codes: range) -> None:
    """A font whose character ``code`` is the squares of a grid of 4 x 3 that are 1 among its lowest 12 bits."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    outlines = {".notdef": TTGlyphPen(None).glyph()}
    for bits in range(1 << 12):
        pen = TTGlyphPen(None)
        for square in range(12):
            if bits >> square & 1:
                left, low = 250 * (square % 4), 250 * (square // 4)
                pen.moveTo((left, low))
                for corner in ((left, low + 200), (left + 200, low + 200), (left + 200, low)):
                    pen.lineTo(corner)
                pen.closePath()
        outlines[f"g{bits}"] = pen.glyph()
    builder = FontBuilder(1000)
    builder.setupGlyphOrder(list(outlines))
    builder.setupCharacterMap({code: f"g{code & 0xFFF}" for code in codes})
    builder.setupGlyf(outlines)
    builder.setupHorizontalMetrics(dict.fromkeys(outlines, (1000, 0)))
    builder.setupHorizontalHeader(ascent=1000, descent=0)
    builder.setupNameTable({"familyName": path.stem, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)


def test_glyphs_of_22000_classes_need_some_of_the_fonts(tmp_path: Path) -> None:
    """Three fonts for training share 6,000 characters; 22,000 are in two of them and in one of two for validation."""
    start = 0x20000
    spans = {
        "one": range(start, start + 16000),
        "two": range(start + 10000, start + 24000),
        "three": range(start, start + 24000),
        "short": range(start, start + 12000),
        "long": range(start + 12000, start + 22000),
    }
    for name, codes in spans.items():
        font(tmp_path / f"{name}.ttf", codes)
    faces = {name: drawing.Face.named(f"{tmp_path}/{name}.ttf") for name in spans}
    train, validation = ([faces[name] for name in names] for names in (("one", "two", "three"), ("short", "long")))
    assert drawing.candidates(train, validation, 1, "han", None) == []
    assert len(drawing.candidates(train, validation[1:], 1, "han", None)) == 4000
    found = drawing.candidates(train, validation, 1, "han", 2)
    assert sorted(ord(each.character) for each in found) == list(range(start, start + 22000))
    for each in found:
        having = [name for name, codes in spans.items() if ord(each.character) in codes]
        assert [*each.train, *each.validation] == [faces[name] for name in having]
    assert drawing.candidates(train, validation, 2, "han", 2) != found

    fonts = ["--train-fonts", *(face.path for face in train), "--validation-fonts", *(face.path for face in validation)]
    few = ["--fonts-each", "2", "--classes", "40", "--samples", "3", "--validation-samples", "2", "--size", "16"]
    done = ends("glyphs.py", str(tmp_path / "some"), *fonts, *few, "--seed", "1")
    assert done.returncode == 0, done.stderr
    chosen = json.loads((tmp_path / "some" / "glyphs.json").read_text("utf-8"))["characters"]
    # Those whose lowest bits are the same look alike, and those that have none are empty.
    assert len({ord(character) & 0xFFF for character in chosen} - {0}) == 40
    assert chosen[:3] == [each.character for each in found[:3]]
    for part, samples in (("train", 3), ("validation", 2)):
        for each in found[:3]:
            names = sorted(path.name for path in (tmp_path / "some" / part / f"u{ord(each.character):05x}").iterdir())
            turns = [face.name for face in getattr(each, part)]
            assert names == [f"{number:05d}-{turns[number % len(turns)]}.png" for number in range(samples)]

    for number, message in (
        ("4", "--fonts-each 4: a number from 1 to 3, the fonts for training, is needed"),
        ("0", "--fonts-each 0: a number from 1 to 3, the fonts for training, is needed"),
    ):
        done = ends("glyphs.py", str(tmp_path / "none"), *fonts, "--fonts-each", number)
        assert (done.returncode, done.stderr) == (1, f"glyphs: {message}\n")
    done = ends("glyphs.py", str(tmp_path / "none"), *fonts)
    assert done.stderr == (
        "glyphs: --classes 1000: 5 fonts share 0 characters of --script han that look different; ask for fewer "
        "classes, or name other fonts, or --fonts-each 2 if that is enough\n"
    )


# --- recipes ---


@pytest.mark.parametrize(
    ("name", "batch", "each", "expected"),
    [
        # 1,281,167 images are 157 steps of 8192 in an epoch: 5 epochs of warm-up end at step 785.
        ("facebook", 8192, 157, {0: 0.1, 157: 0.72, 785: 3.2, 4709: 3.2, 4710: 0.32, 9420: 0.032, 12560: 0.0032}),
        ("facebook", 256, 5005, {0: 0.1, 20000: 0.1, 30 * 5005: 0.01}),
        ("facebook", 1024, 1252, {0: 0.1, 3130: 0.25, 6260: 0.4}),
        ("facebook", 64, 20019, {0: 0.025, 7: 0.025, 600570: 0.0025}),  # below the rate at which others begin
        ("ibm-resnet50", 8192, 157, {0: 0.1, 785: 3.2}),
        ("ibm-resnet101-22k", 5120, 1465, {0: 0.1, 7325: 2.0, 17 * 1465: 0.2}),
        # 90 steps of 14336; from 4.8 at step 450 to zero at 8100, but from step 7650 on the collapse.
        ("surfsara", 14336, 90, {0: 0.1, 225: 2.45, 450: 4.8, 4275: 2.4, 7650: 0.254, 7875: 0.0635, 8100: 0}),
        ("surfsara", 7168, 179, {895: 2.4, 85 * 179: 0.127}),
        # 312 steps of 4096 in an epoch; half of the way that a rate falls with power 2 is nine sixteenths of it.
        (
            "surfsara-ensemble",
            4096,
            312,
            {
                **{0: 0.1, 780: 0.85, 1560: 1.6, 4680: 1.31, 7800: 1.02, 31 * 312: 1.02 * 9 / 16, 37 * 312: 0.255},
                **{
                    12324: 0.255 / 4,
                    42 * 312: 0.255,
                    43.5 * 312: 0.5095,
                    45 * 312: 0.764,
                    57 * 312: 0.19,
                    62 * 312: 0.19,
                },
                **{65 * 312: 0.572, 77 * 312: 0.143, 82 * 312 - 780: 0.143 / 4, 82 * 312: 0, 83 * 312: 0},
            },
        ),
        ("surfsara-ensemble", 2048, 625, {0: 0.05, 45 * 625: 0.382}),
        ("surfsara-wide", 14336, 90, {450: 4.8, 7650: 0.254}),
        ("modern", 1024, 1252, {0: 0.005, 6260: 0.5, 65730: 0.25, 125200: 0}),
        ("modern", 512, 2503, {0: 0.005, 12515: 0.25}),
    ],
)
def test_learning_rates(name: str, batch: int, each: int, expected: dict[int, float]) -> None:
    preset = presets.changed(presets.PRESETS[name], [f"batch={batch}"])
    rate = presets.rates(preset, each)
    assert {step: pytest.approx(rate(step), abs=1e-12) for step in expected} == expected


def test_presets_are_in_range_and_changes_have_kinds() -> None:
    for preset in presets.PRESETS.values():
        assert presets.checked(preset) == preset
    changes = ["batch=96", "rate=0.5", "drops=2,5", "flip=yes", "schedule=steps", "lars=0.001"]
    preset = presets.changed(presets.PRESETS["glyphs"], changes)
    found = (preset.batch, preset.rate, preset.drops, preset.flip, preset.schedule, preset.lars)
    assert found == (96, 0.5, (2, 5), True, "steps", 0.001)
    surfsara, ensemble = presets.PRESETS["surfsara"], presets.PRESETS["surfsara-ensemble"]
    assert [presets.collapses(surfsara, epoch) for epoch in (0, 84, 85, 89)] == [False, False, True, True]
    collapsing = [epoch for epoch in range(82) if presets.collapses(ensemble, epoch)]
    assert collapsing == [*range(37, 42), *range(57, 62), *range(77, 82)]
    points = presets.changed(preset, ["schedule=points", "epochs=2", "points=0:0.1,0.5:1,2:0"])
    assert points.points == ((0, 0.1), (0.5, 1), (2, 0))


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.5), ("cosine", 0.5)])
def test_rates_begin_anew_with_each_cycle_and_fall_in_its_collapse(schedule: str, middle: float) -> None:
    """Ten steps an epoch; cycles of 5 epochs, one of them warm-up, and of 4; the last epoch of each is a collapse."""
    shape = ["epochs=9", "cycles=5,9", f"schedule={schedule}", "collapse_epochs=1", "collapse_rate=0.01", "batch=64"]
    rate = presets.rates(presets.changed(presets.PRESETS["glyphs"], shape), 10)
    found = [rate(step) for step in (0, 5, 10, 30, 40, 45, 50, 70, 80, 85)]
    expected = [0, 0.05, 0.1, 0.1 * middle, 0.02, 0.005, 0.1, 0.1 * middle, 0.02, 0.005]
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("weight=3", "--set weight=3: a preset has no 'weight', but model, epochs, batch"),
        ("batch=many", "--set batch=many: a whole number is needed"),
        ("flip=1", "--set flip=1: yes or no is needed"),
        ("batch=0", "batch=0: a number above 0 is needed"),
        ("batch=1_0", "--set batch=1_0: a whole number is needed"),
        ("rate=\u0663", "--set rate=\u0663: a number is needed"),
        ("drops=5,10", "drops=5,10: it has no effect with schedule=cosine: give schedule=steps, too"),
        ("collapse_rate=0.1", "collapse_rate=0.1: it has no effect with collapse_epochs=0: give more of these"),
        ("sizes=16,32 train_size=24", "train_size=24: it has no effect with sizes: sizes= has all sizes"),
        ("schedule=points points=0:1,20:0 rate=3", "rate=3.0: it has no effect with schedule=points: points= has all"),
        ("statistics=host", "statistics=host: known are rank, world"),
        ("momentum=1.5", "momentum=1.5: a number from 0 to below 1 is needed"),
        ("collapse_epochs=21", "collapse_epochs=21: the training has 20 epochs"),
        ("rate=inf", "rate=inf: a number below 2**31 is needed"),
        ("rate=nan", "rate=nan: a number below 2**31 is needed"),
        ("warm_up=inf", "warm_up=inf: a number below 2**31 is needed"),
        ("batch=99999999999999999999", "batch=99999999999999999999: a number below 2**31 is needed"),
        ("drops=3,99999999999", "drops=99999999999: a number below 2**31 is needed"),
        ("drops=3,x", "--set drops=3,x: a list such as 30,60,80 is needed"),
        ("drops=9,3", "drops=9,3: epochs of 0 or more are needed, in their order"),
        ("rate=1e-320", "rate=1e-320: a rate of 1e-12 or more is needed"),
        ("sizes=16,0", "sizes=16,0: numbers above 0 are needed"),
        ("batch", "--set batch: NAME=VALUE is needed, such as batch=256"),
        ("cycles=5,10", "cycles=5,10: the ends of two or more are needed, the last at epochs=20"),
        ("cycles=20", "cycles=20: the ends of two or more are needed, the last at epochs=20"),
        ("cycles=8,8,20", "cycles=8,8,20: epochs in their order are needed, 1 or more apart"),
        ("cycles=0,20", "cycles=0,20: epochs in their order are needed, 1 or more apart"),
        ("cycles=3,20 collapse_epochs=4", "cycles=3,20: epochs in their order are needed, 4 or more apart"),
        (
            "cycles=8,20 schedule=steps",
            "cycles=8,20: schedule=steps does not begin anew: choose linear, cosine or points",
        ),
        ("points=0:1,20:0", "schedule=cosine: it has no points: choose schedule=points"),
        ("schedule=points", "points=: pairs of an epoch and its rate are needed, from 0 to epochs=20"),
        (
            "schedule=points points=0:1,9:0",
            "points=0:1,9:0: pairs of an epoch and its rate are needed, from 0 to epochs=20",
        ),
        (
            "schedule=points points=0:1,9:2,8:1,20:0",
            "points=0:1,9:2,8:1,20:0: pairs of an epoch and its rate are needed",
        ),
        ("schedule=points points=0:1,20:-1", "points=0:1,20:-1: rates of 0 or more are needed"),
        ("schedule=points points=0:1,20:nan", "points=nan: a number below 2**31 is needed"),
        ("schedule=points points=0:1,20", "--set points=0:1,20: pairs such as 0:0.1,5:1.6,30:0 is needed"),
        (
            "schedule=points points=0:1,20:0 collapse_rate=0.1",
            "collapse_rate=0.1: schedule=points has the rates of a collapse in points",
        ),
        ("width=0", "width=0: a number above 0 is needed"),
        ("schedule=steps", "drops=30,60,80: the training ends after epochs=20: give it drops before that"),
        ("schedule=steps drops=7,20", "drops=7,20: the training ends after epochs=20: give it drops before that"),
    ],
)
def test_presets_cannot_be_changed_into_nonsense(change: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        presets.changed(presets.PRESETS["glyphs"], change.split())


# --- networks ---


class WithActivation(torch.nn.BatchNorm2d):
    """A batch norm that ends in ReLU, like timm's BatchNormAct2d."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


def test_only_plain_batch_norms_are_replaced_by_those_of_all_ranks() -> None:
    plain = torch.nn.BatchNorm2d(3, eps=0.5)
    torch.nn.init.constant_(plain.weight, 7)
    (replaced,) = networks.over_all_ranks(torch.nn.Sequential(plain))
    assert type(replaced) is networks.WorldBatchNorm
    assert (replaced.eps, replaced.weight.tolist()) == (0.5, [7, 7, 7])
    for other in (WithActivation(3), torch.nn.BatchNorm1d(3)):
        nested = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), other))
        with pytest.raises(ValueError, match=rf"statistics=world: 1 is a \S+\.{type(other).__name__}, and only"):
            networks.over_all_ranks(nested)


@pytest.mark.parametrize(
    ("library", "function", "error"),
    [("timm", "create_model", RuntimeError), ("torchvision.models", "get_model", ValueError)],
)
def test_models_that_a_library_does_not_know(
    library: str, function: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(name: str, **_: object) -> None:
        raise error(f"Unknown model {name}")

    top = library.partition(".")[0]
    for name in {top, library}:
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**{function: unknown}))
    with pytest.raises(ValueError, match=f"model={top}:huge: Unknown model huge"):
        networks.build(f"{top}:huge", 5, width=1, zero_gamma=True, statistics="rank")


def test_models_that_cannot_take_the_images_are_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    networks.check("small", 5, (32, 5), 1, width=2)
    networks.check("small", 5, (1,), 2, width=1)
    message = "model=small: it cannot train on 1 image of 4x4 at once, which a pass may have: ValueError: Expected more"
    with pytest.raises(ValueError, match=re.escape(message)):
        networks.check("small", 5, (32, 4), 1, width=1)
    made = {"kernel": lambda: torch.nn.Conv2d(3, 5, 3), "map": lambda: torch.nn.Conv2d(3, 5, 1), "pair": PairOf}
    library = types.SimpleNamespace(get_model=lambda name, **_: made[name]())
    for name in ("torchvision", "torchvision.models"):
        monkeypatch.setitem(sys.modules, name, library)
    for name, message in (
        ("kernel", "it cannot train on 2 images of 2x2 at once, which a pass may have: RuntimeError: "),
        ("map", "it answers with (2, 5, 2, 2), and (2, 5) is needed"),
        ("pair", "it answers with a tuple, and (2, 5) is needed"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"model=torchvision:{name}: {message}")):
            networks.check(f"torchvision:{name}", 5, (2,), 2, width=1)
    for made["asks"] in (lambda: torch.nn.Linear(5, int(torch.tensor(5).item())), Asks):
        networks.check("torchvision:asks", 5, (2,), 2, width=1)


class Asks(torch.nn.Module):
    """A model that asks for the value of a tensor, which there is none of without memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if bool(x.mean() > 0) else -x


class PairOf(torch.nn.Module):
    """A model that answers with two tensors, like torchvision's GoogLeNet where it trains."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("library", "function", "option"),
    [("timm", "create_model", "base_width"), ("torchvision.models", "get_model", "width_per_group")],
)
def test_wide_networks_have_more_channels_inside_their_blocks(
    library: str, function: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for width, weights in ((1, 24 * 24 * 9), (3, 72 * 72 * 9)):
        small = networks.build("small", 5, width=width, zero_gamma=True, statistics="rank")
        assert small.blocks[1].conv2.weight.numel() == weights
        assert small.stem[0].out_channels == 24
        assert small(torch.zeros(2, 3, 32, 32)).shape == (2, 5)

    def made(name: str, num_classes: int, **options: Any) -> torch.nn.Module:
        if name == "narrow" and option in options:
            raise TypeError(f"narrow() got an unexpected keyword argument '{option}'")
        return torch.nn.Conv2d(3, options.get(option, 64), 1)

    top = library.partition(".")[0]
    for name in {top, library}:
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**{function: made}))
    found = [networks.build(f"{top}:any", 5, width=width, zero_gamma=True, statistics="rank") for width in (1, 2)]
    assert [each.out_channels for each in found] == [64, 128]
    with pytest.raises(ValueError, match=f"model={top}:narrow: no width=2: narrow\\(\\) got an unexpected .*{option}"):
        networks.build(f"{top}:narrow", 5, width=2, zero_gamma=True, statistics="rank")


# --- training ---


def trains(
    data: Path,
    ranks: int,
    *changes: str,
    options: tuple[str, ...] = (),
    launcher: tuple[str, ...] = (),
    workers: str = "0",
    patience: float = 250,
    **failing: str,
) -> subprocess.CompletedProcess[str]:
    """Train the preset glyphs with a report of each step, and return how that ended."""
    named = ["--preset", "glyphs", "--data", str(data), "--workers", workers, "--report", "1"]
    program = str(Path(__file__).parent / "imagenet_ranks.py")
    more: dict[str, Any] = {"options": launcher, "patience": patience} if ranks > 1 else {}
    return ends(program, *named, "--reproducible", "--set", *changes, *options, ranks=ranks, **more, **failing)


def of_any_rank(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """The same without the numbers that the launcher puts before lines of others than its first rank."""
    output = re.sub(r"^\[\d\] ", "", done.stdout, flags=re.MULTILINE)
    return subprocess.CompletedProcess(done.args, done.returncode, output, done.stderr)


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"^epoch .* step .* loss (\S+) ", done.stdout, re.MULTILINE)]


def validated(done: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"^epoch \d+ validated: top-1 \S+ (\(\d+ of \d+\))", done.stdout, re.MULTILINE)


def validation_loss(done: subprocess.CompletedProcess[str]) -> str:
    return re.findall(r"^epoch \d+ validated: .* loss (\S+)$", done.stdout, re.MULTILINE)[-1]


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The mistakes that ranks tell; the launcher repeats them further to the right."""
    return re.findall(r"^(?:\[\d\] )?train: (.*)$", done.stderr, re.MULTILINE)


def cells(file: Path, caption: str) -> list[list[str]]:
    """The rows of a table of a page, without its headings."""
    (found,) = re.findall(rf"<caption>{caption}</caption>.*?<tbody>(.*?)</tbody>", file.read_text("utf-8"), re.DOTALL)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", found)]


def test_one_two_and_three_ranks_train_the_same(glyphs: Path, tmp_path: Path) -> None:
    """The last batch of an epoch has 4 of the 40 images, which three ranks cut into 1, 1 and 2.

    The page says the same of each: the mean loss of an epoch, and what the worst classes were taken for.
    """
    shape = ["epochs=2", "batch=12", "statistics=world", "rate=0.02", "warm_up=0", "schedule=steps", "drops="]
    pages = {ranks: tmp_path / f"{ranks}.html" for ranks in (1, 2, 3)}
    one, *others = (trains(glyphs, ranks, *shape, options=("--page", str(pages[ranks]))) for ranks in pages)
    assert len(losses(one)) == 8
    assert losses(one)[-1] < losses(one)[0]
    for other in others:
        assert losses(other) == pytest.approx(losses(one), rel=1e-4)
        assert validated(other) == validated(one)
        assert len(validated(other)) == 2
        assert validated(other)[0].endswith(" of 15)")
    sizes = [12, 12, 12, 4]
    means = [sum(map(float.__mul__, losses(one)[at : at + 4], map(float, sizes))) / 40 for at in (0, 4)]
    worst = "the worst classes of the last validation"
    right = int(validated(one)[-1][1:].partition(" ")[0])
    for ranks, file in pages.items():
        epochs = cells(file, "epochs")
        assert [row[:2] for row in epochs] == [["0", str(ranks)], ["1", str(ranks)]]
        assert [float(row[2]) for row in epochs] == pytest.approx(means, rel=1e-4)
        assert epochs[-1][6] == f"{right / 15:.2%}"
        assert cells(file, worst) == cells(pages[1], worst)
        mistakes = 0
        for _, seen, hits, taken in cells(file, worst):
            times = list(map(int, re.findall(r"\((\d+)\)", taken)))
            assert int(seen) - int(hits) == sum(times)
            mistakes += sum(times)
        assert mistakes == 15 - right


@pytest.mark.parametrize(("uneven", "steps"), [("pad", 4), ("drop", 3)])
def test_four_ranks_have_the_last_batch_that_one_has(uneven: str, steps: int, glyphs: Path) -> None:
    """The last 4 of the 40 images are filled up with the first 8 of the epoch, or left out; each rank has 3 of 12."""
    shape = ["epochs=2", "batch=12", "statistics=world", "rate=0.02", "warm_up=0", "schedule=steps", "drops="]
    one, four = (trains(glyphs, ranks, *shape, options=("--uneven", uneven)) for ranks in (1, 4))
    assert len(losses(one)) == 2 * steps
    assert losses(four) == pytest.approx(losses(one), rel=1e-4)
    assert validated(four) == validated(one)
    for done in (one, four):
        assert f"; here {2 * steps * 12} images in " in done.stdout


def test_factors_of_the_classifier_change_no_loss_also_where_a_rank_is_lost(glyphs: Path, tmp_path: Path) -> None:
    """A rank of 3 has 3 or 4 of 10 images in passes of 3, so some pass once and others twice; rank 1 is lost."""
    found = []
    for factors in ("no", "yes"):
        (tmp_path / "1-5").touch()  # before step 5, once
        shape = ["epochs=2", "batch=10", "micro=3", f"factors={factors}"]
        kept = tmp_path / f"{factors}.pt"
        options, launcher = ("--uneven", "drop", "--checkpoint", str(kept)), ("--min-ranks", "2")
        done = trains(glyphs, 3, *shape, options=options, launcher=launcher, TEST_KILLS=str(tmp_path), TEST_LEAST="1")
        found.append((losses(done), torch.load(kept, weights_only=True)["net"]))
        assert "; 2 ranks go on in epoch 1" in done.stdout
    (summed, net), (gathered, other) = found
    assert len(summed) == 8
    assert gathered == pytest.approx(summed, rel=1e-4)
    unlike = [name for name in net if not torch.equal(net[name], other[name])]
    assert unlike  # sums of other roundings
    for name in unlike:
        torch.testing.assert_close(net[name], other[name], rtol=1e-3, atol=1e-5)


def test_a_training_that_was_killed_goes_on_in_the_middle_of_an_epoch_to_the_same_bits(
    glyphs: Path, tmp_path: Path
) -> None:
    """Five steps an epoch, checkpoints after steps 3, 5, 6, 9 and 10, all ranks killed before step 8 of 0 to 9."""
    shape = ["epochs=2", "batch=8", "micro=3", "average=0.9", "lars=0.01"]
    for part in ("train", "validation"):
        pack(glyphs / part, tmp_path / "packed" / part)
    packed, first, second = tmp_path / "packed", tmp_path / "whole.pt", tmp_path / "killed.pt"
    whole = trains(packed, 2, *shape, options=("--every", "3", "--checkpoint", str(first)), workers="1")
    assert len(losses(whole)) == 10
    options = ("--every", "3", "--checkpoint", str(second))
    killed = trains(packed, 2, *shape, options=options, TEST_KILL="all:8")
    assert killed.returncode != 0
    assert torch.load(second, weights_only=True)["state"]["loader"]["consumed"] == 8
    resumed = trains(packed, 2, *shape, options=options)
    assert losses(resumed) == losses(whole)[6:]
    assert "epoch 1 step 2 of 5" in resumed.stdout.partition("\n")[0]
    left, right = (torch.load(path, weights_only=True) for path in (first, second))
    assert left["state"] == right["state"]
    for part in ("net", "average"):
        assert left[part].keys() == right[part].keys()
        assert all(torch.equal(left[part][name], right[part][name]) for name in left[part])
    moments = [[each["momentum_buffer"] for each in state["optimizer"]["state"].values()] for state in (left, right)]
    assert len(moments[0]) > 20
    assert all(map(torch.equal, *moments))

    # It is over, which those must find out who are left when rank 0 is lost before it has told the others.
    before = second.read_bytes()
    page = tmp_path / "all.html"
    paged = (*options, "--page", str(page))
    again = trains(packed, 3, *shape, options=paged, launcher=("--min-ranks", "2"), TEST_KILL="0:start")
    assert losses(again) == []
    lost, last = again.stdout.splitlines()
    assert lost.endswith("; 2 ranks begin")
    assert last.startswith("[1] glyphs: 2 epochs, batch 8, world 2: top-1")  # its first number is [1]
    assert second.read_bytes() == before
    means = [sum(losses(whole)[at : at + 5]) / 5 for at in (0, 5)]
    assert [(row[0], float(row[2])) for row in cells(page, "epochs")] == [
        (epoch, pytest.approx(mean, abs=2e-6)) for epoch, mean in zip("01", means, strict=True)
    ]
    other = trains(packed, 1, *shape, "rate=0.3", options=options)
    assert other.returncode == 1
    assert told(other) == [
        f"{second}: rate was 0.05 and is 0.3: give the options of the run that wrote it, or another --checkpoint"
    ]


def test_the_model_has_had_each_sample_once_an_epoch_though_a_rank_was_killed(tmp_path: Path) -> None:
    """Each sample has a weight of its own, from which a step on it takes 1/batch; a pass has one sample.

    Ranks thus pass as often as they have samples: 1, 2 and 2 times, then 2 and 3.
    The first replacement finds its data wrong and leaves alone; the second is admitted.
    """
    counts = ["epochs=2", "batch=5", "micro=1", "base_batch=5", "rate=1", "warm_up=0", "schedule=steps", "drops="]
    plain = ["momentum=0", "nesterov=no", "decay=0"]
    options = ("--every", "3", "--wait", "100", "--page", str(tmp_path / "job.html"))
    launcher = ("--min-ranks", "2", "--max-replacements", "2")
    done = trains(
        tmp_path,
        3,
        *counts,
        *plain,
        options=options,
        launcher=launcher,
        TEST_KILL="2:4",
        TEST_COUNT="60",
        TEST_WRONG="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks go on in epoch 0 near step" in done.stdout
    assert "3 ranks go on in epoch 0 at step 6\n" in done.stdout
    assert told(done) == ["the data are wrong here"]
    assert "2 ranks go on in epoch 0 near step 6\n" in done.stdout
    assert "3 ranks go on in epoch 0 at step 9\n" in done.stdout
    assert done.stdout.endswith("times [2.0], world 3, alike True\n")
    page = tmp_path / "job.html"
    first = page.read_text("utf-8").partition("</h1>")[0]
    assert first.endswith("<h1>glyphs: top-1 0.00% (0 of 7), top-5 100.00%, loss " + validation_loss(done))
    assert cells(page, "the worst classes of the last validation") == [["one", "7", "0", "other (7)"]]
    changes = cells(page, "ranks lost and admitted")
    found = [(int(epoch), what.rpartition("; ")[2]) for epoch, _, what in changes]
    assert found == [(0, f"{ranks} ranks go on") for ranks in (2, 3, 2, 3)]
    assert "rank 2" in changes[0][2]
    for _, ranks, _, speed, expected, part, *_ in cells(page, "epochs"):
        assert ranks == "3"
        assert float(part.rstrip("%")) == pytest.approx(100 * float(speed) / float(expected), abs=0.1)
    if CHROMIUM:
        seen = opened(page, tmp_path / "profile", width=500)
        assert seen["width"] == 500
        assert table_of(seen, "ranks lost and admitted")[1:] == changes
        assert seen["headings"][1:3] == ["Loss", "Accuracy on the validation images"]
        drawn = [picture["curves"] for picture in seen["pictures"]]
        assert drawn[:3] == [2, 2, 1]
        (texts,) = [[text for text, _ in picture["texts"]] for picture in seen["pictures"][:1]]
        assert any(text.endswith(" validation") for text in texts)
    assert validated(done) == ["(0 of 7)"] * 2


@pytest.mark.timeout(200 + 60 * KILLS)
def test_ranks_that_are_killed_at_random_cost_and_double_no_sample(tmp_path: Path) -> None:
    """At so many random steps of three epochs a random rank of three is killed; each time another takes its place.

    The last step is spared, after which none is admitted.
    """
    dice = random.Random(seed := random.randrange(1 << 32))
    kills = tmp_path / "kills"
    kills.mkdir()
    for step in dice.sample(range(3 * 12 - 1), KILLS):
        (kills / f"{dice.randrange(3)}-{step}").touch()
    planned = sorted(path.name for path in kills.iterdir())
    shape = ["epochs=3", "batch=5", "micro=1", "base_batch=5", "rate=1", "warm_up=0", "schedule=steps", "drops="]
    done = trains(
        tmp_path,
        3,
        *shape,
        *("momentum=0", "nesterov=no", "decay=0"),
        options=("--every", "1", "--wait", "100", "--uneven", "pad"),
        launcher=("--min-ranks", "2", "--max-replacements", str(KILLS)),
        patience=150 + 60 * KILLS,
        TEST_KILLS=str(kills),
        TEST_COUNT="60",
    )
    told_all = f"seed {seed}, killed {planned}\n{done.stdout}{done.stderr}"
    assert done.returncode == 0, told_all
    assert list(kills.iterdir()) == [], told_all
    assert done.stderr.count("is started again, replacement") == KILLS, told_all
    assert done.stdout.endswith("times [3.0], world 3, alike True\n"), told_all


def ensemble(done: subprocess.CompletedProcess[str]) -> str:
    """The line of the ensemble's validation; no rank may have told another one."""
    (line,) = re.findall(r"^ensemble of 3 cycles validated: (.*)$", done.stdout, re.MULTILINE)
    assert f"; ensemble of 3 cycles {line}; here" in done.stdout.splitlines()[-1]
    return str(line)


def test_the_ends_of_cycles_are_validated_together(glyphs: Path, tmp_path: Path) -> None:
    """Five steps an epoch, cycles of 1, 2 and 1 epochs.

    A job is killed in the middle of the second cycle and goes on; in another one rank 0 is lost before it has written
    the second cycle's network, and one more in the third cycle. The ensemble is that of a job that nobody left.
    """
    shape = ["epochs=4", "cycles=1,3,4", "batch=8", "statistics=world", "average=0.5", "rate=0.02", "warm_up=0"]
    shape += ["collapse_epochs=1", "collapse_rate=0.01", "width=2"]
    files = {name: tmp_path / f"{name}.pt" for name in ("whole", "killed", "lost", "single")}
    options = {name: ("--every", "3", "--checkpoint", str(files[name])) for name in files}
    page = tmp_path / "page.html"
    whole = trains(glyphs, 2, *shape, options=(*options["whole"], "--page", str(page)))
    assert len(losses(whole)) == 20
    kept = [torch.load(tmp_path / f"whole-cycle{number}.pt", weights_only=True) for number in (1, 2, 3)]
    assert [each["epoch"] for each in kept] == [0, 2, 3]
    assert torch.equal(
        kept[2]["net"]["head.weight"], torch.load(files["whole"], weights_only=True)["average"]["head.weight"]
    )

    # The mean of the probabilities, computed here.
    preset = presets.changed(presets.PRESETS["glyphs"], shape)
    pictures = images.Images(glyphs / "validation", preset, 0, False, "raise")
    pixels, labels = (
        torch.stack(list(map(torch.as_tensor, part)))
        for part in zip(*map(pictures.__getitem__, range(15)), strict=True)
    )
    mean, deviation = (torch.tensor(each).view(1, 3, 1, 1) for each in (images.MEAN, images.DEVIATION))
    probabilities = torch.zeros(15, 5, dtype=torch.float64)
    for each in kept:
        network = networks.build("small", 5, width=2, zero_gamma=True, statistics="world").eval()
        network.load_state_dict(each["net"])
        with torch.no_grad():
            probabilities += network((pixels / 255 - mean) / deviation).double().softmax(1) / 3
    right = int((probabilities.argmax(1) == labels).sum())
    loss = -probabilities[torch.arange(15), labels].log().mean().item()
    told_all = ensemble(whole)
    assert f"top-1 {right / 15:.2%} ({right} of 15), top-5 100.00%, loss " in told_all
    assert float(told_all.rpartition(" ")[2]) == pytest.approx(loss, abs=2e-6)
    rows = cells(page, "networks at the ends of cycles")
    assert [row[:2] for row in rows] == [["1", "0"], ["2", "2"], ["3", "3"], ["ensemble", ""]]
    assert [row[2] for row in rows] == [*(f"{each['result']['top1']:.2%}" for each in kept), f"{right / 15:.2%}"]
    assert rows[3][4] == told_all.rpartition(" ")[2]

    killed = trains(glyphs, 2, *shape, options=options["killed"], TEST_KILL="all:13")
    assert killed.returncode != 0
    resumed = trains(glyphs, 2, *shape, options=options["killed"])
    assert losses(resumed) == losses(whole)[12:]
    assert ensemble(resumed) == told_all
    for number, before in enumerate(kept, 1):
        after = torch.load(tmp_path / f"killed-cycle{number}.pt", weights_only=True)
        assert all(torch.equal(after["net"][name], before["net"][name]) for name in before["net"])

    lost = trains(
        glyphs, 3, *shape, options=options["lost"], launcher=("--min-ranks", "1"), TEST_KEEP="0:2", TEST_KILL="1:17"
    )
    assert lost.returncode == 0, lost.stdout + lost.stderr
    lost = of_any_rank(lost)
    assert "1 ranks go on in epoch 3 near step 2\n" in lost.stdout
    assert "2 ranks go on in epoch 2 near step 5\n" in lost.stdout
    assert validated(lost) == validated(whole)
    assert float(ensemble(lost).rpartition(" ")[2]) == pytest.approx(loss, rel=1e-3)

    # It is over; without the networks nothing can be said of them.
    state = torch.load(files["killed"], weights_only=True)
    state["state"]["ensemble"] = {}
    torch.save(state, files["killed"])
    again = trains(glyphs, 1, *shape, options=options["killed"])
    assert losses(again) == []
    assert ensemble(again).partition(", loss")[0] == told_all.partition(", loss")[0]
    torch.save(state, files["killed"])
    (tmp_path / "killed-cycle2.pt").unlink()
    missing = trains(glyphs, 1, *shape, options=options["killed"])
    assert missing.returncode == 1
    assert told(missing) == [
        f"{tmp_path}/killed-cycle2.pt: the network of cycle 2 is not there, which rank 0 wrote on its host: put it "
        "there, and give this command again"
    ]
    without = trains(glyphs, 1, *shape)
    assert told(without) == [
        "cycles=1,3,4: --checkpoint FILE is needed, beside which the networks of their ends are kept"
    ]


def test_curves_go_on_without_double_points_when_the_job_and_a_rank_are_lost(glyphs: Path, tmp_path: Path) -> None:
    """Five steps an epoch, checkpoints after steps 3, 5, 6 and 9; the job is killed before step 8 of 0 to 9.

    It goes on from step 6 on three ranks, whose rank 0 is lost before step 8, so that another one goes on writing.
    """
    pytest.importorskip("tensorboard")
    folder = tmp_path / "curves"
    options = ("--every", "3", "--checkpoint", str(tmp_path / "some.pt"), "--tensorboard", str(folder))
    shape = ["epochs=2", "batch=8"]
    killed = trains(glyphs, 2, *shape, options=options, TEST_KILL="all:8")
    assert killed.returncode != 0
    (tmp_path / "kills").mkdir()
    (tmp_path / "kills" / "0-8").touch()
    kills = str(tmp_path / "kills")  # once: the next rank 0 goes on
    done = trains(glyphs, 3, *shape, options=options, launcher=("--min-ranks", "2"), TEST_KILLS=kills)
    assert done.returncode == 0, done.stdout + done.stderr
    done = of_any_rank(done)
    assert "2 ranks go on in epoch 1 near step 3\n" in done.stdout
    line = re.compile(r"^epoch (\d) step (\d) of 5  loss (\S+)  rate (\S+)  (\d+) images/s", re.MULTILINE)
    told_of = {5 * int(epoch) + int(step): rest for epoch, step, *rest in line.findall(killed.stdout + done.stdout)}
    assert sorted(told_of) == list(range(1, 11))

    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    waits = "share of time waiting for other ranks"
    training = ["training/loss", "training/rate", "training/images per second"]
    validation = ["validation/loss", "validation/top-1", "validation/top-5"]
    assert sorted(events.Tags()["scalars"]) == sorted(
        [*training, *validation, f"{waits}/longest", f"{waits}/mean of ranks"]
    )
    found = {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}
    for name, values in found.items():
        assert [event.step for event in events.Scalars(name)] == ([5, 10] if name in validation else list(range(1, 11)))
        assert name not in validation or all(values.values())
    for step, (loss, rate, speed) in told_of.items():
        seen = [found[name][step] for name in training]
        assert seen[:2] == pytest.approx([float(loss), float(rate)], rel=1e-3)
        assert seen[2] == pytest.approx(float(speed), abs=0.51)
        assert 0 <= found[f"{waits}/mean of ranks"][step] <= found[f"{waits}/longest"][step]
    assert max(found[f"{waits}/longest"].values()) > 0
    for name, text in (("top-1", r"top-1 (\S+)%"), ("top-5", r"top-5 (\S+)%")):
        printed = re.findall(rf"^epoch 1 validated: .*?{text}", done.stdout, re.MULTILINE)
        assert 100 * found[f"validation/{name}"][10] == pytest.approx(float(printed[0]), abs=0.01)
    assert found["validation/loss"][10] == pytest.approx(float(validation_loss(done)), abs=1e-5)


def test_curves_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=rf"^--tensorboard {tmp_path}/no/no: a folder in one that is there is needed$"):
        curves.check(tmp_path / "no" / "no", True)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"^--tensorboard {tmp_path}/file: a folder in one that is there is needed$"):
        curves.check(tmp_path / "file", True)
    curves.check(tmp_path / "file", False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(
        ValueError, match=r"^--tensorboard: the package tensorboard is missing: pip install tensorboard$"
    ):
        curves.check(tmp_path / "curves", False)


def test_old_points_of_a_curve_become_one_and_keep_their_sums() -> None:
    history = account.begun()
    number = 2 * account.MOST_POINTS + 7
    for step in range(1, number + 1):
        account.add_point(history, step, 2.0 * step, 3, 0.5)
    points = history["points"]
    assert account.MOST_POINTS / 2 < len(points) <= account.MOST_POINTS
    assert [point[0] for point in points] == sorted({point[0] for point in points})
    assert points[-1][0] == number
    sums = [sum(column) for column in list(zip(*points, strict=True))[1:]]
    assert sums == [number * (number + 1), 3 * number, 0.5 * number]


def test_the_worst_of_many_classes_and_what_they_were_taken_for() -> None:
    """Class k has k + 4 images, of which k % 7 are mistaken; class 0 of 22,000 is unseen."""
    seen = torch.arange(22000, dtype=torch.float64) + 4
    seen[0] = 0
    right = seen - torch.arange(22000) % 7
    worst = account.worst_classes(seen, right)
    assert worst == sorted((k for k in range(1, 300) if k % 7), key=lambda k: ((4 + k - k % 7) / (k + 4), k))[:10]
    assert worst[0] == 6
    taken = torch.zeros(len(worst), 22000)
    taken[0, 21999], taken[0, 8], taken[0, 3], taken[0, 5] = 3, 1, 1, 1
    first = account.confused([f"n{k}" for k in range(22000)], worst, seen, right, taken)[0]
    assert first == {"name": "n6", "seen": 10, "right": 4, "taken": [["n21999", 3], ["n3", 1], ["n5", 1]]}


# --- mistakes ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "alexnet", "--data", "{glyphs}"], "argument --preset: invalid choice: 'alexnet'"),
        (["--preset", "glyphs"], "--data DIR is needed, a folder that has train and validation in it"),
        (["--preset", "glyphs", "--data", "{val}"], "that has train and validation in it; rename {val}/val"),
        (
            ["--preset", "glyphs", "--data", "{glyphs}", "--set", "batch=1"],
            "batch=1: each of 2 ranks needs a sample of it: --set batch=2 or more",
        ),
        (["--preset", "glyphs", "--data", "{empty}"], "{empty}/train: no such folder; --data names one that has"),
        (
            ["--preset", "glyphs", "--data", "{glyphs}", "--set", "batch=39"],
            "batch=39: the last batch of 40 images has 1, and each of 2 ranks needs a sample of it: choose --uneven",
        ),
        (
            ["--preset", "glyphs", "--data", "{glyphs}", "--checkpoint", "{empty}"],
            "{empty}: a file in a folder that is",
        ),
        (
            ["--preset", "glyphs", "--data", "{glyphs}", "--set", "model=huge"],
            "model=huge: known are small, torchvision",
        ),
        (
            ["--preset", "glyphs", "--data", "{unknown}"],
            "{unknown}/validation: it has the class n42, and 1 in all, that train has not: both need the same classes",
        ),
    ],
)
def test_mistakes_are_told_in_a_line(options: list[str], message: str, glyphs: Path, tmp_path: Path) -> None:
    folders = {"{glyphs}": glyphs, "{empty}": tmp_path / "empty", "{unknown}": tmp_path / "unknown"}
    folders["{empty}"].mkdir()
    folders["{val}"] = tmp_path / "val"
    for part, name in (("train", "train"), ("validation", "val")):
        (tmp_path / "val" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "val" / name).symlink_to(glyphs / part)
    shutil.copytree(glyphs, folders["{unknown}"])
    shutil.copytree(next((glyphs / "validation").iterdir()), folders["{unknown}"] / "validation" / "n42")
    ranks = 2 if {"batch=39", "batch=1"} & set(options) else 1  # 1 of 40 images is left, too few for two
    words = [str(folders.get(option, option)) for option in options]
    done = ends("train.py", *words, ranks=ranks)
    assert done.returncode in (1, 2)
    (line,) = told(done)
    for name, folder in folders.items():
        message = message.replace(name, str(folder))
    assert message in line
    assert ranks == 2 or done.stderr.count("\n") == 1, done.stderr
    assert not done.stdout


def test_a_broken_image_is_named(glyphs: Path, tmp_path: Path) -> None:
    shutil.copytree(glyphs, tmp_path / "glyphs")
    broken = next((tmp_path / "glyphs" / "train").rglob("*.png"))
    broken.write_bytes(broken.read_bytes()[:200])
    done = trains(tmp_path / "glyphs", 1, "epochs=1", "batch=8", workers="1")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"{broken}: it cannot be decoded: " in done.stderr


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def broken_images(whole: bytes) -> list[tuple[bytes, str]]:
    """Images that are none, and what is told of them; Pillow raises another kind of error for each."""
    size = struct.pack(">IIBBBBB", 100000, 100000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    start = whole.index(b"IDAT")
    pixels = whole[start + 4 : start + 4 + int.from_bytes(whole[start - 4 : start], "big")]
    return [
        (whole[:200], "OSError: image file is truncated"),
        (bomb, "DecompressionBombError: Image size (10000000000 pixels) exceeds limit"),
        (whole[:8] + struct.pack(">I", 5) + b"IHDR12345", "ValueError: Truncated IHDR chunk"),
        (whole[:33] + chunk(b"IDAT", pixels[:50]) + chunk(b"\0\0\0\0", pixels[50:]), "SyntaxError: broken PNG file"),
        (b"", "it is no image that Pillow knows"),
    ]


def test_broken_images_are_left_out_and_the_others_count_alike_on_any_number_of_ranks(
    glyphs: Path, tmp_path: Path
) -> None:
    """Two ranks have one and two samples of a batch, and all that a rank has may be broken."""
    data = tmp_path / "broken"
    shutil.copytree(glyphs, data)
    files = sorted((data / "train").rglob("*.png"))
    kinds = broken_images(files[0].read_bytes())
    for file, (content, _) in zip(files[1:], kinds, strict=False):
        file.write_bytes(content)
    next((data / "validation").rglob("*.png")).write_bytes(b"none")
    shape = ["epochs=1", "batch=3", "statistics=world", "rate=0.02", "warm_up=0", "schedule=steps", "drops="]
    options = ("--broken", "skip", "--page", str(tmp_path / "page.html"))
    one = trains(data, 1, *shape, options=options)
    two = trains(data, 2, *shape, options=(*options, "--uneven", "drop"))
    assert len(losses(one)) == 14
    for done in (one, two):
        assert done.returncode == 0, done.stderr
        for file, (_, message) in zip(files[1:], kinds, strict=False):
            assert f"skipped: {file}: it cannot be decoded: {message}" in done.stderr
        assert "epoch 0 left out: 5 broken images in training, 1 in validation\n" in done.stdout
        assert validated(done)[0].endswith(" of 14)")
        assert "left out 5 times a broken image, and 1 of validation\n" in done.stdout
        assert [row[-1] for row in cells(tmp_path / "page.html", "epochs")] == ["5"]
    assert losses(two) == pytest.approx(losses(one)[:13], rel=1e-4)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"png": b"1"}, r"there is no member cls"),
        ({"png": b"1", "cls": b"cat"}, r"the member cls is b'cat', and not a number from 0 to 1"),
        ({"png": b"1", "cls": b"-1"}, r"the member cls is b'-1', and not a number"),
        ({"png": b"1", "cls": b"2"}, r"the member cls is b'2', and not a number from 0 to 1"),
        ({"png": b"1", "cls": b"1_0"}, r"the member cls is b'1_0', and not"),
        ({"png": b"1", "jpg": b"1", "cls": b"1"}, r"beside cls there are 2 members, and one image is needed"),
        ({"png": b"1", "cls": b"1"}, r"it is no image that Pillow knows"),
    ],
)
def test_samples_of_a_pack_that_are_none_are_named(members: dict[str, bytes], message: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(f"a/7.{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    (tmp_path / "classes.json").write_text('["one", "other"]')
    index.build(tmp_path)
    found = images.Images(tmp_path, presets.PRESETS["glyphs"], 0, True, "raise")
    names = ", ".join(rf"a/7\.{name}" for name in members)
    with pytest.raises(BrokenSample, match=rf"{tmp_path}/0\.tar: {names} \(sample 0\): .*{message}"):
        found[0]


def test_training_images_grow_in_equal_parts_of_the_epochs(glyphs: Path) -> None:
    preset = presets.changed(presets.PRESETS["glyphs"], ["epochs=7", "sizes=16,24,32", "collapse_epochs=1"])
    assert [presets.training_size(preset, epoch) for epoch in range(7)] == [16, 16, 16, 24, 24, 32, 32]
    train, validation = (images.Images(glyphs / part, preset, 0, part == "train", "raise") for part in images.PARTS)
    for epoch, size in ((0, 16), (3, 24), (6, 32)):
        train.epoch, train.augments = epoch, epoch < 6
        assert train[5][0].shape == (3, size, size)
        assert validation[5][0].shape == (3, 32, 32)
    assert presets.training_size(presets.PRESETS["modern"], 99) == 176


def test_a_folder_and_its_pack_are_the_same_images(glyphs: Path, tmp_path: Path) -> None:
    shutil.copytree(glyphs / "train", tmp_path / "train")
    shutil.copytree(next((glyphs / "train").iterdir()), tmp_path / "elsewhere" / "deep")
    (tmp_path / "train" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "train" / ".hidden").mkdir()
    (next((tmp_path / "train").glob("u*")) / "._x.png").write_bytes(b"no image")
    pack(tmp_path / "train", tmp_path / "packed")
    folder, packed = (
        images.Images(tmp_path / part, presets.PRESETS["glyphs"], 0, True, "raise") for part in ("train", "packed")
    )
    assert folder.classes == packed.classes
    assert len(folder.classes) == 6
    assert len(folder) == len(packed) == 48
    for number in range(48):
        assert folder[number][1] == packed[number][1]
        assert torch.equal(folder[number][0], packed[number][0])


def test_a_loss_that_is_no_number_ends_all_ranks_with_one_line(tmp_path: Path, glyphs: Path) -> None:
    checkpoint = tmp_path / "some.pt"
    options = ("--checkpoint", str(checkpoint), "--every", "2")
    shape = ["epochs=1", "batch=8", "rate=0.25", "warm_up=0", "schedule=steps", "drops="]
    done = trains(glyphs, 2, *shape, options=options, TEST_NAN="1:3")
    assert done.returncode == 1
    assert told(done) == [
        "step 3 of epoch 0: the loss of rank 1 is nan at a rate of 0.0625: lower it by --set rate=, or warm up for "
        f"longer, and {checkpoint} is of before"
    ]
    assert "step 3 of 5" in done.stdout
    assert "step 4 of 5" not in done.stdout
    history = torch.load(checkpoint, weights_only=True)["history"]
    assert [point[::2][0] for point in history["points"]] == [1, 2]


def test_a_checkpoint_that_cannot_be_written_ends_all_ranks_with_one_line(tmp_path: Path, glyphs: Path) -> None:
    for name in ("some-cycle1.pt", "some.pt"):
        (tmp_path / f"{name}.part").symlink_to("/dev/full")
        options = ("--checkpoint", str(tmp_path / "some.pt"), "--every", "9")
        done = trains(glyphs, 2, "epochs=2", "batch=8", "cycles=1,2", options=options)
        assert done.returncode == 1
        assert told(done) == [f"{tmp_path / name}: it cannot be written: No space left on device"]
        assert not [*tmp_path.glob("*.part")]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"x", b"PK\x03\x04" * 99):
        (tmp_path / "some.pt").write_bytes(content)
        with pytest.raises(
            ValueError, match=r"some.pt: it is no checkpoint of this program that can be read: remove it"
        ):
            checkpoints.load(tmp_path / "some.pt", {}, torch.device("cpu"))
    (tmp_path / "some.pt").unlink()
    with pytest.raises(ValueError, match="that can be read: No such file or directory: remove it"):
        checkpoints.load(tmp_path / "some.pt", {}, torch.device("cpu"))


def test_steps_since_the_last_line_are_in_the_history(glyphs: Path, tmp_path: Path) -> None:
    """Ten steps of two epochs, a line after each three, checkpoints after steps 4, 5, 8 and 10."""
    file = tmp_path / "some.pt"
    options = ("--report", "3", "--every", "4", "--checkpoint", str(file))
    done = trains(glyphs, 1, "epochs=2", "batch=8", options=options)
    assert len(losses(done)) == 3
    points = torch.load(file, weights_only=True)["history"]["points"]
    assert [(step, images) for step, _, images, _ in points] == [
        (3, 24), (4, 8), (5, 8), (6, 8), (8, 16), (9, 8), (10, 8),
    ]  # fmt: skip


def test_the_time_that_is_left_is_that_of_steps_in_this_world_and_of_validations() -> None:
    pace, history = account.Pace(), account.begun()
    pace.add(60.0)  # workers start
    assert pace.left(10, 2, history) == 600
    for seconds in (1.0, 2.0):
        pace.add(seconds)
    assert pace.left(10, 2, history) == 15
    history["epochs"].append({"validated in": 4.0})
    assert pace.left(10, 2, history) == 23


def test_replacements_that_have_nothing_to_go_on_from_end(tmp_path: Path) -> None:
    done = trains(tmp_path, 1, "epochs=1", "batch=6", TEST_COUNT="60", TEST_ALONE="yes")
    assert done.returncode == 1
    assert told(done) == [
        "all ranks that had trained were lost, and there is no --checkpoint to go on from: start the job again"
    ]
    assert not done.stdout


def test_an_error_that_is_no_loss_is_raised_as_it_is(tmp_path: Path) -> None:
    done = trains(tmp_path, 1, "epochs=1", "batch=6", TEST_COUNT="60", TEST_FAIL="1")
    assert done.returncode == 1
    assert done.stderr.endswith("RuntimeError: out of memory in step 1\n")
    assert "no rank was lost" not in done.stderr


def test_a_checkpoint_is_for_the_same_classes_and_preset(tmp_path: Path) -> None:
    path, facts = tmp_path / "some.pt", {"hash of the names of classes": "0a1b", "--every": 500}
    checkpoints.save(path, {"facts": facts})
    assert checkpoints.load(path, {**facts, "--every": 3}, torch.device("cpu"))["facts"] == facts
    with pytest.raises(ValueError, match="hash of the names of classes was '0a1b' and is 'ffff'"):
        checkpoints.load(path, {**facts, "hash of the names of classes": "ffff"}, torch.device("cpu"))


@pytest.mark.parametrize(
    ("everybody", "ends"),
    [
        ([(None, 1, False), (None, 2, True)], {1: "rank 1 has seed 2, and rank 0 has 1: all need the same"}),
        ([(None, 1, True), (None, 2, False)], {0: "rank 0 has seed 1, and rank 1 has 2: all need the same"}),
        ([(None, 1, False), ("no data", None, True), (None, 1, False)], {1: "no data"}),
        ([("no data", None, False), (None, 1, False), (None, 2, True)], {0: "no data", 1: 1, 2: 1}),
        ([("no checkpoint", 1, True), (None, 1, True)], {0: "no checkpoint", 1: 1}),
    ],
)
def test_a_newcomer_at_fault_ends_alone(
    everybody: list[tuple[str | None, int | None, bool]],
    ends: dict[int, str | int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = [(found, {} if seed is None else {"seed": seed}, new) for found, seed, new in everybody]
    monkeypatch.setattr(agreement.mr, "all_gather_object", lambda _: told)
    monkeypatch.setattr(agreement.dist, "destroy_process_group", lambda: None)
    found: dict[int, str | int] = {}
    for rank, mine in enumerate(told):
        monkeypatch.setattr(agreement.mr, "rank", lambda rank=rank: rank)
        try:
            agreement.agree(*mine)
        except SystemExit as left:
            found[rank] = left.code
    assert found == {rank: f"train: {end}" if isinstance(end, str) else end for rank, end in ends.items()}


def test_the_rank_that_differs_is_named(glyphs: Path) -> None:
    done = trains(glyphs, 3, "epochs=1", "batch=8", TEST_DIFFERS="1")
    assert done.returncode == 1
    assert told(done) == ["rank 1 has seed 7, and rank 0 has 0: all need the same"]
    assert "[1] train: rank 1 has" in done.stderr
    assert "step" not in done.stdout
