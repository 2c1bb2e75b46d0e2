"""``multiring run`` at the price of forks, for programs whose imports take a process some seconds.

The launcher is a process of a fork server that has done these imports, and its ranks are forks of their agent in the
place of fresh interpreters. All else is the launcher's own: they are its agent's children, with the process group,
cores, descriptors, directory and variables that it gives them, and end as an interpreter does.
What an interpreter reads when it starts is as in the launcher; so is the seed of hashes, in all ranks.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any, NoReturn

import fork_server

from multiring.launch import processes
from multiring.launch.processes import Recipe, Streams


def _installed(*modules: str) -> list[str]:
    return [name for name in modules if find_spec(name.partition(".")[0])]


OF_THE_LAUNCHER = (
    "forking_launcher",
    "multiring.cli.run",
    "multiring.cli.errors",
    "multiring.launch.start",
    "typer",
    *_installed("pydantic.fields", "pydantic.type_adapter", "pydantic.types"),  # typer may read the words with it
)

TORCH = (
    *OF_THE_LAUNCHER,
    *("torch", "torch.distributed", "torch.utils.data"),
    *("torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel"),  # optimizers import the first
    *("multiring.torch.create", "multiring.torch.optimizer", "multiring.data"),
    *_installed("sklearn.datasets", "PIL.Image"),
)
"""Modules that the one server for all torch programs imports."""

TORCH_LIBRARIES = (*TORCH, *_installed("lightning", "accelerate", "transformers.trainer"))

_CALL = "import forking_launcher; forking_launcher.main()"

program: CodeType
"""Code that this process runs once it is a rank."""


def start(*words: str, **options: Any) -> fork_server.Forked:
    """Start ``multiring WORDS`` where ``imports`` are done, with the other ``options`` of `fork_server.start`."""
    return fork_server.start(_CALL, *words, **_of_launcher(**options))


def start_on(streams: Sequence[int], *words: str, **options: Any) -> fork_server.Process:
    """Start ``multiring WORDS`` as `start` does, with ``streams`` as its standard streams."""
    return fork_server.start_on(streams, _CALL, *words, **_of_launcher(**options))


def _of_launcher(*, imports: Sequence[str], environment: Mapping[str, str], **options: Any) -> dict[str, Any]:
    variables = {**environment, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return {"environment": variables, "imports": list(dict.fromkeys([*OF_THE_LAUNCHER, *imports])), **options}


def run(*words: str, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``multiring WORDS``; after ``timeout`` seconds it is killed, and `subprocess.TimeoutExpired` raised."""
    process = start(*words, **options)
    try:
        output, error = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(["multiring", *words], process.wait(), output, error)


def main() -> None:
    """Be the command ``multiring`` in this process of a fork server."""
    from multiring.cli import main as command

    processes.start = _start
    command()


class _Rank:
    """A forked rank, with the part of `subprocess.Popen` that an agent uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


_start_fresh = processes.start


def _start(recipe: Recipe, streams: Streams, inherited: Collection[int]) -> Any:
    """The place of `multiring.launch.processes.start`."""
    python, *words = recipe.command
    if python != sys.executable or not (words[0] == "-m" or words[0].endswith(".py")):
        return _start_fresh(recipe, streams, inherited)
    other = [
        name
        for name in {*os.environ, *recipe.environment}
        if name.startswith(fork_server.AT_START) and os.environ.get(name) != recipe.environment.get(name)
    ]
    assert not other, f"a forked rank cannot have variables of its own that an interpreter reads at its start: {other}"
    agent = os.getpid()
    pid = os.fork()
    if pid:
        return _Rank(pid)
    try:
        processes.take_place(recipe, agent)
        _become(recipe, words, streams, inherited)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    _run_to_the_end()


def _become(recipe: Recipe, words: Sequence[str], streams: Streams, inherited: Collection[int]) -> None:
    """Leave behind what an agent has, as a call of another program does."""
    global program
    asyncio.events._set_running_loop(None)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    numbers = [0, 1, 2, *inherited]
    fork_server.hold_only([streams.input, streams.output, streams.error, *inherited], numbers)
    os.environ.clear()
    os.environ.update(recipe.environment)
    os.chdir(recipe.directory)
    sys.modules["__main__"] = ModuleType("__main__")
    program = fork_server.program_of(words)


def _run_to_the_end() -> NoReturn:
    """Run the program and end as an interpreter does, though from within the calls of an agent."""
    python = ctypes.pythonapi
    failed = python.PyRun_SimpleString(b"exec(__import__('forking_launcher').program)")  # leaves by SystemExit's code
    if failed and sys.last_type is KeyboardInterrupt:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    python.Py_Exit(1 if failed else 0)
    raise AssertionError("an interpreter that has ended goes on")
