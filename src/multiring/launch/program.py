"""From the words of the command line to what is executed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from multiring.launch import LaunchError


def resolve(words: Sequence[str], directory: str, environment: Mapping[str, str]) -> list[str]:
    """The command for ``words``: a script or a module runs with this Python, any other word is executed."""
    if words[0] == "-m":
        return [sys.executable, *words]
    if words[0].endswith(".py"):
        script = os.path.join(directory, words[0])
        if not os.path.isfile(script):
            raise LaunchError(f"no such script: {words[0]} (looked for {script})")
        return [sys.executable, *words]
    if os.sep in words[0]:
        found = shutil.which(os.path.join(directory, words[0]))
    else:
        found = shutil.which(words[0], path=environment.get("PATH"))
    if found is None:
        raise LaunchError(
            f"no such command: {words[0]} (a script's name ends in .py, a module is given by -m, anything else must be "
            f"an executable file)"
        )
    return [found, *words[1:]]


def module_name(script: str) -> str:
    """What -m calls a script, seen from the directory in which it was typed."""
    return os.path.normpath(script).removesuffix(".py").strip(os.sep).replace(os.sep, ".")


_OF_THE_HOST = {
    "HOME",
    "HOSTNAME",
    "LOGNAME",
    "MAIL",
    "MULTIRING_HOST",
    "OLDPWD",
    "PWD",
    "SHELL",
    "SHLVL",
    "TMPDIR",
    "USER",
    "_",
}
_PREFIXES_OF_THE_HOST = ("SSH_", "XDG_", "DBUS_")


def portable(environment: Mapping[str, str]) -> dict[str, str]:
    """What of ``environment`` makes sense on another host."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_THE_HOST and not name.startswith(_PREFIXES_OF_THE_HOST)
    }
