"""Make the environment in which Chainer, Theano and Aesara are tried: ``python tools/legacy_environment.py DIRECTORY``.

They need older releases of Python and NumPy than the rest: Theano 1.0.5 Python 3.10 at most, the others Python 3.11.
Where a machine has newer ones only, what cannot be installed is left out and named. Multiring itself comes from the
wheels in dist/.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from interpreters import find_interpreters

ROOT = Path(__file__).resolve().parent.parent
NEWEST = {"Chainer 7.8.1": (3, 11), "Aesara 2.9.4": (3, 11), "Theano 1.0.5": (3, 10)}


def main() -> None:
    interpreters = find_interpreters(headers=True)  # Theano and Aesara compile against them
    if not interpreters:
        sys.exit("no Python from 3.10 to 3.13 with its headers was found, on PATH or under ~/.pyenv/versions")
    version = min(interpreters)
    for name, newest in NEWEST.items():
        if version > newest:
            needed, found = (".".join(map(str, one)) for one in (newest, version))
            print(f"{name} is left out: it needs Python {needed} or older, and the oldest here is {found}")
    make(Path(sys.argv[1]), version, interpreters[version])


def make(directory: Path, version: tuple[int, int], python: str) -> None:
    tag = "abi3" if version >= (3, 12) else f"cp{version[0]}{version[1]}"
    wheels = sorted((ROOT / "dist").glob(f"multiring-*-{tag}-*.whl"))
    if not wheels:
        sys.exit(f"dist/ has no wheel for Python {version[0]}.{version[1]}: `make wheel` builds it")
    subprocess.run([python, "-m", "venv", "--clear", directory], check=True)
    install = [directory / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    groups = f"{ROOT}/pyproject.toml"
    subprocess.run([*install, "pip>=25.1"], check=True)  # the first that knows --group
    subprocess.run([*install, "--group", f"{groups}:legacy-build"], check=True)
    # In an isolated build environment they would find a setuptools that they do not know.
    subprocess.run([*install, "--no-build-isolation", "--group", f"{groups}:legacy", wheels[0]], check=True)


if __name__ == "__main__":
    main()
