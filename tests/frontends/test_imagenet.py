"""The ImageNet application: its image set, its recipes, and its training in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from framework_jobs import needs

from multiring.data import Dataset

pytestmark = needs("torch", "PIL", "fontTools", "matplotlib", seconds=300)

ROOT = Path(__file__).parents[2]
APPLICATION = ROOT / "examples" / "imagenet"


def ends(program: str, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """What became of a program of the application."""
    paths = [str(ROOT / "src"), str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *launcher, str(APPLICATION / program), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )


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
        ([*both, "--size", "4"], "--size 4: 8 pixels or more are needed"),
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
