"""A stand-in for ``multiring run`` in shells of the tests: its jobs are forked, as `forking_launcher` does it.

They have the standard streams, directory and variables of the command, and end when this is killed.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import forking_launcher

_MOST = 1 << 17  # bytes of a request, as to a fork server
_COMMAND = """#!{python} -IS
import json, os, socket, sys

if sys.argv[1:2] != ["run"]:
    os.execv({command!r}, [{command!r}, *sys.argv[1:]])
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect({address!r})
request = [sys.argv[1:], os.getcwd(), dict(os.environ)]
socket.send_fds(link, [json.dumps(request).encode()], [0, 1, 2])
sys.exit(json.loads(link.recv(100)))
"""


@contextmanager
def stand_in(folder: Path, path: str, imports: Sequence[str]) -> Iterator[str]:
    """A PATH that begins with ``folder``, which is made: ``multiring run`` forks there what has done ``imports``.

    Other words are for the command ``multiring`` of ``path``.
    """
    command = shutil.which("multiring", path=path)
    assert command, f"no command multiring on {path}: pip install makes it"
    folder.mkdir()
    address = str(folder / "socket")
    script = folder / "multiring"
    script.write_text(_COMMAND.format(python=sys.executable, address=address, command=command))
    script.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen()
        accepting = threading.Thread(target=_accept, args=(listening, imports))
        accepting.start()
        try:
            yield os.pathsep.join([str(folder), path])
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            accepting.join()


def _accept(listening: socket.socket, imports: Sequence[str]) -> None:
    running = []
    while True:
        try:
            link, _ = listening.accept()
        except OSError:  # it was shut down
            break
        running.append(threading.Thread(target=_run, args=(link, imports)))
        running[-1].start()
    for thread in running:
        thread.join()


def _run(link: socket.socket, imports: Sequence[str]) -> None:
    with link:
        packed, streams, _, _ = socket.recv_fds(link, _MOST, 3)
        words, directory, environment = json.loads(packed)
        try:
            job = forking_launcher.start_on(
                streams, *words, imports=imports, environment=environment, directory=directory
            )
        finally:
            for stream in streams:
                os.close(stream)
        while job.poll() is None:
            if select.select([link], [], [], 0.05)[0]:  # the command was killed
                job.kill()
                job.wait()
                return
        code = job.wait()
        link.send(json.dumps(code if code >= 0 else 128 - code).encode())
