"""Checks before a job comes together: settings that contradict one another, or differ between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multiring import _native, env
from multiring.errors import RendezvousError
from multiring.files import read_text
from multiring.planning import topology_file
from multiring.planning.plan import is_id
from multiring.planning.planner import check_wire
from multiring.planning.strategies import Strategy
from multiring.planning.topology import Topology


@dataclass(frozen=True)
class Terms:
    """Settings, by name, in which all ranks must agree, and the host on which a rank has them."""

    host: str
    agreed: Mapping[str, str]


def difference(one: str, its: Terms, other: str, theirs: Terms) -> str:
    """Both sides of the first setting in which two ranks differ that must agree; "" if they do."""
    for name, value in its.agreed.items():
        if value != theirs.agreed[name]:
            return (
                f"{name} is {value or 'not set'} on {one} (host {its.host}) and {theirs.agreed[name] or 'not set'} on "
                f"{other} (host {theirs.host}): it must be the same everywhere"
            )
    return ""


def check_settings(settings: env.Settings) -> None:
    """RendezvousError for settings that contradict one another, wherever the job runs.

    ResourceError if what one of them needs is not here.
    """
    trace, engine = f"MULTIRING_TRACE={settings.trace}", f"MULTIRING_ENGINE={settings.engine}"
    wire, plan = f"MULTIRING_WIRE={settings.wire}", f"MULTIRING_PLAN={settings.plan}"
    if settings.trace and settings.engine != "native":
        raise _contradiction(trace, engine, "the native engine alone notes what happens when")
    if settings.flight_recorder and settings.engine != "native":
        flight = f"MULTIRING_FLIGHT_RECORDER={settings.flight_recorder}"
        raise _contradiction(flight, engine, "the native engine alone keeps its last calls")
    if settings.flight_recorder_signal and not settings.flight_recorder:
        raise RendezvousError(
            f"MULTIRING_FLIGHT_RECORDER_SIGNAL={settings.flight_recorder_signal} without MULTIRING_FLIGHT_RECORDER: "
            "name the directory to write to as well"
        )
    if settings.encrypt and settings.engine != "native":
        raise _contradiction("MULTIRING_ENCRYPT=1", engine, "MPI moves the data, in clear; the native engine encrypts")
    if settings.encrypt:
        _native.load_libcrypto()
    if settings.checksum and settings.engine != "native":
        raise _contradiction("MULTIRING_CHECKSUM=1", engine, "MPI moves the data; the native engine sums what it moves")
    if settings.reproducible and settings.wire:
        why = "where a sum is rounded to a narrower format depends on where the ranks are"
        raise _contradiction(wire, "MULTIRING_REPRODUCIBLE", why)
    if settings.reproducible and settings.plan and not is_id(settings.plan):
        raise _contradiction(plan, "MULTIRING_REPRODUCIBLE", "the strategy sums in an order of its own")


def _contradiction(one: str, other: str, why: str) -> RendezvousError:
    return RendezvousError(f"{one} and {other} do not go together: {why}")


def check_strategy(strategy: Strategy | None, topology: Topology) -> None:
    """RendezvousError if the strategy to force has no plan for this topology."""
    if strategy is None:
        return
    try:
        strategy.plan(topology, 1)
    except ValueError as error:
        raise RendezvousError(f"MULTIRING_PLAN={strategy.name}: {error}") from None


def check_formats(settings: env.Settings, topology: Topology) -> None:
    """RendezvousError if MULTIRING_WIRE names a level that the topology does not have."""
    try:
        check_wire(env.parse_wire(settings.wire), topology)
    except ValueError as error:
        raise RendezvousError(f"{error} (of init, or MULTIRING_WIRE)") from None


def topology_text(settings: env.Settings) -> str:
    """The content of the topology file, "" if none is given; RendezvousError if it cannot be read."""
    if not settings.topology:
        return ""
    path = Path(settings.topology)
    try:
        topology_file.load(path)  # what is wrong in it is said of the file, before it is handed to all
        return read_text(path)
    except OSError as error:
        raise RendezvousError(f"MULTIRING_TOPOLOGY={path}: {error.strerror}") from None


def topology_of(text: str, hosts: Sequence[str]) -> Topology:
    """Return the topology of the job's hosts from the file; without a file, two levels with the usual links."""
    return topology_file.parse(text).assign(hosts) if text else Topology.of_hosts(hosts)
