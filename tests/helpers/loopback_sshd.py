"""OpenSSH's servers on loopback, with keys of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from free_ports import free_port

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")


@contextlib.contextmanager
def serving(directory: Path, hosts: Mapping[str, str]) -> Iterator[Path]:
    """Serve ``hosts``, each on this machine with further lines of options; yield the file of ssh's options."""
    for name in ("user", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)], check=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where root's sshd keeps what it trusts least
    options = directory / "ssh"
    with contextlib.ExitStack() as stack, options.open("w") as written:
        for host, lines in hosts.items():
            port = free_port()
            served = directory / f"sshd-{host}"
            served.write_text(
                f"Port {port}\nListenAddress 127.0.0.1\nHostKey {directory}/host\n"
                f"AuthorizedKeysFile {directory}/user.pub\nStrictModes no\n"
                f"UsePAM no\nPasswordAuthentication no\nPidFile none\n{lines}\n"
            )
            written.write(
                f"Host {host}\n HostName 127.0.0.1\n Port {port}\n IdentityFile {directory}/user\n"
                f" StrictHostKeyChecking accept-new\n UserKnownHostsFile {directory}/known\n"
            )
            server = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(served)], stderr=subprocess.PIPE, text=True)
            stack.callback(server.communicate, timeout=30)
            stack.callback(server.send_signal, signal.SIGTERM)
            _wait_for(port, server)
        written.flush()
        yield options


def _wait_for(port: int, server: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    server.kill()
    pytest.fail(f"sshd does not serve: {server.communicate()[1]}")
