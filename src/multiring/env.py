"""The one table of environment variables: what a user may set, and what a launcher sets for each rank."""

from __future__ import annotations

import contextlib
import difflib
import functools
import ipaddress
import logging
import math
import operator
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

PREFIX = "MULTIRING_"

# Kubernetes gives every container such variables for a service called multiring or multiring-something.
_KUBERNETES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")

_log = logging.getLogger("multiring")
_warned: set[str] = set()
_T = TypeVar("_T")


MOST_BYTES = 1 << 63
"""Bytes from which on a number is refused as a size."""

MOST_RANKS = 1 << 19
"""Most ranks of a job: the numbers of their groups, 4096 for each, have 31 bits."""

MOST_SECONDS = 10**10
"""Longest duration that may be set, some 300 years: what is far longer overflows clocks."""

RANKS = (
    *("MULTIRING_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"),
    *("MULTIRING_STORE", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables by which launchers say which rank of which job a process is."""


def whole_number(name: str, value: Any, kind: str = "") -> int:
    """The whole number that a caller gave as ``name``, also one of NumPy's; TypeError for all else, bools included.

    ``kind`` is what such a number is called, as in "a rank".
    """
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name}={value!r}: " + (f"{kind} is a whole number" if kind else "expected a whole number"))


def parse_whole(text: str, least: int = 0, most: int = MOST_BYTES) -> int:
    """The whole number in ``text``, in the digits 0 to 9; ValueError says from where to where it may be."""
    if not re.fullmatch("[0-9]+", text) or len(text.lstrip("0")) > 20 or not least <= int(text) <= most:
        raise ValueError(f"a whole number from {least} to {_power(most)}")
    return int(text)


def _power(number: int) -> str:
    """A number as text, where it is a large power of 2, or 1 less, as such."""
    for less, ending in (0, ""), (1, " - 1"):
        power = (number + less).bit_length() - 1
        if power >= 31 and number + less == 1 << power:
            return f"2**{power}{ending}"
    return str(number)


def named_number(name: str, text: str, least: int = 0, most: int = MOST_BYTES) -> int:
    """The whole number that ``text`` has as the value of ``name``; ValueError names both, and what was expected."""
    try:
        return parse_whole(text, least, most)
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: expected {error}") from None


def _whole(least: int, most: int) -> Callable[[str], int]:
    return functools.partial(parse_whole, least=least, most=most)


def _from(least: float, about: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        written = re.fullmatch(r"\+?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", text.strip().lower())
        value = float(text) if written else math.nan
        if not least <= value <= MOST_SECONDS:
            raise ValueError(about)
        return value

    return parse


_seconds = _from(0, "seconds from 0 to 1e10, such as 60 or 0.5")
_heartbeat = _from(1, "seconds from 1 to 1e10, such as 30")


_COUNT = _whole(0, (1 << 32) - 1)
_DESCRIPTOR = _whole(0, (1 << 31) - 1)


def _flag(text: str) -> bool:
    if text.lower() not in ("0", "1", "false", "true"):
        raise ValueError("0 or 1")
    return text.lower() in ("1", "true")


def parse_size(text: str) -> int:
    """Bytes in ``text``: a number with K, M or G (powers of 1024, "MB" and "MiB" alike); ValueError otherwise."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]?)(?:I?B)?", text.strip().upper())
    if not match:
        raise ValueError("a size, such as 65536, 256K or 1.5GB")
    nbytes = float(match[1]) * 1024 ** " KMG".index(match[2] or " ")
    if nbytes >= MOST_BYTES:
        raise ValueError("a size below 2**63 bytes")
    return int(nbytes)


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text.lower()

    return parse


def _ports(text: str) -> range:
    match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    ports = range(first, last + 1)
    _check_ports(ports)
    return ports


def _check_ports(ports: range) -> None:
    if not ports or not 1 <= min(ports) <= max(ports) <= 65535:
        raise ValueError("a port or a range within 1-65535, such as 29400-29499")


def parse_addresses(text: str) -> tuple[str, ...]:
    """host:port pairs, comma-separated; an IPv6 address stands in brackets; ValueError says what was expected."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]]+):[0-9]{1,5}", part) for part in found):
        raise ValueError("host:port[,host:port...], an IPv6 address in brackets")
    if not all(1 <= split_address(part)[1] <= 65535 for part in found):
        raise ValueError("host:port[,host:port...], a port being 1 to 65535")
    return found


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of "host:port" or "[v6]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """The reverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ipv6(text: str) -> bool:
    """True if a text is an IPv6 address, without brackets."""
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def parse_wire(text: str) -> dict[str, str] | str:
    """The format in which float32 travels at each level, by level; "auto" and "" are returned as they are."""
    if text in ("", "auto"):
        return text
    found = [part.strip().partition("=") for part in text.split(",")]
    if not all(level and format for level, _, format in found):
        raise ValueError("level=format[,level=format...], such as rack=bfloat16, or auto")
    if len({level for level, _, _ in found}) != len(found):
        raise ValueError("each level once")
    return {level: format for level, _, format in sorted(found)}


def _wire(text: str) -> str:
    """The same wire is the same text."""
    found = parse_wire(text)
    return found if isinstance(found, str) else ",".join(f"{level}={format}" for level, format in found.items())


def parse_metrics(text: str) -> tuple[str, str, int]:
    """Return the target of metrics: "tcp", an address and the first port; or "unix" or "directory", a path and 0."""
    kind, _, path = text.partition(":")
    if kind == "unix" and path.startswith("/"):
        return "unix", path, 0
    if "/" in text and kind != "unix":
        return "directory", text, 0
    address = text if ":" in text else f"127.0.0.1:{text}"
    try:
        host, port = split_address(*parse_addresses(address))
    except (TypeError, ValueError):
        raise ValueError(
            "a port, address:port, unix:/path or a directory (a / in its name), such as 9400, 0.0.0.0:9400 or ./metrics"
        ) from None
    return "tcp", host, port


def _metrics(text: str) -> str:
    parse_metrics(text)
    return text


def _plan(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{12}|[a-z][a-z-]*(:\S+)?", text):
        raise ValueError("the id of a plan, 12 hexadecimal digits, or a strategy, such as ring or multiring:4x8x8")
    return text


def _knob(default: Any, parse: Callable[[str], Any], form: str, about: str, *, agree: bool = False) -> Any:
    return field(default=default, metadata={"parse": parse, "form": form, "about": about, "agree": agree})


@dataclass(frozen=True)
class Settings:
    """Settings of a user, by environment or as options of `init` (the name in lower case, without the prefix)."""

    engine: str = _knob(
        "native",
        _one_of("native", "mpi"),
        "native, mpi",
        "what moves the data: multiring's own engine, or the MPI whose mpirun or srun started the ranks",
        agree=True,
    )
    host: str = _knob("", str, "name", "name of this host; ranks with different names never share memory")
    interface: str = _knob(
        "",
        str,
        "names, networks",
        "interfaces to use: names or CIDR, comma-separated; ^ before the list excludes",
    )
    ports: range | None = _knob(
        None,
        _ports,
        "range",
        "ports to listen on, such as 29400-29499; any free one if unset; a rank takes one, and another one in `grow`",
    )
    streams: int | None = _knob(
        None,
        _whole(1, 1 << 10),
        "count",
        "TCP connections between two ranks on different hosts; 1, and one more for each core that every rank has "
        "beyond two, up to 4, and up to 256 of a rank to all others",
        agree=True,
    )
    encrypt: bool = _knob(
        False,
        _flag,
        "0 or 1",
        "encrypt what ranks and their store say over TCP ([how, and what is left out](security.md#encryption)); needs "
        "OpenSSL's libcrypto, and a secret that is one",
        agree=True,
    )
    checksum: bool = _knob(
        False,
        _flag,
        "0 or 1",
        "send a checksum with each 32 KB of what ranks say to each other over TCP, which finds [what a network alters"
        "](security.md#checksums); encrypted connections have better ones",
        agree=True,
    )
    topology: str = _knob("", str, "path", "topology file; read by rank 0, who hands it to all")
    probe: str = _knob(
        "on",
        _one_of("on", "off", "refresh"),
        "on, off, refresh",
        "whether several hosts measure the links between them when no topology is given; refresh: anew",
    )
    wire: str = _knob(
        "",
        _wire,
        "level=format,...",
        "format in which float32, metrics too, is summed between the places of a level: bfloat16, float16, float8, "
        "int8, int4 or int2; auto: bfloat16 where it pays; what it loses can be [sent "
        "later](algorithms.md#what-rounding-loses)",
        agree=True,
    )
    plan: str = _knob(
        "",
        _plan,
        "id or strategy",
        "the plan to use: by the id that `multiring plan` shows, for the calls of which it is a candidate; or for every"
        " all_reduce that of a strategy, such as ring or multiring:4x8x8 ([strategies](algorithms.md#strategies))",
        agree=True,
    )
    tune: bool = _knob(
        False,
        _flag,
        "0 or 1",
        "try several plans on the job's own calls and keep the fastest; not beside MULTIRING_PLAN",
        agree=True,
    )
    reproducible: bool = _knob(
        False,
        _flag,
        "0 or 1",
        "the same bits whatever the topology, plan and segments: contributions are summed in the order of the ranks",
        agree=True,
    )
    trace: str = _knob("", str, "path", "write a timeline of all ranks there, which Perfetto opens", agree=True)
    flight_recorder: str = _knob(
        "",
        str,
        "directory",
        "where each rank writes its last calls when the job fails, for torch's analyser"
        " ([flight records](flight-records.md))",
        agree=True,
    )
    flight_recorder_signal: str = _knob(
        "",
        _one_of("usr1", "usr2"),
        "usr1, usr2",
        "the signal on which a rank writes them while the job goes on",
    )
    metrics: str = _knob(
        "",
        _metrics,
        "port, address:port, unix:/path or directory",
        "where each rank shows [metrics](watching.md) to Prometheus: its local rank is added to the port, which is of "
        "127.0.0.1 unless an address is given",
    )
    timeout: float = _knob(
        600.0,
        _seconds,
        "seconds",
        "a collective that takes longer raises CollectiveTimeout; in torch.distributed its own timeout where that is "
        "less, and 30 min unless either is given",
    )
    heartbeat_timeout: float = _knob(
        30.0, _heartbeat, "seconds", "a rank of which nothing is heard for so long is lost", agree=True
    )
    late_warning: float = _knob(
        30.0, _seconds, "seconds", "a call that waits so long logs for whom, and again at doubling intervals"
    )
    init_timeout: float = _knob(120.0, _seconds, "seconds", "time for all ranks to arrive and to find each other")
    arena_bytes: int = _knob(1 << 28, parse_size, "size", "shared memory of a rank: staging and multiring.empty")
    blocking_wait: bool = _knob(
        False,
        _flag,
        "0 or 1",
        "the wait of a work on CUDA tensors holds the host until the device is done, and raises what went wrong",
    )
    device_threads: int | None = _knob(
        None,
        _whole(0, 1 << 10),
        "count",
        "threads of a rank that sum and copy for calls on CUDA tensors, beside the one that moves bytes; what its "
        "share of the cores leaves, 4 at most",
    )
    socket_threads: int | None = _knob(
        None,
        _whole(0, 1 << 10),
        "count",
        "threads of a rank that read and write TCP connections, beside the one that drives a call, which keeps the "
        "first of each pair of ranks; what its share of the cores leaves, 3 at most",
    )
    spin_seconds: float | None = _knob(
        None,
        _seconds,
        "seconds",
        "how long who waits keeps its core, before it gives it away for 300e-6 and sleeps; 5e-6, or 0 where ranks "
        "outnumber the cores",
    )

    @property
    def host_name(self) -> str:
        """The name of this host: the one that was given, or else the system's."""
        return self.host or os.uname().nodename


@dataclass(frozen=True)
class Launch:
    """Variables that `multiring run` sets for each rank; ``bootstrap`` translates those of other launchers."""

    rank: int | None = _knob(None, _whole(0, MOST_RANKS - 1), "count", "index of this process in the job")
    world_size: int | None = _knob(None, _whole(1, MOST_RANKS), "count", "number of processes in the job")
    local_rank: int | None = _knob(
        None, _whole(0, MOST_RANKS - 1), "count", "index of this process among those started on this host"
    )
    local_world_size: int | None = _knob(
        None, _whole(1, MOST_RANKS), "count", "number of processes started on this host"
    )
    store: tuple[str, ...] = _knob(
        (), parse_addresses, "host:port,...", "addresses at which the job's store may be reached; all are tried"
    )
    secret_file: str = _knob("", str, "path", "file with the job's secret, 16 bytes or more")
    secret_fd: int | None = _knob(None, _DESCRIPTOR, "descriptor", "inherited descriptor that yields the job's secret")
    report_fd: int | None = _knob(
        None,
        _DESCRIPTOR,
        "descriptor",
        "inherited descriptor for what a rank tells its launcher: what it does, whom it waited for, what failed it",
    )
    python: str = _knob("", str, "path", "the Python that a program linked to libmultiring.so loads; python3 if unset")
    job: str = _knob("", str, "name", "identity of the job in a launcher's store, part of every handshake", agree=True)
    restart: int = _knob(
        0, _COUNT, "count", "counts the restarts of the job, part of every handshake between ranks", agree=True
    )
    replacement: int = _knob(
        0,
        _COUNT,
        "count",
        "counts the ranks that were started again one by one; above 0, init waits until the others call grow",
    )
    max_replacements: int = _knob(
        0,
        _COUNT,
        "count",
        "most ranks that the launcher starts again; above 0, init waits for those that are lost before all have met",
    )


def _rows(table: type) -> Iterator[tuple[str, Field[Any]]]:
    return ((PREFIX + row.name.upper(), row) for row in fields(table))


NAMES = frozenset(name for table in (Settings, Launch) for name, _ in _rows(table))


def read(table: type[_T], environ: Mapping[str, str] | None = None, **options: Any) -> _T:
    """A `Settings` or `Launch` from ``environ`` (the process's if None); ``options`` win over the environment.

    Text in ``options`` is parsed as in the environment and None means not given. ValueError names the variable, its
    value and what was expected; TypeError names an unknown option.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for name, row in _rows(table):
        text = options.pop(row.name, None)
        origin = row.name
        if text is None:
            text, origin = environ.get(name), name
        parse = row.metadata["parse"]
        if isinstance(text, Mapping) and parse is _wire:
            text = ",".join(f"{key}={value}" for key, value in text.items())
        if text is None or (isinstance(text, str) and not text):
            values[row.name] = row.default
            continue
        try:
            if isinstance(text, range) and parse is _ports:
                _check_ports(text)
                values[row.name] = text
            else:
                values[row.name] = parse(str(text))
        except ValueError as error:
            raise ValueError(f"{origin}={text!r}: expected {error}") from None
    if options:
        known = ", ".join(row.name for _, row in _rows(table))
        raise TypeError(f"unknown option {sorted(options)[0]!r}; options are {known}")
    return table(**values)


def agreed(*tables: Settings | Launch) -> dict[str, str]:
    """The settings that must be equal on all ranks, as text by variable name."""
    return {
        name: "not set" if (value := getattr(table, row.name)) is None else str(value)
        for table in tables
        for name, row in _rows(type(table))
        if row.metadata["agree"]
    }


def unknown(environ: Mapping[str, str] | None = None) -> Iterator[tuple[str, str]]:
    """Each MULTIRING_* variable that does not exist, with the nearest one that does."""
    for name in sorted(os.environ if environ is None else environ):
        if name.startswith(PREFIX) and name not in NAMES and not _KUBERNETES.search(name):
            yield name, difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)[0]


def warn_unknown(environ: Mapping[str, str] | None = None) -> None:
    """Log each unknown variable, once."""
    for name, nearest in unknown(environ):
        if name not in _warned:
            _warned.add(name)
            _log.warning("unknown environment variable %s is ignored; did you mean %s?", name, nearest)


def _short(row: Field[Any]) -> str:
    default: Any = row.default
    if row.metadata["parse"] is parse_size:
        return f"{default >> 20}M"
    return default if isinstance(default, str) else f"{default:g}"


def markdown(table: type) -> str:
    """The list of settings in ``docs/settings.md``."""
    items = []
    for name, row in _rows(table):
        default = "" if row.default in (None, "", ()) else f"; default `{_short(row)}`"
        about = row.metadata["about"] + ("; must agree on all ranks" if row.metadata["agree"] else "")
        items.append(f"- **`{name}`** ({row.metadata['form']}{default}): {about}.")
    return "".join(f"{_wrapped(item)}\n" for item in items)


def _wrapped(item: str) -> str:
    return textwrap.fill(item, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
