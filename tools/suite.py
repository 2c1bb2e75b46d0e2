"""The whole suite, for `make test`: parts of it side by side, as much of it waits; then what times links, alone.

A few tests that failed run once more when nothing else does: what fails then too is a defect, what passes had too
little of the machine. pytest-xdist hands any test to any worker, and runs none of them when the others have ended;
here a part is a pytest of its own, whose tests share fork servers. Usage: python tools/suite.py [COMMAND ...], a pytest
of another interpreter that is a part too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build/suite"
LABS, TIMED = "labs", "timed"

# A file of tests belongs to the first part that has a pattern for it. Parts begin in this order, the longest first.
# Labs are in one part, as they look at what others have left; those marked as timed wait until nothing else runs.
PARTS = {
    LABS: ["lab/*", "faults/*", "docs/test_documents.py"],
    "losses": [
        f"multiprocess/test_{each}*" for each in ("behaviour", "join", "shrink", "grow", "lost", "slow", "engine")
    ],
    "torch": ["frontends/test_torch*"],
    "frameworks": ["frontends/*"],
    "launcher": [f"multiprocess/test_{each}*" for each in ("run", "launch", "spares", "standby", "top", "anywhere")],
    "ranks": ["multiprocess/*"],
    "unit": ["unit/*"],
    "pages": ["docs/*"],
    "cuda": ["cuda/*"],
    "builds": ["wheel/*", "fuzz/*"],
}
ELSEWHERE = ["clusters/*"]  # what `make test-engines` runs

PYTEST = [sys.executable, "-m", "pytest"]
SHOWN = 15  # slowest tests of a part
MOST = 8  # failures, from which on the machine is no excuse


class Part:
    """Tests that one pytest runs, one after the other."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._cache = KEPT / name
        self._command = [*command, "-o", f"cache_dir={self._cache}", f"--durations={SHOWN}"]

    def run(self, *words: str) -> int:
        """pytest's exit code; its output is shown when it has ended."""
        began = time.monotonic()
        ended = subprocess.run(
            [*self._command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        spent = time.monotonic() - began
        print(f"\n{ended.stdout}{self.name}: {spent:.0f} s, exit code {ended.returncode}", flush=True)
        return ended.returncode

    def failed(self) -> list[str]:
        """The tests that failed when it ran last."""
        return list(json.loads((self._cache / "v/cache/lastfailed").read_text()))


def files_by_part(patterns: Mapping[str, Sequence[str]], elsewhere: Sequence[str]) -> dict[str, list[Path]]:
    """All files of tests by the part that runs them; SystemExit names those that no part has, or a part without any."""
    tests = ROOT / "tests"
    left = set(tests.glob("*/test_*.py")) - {path for pattern in elsewhere for path in tests.glob(pattern)}
    found: dict[str, list[Path]] = {}
    for name, globs in patterns.items():
        files = left & {path for pattern in globs for path in tests.glob(pattern)}
        if not files:
            raise SystemExit(f"part {name!r} of the suite has no tests: {', '.join(globs)}")
        found[name] = sorted(files)
        left -= files
    if left:
        raise SystemExit(f"no part of the suite runs {', '.join(str(path.relative_to(ROOT)) for path in sorted(left))}")
    return found


def parts(legacy: Sequence[str]) -> tuple[list[Part], Part]:
    """Return the parts that run side by side, and the one that then runs alone."""
    files = {
        name: [str(path.relative_to(ROOT)) for path in found] for name, found in files_by_part(PARTS, ELSEWHERE).items()
    }
    chosen = {LABS: ["-m", f"not {TIMED}"]}
    beside = [Part(name, [*PYTEST, *chosen.get(name, []), *found]) for name, found in files.items()]
    if legacy:
        beside.insert(0, Part("legacy", legacy))
    return beside, Part(TIMED, [*PYTEST, "-m", TIMED, *files[LABS]])


def once_more(part: Part) -> str | None:
    """Run what failed again; what to say of it if it is a failure still."""
    failed = part.failed()
    print(f"\nfailed, {part.name}: {' '.join(failed)}")
    if len(failed) > MOST:
        return f"{part.name}: {len(failed)} tests"
    print("once more, alone:")
    if part.run("--last-failed", "--last-failed-no-failures", "none") != 0:
        return f"{part.name}: failed alone too"
    print(f"passed alone and failed beside others, {part.name}: {' '.join(failed)}")
    return None


def main(legacy: Sequence[str]) -> None:
    """Run it; SystemExit says what failed."""
    os.chdir(ROOT)
    shutil.rmtree(KEPT, ignore_errors=True)
    KEPT.mkdir(parents=True)
    beside, timed = parts(legacy)
    codes: dict[Part, int] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) + 2) as pool:
        running = {pool.submit(part.run): part for part in beside}
        for future in as_completed(running):
            codes[running[future]] = future.result()
    codes[timed] = timed.run()
    broken = [f"{part.name}: pytest ended with {code}" for part, code in codes.items() if code not in (0, 1)]
    again = [once_more(part) for part, code in codes.items() if code == 1]
    if failures := [*broken, *filter(None, again)]:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main(sys.argv[1:])
