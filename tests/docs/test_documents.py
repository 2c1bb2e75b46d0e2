"""The code of README.md and docs/ runs, and prints what the documents say it prints.

A block whose first line is ``# name`` is a file of that name in the directory where the document's blocks are run,
beside the clone's own ``examples`` and ``lab``. A ``console`` block is a session: every ``$`` line is run, and the
lines below it are what it prints, ``...`` standing for anything; one that brings up a lab needs root. A ``python``
block that no session of its document names is a program for two ranks, skipped where a framework that it imports is not
installed; in docs/lab.md for one process, which needs root. ``sh`` blocks need other machines: not run.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import command_stand_in
import fork_server
import pytest
from forking_launcher import OF_THE_LAUNCHER, TORCH, TORCH_LIBRARIES

from multiring import lab

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ACCOUNTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
TUTORIAL = ROOT / "docs" / "tutorial"

TORCHRUN = 'type torchrun > /dev/null 2>&1 || torchrun() { python -m torch.distributed.run "$@"; }'
"""Stand-in for torch's script, which may be missing if torch lies elsewhere."""

VARIABLES = {
    "COLUMNS": "120",
    "PYTENSOR_FLAGS": "linker=py",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
}
"""PyTensor's other linkers compile, for longer than all else that a program of a page does, and leave that at home."""

IS_ENGINES = find_spec("pyspark") is not None and not Path(sys.executable).with_name("multiring").exists()
"""True in the environment of `make test-engines`, in which sessions of a page start what the engines run."""

TENSORFLOW = (*OF_THE_LAUNCHER, "keras", "tensorflow")
JAX = (*OF_THE_LAUNCHER, "jax", "optax", "multiring.jax")


@dataclass(frozen=True)
class Block:
    document: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        named = re.match(r"# ([\w-]+\.\w+)$", self.text.partition("\n")[0])
        return named[1] if named else ""

    @property
    def missing(self) -> list[str]:
        """The frameworks that it imports and that are not installed."""
        imported = re.findall(
            r"^(?:import|from) (jax|optax|keras|tensorflow|chainer|pytensor|pyspark|distributed|ray)\b",
            self.text,
            re.MULTILINE,
        )
        return [name for name in imported if find_spec(name) is None]

    @property
    def in_lab(self) -> bool:
        return self.document.name == "lab.md" or self.lab != ""

    @property
    def lab(self) -> str:
        """The lab that a session brings up."""
        named = re.search(r"^\$ multiring lab up (?:\S*/)?(\w+)\.toml$", self.text, re.MULTILINE)
        return named[1] if named and self.language == "console" else ""

    @property
    def in_a_session(self) -> bool:
        """True if a session of the document runs the block."""
        sessions = [block for block in BLOCKS if block.document == self.document and block.language == "console"]
        return bool(self.name) and any(re.search(rf"^\$ .* {self.name}", each.text, re.M) for each in sessions)

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"


def blocks_of(document: Path) -> list[Block]:
    text = document.read_text()
    fences = re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(document, text.count("\n", 0, fence.start()) + 1, fence[1], fence[2]) for fence in fences]


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]


