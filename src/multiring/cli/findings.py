"""Findings of ``multiring doctor``: each function yields those about one subject."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib import metadata
from pathlib import Path

from multiring import env
from multiring.errors import MultiringError
from multiring.job import bootstrap
from multiring.job.checks import check_settings, topology_text
from multiring.job.cores import allowed_cores, cgroup_quota, format_list
from multiring.net import interfaces, listen
from multiring.simulate import forced
from multiring.version import __version__

PROBE_BYTES = 1 << 20


class State(str, Enum):
    """``stop``: a job will not run like this; ``note``: it will, but with a limit worth knowing."""

    ok = "ok"
    note = "note"
    stop = "stop"


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``remedy`` says what to do unless all is well."""

    about: str
    state: State
    found: str
    remedy: str = ""


def all_findings() -> list[Finding]:
    """Everything that can be known of this host without starting a job."""
    findings = [*_versions(), *_engine(), *_cores(), *_descriptors(), *_settings()]
    try:
        settings = env.read(env.Settings)
    except ValueError:
        settings = env.read(env.Settings, {})  # the bad variable is among the findings
    return [*findings, *_memory(settings), *_network(settings), *_secret(), *_frameworks()]


def _versions() -> Iterator[Finding]:
    libc, version = platform.libc_ver()
    host = f"Python {platform.python_version()}, Linux {platform.release()}, {libc} {version}, {platform.machine()}"
    yield Finding("version", State.ok, f"multiring {__version__}, {host}")


def _engine() -> Iterator[Finding]:
    try:
        from multiring import _native
    except ImportError as error:
        remedy = "install the wheel that fits this Python and machine, or build from source with a C++20 compiler"
        yield Finding("engine", State.stop, str(error), remedy)
    else:
        yield Finding("engine", State.ok, ", ".join(f"{name} {value}" for name, value in _native.features().items()))


def _cores() -> Iterator[Finding]:
    cores = allowed_cores()
    cpus = sorted(cpu for core in cores for cpu in core.cpus)
    found = f"{len(cores)} cores may be used (CPUs {format_list(cpus)} of {os.cpu_count()})"
    quota = cgroup_quota()
    if quota is not None and quota < len(cores):
        remedy = "start fewer ranks here, or raise the quota"
        yield Finding("cores", State.note, f"{found}, but a control group grants the time of {quota:g}", remedy)
    else:
        yield Finding("cores", State.ok, found)


def _descriptors() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding("descriptors", State.ok, f"a process may open {soft} (up to {hard})")


def _settings() -> Iterator[Finding]:
    for check in (_check_user_settings, partial(env.read, env.Launch)):
        try:
            check()
        except (ValueError, MultiringError) as error:
            yield Finding("settings", State.stop, str(error), "correct the variable or unset it")
    for name, nearest in env.unknown():
        yield Finding("settings", State.note, f"{name} is no variable of multiring", f"did you mean {nearest}?")


def _check_user_settings() -> None:
    """The error that every rank would raise."""
    settings = env.read(env.Settings)
    check_settings(settings)
    forced.wanted(settings.plan, settings.wire)
    topology_text(settings)


def _memory(settings: env.Settings) -> Iterator[Finding]:
    arena, available = settings.arena_bytes, _available_memory()
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < arena:
        found = f"a limit of file sizes leaves a rank {limit >> 10} KB of the {arena >> 20} MB that it wants"
        yield Finding("shared memory", State.note, found, "raise ulimit -f")
        return
    try:
        _allocate_sealed(PROBE_BYTES)
    except OSError as error:
        remedy = "raise the memory limit of this host or container"
        yield Finding("shared memory", State.stop, f"none can be allocated and sealed: {error.strerror}", remedy)
        return
    found = f"a rank takes {arena >> 20} MB, {available >> 20} MB are available"
    if arena > available:
        yield Finding("shared memory", State.stop, found, "set MULTIRING_ARENA_BYTES to less, or free memory")
    else:
        yield Finding("shared memory", State.ok, found)


def _allocate_sealed(nbytes: int) -> None:
    descriptor = os.memfd_create("multiring-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    finally:
        os.close(descriptor)


def _available_memory() -> int:
    """Bytes that the kernel would give without ending a process for it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _network(settings: env.Settings) -> Iterator[Finding]:
    try:
        usable = interfaces.addresses(settings.interface)
    except ValueError as error:
        yield Finding("addresses", State.stop, str(error), "correct MULTIRING_INTERFACE or unset it")
        return
    named = [f"{name} {ip}" for name, ip in interfaces.named_addresses() if str(ip) in usable]
    if named:
        yield Finding("addresses", State.ok, ", ".join(named))
    else:
        remedy = "give the host an address if other hosts are to take part"
        yield Finding("addresses", State.note, "loopback only: the ranks of a job must all be on this host", remedy)
    yield _port(settings.ports)


def _port(ports: range | None) -> Finding:
    asked = f"{ports[0]}-{ports[-1]}" if ports else "any"
    try:
        listening = listen.bind("", ports)
    except MultiringError as error:
        return Finding("ports", State.stop, str(error), "set MULTIRING_PORTS to a range that is free")
    port = listening.getsockname()[1]
    listening.close()
    return Finding("ports", State.ok, f"{port} is free (allowed: {asked})")


def _secret() -> Iterator[Finding]:
    try:
        given = bootstrap.given_secret(env.read(env.Launch))
    except (ValueError, MultiringError) as error:
        yield Finding("secret", State.stop, str(error), "write 16 random bytes or more to a file of yours")
        return
    if given is not None:
        yield Finding("secret", State.ok, "given: every connection proves that it knows it; data travel in clear")
        return
    found = "`multiring run` makes one for each job; under torchrun the job's store hands it to whoever asks"
    yield Finding("secret", State.note, found, "set MULTIRING_SECRET_FILE on all hosts to keep out more than strays")


def _frameworks() -> Iterator[Finding]:
    yield Finding("framework", State.ok, f"numpy {metadata.version('numpy')}")
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield Finding("framework", State.note, "no torch in this environment", "install torch to train with it")
        return
    registered = any(entry.name == "multiring" for entry in metadata.entry_points(group="torch.backends"))
    if registered:
        yield Finding("framework", State.ok, f'torch {version}, which knows the backend "multiring"')
    else:
        remedy = "install the multiring package in this environment, or `import multiring.torch` in the script"
        yield Finding("framework", State.note, f'torch {version}, which does not know the backend "multiring"', remedy)
