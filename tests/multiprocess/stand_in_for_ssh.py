"""What stands for ssh where there is one machine: it executes its command here."""

from __future__ import annotations

from launching import Launch

SSH = """#!/bin/sh
# What ssh does: it drops its own options, and hands the words after the host to a shell in another directory.
# MULTIRING_HOST keeps apart what is one machine here.
while [ "${1#-}" != "$1" ]; do shift; done
export FAKE_HOST=$1 MULTIRING_HOST=$1
shift
cd /
echo "Welcome to $FAKE_HOST"
exec sh -c "$*"
"""


def stand_in(launch: Launch) -> None:
    """Let the launch find it as ssh."""
    script = launch.directory / "bin/ssh"
    script.parent.mkdir()
    script.write_text(SSH)
    script.chmod(0o755)
    launch.environment["PATH"] = f"{script.parent}:{launch.environment['PATH']}"
