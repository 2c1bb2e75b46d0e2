"""Programs of the ranks of `test_flight_recorder`."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import multiring as mr

CULPRIT = 1
OPS = ("sum", "max")
BEFORE = 3
"""Collectives of all ranks that go well."""


def _call_together() -> None:
    x = np.zeros(1000, np.float32)
    for step in range(BEFORE):
        x[:] = mr.rank() + step
        mr.all_reduce(x)
        assert x[step] == sum(rank + step for rank in range(mr.world_size()))


def _disagree(x: np.ndarray, collective: Callable[..., Any] = mr.all_reduce) -> None:
    """Make a call, rank CULPRIT once all others have made theirs: who has not made it yet blames another one."""
    if mr.rank() == CULPRIT:
        _wait_for_the_others()
        collective(x)
    else:
        work = collective(x, async_op=True)
        _show_the_culprit()
        work.wait()


def _show_the_culprit() -> None:
    Path(os.environ["SIGNS"], str(mr.rank())).touch()


def _wait_for_the_others() -> None:
    signs = [Path(os.environ["SIGNS"], str(rank)) for rank in range(mr.world_size()) if rank != CULPRIT]
    until = time.monotonic() + 30
    while not all(sign.exists() for sign in signs) and time.monotonic() < until:
        time.sleep(0.01)


def _error_of(how: str) -> str:
    """Return the error of a call in which rank CULPRIT does something else, or nothing."""
    is_culprit = mr.rank() == CULPRIT
    try:
        if how == "late":
            if is_culprit:
                time.sleep(8)
            mr.all_reduce(np.zeros(500, np.float32))
        elif how == "size":
            _disagree(np.zeros(700 if is_culprit else 500, np.float32))
        elif how == "dtype":
            _disagree(np.zeros(500, np.int32 if is_culprit else np.float32))
        elif how == "operation":
            _disagree(np.zeros(500, np.float32), mr.broadcast if is_culprit else mr.all_reduce)
        elif how == "reduction":
            _disagree(np.zeros(500, np.float32), lambda x, **given: mr.all_reduce(x, OPS[is_culprit], **given))
        elif how == "root":
            _disagree(np.zeros(500, np.float32), lambda x, **given: mr.broadcast(x, 2 if is_culprit else 0, **given))
            mr.barrier()  # a root waits for nobody
        elif how == "killed":
            if is_culprit:
                _wait_for_the_others()  # to have ended the calls before
                os.kill(os.getpid(), signal.SIGKILL)
            _show_the_culprit()
            mr.all_reduce(np.zeros(500, np.float32))
        elif how == "group":
            group = mr.new_group([2, CULPRIT])
            if mr.rank() == 2:
                mr.all_gather(np.zeros(60, np.int64), group=group)
            elif is_culprit:
                time.sleep(8)
                mr.all_gather(np.zeros(60, np.int64), group=group)
            else:
                mr.barrier()
        elif how == "message":
            x = np.zeros(40, np.float64)
            if is_culprit:
                mr.send(x, 0, tag=5)
                time.sleep(8)
                mr.barrier()
            elif mr.rank() == 0:
                mr.recv(x, CULPRIT, tag=5)
                mr.recv(x, CULPRIT, tag=5)
            else:
                mr.barrier()
    except mr.MultiringError as error:
        return f"{type(error).__name__} {error.rank}"
    return "nothing"


def fails(how: str) -> str:
    mr.init()
    _call_together()
    error = _error_of(how)
    mr.shutdown()
    return error


def disagrees(odd: list[int], late: int) -> str:
    """These ranks call something else; rank ``late`` makes its call when another one has raised."""
    mr.init()
    _call_together()
    x = np.zeros(700 if mr.rank() in odd else 500, np.float32)
    failed = Path(os.environ["SIGNS"], "failed")
    until = time.monotonic() + 30
    while mr.rank() == late and not failed.exists() and time.monotonic() < until:
        time.sleep(0.01)
    try:
        mr.all_reduce(x)
        mr.barrier()
    except mr.Mismatch as error:
        failed.touch()
        mr.shutdown()
        return f"Mismatch {error.rank}"
    return "nothing"


def waits_elsewhere(how: str) -> str:
    """Four ranks, of which some wait in calls that have not ended because another call has failed."""
    mr.init()
    _call_together()
    x = np.zeros(500, np.float32)
    rank = mr.rank()
    group = mr.new_group([1, 2, 3])
    try:
        if how == "a size in a group":
            if rank == 0:
                mr.barrier()
            mr.all_reduce(np.zeros(700, np.float32) if rank == 3 else x, group=group)
        elif how == "further ahead" and rank != 1:  # rank 0 has begun calls that others have not
            works = [mr.all_reduce(x.copy(), async_op=True) for _ in range(5 if rank == 0 else 1)]
            for work in works:
                work.wait()
        elif how == "messages of others":
            if rank == 3:
                time.sleep(1)  # the message that rank 2 waits for is the first whose time is up
                mr.recv(x, 2, tag=7)
            elif rank == 2:
                mr.recv(x, 1, tag=7)
        time.sleep(8)
        mr.barrier()
    except mr.MultiringError as error:
        mr.shutdown()
        return f"{type(error).__name__} {error.rank}"
    return "nothing"


def asked(where: str) -> None:
    """Each rank is asked for its record while rank CULPRIT computes, and the others wait for it.

    ``where`` the rank waits: in the main thread; in another one, which has called `init` as well; or there while the
    main thread is in native code, as it is in XLA, where it runs no handler of Python.
    """
    if where == "in the main thread":
        _waits()
        assert not _is_handled(signal.SIGUSR2)
        return
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # zeros are a mutex that nobody holds
    libc.pthread_mutex_lock(mutex)
    ended: list[bool] = []

    def work() -> None:
        try:
            _waits()
            ended.append(True)
        finally:
            libc.pthread_mutex_unlock(mutex)

    thread = threading.Thread(target=work)
    thread.start()
    if where == "in native code":
        libc.pthread_mutex_lock(mutex)
    thread.join()
    assert ended
    assert not _is_handled(signal.SIGUSR2)


def _waits() -> None:
    mr.init()
    _call_together()
    mr.all_gather(np.zeros(20, np.int32))
    assert _is_handled(signal.SIGUSR2)
    print("ready", flush=True)
    if mr.rank() == CULPRIT:
        until = time.monotonic() + 150
        while not Path(os.environ["MULTIRING_FLIGHT_RECORDER"], "go-on").exists() and time.monotonic() < until:
            time.sleep(0.01)
    mr.barrier()
    mr.shutdown()


def _is_handled(number: int) -> bool:
    """True if this process has a handler for a signal: Python knows of its own alone."""
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) >> (number - 1) & 1)


def lacks_room(what: str) -> str:
    """Rank 0 cannot write its record when the job fails."""
    mr.init()
    _call_together()
    if mr.rank() == 0 and what == "gone":
        top = Path(os.environ["MULTIRING_FLIGHT_RECORDER"])
        shutil.rmtree(top)
        top.write_text("a file where the directory was")
    if mr.rank() == 0 and what == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    error = _error_of("size")
    mr.shutdown()
    return error


def idles(go_on: str) -> None:
    """Rank CULPRIT is killed before any call, and the others make none."""
    mr.init()
    if mr.rank() == CULPRIT:
        os.kill(os.getpid(), signal.SIGKILL)
    _await(go_on)
    time.sleep(1)


def dies_as_it_writes() -> str:
    """Rank CULPRIT is killed when half of its record is written."""
    mr.init()
    _call_together()
    if mr.rank() == CULPRIT:
        Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
    return _error_of("size")


def goes_on_when_asked(folder: str) -> list[int]:
    """Ranks are asked for records while they wait in `init`, in `shrink`, and in `init` to be admitted.

    Members say how many calls they had made in each generation.
    """
    is_newcomer = os.environ.get("MULTIRING_REPLACEMENT", "0") != "0"
    if os.environ["MULTIRING_RANK"] == "2" and not is_newcomer:
        _await(f"{folder}/asked in init")
    if not is_newcomer:
        print("waits", flush=True)
    mr.init()
    if not is_newcomer:
        try:
            _call_together()
            if mr.rank() == CULPRIT:
                os.kill(os.getpid(), signal.SIGKILL)
            mr.all_reduce(np.zeros(500, np.float32))
        except mr.PeerLost:
            pass
        if mr.rank() == 2:
            _await(f"{folder}/asked in shrink")
        print("shrinks", flush=True)
        mr.shrink()
        _await(f"{folder}/asked to be admitted")
        mr.grow()
    _call_together()
    time.sleep(0.5)  # until the recorder has looked again
    size = mr.world_size()
    mr.shutdown()
    assert not _is_handled(signal.SIGUSR2)
    return [size]


def _await(sign: str) -> None:
    until = time.monotonic() + 30
    while not Path(sign).exists():
        assert time.monotonic() < until, sign
        time.sleep(0.01)


def shrinks() -> str:
    """Rank CULPRIT is killed, the others go on, and disagree later."""
    mr.init()
    try:
        _call_together()
        if mr.rank() == CULPRIT:
            os.kill(os.getpid(), signal.SIGKILL)  # the others may still be in the last of these calls
        mr.all_reduce(np.zeros(500, np.float32))
    except mr.PeerLost:
        mr.shrink()
    _call_together()
    try:
        mr.all_reduce(np.zeros(100 + mr.rank(), np.float32))
    except mr.Mismatch as error:
        mr.shutdown()
        return f"Mismatch {error.rank}"
    return "nothing"


def many_calls() -> int:
    """More calls than are kept, in groups of which rank 0 is in more than the others, and then another size."""
    mr.init()
    group = mr.new_group([0, 2])
    x = np.zeros(10, np.float32)
    for step in range(1500):
        mr.all_reduce(x)
        if mr.rank() != CULPRIT and step % 2:
            mr.all_reduce(x, group=group)
        if mr.rank() != 2:
            mr.send(x, CULPRIT, tag=step) if mr.rank() == 0 else mr.recv(x, 0, tag=step)
    try:
        _disagree(np.zeros(11 if mr.rank() == CULPRIT else 10, np.float32))
    except mr.Mismatch as error:
        mr.shutdown()
        return error.number
    return -1
