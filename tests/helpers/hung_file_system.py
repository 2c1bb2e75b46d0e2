"""A file system that never answers: who opens a file of it waits in the kernel, where no signal reaches it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

# <linux/fuse.h>
_REQUEST = struct.Struct("=IIQQIIIHH")
_REPLY = struct.Struct("=IiQ")
_INIT, _BUFFER = 26, 1 << 17
_INIT_REPLY = struct.Struct("=IIIIHHIIHHII24x")

_MNT_DETACH = 2


@contextlib.contextmanager
def mounted(directory: Path) -> Iterator[None]:
    """Mount it on a directory. At the end those that wait get an error."""
    device = os.open("/dev/fuse", os.O_RDWR)
    try:
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
        if _libc.mount(b"hung", os.fsencode(directory), b"fuse", 0, options) != 0:
            raise OSError(ctypes.get_errno(), "mount")
        serving = [sys.executable, __file__, str(device)]
        with subprocess.Popen(serving, pass_fds=[device], stdout=subprocess.PIPE) as server:
            os.close(device)
            try:
                assert server.stdout is not None
                assert server.stdout.readline() == b"ready\n"
                yield
            finally:
                server.kill()  # with it the connection ends
                _libc.umount2(os.fsencode(directory), _MNT_DETACH)
    except BaseException:
        _libc.umount2(os.fsencode(directory), _MNT_DETACH)
        raise


def obstacle() -> str | None:
    """The reason that there can be none here; None if there can."""
    if os.geteuid() != 0:
        return "needs root"
    return None if os.access("/dev/fuse", os.W_OK) else "needs /dev/fuse"


def _serve(device: int) -> None:
    """Answer the first request, and no other."""
    while True:
        request = os.read(device, _BUFFER)
        _, operation, number, *_ = _REQUEST.unpack_from(request)
        if operation == _INIT:
            said = _INIT_REPLY.pack(7, 31, 0, 0, 1, 1, 4096, 1, 0, 0, 0, 0)
            os.write(device, _REPLY.pack(_REPLY.size + len(said), 0, number) + said)
            print("ready", flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
