"""The demonstration on two emulated racks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from multiring import lab

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_racks.py"

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),
    pytest.mark.skipif(lab.obstacle() is not None, reason=str(lab.obstacle())),
]


def test_a_step_over_both_backends_is_reported_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    picture = tmp_path / "racks.png"
    before = lab.clusters()
    done = subprocess.run([sys.executable, str(EXAMPLE), str(picture)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("gloo", "multiring"):
        shown = re.search(rf"^{name} +([\d.]+) ms +(-?[\d.]+) ms +(\d+)%$", done.stdout, re.MULTILINE)
        assert shown, done.stdout
        step, waiting, efficiency = map(float, shown.groups())
        assert efficiency == pytest.approx(100 * (step - waiting) / step, abs=1)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert lab.clusters() == before
