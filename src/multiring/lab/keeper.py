"""The process that a lab's namespaces live and die with.

It runs in the namespace of the switches and holds those of the hosts open, so all of them, and the interfaces in
them, go when it ends, however it ends. It reads one line of JSON (what to hold), answers with one (where it is, null
if another lab has the directory), and then waits: for ``detach``, after which it stays until it is killed, or for the
end of its input, when it clears the lab away.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from multiring.lab.directory import HOSTS, LOG, claim, clear
from multiring.lab.forwarder import forward, open_tap

NAMESPACES = {"mount": "mnt", "uts": "uts", "ipc": "ipc", "net": "net"}
"""nsenter's name for each kind of namespace that a host has of its own, and the kernel's."""

IPV6_DEFAULTS = Path("/proc/sys/net/ipv6/conf/default/addr_gen_mode")
"""Kernel setting that is 1 where new interfaces give themselves no addresses; missing on a machine without IPv6."""

# A host has its own name, interfaces, shared memory and list of hosts. Of /sys only the interfaces are its own. ARP
# answers for an address only on the card that has it, since all cards of a host may hang from one switch.
_MAKE_HOST = f"""
echo "$1" > /proc/sys/kernel/hostname
[ ! -e {IPV6_DEFAULTS} ] || echo 1 > {IPV6_DEFAULTS}
echo 1 > /proc/sys/net/ipv4/conf/all/arp_ignore
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t sysfs sysfs /mnt
mount --bind /mnt/class/net /sys/class/net
mount --bind /mnt/devices/virtual/net /sys/devices/virtual/net
umount --lazy /mnt
mount --bind "$2" /etc/hosts
echo made
read -r _
"""


def main(directory: Path) -> None:
    """Make and hold the lab of ``directory``, whose lock this process has from then on."""
    line = sys.stdin.readline()
    if not line.endswith("\n"):
        return  # whoever wanted the lab is gone
    wanted = json.loads(line)
    if claim(directory) is None:
        print("null", flush=True)
        return
    with (directory / LOG).open("w") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    for name, text in wanted["files"].items():
        (directory / name).write_text(text)
    if _hold(wanted, directory / HOSTS):
        clear(directory)


def _hold(wanted: dict[str, Any], hosts_file: Path) -> bool:
    """Make the hosts and forwarders and wait for ever, or until the input ends without a ``detach``: then True."""
    if IPV6_DEFAULTS.exists():
        IPV6_DEFAULTS.write_text("1")
    namespaces = {host: _hold_host(host, hosts_file) for host in wanted["hosts"]}
    forwarders = _fork_forwarders(wanted["delays"])
    with contextlib.suppress(BrokenPipeError):  # whoever wanted the lab is gone, so the input ends too
        print(json.dumps(namespaces), flush=True)
    poll = select.poll()
    for descriptor in (sys.stdin.fileno(), *forwarders):
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in forwarders:
                raise SystemExit("a forwarder has ended, and with it the lab")
            if sys.stdin.readline() != "detach\n":
                return True
            poll.unregister(descriptor)


def _hold_host(name: str, hosts_file: Path) -> dict[str, str]:
    """The paths under which the namespaces of a new host can be entered."""
    unshare = ["unshare", "--mount", "--uts", "--ipc", "--net"]
    command = [*unshare, "sh", "-euc", _MAKE_HOST, "sh", name, str(hosts_file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        if maker.stdout.readline() != "made\n":
            raise SystemExit(f"cannot make host {name}")
        return {
            kind: f"/proc/{os.getpid()}/fd/{os.open(f'/proc/{maker.pid}/ns/{file}', os.O_RDONLY)}"
            for kind, file in NAMESPACES.items()
        }


def _fork_forwarders(delays: list[tuple[str, str, float]]) -> list[int]:
    """The pidfds of processes that forward between new pairs of TAP devices for as long as this one lives."""
    keeper_lives, keeper_end = os.pipe()
    forwarders = []
    for inner, outer, delay in delays:
        taps = open_tap(inner), open_tap(outer)
        process = os.fork()
        if process == 0:
            try:
                os.close(keeper_end)
                forward(*taps, delay, until=keeper_lives)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        forwarders.append(os.pidfd_open(process))
        for tap in taps:
            os.close(tap)
    os.close(keeper_lives)
    return forwarders


if __name__ == "__main__":
    main(Path(sys.argv[1]))
