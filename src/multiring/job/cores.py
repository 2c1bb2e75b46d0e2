"""The cores that this process may use, and their division among the ranks of its host."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Binding(str, Enum):
    """Parts of the machine that a rank may be bound to."""

    core = "core"
    numa = "numa"
    none = "none"


@dataclass(frozen=True)
class Core:
    """A physical core: those of its hardware threads that this process may use, and its NUMA domain."""

    cpus: tuple[int, ...]
    domain: int


@dataclass(frozen=True)
class Share:
    """CPUs to bind a rank to (none: not bound) and its number of threads."""

    cpus: tuple[int, ...]
    threads: int

    def __str__(self) -> str:
        bound = f"bound to CPUs {format_list(self.cpus)}" if self.cpus else "not bound"
        return f"{bound}, {self.threads} thread{'s' if self.threads > 1 else ''}"


def divide(cores: Sequence[Core], quota: float | None, ranks: int, binding: str) -> list[Share]:
    """The shares of ``ranks`` ranks, in their order.

    ``quota`` is CPU time that a cgroup grants, in CPUs. It bounds the number of threads and not the binding: it says
    how much may be used, not which. Of ranks that outnumber the hardware threads "core" binds each to one, if all
    threads get equally many, and none otherwise.
    """
    if ranks > len(cores):
        cores = [Core((cpu,), core.domain) for core in cores for cpu in core.cpus]
    usable = len(cores) if quota is None else min(len(cores), int(quota))
    even = max(1, usable // ranks)
    is_uneven = ranks > len(cores) and ranks % len(cores) != 0
    if binding == "none" or (binding == "core" and is_uneven):
        return [Share((), even)] * ranks
    if binding == "numa":
        domains = _domains(cores)
        return [Share(_cpus(domains[rank * len(domains) // ranks]), even) for rank in range(ranks)]
    if ranks > len(cores):
        # The kernel cannot tell who waits from who works, and leaves three on one core and one on another for a while.
        return [Share(cores[rank * len(cores) // ranks].cpus, even) for rank in range(ranks)]
    shares = _split_by_domain(cores, ranks)
    threads = min(even, *(len(share) for share in shares))
    return [Share(_cpus(share), threads) for share in shares]


def _domains(cores: Sequence[Core]) -> list[list[Core]]:
    return [[core for core in cores if core.domain == domain] for domain in sorted({core.domain for core in cores})]


def _split_by_domain(cores: Sequence[Core], ranks: int) -> list[list[Core]]:
    """Contiguous shares that differ by one core at most; none crosses a NUMA domain where the numbers allow it."""
    domains = _domains(cores)
    if all(len(domain) * ranks % len(cores) == 0 for domain in domains):
        parts = [(domain, len(domain) * ranks // len(cores)) for domain in domains]
    else:
        parts = [([core for domain in domains for core in domain], ranks)]
    return [part[i * len(part) // n : (i + 1) * len(part) // n] for part, n in parts for i in range(n)]


def _cpus(cores: Iterable[Core]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core.cpus))


def allowed_cores(sysfs: Path = Path("/sys"), affinity: Iterable[int] | None = None) -> list[Core]:
    """The physical cores that this process may use, by NUMA domain and number."""
    allowed = set(os.sched_getaffinity(0) if affinity is None else affinity)
    domain_of = {
        cpu: int(path.parent.name[len("node") :])
        for path in sysfs.glob("devices/system/node/node[0-9]*/cpulist")
        for cpu in parse_list(path.read_text())
    }
    cores = set()
    for cpu in allowed:
        siblings = sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        together = parse_list(siblings.read_text()) if siblings.exists() else [cpu]
        cores.add(Core(tuple(sorted(allowed.intersection(together) | {cpu})), domain_of.get(cpu, 0)))
    return sorted(cores, key=lambda core: (core.domain, core.cpus))


def parse_list(text: str) -> list[int]:
    """The numbers of the kernel's list format, ``0-3,8``."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def format_list(numbers: Sequence[int]) -> str:
    """The reverse of `parse_list`, for ascending ``numbers``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def cgroup_quota(sysfs: Path = Path("/sys"), proc: Path = Path("/proc")) -> float | None:
    """The CPUs' worth of time that the control groups (v2 or v1) of this process grant, None for no limit."""
    memberships = proc / "self/cgroup"
    limits: list[float] = []
    for line in memberships.read_text().splitlines() if memberships.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _limits(sysfs / "fs/cgroup", path, _limit_v2)
            limits += _limits(sysfs / "fs/cgroup/unified", path, _limit_v2)
        elif "cpu" in controllers.split(","):
            limits += _limits(sysfs / "fs/cgroup" / controllers, path, _limit_v1)
            limits += _limits(sysfs / "fs/cgroup/cpu", path, _limit_v1)
    return min(limits, default=None)


def _limits(mount: Path, path: str, read: Callable[[Path], float | None]) -> Iterator[float]:
    """The limits of a group and of those above it; in a container only the mount may exist."""
    group = mount / path.lstrip("/")
    for directory in (group, *group.parents):
        limit = read(directory)
        if limit is not None:
            yield limit
        if directory == mount:
            return


def _limit_v2(group: Path) -> float | None:
    return _ratio(*_words(group / "cpu.max"))


def _limit_v1(group: Path) -> float | None:
    return _ratio(*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us"))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []  # no such group, or no such controller in it


def _ratio(*words: str) -> float | None:
    """CPUs of ("quota", "period"); "max" and -1 are no limit."""
    if len(words) != 2 or words[0] in ("max", "-1"):
        return None
    return int(words[0]) / int(words[1])
