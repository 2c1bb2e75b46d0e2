"""From the words of the command line to what is executed."""

from __future__ import annotations

import os
import re
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


_FLAG = re.compile(r"-([bBdEIOPqRsSuv]+|[WX].+)")
_FLAG_WITH_WORD = ("-W", "-X", "--check-hash-based-pycs")


def words_before_script(command: Sequence[str]) -> int:
    """Number of words before the script or the ``-m`` of a command that runs a Python: that Python, and its options.

    LaunchError with the reason if it runs neither a script nor a module, or has options that a standby cannot keep.
    """
    place = 1
    while place < len(command):
        word = command[place]
        if word == "-m" and place + 1 < len(command):
            return place
        if word.endswith(".py") and not word.startswith("-"):
            return place
        if not (word in _FLAG_WITH_WORD or _FLAG.fullmatch(word)):
            raise LaunchError(
                f"{word} before a script (train.py) or a module (-m) is no option that a standby can keep"
            )
        place += 2 if word in _FLAG_WITH_WORD else 1
    raise LaunchError(f"{command[0]} is given no script (train.py) and no module (-m)")


def why_no_standby(words: Sequence[str]) -> str:
    """Return in a line why no interpreter can stand by for ``words`` of the command line; empty if one can."""
    is_script = words[0] == "-m" or words[0].endswith(".py")
    if not is_script and not re.fullmatch(r"python[0-9.]*t?", os.path.basename(words[0])):
        return f"{words[0]} is no script (train.py) and no module (-m) of Python"
    try:
        words_before_script(["python", *words] if is_script else words)
    except LaunchError as error:
        return str(error)
    return ""


def module_name(script: str) -> str:
    """Return the name for -m of a script, seen from the directory in which it was typed."""
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
    """Return the variables of ``environment`` that make sense on another host."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_THE_HOST and not name.startswith(_PREFIXES_OF_THE_HOST)
    }
