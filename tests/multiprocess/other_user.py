"""Another user of the machine, who fills the backlog of every socket of our jobs and keeps it full.

    python other_user.py CONNECTIONS

takes the sockets that a line on its standard input names, says ``full``, and goes on connecting until the input ends.
Started by root, it becomes another user, and needs nothing of multiring.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import threading
import time
from pathlib import Path

NOBODY = 65534


def sockets() -> list[str]:
    """The abstract sockets of jobs that listen."""
    words = (line.split() for line in Path("/proc/net/unix").read_text().splitlines())
    return sorted({found[7] for found in words if len(found) > 7 and found[7].startswith("@multiring-")})


def fill(name: str, count: int, held: list[socket.socket]) -> None:
    with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
        for _ in range(count):
            sock = socket.socket(socket.AF_UNIX)
            held.append(sock)
            sock.setblocking(False)
            sock.connect("\0" + name.removeprefix("@"))


def knock(name: str) -> None:
    """Take every place that becomes free."""
    while True:
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect("\0" + name.removeprefix("@"))
            except ConnectionRefusedError:
                time.sleep(0.1)


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    held: list[socket.socket] = []
    names = sys.stdin.readline().split()
    for name in names:
        fill(name, int(sys.argv[1]), held)
    for name in names:
        for _ in range(4):
            threading.Thread(target=knock, args=(name,), daemon=True).start()
    print(f"full {len(names)} {len(held)}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
