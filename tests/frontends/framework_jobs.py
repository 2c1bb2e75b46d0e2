"""Programs of the framework tests in real processes: under ``multiring run``, or forked by `forked_job`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import fork_server
import forking_launcher
import pytest

from multiring.job.store import Server

HERE = Path(__file__).parent
SECRET = b"the secret of a test's job"
PATIENCE = 60.0
"""Seconds after the end of a rank that failed, after which the others are killed."""


def needs(*frameworks: str, seconds: float = 300) -> list[pytest.MarkDecorator]:
    """Marks for tests of frameworks, which only their ranks import."""
    missing = [name for name in frameworks if find_spec(name) is None]
    # Ranks that share a busy core take long to compile.
    return [
        pytest.mark.timeout(seconds),
        pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
    ]


def job(
    program: str | Path,
    *arguments: str,
    ranks: int,
    options: Sequence[str] = (),
    imports: Sequence[str] = (),
    timeout: float = 280,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program that stands beside this file, or those of its functions that ``arguments`` name.

    It runs under ``multiring run`` with ``options``; where there are ``imports``, as in `forking_launcher`.
    """
    words = ["run", "-n", str(ranks), *options, str(HERE / program), *arguments]
    if imports:
        return forking_launcher.run(*words, imports=imports, environment=of_forks(**environment), timeout=timeout)
    return subprocess.run(
        [sys.executable, "-m", "multiring", *words],
        env={**os.environ, **_variables(environment)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def alone(
    program: str | Path, *arguments: str, imports: Sequence[str], timeout: float = 280, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program, a file or the text of one, as one process that is forked where ``imports`` are done."""
    process = fork_server.start(program, *arguments, environment=of_forks(**environment), imports=imports)
    try:
        output, error = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess([str(program), *arguments], process.wait(), output, error)


def forked_job(
    program: Path, *arguments: str, ranks: int, imports: Sequence[str], timeout: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a job of a program whose framework takes seconds to import, and return how it ended.

    Its ranks are forks of two processes that have done ``imports``, one for even and one for odd ranks, which differ in
    the seeds of their hashes. The ranks find the variables of ``multiring run``, and are killed after ``timeout``
    seconds.
    """
    store = Server(SECRET, job="test", bind=["127.0.0.1"])
    started: list[fork_server.Forked] = []
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.touch(mode=0o600)
        secret.write_bytes(SECRET)
        job = {
            **of_forks(**environment),
            "MULTIRING_STORE": ",".join(store.addresses),
            "MULTIRING_SECRET_FILE": str(secret),
            "MULTIRING_JOB": "test",
        }
        try:
            fork_server.prepare(environment=job, seats=range(ranks), imports=imports)
            for rank in range(ranks):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                own = {prefix + name: str(value) for name, value in place.items() for prefix in ("", "MULTIRING_")}
                started.append(
                    fork_server.start(program, *arguments, environment={**job, **own}, seat=rank, imports=imports)
                )
            _wait(started, timeout)
        finally:
            for process in started:
                process.kill()
            store.close()
    codes = [process.wait() for process in started]
    while fork_server.read(started, 0):  # it may be open elsewhere, in what a rank left behind
        pass
    output, error = ("".join(getattr(each, name).rest() for each in started) for name in ("stdout", "stderr"))
    failed = [code for code in codes if code]
    words = [str(program), *arguments]
    return subprocess.CompletedProcess(words, failed[0] if failed else 0, output, f"exit codes {codes}\n{error}")


def _wait(processes: Sequence[fork_server.Forked], timeout: float) -> None:
    """Wait until all have ended, for ``timeout`` seconds, and PATIENCE from when one has failed."""
    deadline = time.monotonic() + timeout
    codes: list[int | None] = [None]
    while None in codes and time.monotonic() < deadline:
        fork_server.read(processes, 0.05)
        codes = [process.poll() for process in processes]
        if any(codes):
            deadline = min(deadline, time.monotonic() + PATIENCE)


def compiled_by_jax(folder: Path) -> dict[str, str]:
    """Variables with which XLA compiles in half the time: most of a short test's time goes there.

    LLVM is not to optimise, and what was compiled is kept in ``folder`` for all processes, but for programs that call
    back into Python.
    """
    return {
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def of_forks(**environment: str) -> dict[str, str]:
    """The variables of what is forked, of which those that an interpreter reads at its start are always the same."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **_variables(environment)}


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment``, completed by what the programs beside this file need."""
    paths = [str(HERE.parent / "helpers"), environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
    return {"TF_CPP_MIN_LOG_LEVEL": "2", **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def succeeds(program: str, *arguments: str, ranks: int, imports: Sequence[str] = (), **environment: str) -> str:
    """Run a job, check that it ended well, and return what it printed."""
    done = job(program, *arguments, ranks=ranks, imports=imports, **environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


class Worlds:
    """Ranks that several tests share: a number of them starts once, and runs all functions that are chosen for it.

    In those whose number is in ``losing``, ``loss_of_a_rank`` comes last, in which the highest rank is killed.
    """

    def __init__(
        self,
        program: str,
        chosen: Mapping[int, Sequence[str]],
        *arguments: str,
        losing: Collection[int] = (),
        imports: Sequence[str] = (),
        **environment: str,
    ) -> None:
        """``imports`` are done once for all ranks, as in `forked_job`."""
        self._chosen = chosen
        self._losing = losing
        self._imports = imports
        self._environment = environment

        def run(ranks: int) -> subprocess.CompletedProcess[str]:
            last = ["loss_of_a_rank"] if ranks in losing else []
            words = [*arguments, *chosen[ranks], *last]
            if imports:
                return forked_job(HERE / program, *words, ranks=ranks, imports=imports, timeout=560, **environment)
            return job(program, *words, ranks=ranks, timeout=560, **environment)

        self._ended = cache(run)

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *error: object) -> None:
        if self._imports:
            fork_server.end(self._imports)

    def prints(self, program: str, *arguments: str, ranks: int) -> str:
        """Run another program in forks of the same processes, check that it ended well, and return what it printed."""
        done = forked_job(
            HERE / program, *arguments, ranks=ranks, imports=self._imports, timeout=280, **self._environment
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def succeed(self, *functions: str, ranks: int) -> None:
        """Check that all ranks returned from these functions, and that they ended well unless one was killed."""
        assert set(functions) <= set(self._chosen[ranks])
        done = self._ended(ranks)
        printed = [re.sub(r"^\[\d+\] ", "", line) for line in done.stdout.splitlines()]
        missing = [name for name in functions if printed.count(f"finished {name}") != ranks]
        assert not missing, f"not finished: {missing}\n{done.stdout}\n{done.stderr}"
        if ranks not in self._losing:
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        elif self._imports:
            ended = f"exit codes {[0] * (ranks - 1) + [-signal.SIGKILL.value]}\n"
            assert done.stderr.startswith(ended), f"{done.stdout}\n{done.stderr}"

    def told_of_the_killed_rank(self, words: str, *, ranks: int) -> None:
        """Check that each of the others printed a line that matches these words."""
        assert ranks in self._losing
        done = self._ended(ranks)
        assert done.returncode != 0
        told = [line for line in done.stdout.splitlines() if re.search(words, line)]
        assert len(told) == ranks - 1, f"{done.stdout}\n{done.stderr}"
