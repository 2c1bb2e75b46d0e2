"""The image that the manifests in examples/kubernetes name: its Dockerfile is linted, and its steps are carried out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from image_steps import Stage, build

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "examples" / "kubernetes" / "Dockerfile"
HADOLINT = Path(sys.executable).with_name("hadolint")
CONFIGURE_ONLY = {"SKBUILD_BUILD_TARGETS": "help", "SKBUILD_INSTALL_COMPONENTS": "none"}
"""Lets a build go through all its steps but the compiler's, which take a minute and a half."""


@pytest.mark.skipif(not HADOLINT.exists(), reason="`make test-engines` installs hadolint")
def test_the_linter_finds_nothing() -> None:
    linted = subprocess.run([HADOLINT, DOCKERFILE], capture_output=True, text=True)
    assert (linted.returncode, linted.stdout) == (0, ""), linted.stdout + linted.stderr


def built_wheel() -> Path:
    """Return the wheel that `make wheel` built for this interpreter; skip the test without one."""
    tag = "abi3" if sys.version_info >= (3, 12) else f"cp{sys.version_info[0]}{sys.version_info[1]}"
    for wheel in (ROOT / "dist").glob(f"multiring-*-{tag}-*.whl"):
        return wheel
    pytest.skip(f"no wheel for {tag} in dist/: `make wheel` builds it")


def index_of_torch(directory: Path) -> None:
    """A package index that has a torch of one line."""
    (directory / "torch").mkdir(parents=True)
    with zipfile.ZipFile(directory / "torch" / "torch-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch.py", "KIND = 'for CPUs'\n")
        wheel.writestr("torch-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
        wheel.writestr("torch-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("torch-1.0.dist-info/RECORD", "")
    (directory / "torch" / "index.html").write_text('<a href="torch-1.0-py3-none-any.whl">torch</a>', encoding="utf-8")


@pytest.mark.timeout(400)  # it installs NumPy
@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_its_steps_end_in_two_ranks_that_train_as_a_user_with_no_rights(tmp_path: Path) -> None:
    packed: list[list[str]] = []

    def after(text: str, stage: Stage) -> None:
        if "pip wheel" not in text:
            return
        (made,) = stage.path("/wheels").iterdir()
        packed.append(zipfile.ZipFile(made).namelist())
        made.unlink()
        shutil.copy2(built_wheel(), stage.path("/wheels"))
        index_of_torch(stage.path("/index"))

    arguments = {"TORCH": "torch==1.0", "TORCH_INDEX": "file:///index"}
    pip = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "http_", "https_", "HTTP"))}
    image = build(DOCKERFILE, ROOT, tmp_path, arguments, {**pip, **CONFIGURE_ONLY}, after)
    assert {"multiring/api.py", "multiring/include/multiring.h"} <= set(*packed)
    assert [name for name in packed[0] if name.endswith(".so")] == []  # what `make native` left here is not the image's
    assert image.command == ["multiring", "run", "-n", "2", "train.py"]
    assert image.user == "1000:1000"
    output = image.run(image.command)
    for rank in range(2):
        assert f"rank {rank} of 2: y = 3.0 x + -2.0" in output
    look = "import os, sys, torch; open('checkpoint', 'x'); print(os.getpid(), os.getuid(), torch.KIND, sys.prefix)"
    assert image.run(["python", "-c", look]) == "1 1000 for CPUs /opt/train\n"
    assert not {"source", "wheels"} & {path.name for path in image.root.iterdir()}