@pytest.fixture
def directory(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A directory with all named blocks of the document that the test's block stands in; the tutorial is one."""
    for name in ("examples", "lab"):
        (tmp_path / name).symlink_to(ROOT / name)
    here = request.node.callspec.params["block"].document
    for block in BLOCKS:
        if block.name and (block.document == here or block.document.parent == here.parent == TUTORIAL):
            (tmp_path / block.name).write_text(block.text)
    return tmp_path


def run(command: str, directory: Path) -> str:
    """Return all that the command prints, on both streams; it must succeed.

    Launchers and their ranks are forked, since each would take time for its imports: seconds for a framework.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with ExitStack() as stack:
        if re.search(r"\bmultiring run\b", command):
            folder = Path(stack.enter_context(TemporaryDirectory())) / "bin"
            path = stack.enter_context(command_stand_in.stand_in(folder, path, _imports(command, directory)))
        job = subprocess.run(
            ["bash", "-c", f"{TORCHRUN}\n{command}"],
            cwd=directory,
            env={**os.environ, **VARIABLES, "PATH": path, "XDG_CACHE_HOME": str(directory / "cache")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    assert job.returncode == 0, f"$ {command}\n{job.stdout}"
    return job.stdout


def _imports(command: str, directory: Path) -> Sequence[str]:
    """Return the imports for a command's ranks: one of a few sets, so that programs share servers."""
    programs = [directory / word for word in re.findall(r"\bmultiring run .*?([\w/.]+\.py)\b", command)]
    text = "".join(program.read_text() for program in programs)
    imported = set(re.findall(r"^(?:import|from) (\w+)\b", text, re.MULTILINE))
    if imported & {"keras", "tensorflow"}:
        return TENSORFLOW
    if "jax" in imported:
        return JAX
    if "torch" not in imported:
        return OF_THE_LAUNCHER
    return TORCH_LIBRARIES if imported & {"accelerate", "lightning", "transformers"} else TORCH


@pytest.fixture(scope="module", autouse=True)
def _end_servers() -> Iterator[None]:
    """They hold some hundred MB each, and no other tests have these imports."""
    yield
    for imports in (TENSORFLOW, JAX):
        fork_server.end(imports)


def marked(blocks: list[Block]) -> list[Any]:
    reason = lab.obstacle()
    needs_lab = [pytest.mark.lab, pytest.mark.skipif(reason is not None, reason=str(reason))]
    return [pytest.param(block, id=str(block), marks=needs_lab if block.in_lab else []) for block in blocks]


@pytest.mark.parametrize(
    "block", marked([block for block in BLOCKS if block.language == "python" and not block.in_a_session])
)
def test_program_runs(block: Block, directory: Path) -> None:
    if block.missing:
        pytest.skip(f"not installed: {', '.join(block.missing)}")
    if IS_ENGINES and not block.in_lab:
        pytest.skip("`make test` runs it: the environment of cluster engines has no command multiring")
    (directory / "block.py").write_text(block.text)
    run("python block.py" if block.in_lab else "multiring run -n 2 block.py", directory)


@pytest.fixture
def own_lab(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave no lab behind where a session fails that has brought one up."""
    yield
    name = request.node.callspec.params["block"].lab
    if name:
        subprocess.run([sys.executable, "-m", "multiring", "lab", "down", "--lab", name], capture_output=True)


@pytest.mark.usefixtures("own_lab")
@pytest.mark.parametrize("block", marked([block for block in BLOCKS if block.language == "console"]))
def test_session_prints_what_is_shown(block: Block, directory: Path) -> None:
    programs = [each for each in BLOCKS if each.document == block.document and each.name and each.name in block.text]
    if missing := [name for program in programs for name in program.missing]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    _, *entries = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    for entry in entries:
        command, _, shown = entry.partition("\n")
        if block.lab:  # others may be up
            command = re.sub(r"^multiring lab (run|down)\b", rf"\g<0> --lab {block.lab}", command)
        printed = run(command, directory)
        pattern = re.escape(shown.strip()).replace(r"\.\.\.", ".*")
        assert re.fullmatch(pattern, _plain(printed), re.DOTALL), (
            f"$ {command}\n{printed}\nThe document shows:\n{shown}"
        )


def _plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip()


@pytest.mark.parametrize("document", [*DOCUMENTS, *ACCOUNTS], ids=lambda document: document.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_a_name_in_the_tutorial_stands_for_one_file() -> None:
    """Its pages share a directory, so a page that shows a program again shows the same one."""
    named = [block for block in BLOCKS if block.document.parent == TUTORIAL and block.name]
    texts = {block.name: block.text for block in named}
    assert [str(block) for block in named if block.text != texts[block.name]] == []


def test_two_machines_without_ssh(tmp_path: Path) -> None:
    """The commands of the tutorial that make the secret and use it, with this machine as both."""
    (block,) = (each.text for each in BLOCKS if str(each).startswith("two-machines.md") and "--host-index" in each.text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lines = block.replace("alpha:29400", f"127.0.0.1:{port}").splitlines()
    make, copy, export, *starts = (line for line in lines if not line.startswith("#"))
    assert copy.startswith("scp -p ~/.multiring-secret ")
    (tmp_path / "train.py").write_text(
        "import multiring as mr\nmr.init()\nprint('rank', mr.rank(), 'of', mr.world_size())\nmr.barrier()\n"
    )
    jobs = " & ".join(starts)
    printed = run(f"set -e; export HOME=$PWD; {make}; stat -c %a .multiring-secret; {export}; {jobs}; wait", tmp_path)
    assert printed.startswith("600\n")
    assert {f"rank {rank} of 4" for rank in range(4)} <= set(re.findall(r"rank \d of \d", printed))
