"""Programs of the framework tests, run by ``multiring run`` in real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from prepared import Prepared

HERE = Path(__file__).parent


def needs(*frameworks: str, seconds: float = 300) -> list[pytest.MarkDecorator]:
    """Marks for tests of frameworks, which only their ranks import."""
    missing = [name for name in frameworks if find_spec(name) is None]
    # Ranks that share a busy core take long to compile.
    return [
        pytest.mark.timeout(seconds),
        pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
    ]


def job(
    program: str, *arguments: str, ranks: int, timeout: float = 280, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program that stands beside this file, or those of its functions that ``arguments`` name."""
    return subprocess.run(
        [sys.executable, "-m", "multiring", "run", "-n", str(ranks), str(HERE / program), *arguments],
        env={**os.environ, **_variables(environment)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What the programs beside this file need, too."""
    paths = [str(HERE.parent / "helpers"), environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
    return {"TF_CPP_MIN_LOG_LEVEL": "2", **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def succeeds(program: str, *arguments: str, ranks: int, **environment: str) -> str:
    """What a job prints that is to end well."""
    done = job(program, *arguments, ranks=ranks, **environment)
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
        """``imports`` are done once for all ranks, which are forked then."""
        self._chosen = chosen
        self._losing = losing
        self._prepared = Prepared(imports, _variables(environment)) if imports else None

        def run(ranks: int) -> subprocess.CompletedProcess[str]:
            last = ["loss_of_a_rank"] if ranks in losing else []
            words = [*arguments, *chosen[ranks], *last]
            if self._prepared is not None:
                return self._prepared.job(HERE / program, *words, ranks=ranks, timeout=560)
            return job(program, *words, ranks=ranks, timeout=560, **environment)

        self._ended = cache(run)

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *error: object) -> None:
        if self._prepared is not None:
            self._prepared.close()

    def succeed(self, *functions: str, ranks: int) -> None:
        """Check that all ranks returned from these functions, and that they ended well unless one was killed."""
        assert set(functions) <= set(self._chosen[ranks])
        done = self._ended(ranks)
        printed = [re.sub(r"^\[\d+\] ", "", line) for line in done.stdout.splitlines()]
        missing = [name for name in functions if printed.count(f"finished {name}") != ranks]
        assert not missing, f"not finished: {missing}\n{done.stdout}\n{done.stderr}"
        if ranks not in self._losing:
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        elif self._prepared is not None:
            ended = f"exit codes {[0] * (ranks - 1) + [-signal.SIGKILL.value]}\n"
            assert done.stderr.startswith(ended), f"{done.stdout}\n{done.stderr}"

    def told_of_the_killed_rank(self, words: str, *, ranks: int) -> None:
        """Check that each of the others printed a line that matches these words."""
        assert ranks in self._losing
        done = self._ended(ranks)
        assert done.returncode != 0
        told = [line for line in done.stdout.splitlines() if re.search(words, line)]
        assert len(told) == ranks - 1, f"{done.stdout}\n{done.stderr}"
