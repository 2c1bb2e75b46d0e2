"""The Python interpreters of this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

SUPPORTED = [(3, minor) for minor in range(10, 14)]
PROBE = """
import json, os, sys, sysconfig, ensurepip, venv
headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
print(json.dumps([list(sys.version_info[:2]), headers]))
"""


def find_interpreters(*, headers: bool = False) -> dict[tuple[int, int], str]:
    """One working interpreter for each supported version, on PATH or under pyenv; ``headers``: fit to compile for."""
    found = {}
    for version in SUPPORTED:
        name = f"python{version[0]}.{version[1]}"
        pyenv = Path.home().glob(f".pyenv/versions/{version[0]}.{version[1]}.*/bin/{name}")
        for candidate in [shutil.which(name), *map(str, sorted(pyenv))]:
            if candidate and _usable(candidate, version, headers):
                found[version] = candidate
                break
    return found


def _usable(python: str, version: tuple[int, int], headers: bool) -> bool:
    probe = subprocess.run([python, "-c", PROBE], capture_output=True, text=True)
    if probe.returncode != 0:  # a pyenv shim of a version that is not switched on, a Debian Python without venv
        return False
    found_version, has_headers = json.loads(probe.stdout)
    return tuple(found_version) == version and (has_headers or not headers)
