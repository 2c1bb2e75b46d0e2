"""Hosts of a job, and the number of ranks on each."""

from __future__ import annotations

import os
import pwd
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from multiring.env import MOST_RANKS, is_ipv6, parse_whole
from multiring.files import read_text
from multiring.job.hostlist import expand
from multiring.launch import LaunchError
from multiring.net import local

NAME = r"(?P<name>\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[^\s:,=\[\]]+)"
"""A host's name or address; one of IPv6 in brackets."""

_WORD = re.compile(NAME + r"(:(?P<slots>[0-9]+))?")
_RANGES = re.compile(r"(?P<name>([^\s:,=\[\]]|\[[0-9,-]+\])+)(:(?P<slots>[0-9]+))?")
"""Names with numbers in brackets, such as node[01-04]."""


@dataclass(frozen=True)
class HostEntry:
    """A machine and how many ranks may run on it."""

    name: str
    slots: int


@dataclass(frozen=True)
class Assignment:
    """The ranks [first, first + count) of a job run on ``host``."""

    host: str
    first: int
    count: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)


def parse_hosts(text: str, option: str = "-H") -> list[HostEntry]:
    """The hosts of ``a:2,b:2``, ``n[01-04]:2`` or ``a slots=2``; a host without a number has one slot."""
    if text.count("[") != text.count("]"):
        raise LaunchError(f"{option} {text}: a bracket has no other half: write ranges as in n[01-04,7]:2")
    if "/" in text:
        raise LaunchError(f"{option} {text}: the name of a host has no '/': --hostfile reads a file of hosts")
    listed = re.sub(r"\s*=\s*", "=", text.strip())
    listed = re.sub(r"\s*,\s*|\s+(?!(max[-_]?)?slots=)", ",", listed).removesuffix(",")
    entries = re.split(r",(?![0-9,-]*\])", listed)  # at no comma within brackets
    if text.strip() and not all(entries):
        raise LaunchError(f"{option} {text}: a comma has no host beside it: expected host:ranks,host:ranks")
    return _merge(host for entry in entries for host in _hosts(entry, f"{option} {text}", "host:ranks,host:ranks"))


def read_hostfile(path: Path) -> list[HostEntry]:
    """The hosts of a file: a line ``a slots=2``, ``a:2`` or ``a`` for each, ``#`` begins a comment."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise LaunchError(f"cannot read the hostfile {path}: {getattr(error, 'strerror', None) or error}") from None
    found: list[HostEntry] = []
    for number, line in enumerate(lines, 1):
        entry = line.partition("#")[0].strip().removesuffix(",").rstrip()
        if entry:
            found += _hosts(entry, f"{path}, line {number}", "'host slots=2', 'host:2' or 'host'")
    if not found:
        raise LaunchError(f"the hostfile {path} names no host")
    return _merge(found)


def _hosts(entry: str, where: str, expected: str) -> list[HostEntry]:
    """The hosts of an entry: one, or as many as the numbers in its brackets."""
    word, *options = re.sub(r"\s*=\s*", "=", entry).split() or [""]
    given = dict(re.findall(r"^(slots|max[-_]?slots)=([0-9]+)$", "\n".join(options), re.MULTILINE))
    match = _WORD.fullmatch(word) or _RANGES.fullmatch(word)
    own = match["slots"] if match else None
    is_odd = len(given) < len(options) or (options and ("slots" not in given or own))
    name = word if match is None and _is_bare_ipv6(word, where) else match["name"] if match else ""
    if is_odd or not name or name.startswith("-") or re.fullmatch("[0-9]+", name):
        raise LaunchError(f"{where}: {entry!r} is not {expected}")
    try:
        slots = parse_whole(own or given.get("slots", "1"), 0, MOST_RANKS)
        most = min((parse_whole(value) for option, value in given.items() if option != "slots"), default=slots)
    except ValueError as error:
        raise LaunchError(f"{where}: the number of slots in {entry!r} is not {error}") from None
    if slots == 0:
        raise LaunchError(f"{where}: {entry!r} gives the host no slot")
    if slots > most:  # Open MPI's bound of what may be asked for
        raise LaunchError(f"{where}: {entry!r} gives the host more slots than it may have")
    return [HostEntry(each, slots) for each in _names(name, where)]


def _names(name: str, where: str) -> list[str]:
    if "[" not in name or ":" in name:
        return [name.strip("[]")]
    try:
        return expand(name)
    except ValueError as error:
        raise LaunchError(f"{where}: {name!r}: {error}") from None


def _is_bare_ipv6(word: str, where: str) -> bool:
    """True if it is an address without brackets; LaunchError if its end may be a number of slots as well."""
    if not is_ipv6(word):
        return False
    address, _, last = word.rpartition(":")
    if last.isdecimal() and is_ipv6(address):
        raise LaunchError(f"{where}: {word!r} may be [{word}] or [{address}]:{last}: put the address in brackets")
    return True


def _merge(hosts: Iterable[HostEntry]) -> list[HostEntry]:
    """Add up the slots of a host that is named several times, as batch systems do in their files."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [HostEntry(name, count) for name, count in slots.items()]


