"""Write src/multiring/_native.pyi: what nanobind's stubgen makes of the engine that is imported, formatted by ruff."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "src" / "multiring" / "_native.pyi"
PATTERNS = ROOT / "csrc" / "stub_patterns.txt"


def native_stub() -> str:
    """The text of the stub; CalledProcessError, after stubgen's own words, if there is no engine to import."""
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / "_native.pyi"
        options = ["-q", "-m", "multiring._native", "-p", PATTERNS, "-o", made]
        subprocess.run([sys.executable, "-m", "nanobind.stubgen", *options], check=True)
        formatter = [sys.executable, "-m", "ruff", "format", "-q", "--stdin-filename", STUB]
        return subprocess.run(formatter, input=made.read_text(), check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    STUB.write_text(native_stub())
