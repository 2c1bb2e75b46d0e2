"""OpenSSH's servers on loopback, or on hosts of a lab, with keys of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from free_ports import free_port

from multiring.lab import LabHost

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")


@contextlib.contextmanager
def serving(directory: Path, hosts: Mapping[str, str], lab: Sequence[LabHost] = ()) -> Iterator[Path]:
    """Serve ``hosts``, each with further lines of options; yield the file of ssh's options.

    Those that are hosts of a ``lab`` are served there, others on this machine's loopback.
    """
    for name in ("user", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)], check=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where root's sshd keeps what it trusts least
    options = directory / "ssh"
    places = {host.name: (host.addresses[0], host.enter()) for host in lab}
    with contextlib.ExitStack() as stack, options.open("w") as written:
        for host, lines in hosts.items():
            address, entered = places.get(host, ("127.0.0.1", []))
            port = free_port()
            served = directory / f"sshd-{host}"
            served.write_text(
                f"Port {port}\nListenAddress {address}\nHostKey {directory}/host\n"
                f"AuthorizedKeysFile {directory}/user.pub\nStrictModes no\n"
                f"UsePAM no\nPasswordAuthentication no\nPidFile none\n{lines}\n"
            )
            written.write(
                f"Host {host}\n HostName {address}\n Port {port}\n IdentityFile {directory}/user\n"
                f" StrictHostKeyChecking accept-new\n UserKnownHostsFile {directory}/known\n"
            )
            command = [*entered, str(SSHD), "-D", "-e", "-f", str(served)]
            server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            stack.callback(_end, server)
            _wait_for(server)
        written.flush()
        yield options


def _end(server: subprocess.Popen[str]) -> None:
    """End a server, and not its sessions, which may go on behind a cut network until their lab ends them."""
    server.send_signal(signal.SIGTERM)
    server.wait(30)
    assert server.stderr is not None
    server.stderr.close()


def _wait_for(server: subprocess.Popen[str]) -> None:
    assert server.stderr is not None
    said = []
    for line in server.stderr:
        if "Server listening on" in line:
            return
        said.append(line)
    pytest.fail(f"sshd does not serve: {''.join(said)}")
