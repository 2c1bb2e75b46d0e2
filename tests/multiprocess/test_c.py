"""``multiring.h`` and libmultiring.so, as a C program uses them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import Launch

from multiring import _native, embed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python that has multiring need not be the one called python3."""
    monkeypatch.setenv("MULTIRING_PYTHON", sys.executable)


def compile_c(source: Path, program: Path, *flags: str) -> None:
    command = ["c++" if "c++" in flags else "cc", "-Wall", "-Wextra", "-Werror", *flags]
    subprocess.run([*command, source, *embed.flags().split(), "-pthread", "-o", program], check=True)


@pytest.fixture
def program(launch: Launch) -> str:
    compile_c(ROOT / "tests/multiprocess/c_program.c", launch.directory / "program")
    return "./program"


def test_the_example_sums(launch: Launch) -> None:
    compile_c(ROOT / "examples/all_reduce.c", launch.directory / "all_reduce", "-std=c11", "-D_POSIX_C_SOURCE=200809L")
    done = launch.run("-n", "3", "./all_reduce")
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        assert f"rank {rank} of 3: mean of element 7 is 8" in done.stdout


def test_the_header_is_cxx_too(tmp_path: Path) -> None:
    source = tmp_path / "program.cpp"
    source.write_text("#include <multiring.h>\nint main() { return multiring_rank() == -1 ? 0 : 1; }\n")
    compile_c(source, tmp_path / "program", "-x", "c++", "-xnone")
    subprocess.run([tmp_path / "program"], check=True, timeout=60)


def test_the_header_has_all_types_and_operations_of_the_engine() -> None:
    text = (ROOT / "src/multiring/include/multiring.h").read_text()
    enumerations = {
        kind: body for body, kind in re.findall(r"typedef enum \{(.*?)\} multiring_(\w+);", text, re.DOTALL)
    }
    for kind, names in ("dtype", _native.DTYPES), ("op", _native.OPS):
        numbers = {name: int(number) for name, number in re.findall(r"MULTIRING_(\w+) = (\d+)", enumerations[kind])}
        assert numbers == {name.upper(): number for number, name in enumerate(names)}


def test_results_and_usage_errors(launch: Launch, program: str) -> None:
    done = launch.run("-n", "2", program)
    assert done.returncode == 0, done.stderr
    for line in (
        "early: 6 multiring is not initialised",
        "init: 0",
        "negative: 6 count=18446744073709551615: no buffer has so many elements",
        "null: 6 data is NULL and count is not 0",
        "dtype: 6 no dtype has the number 99",
        "op: 6 avg is not defined for int32",
        "root: 6 root=2: ranks of this communicator are 0 to 1",
        "empty: 0",
        "max: 0 1 11 21",
        "broadcast: 1",
        "barrier: 0",
        "bits: 0",
        "bxor: 1 33",
        "bor: 1 1 0",
        "shutdown: 0",
        "late: 6 multiring is not initialised",
        "rank -1 of -1",
    ):
        assert done.stdout.count(line) == 2, f"{line!r} in\n{done.stdout}"


def test_a_program_and_a_script_are_one_job(launch: Launch, program: str) -> None:
    (launch.directory / "script.py").write_text(
        "import numpy as np, multiring as mr\n"
        "mr.init()\n"
        "mr.all_reduce(np.empty(0))\n"
        "x = 10.0 * np.arange(3)\n"
        "mr.all_reduce(x, op='max')\n"
        "mr.broadcast(x[:1], root=1)\n"
        "mr.barrier()\n"
        "print('script:', x.tolist())\n"
    )
    either = f'if [ "$RANK" = 0 ]; then exec {sys.executable} script.py; else exec {program}; fi'
    done = launch.run("-n", "2", "sh", "-c", either)
    assert done.returncode == 0, done.stderr
    assert "script: [1.0, 11.0, 21.0]" in done.stdout
    assert "max: 0 1 11 21" in done.stdout


def test_a_killed_rank_is_named_to_callback_and_caller(launch: Launch, program: str) -> None:
    done = launch.run("-n", "3", program, "kill")
    assert done.returncode != 0
    assert done.stdout.count("lost: 2 PeerLost: rank 2") + done.stdout.count("after: 2 PeerLost: rank 2") >= 2
    assert done.stdout.count("after: 2 PeerLost: rank 2") == 2


@pytest.mark.parametrize("told", ["callback", "return"])
def test_nobody_is_started_again_where_a_program_ends_as_it_is_told_of_a_mismatch(
    launch: Launch, program: str, told: str
) -> None:
    """Without what the ranks say before, the first to end would be replaced, and the launcher could name any.

    A rank on a core that is busy for 0.5 s ends before it has said anything, and the others disagree one against one.
    """
    done = launch.run("-n", "3", "--min-ranks", "1", "--max-replacements", "3", program, "exit", told)
    assert done.returncode == 10 + 4, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("multiring: ")]
    assert not [line for line in lines if "again" in line or "go on" in line], lines
    sums = "all_reduce(dtype=float64, count={}, op=sum)"
    most = f"rank 1 called {sums.format(7)} where ranks 0 and 2 called {sums.format(6)}: call number"
    two = r"rank [02] \(host \S+\) called all_reduce\(count=6\), rank 1 \(host \S+\) called all_reduce\(count=7\)"
    assert [line for line in lines if most in line or re.search(two, line)], lines


def test_who_keeps_pythons_lock_is_told_all_the_same(launch: Launch) -> None:
    script = launch.script("""
        import ctypes, os, signal
        from pathlib import Path
        from multiring import _native

        library = ctypes.PyDLL(str(Path(_native.__file__).parent / "lib/libmultiring.so"))
        library.multiring_error.restype = ctypes.c_char_p
        assert library.multiring_init() == 0
        while (code := library.multiring_barrier()) == 0:
            if library.multiring_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        print("told:", code, library.multiring_error().decode())
        print("shut down:", library.multiring_shutdown())
    """)
    done = launch.run("-n", "2", script)
    assert "told: 2 PeerLost: rank 1 (host " in done.stdout, done.stderr
    assert "shut down: 0" in done.stdout
    assert "rank 1 on host" in done.stderr.splitlines()[-1]


def test_a_program_alone_is_a_world_of_one_and_finds_its_python(launch: Launch, program: str) -> None:
    def run(python: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "MULTIRING_PYTHON": python}
        return subprocess.run(
            [program], cwd=launch.directory, env=environment, capture_output=True, text=True, timeout=60
        )

    alone = run(sys.executable)
    assert alone.returncode == 0, alone.stderr
    assert "max: 0 0 10 20" in alone.stdout
    assert "MULTIRING_PYTHON" not in alone.stderr
    lost = run("/nowhere/python")
    assert lost.returncode == 1
    assert "init: 1 multiring cannot be imported by /nowhere/python: set MULTIRING_PYTHON" in lost.stdout
