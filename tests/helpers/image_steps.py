"""The steps of a Dockerfile without Docker: each stage is a directory, and each command runs in it by chroot.

A stage begins with this machine's programs, its Python among them as `python` and `pip`, whatever its FROM names.
Commands see processes, mounts and files of their own, and nothing is left of them when they end. Needs root.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import string
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ENTER = """
set -e
root=$1 python=$2; shift 2
for each in /usr /dev "$python"; do mkdir -p "$root$each"; mount --rbind "$each" "$root$each"; done
mount -t proc proc "$root/proc"
exec "$@"
"""
"""Shell script that makes a process's own mounts and then becomes the command."""

PATHS = "/image/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
RUN_SECONDS = 200


def steps(text: str) -> list[tuple[str, str]]:
    """The instructions in a Dockerfile, each with its arguments."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found = [line.split(maxsplit=1) for line in lines.replace("\\\n", " ").splitlines() if line.strip()]
    return [(word, rest) for word, rest in found]


@dataclass
class Stage:
    """A stage as far as it is built."""

    root: Path
    variables: dict[str, str] = field(default_factory=lambda: {"PATH": PATHS})
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    directory: str = "/"
    command: list[str] = field(default_factory=list)

    def path(self, inside: str) -> Path:
        """Path on this machine of something in the stage."""
        return self.root / os.path.join(self.directory, inside).lstrip("/")

    def start(self, words: list[str], variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """A command as process 1 of the stage; ``variables`` are there beside those of the stage."""
        uid = self.user.partition(":")[0]
        people = (line.split(":") for line in (self.root / "etc/passwd").read_text(encoding="utf-8").splitlines())
        home = next((person[5] for person in people if person[2] == uid), "/")
        given = {"HOME": home, **self.variables, **(variables or {})}
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "sh"]
        chroot = ["chroot", f"--userspec={self.user}", str(self.root), "env", "-i", f"--chdir={self.directory}"]
        return subprocess.Popen(
            [*enter, str(self.root), sys.base_prefix, *chroot, *(f"{n}={v}" for n, v in given.items()), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, words: list[str], variables: Mapping[str, str] | None = None) -> str:
        """Run a command and return its output; AssertionError with that if it fails."""
        process = self.start(words, variables)
        try:
            output = process.communicate(timeout=RUN_SECONDS)[0]
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, f"{words}: exit code {process.returncode}\n{output}"
        return output


def base(root: Path) -> Stage:
    """A directory with this machine's programs and settings, and root alone for a user."""
    root.mkdir()
    shutil.copytree("/etc", root / "etc", symlinks=True)
    for name, line in {"passwd": "root:x:0:0::/root:/bin/sh", "group": "root:x:0:"}.items():
        (root / "etc" / name).write_text(f"{line}\n", encoding="utf-8")
    for name in ("shadow", "gshadow", "subuid", "subgid"):
        (root / "etc" / name).unlink(missing_ok=True)
    for name in ("proc", "root", "home", "tmp"):
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    stage = Stage(root)
    stage.run([f"{sys.base_prefix}/bin/python{sys.version_info[0]}.{sys.version_info[1]}", "-m", "venv", "/image"])
    return stage


def build(
    dockerfile: Path,
    context: Path,
    work: Path,
    arguments: Mapping[str, str],
    variables: Mapping[str, str],
    after: Callable[[str, Stage], None],
) -> Stage:
    """The last stage of a Dockerfile whose files are in ``context``.

    ``arguments`` are those of the build, ``variables`` are given to each RUN beside them; ``after`` is called with
    each RUN when that has ended.
    """
    first = base(work / "base")
    stages: dict[str, Stage] = {}
    stage = first
    for word, text in steps(dockerfile.read_text(encoding="utf-8")):
        known = string.Template(text)
        if word == "FROM":
            stage = Stage(work / str(len(stages)))
            shutil.copytree(first.root, stage.root, symlinks=True)
            stages[text.partition(" AS ")[2]] = stage
        elif word == "ARG":
            name, _, default = text.partition("=")
            stage.arguments[name] = arguments.get(name, default.strip('"'))
        elif word == "ENV":
            name, _, value = known.substitute(stage.variables).partition("=")
            stage.variables[name] = value
        elif word == "WORKDIR":
            stage.directory = text
            stage.path(".").mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            stage.user = text
        elif word == "COPY":
            copy(text, stage, stages, context)
        elif word == "RUN":
            stage.run(["/bin/sh", "-c", text], {**stage.arguments, **variables})
            after(text, stage)
        elif word == "CMD":
            stage.command = json.loads(text)
        else:
            raise ValueError(f"{dockerfile}: {word} {text} is no step that can be taken here")
    return stage


def copy(text: str, stage: Stage, stages: Mapping[str, Stage], context: Path) -> None:
    """Carry out a COPY into a stage, from another one or from the context."""
    found = re.fullmatch(r"(?:--from=(\S+) )?(.+) (\S+)", text)
    assert found, f"COPY {text}"
    origin = stages[found[1]].root if found[1] else context
    target = stage.path(found[3])
    for source in (origin / name.lstrip("/") for name in found[2].split()):
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / source.name if found[3].endswith("/") else target)
