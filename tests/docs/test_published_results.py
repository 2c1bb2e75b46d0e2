"""The figures of docs/published-results.md are those that their commands give."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "published-results.md").read_text()
SIMULATED = {
    int(row): float(value) for row, value in re.findall(r"^\| (\d+)\. .* \| ([\d.]+) % \| [^|]*\|$", PAGE, re.M)
}
COMMANDS = {int(row): options for row, options in re.findall(r"^\| (\d+) \| `([^`]*)` \|$", PAGE, re.M)}


def test_every_row_has_its_command():
    assert list(SIMULATED) == list(COMMANDS) == list(range(1, 13))


@pytest.mark.parametrize("row", [1, 3, 8])
def test_the_command_gives_the_figure(row):
    options = shlex.split(COMMANDS[row])
    shown = subprocess.run(
        [sys.executable, "-m", "multiring", "simulate", *options, "--json"], capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    (point,) = json.loads(shown.stdout)
    assert 100 * point["results"][0]["efficiency"] == pytest.approx(SIMULATED[row], abs=0.1)
