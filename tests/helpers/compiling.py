"""Programs of C++ that try a part of the engine by itself."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def compiled(name: str, parts: Sequence[str], folder: Path) -> Path:
    """The program tests/unit/NAME.cpp, built there with sources of the engine: ``parts`` are their names."""
    program = folder / name
    sources = [ROOT / f"tests/unit/{name}.cpp", *(ROOT / f"csrc/{part}.cpp" for part in parts)]
    options = ["-std=c++20", "-Wall", "-Werror", f"-I{ROOT / 'csrc'}", "-pthread"]
    subprocess.run(["c++", *options, *sources, "-o", program], check=True, timeout=200)
    return program


def said(program: Path, words: Sequence[str]) -> list[str]:
    """The lines that a program prints which is given lines on standard input."""
    done = subprocess.run([program], input="\n".join(words), capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()
