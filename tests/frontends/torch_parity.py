"""Run torch's own distributed tests over any backend with real processes, one line of JSON per test.

    python tests/frontends/torch_parity.py --backend multiring [--again gloo] [--cuda] [test_name ...]

The tests are those of ``torch.testing._internal.distributed.distributed_test``. Many of them choose what to do by the
name of the backend, so they are told that it is Gloo: what runs is what Gloo runs, over another default group.
Each test gets a fresh pair of processes, forked from one that has done nothing but import. With --cuda those are run
that need a GPU for each rank, and the ranks share one. With --again those that have not passed run over another
backend too.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import warnings
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

WORLD_SIZE = 2
os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD_SIZE), MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the other check initialises CUDA, which forbids to fork
warnings.simplefilter("ignore")  # torch's tests try deprecated spellings on purpose

import torch.testing._internal.distributed.distributed_test as suite  # noqa: E402
from torch.testing._internal.common_distributed import (  # noqa: E402
    TEST_SKIPS,
    cleanup_temp_dir,
    initialize_temp_directories,
)

import multiring.torch.create  # noqa: E402, F401  # once, and not in each process
from multiring._torch_entry import register  # noqa: E402

register()  # installing does this; the tests run from a source tree as well

ERROR = 10  # MultiProcessTestCase.TEST_ERROR_EXIT_CODE
SKIPS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
CRASHES_ON_PURPOSE = ("test_ddp_has_finalized",)  # torch's own list of tests whose exit code says nothing


ABOUT_THE_NAME = ("test_Backend_enum_class", "test_get_backend")


class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """The tests as torch's own runner assembles them."""

    def run_test(self, test_name: str, parent_pipe: connection.Connection) -> None:
        """Run a test within the default group, which exists by now."""
        if test_name not in ABOUT_THE_NAME:
            suite.BACKEND = "gloo"
        super().run_test(test_name, parent_pipe)


def names(cuda: bool) -> list[str]:
    """All tests but those that say by their name that they need a GPU; or these, and those of data parallelism."""
    tests = sorted(name for name in dir(Suite) if name.startswith("test_") and "nccl" not in name)
    if cuda:
        return [name for name in tests if re.search("cuda|gpu|ddp|DistributedDataParallel", name)]
    return [name for name in tests if not re.search("cuda|gpu", name)]


def share_one_device() -> None:
    """Let torch's tests find a GPU for each rank, which is the same one; torch itself has looked by then."""
    suite.torch.cuda.init()
    suite.torch.cuda.device_count = lambda: WORLD_SIZE
    suite.init_multigpu_helper = lambda world_size, _: {rank: [0] for rank in range(world_size)}


def child(rank: int, name: str, file_name: str, pipe: connection.Connection, output: Path, cuda: bool) -> None:
    if cuda:
        share_one_device()
    with output.open("w") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    Suite._run(rank, name, file_name, pipe)


def run(name: str, limit: float, cuda: bool) -> dict[str, Any]:
    """Run one test with fresh processes and say how it ended."""
    initialize_temp_directories()
    fork = multiprocessing.get_context("fork")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [fork.Pipe() for _ in range(WORLD_SIZE)]  # torch's runner expects one; the logs hold what it says there
        logs = [Path(folder, f"{rank}.log") for rank in range(WORLD_SIZE)]
        arguments = [(rank, name, f"{folder}/store", pipes[rank][1], logs[rank], cuda) for rank in range(WORLD_SIZE)]
        processes = [fork.Process(target=child, args=of_rank) for of_rank in arguments]
        for process in processes:
            process.start()
        outcome, detail = wait(name, processes, started + limit)
        if outcome in ("failed", "timeout"):
            detail += "".join(f"\n--- rank {rank}\n{log.read_text()[-3000:]}" for rank, log in enumerate(logs))
    cleanup_temp_dir()
    return {"name": name, "outcome": outcome, "detail": detail, "seconds": round(time.monotonic() - started, 2)}


def wait(name: str, processes: list[ForkProcess], deadline: float) -> tuple[str, str]:
    """The outcome of a test and why; no process is left."""
    try:
        while alive := [process.sentinel for process in processes if process.is_alive()]:
            if any(process.exitcode == ERROR for process in processes):
                break
            if not connection.wait(alive, deadline - time.monotonic()):
                return "timeout", ""
    finally:
        for process in processes:
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    if codes[0] in SKIPS:
        return "skipped", SKIPS[codes[0]]
    if ERROR in codes or (codes[0] != 0 and name not in CRASHES_ON_PURPOSE):
        return "failed", f"exit codes {codes}"
    return "passed", ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--again", metavar="BACKEND", help="run what has not passed over this one too")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a test may take")
    parser.add_argument("--cuda", action="store_true", help="the tests that need a GPU, of which there is one")
    parser.add_argument("--names", action="store_true", help="print the names of the tests, and run none")
    parser.add_argument("tests", nargs="*")
    args = parser.parse_args()
    if args.names:
        print("\n".join(names(args.cuda)))
        return
    gc.collect()
    gc.freeze()  # or a collection in a forked process copies the pages of all that is imported
    missed = _over(args.backend, args.tests or names(args.cuda), args)
    if args.again:
        _over(args.again, missed, args)


def _over(backend: str, tests: list[str], args: argparse.Namespace) -> list[str]:
    """Run tests over a backend, print how each ended, and return those that neither passed nor were skipped."""
    suite.BACKEND = backend
    missed = []
    for name in tests:
        result = run(name, args.limit, args.cuda)
        print(json.dumps({"backend": backend, **result}), flush=True)
        if result["outcome"] not in ("passed", "skipped"):
            missed.append(name)
    return missed


if __name__ == "__main__":
    sys.exit(main())