def place(hosts: list[HostEntry], world_size: int | None) -> list[Assignment]:
    """Fill the hosts in their order with ``world_size`` ranks (None: as many as there are slots)."""
    available = sum(host.slots for host in hosts)
    if world_size is None:
        world_size = available
    if world_size > MOST_RANKS:
        raise LaunchError(f"the hosts have {available} slots, and a job has {MOST_RANKS} ranks at most: give -n")
    if world_size > available:
        listed = ", ".join(f"{host.name} {host.slots}" for host in hosts)
        raise LaunchError(f"-n {world_size} is more than the {available} slots of the hosts ({listed}): give them more")
    assignments, first = [], 0
    for host in hosts:
        count = min(host.slots, world_size - first)
        if count:
            assignments.append(Assignment(host.name, first, count))
        first += count
    return assignments


def spread(names: list[str], world_size: int) -> list[Assignment]:
    """Divide ``world_size`` ranks evenly over the hosts, the first ones taking the rest."""
    if world_size < len(names):
        raise LaunchError(f"-n {world_size} ranks cannot be spread over {len(names)} hosts: give at least one for each")
    share, rest = divmod(world_size, len(names))
    # Two hosts may bear the same name here: each typed its own command, and only the index tells them apart.
    return _in_order([HostEntry(name, share + (index < rest)) for index, name in enumerate(names)])


def _in_order(hosts: Iterable[HostEntry]) -> list[Assignment]:
    """All slots of the hosts filled."""
    assignments, first = [], 0
    for host in hosts:
        assignments.append(Assignment(host.name, first, host.slots))
        first += host.slots
    return assignments


def together(assignments: Sequence[Assignment], machines: Sequence[str]) -> list[Assignment]:
    """The assignments with those on one machine made one, at the place of the first."""
    counts: dict[str, int] = {}
    names: dict[str, str] = {}
    for assignment, machine in zip(assignments, machines, strict=True):
        counts[machine] = counts.get(machine, 0) + assignment.count
        names.setdefault(machine, assignment.host)
    return _in_order([HostEntry(names[machine], count) for machine, count in counts.items()])


def identity() -> str:
    """Text that two names of one host share, and no two hosts, containers or users; MULTIRING_HOST parts hosts too.

    The numbers of namespaces tell apart containers that share a network, where /proc is mounted.
    """
    spaces = [file.stat().st_ino for kind in ("mnt", "pid") if (file := Path(f"/proc/self/ns/{kind}")).exists()]
    return " ".join([local.machine(), *map(str, spaces), os.environ.get("MULTIRING_HOST", "")])


def own_name() -> str:
    """Return this host's name in messages: MULTIRING_HOST, which its ranks use too, or its own name."""
    return os.environ.get("MULTIRING_HOST", "") or socket.gethostname()


def is_here(name: str) -> bool:
    """True if ``name`` is this machine, so that no ssh is needed: its own, or one whose address can be bound here.

    A user before it, as in ``me@localhost``, has to be who this process runs as.
    """
    user, _, name = name.rpartition("@")
    if user and user != _own_user():
        return False
    name = name.removesuffix(".")  # ends a name to which no domain is to be added
    own = socket.gethostname()
    if name in ("localhost", own, own.partition(".")[0]):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False  # a name that only ssh knows
    return any(_is_own(family, address) for family, _, _, _, address in found)


def _own_user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return ""  # in containers a user may have a number only


def _is_own(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind(address)
    except OSError:
        return False
    return True
