"""The wheels of ``make wheel``, each installed where there is neither a compiler nor the repository."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from interpreters import find_interpreters

DIST = Path(__file__).resolve().parents[2] / "dist"

SCRIPT = """
import multiring as mr
import numpy as np

mr.init()
x = np.arange(1000.0) + mr.rank()
mr.all_reduce(x)
assert (x == 2 * np.arange(1000.0) + 1).all()
print("rank", mr.rank(), "of", mr.world_size())
mr.shutdown()
"""


@pytest.fixture(scope="module")
def wheels() -> list[Path]:
    wheels = sorted(DIST.glob("multiring-*.whl"))
    if not wheels:
        pytest.skip("no wheels in dist/: `make wheel` builds them")
    return wheels


def fitting(wheels: list[Path], version: tuple[int, int]) -> Path:
    tag = "abi3" if version >= (3, 12) else f"cp{version[0]}{version[1]}"
    return next(wheel for wheel in wheels if f"-{tag}-" in wheel.name)


@pytest.mark.timeout(400)  # it installs NumPy
@pytest.mark.parametrize(("version", "python"), find_interpreters().items(), ids=lambda value: str(value))
def test_wheel_works_in_a_clean_environment(
    version: tuple[int, int], python: str, wheels: list[Path], tmp_path: Path
) -> None:
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    only_this = {"PATH": str(tmp_path / "venv" / "bin"), "HOME": str(tmp_path)}
    pip = [tmp_path / "venv/bin/pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "--only-binary", ":all:", fitting(wheels, version)], check=True)

    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    command = [tmp_path / "venv/bin/multiring", "run", "-n", "2", script]
    job = subprocess.run(command, env=only_this, cwd=tmp_path, capture_output=True, text=True)

    assert job.returncode == 0, job.stderr
    assert "rank 0 of 2" in job.stdout
    assert "rank 1 of 2" in job.stdout


def test_wheel_carries_the_package_and_nothing_else(wheels: list[Path]) -> None:
    for wheel in wheels:
        names = zipfile.ZipFile(wheel).namelist()
        strangers = [name for name in names if not name.startswith(("multiring/", "multiring-"))]
        assert strangers == []
        libraries = {name for name in names if name.endswith(".so")}
        assert libraries - {"multiring/lib/libmultiring.so"} == {
            next(n for n in names if "/_native." in n and ".so" in n)
        }
        assert {"multiring/lib/libmultiring.so", "multiring/include/multiring.h"} < set(names)
        assert {"multiring/py.typed", "multiring/_native.pyi"} < set(names)


def test_auditwheel_finds_nothing_that_the_platform_may_lack(wheels: list[Path]) -> None:
    for wheel in wheels:
        show = subprocess.run([sys.executable, "-m", "auditwheel", "show", wheel], capture_output=True, text=True)
        assert show.returncode == 0, show.stderr
        assert "is consistent with" in " ".join(show.stdout.split())
        assert "manylinux_2_28" in wheel.name
