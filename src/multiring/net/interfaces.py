"""The addresses of this host at which other hosts may find it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path

from multiring.errors import ResourceError

Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def addresses(interface: str = "", *, loopback: bool = False) -> list[str]:
    """Addresses of the interfaces that ``interface`` (MULTIRING_INTERFACE) admits, as `admitted` orders them."""
    return [str(ip) for _, ip in admitted(interface, loopback=loopback)]


def admitted(interface: str = "", *, loopback: bool = False) -> list[tuple[str, Ip]]:
    """The interfaces, and addresses of each, that ``interface`` (MULTIRING_INTERFACE) admits; the fastest first.

    Link-local IPv6 addresses are left out, since they mean something only together with a local interface; loopback
    ones stand last, and only if ``loopback``. ValueError if nothing is admitted by a given ``interface``.
    """
    usable = [
        (name, ip)
        for name, ip in named_addresses()
        if not (ip.version == 6 and ip.is_link_local) and (loopback or not ip.is_loopback)
    ]
    found = [(name, ip) for name, ip in usable if admits(interface, name, ip)]
    if interface and not found:
        have = ", ".join(f"{name} {ip}" for name, ip in usable) or "none"
        raise ValueError(f"MULTIRING_INTERFACE={interface!r} admits no address of this host; it has: {have}")
    return sorted(found, key=lambda entry: (entry[1].is_loopback, -_speed(entry[0]), entry[1].version))


def reachable(interface: str = "") -> list[str]:
    """The addresses that ``interface`` (MULTIRING_INTERFACE) admits, loopback ones if it admits no others."""
    found = admitted(interface, loopback=True)
    return [str(ip) for _, ip in found if not ip.is_loopback] or [str(ip) for _, ip in found]


def loopbacks() -> list[str]:
    """The addresses by which processes of this host reach each other, whatever its names stand for.

    ResourceError if there is none, which no waiting would mend.
    """
    usable, reasons = [], []
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect((address, 9))  # looks for a route and sends nothing
            usable.append(address)
        except OSError as error:
            reasons.append(f"{address}: {error.strerror}")
    if not usable:
        raise ResourceError(
            f"this host has no loopback address ({'; '.join(reasons)}), over which its processes meet: "
            "`ip link set lo up` brings it up"
        )
    return usable


def fastest(names: Iterable[str]) -> list[str]:
    """Return the interfaces that are as fast as the fastest: traffic can be divided between them equally."""
    speeds = {name: _speed(name) for name in names}
    return [name for name, speed in speeds.items() if speed == max(speeds.values())]


def admits(interface: str, name: str, ip: Ip) -> bool:
    """True if an address of the interface ``name`` may be used."""
    if not interface:
        return True
    exclude = interface.startswith("^")
    listed = any(_matches(item.strip(), name, ip) for item in interface.lstrip("^").split(","))
    return listed != exclude


def _matches(item: str, name: str, ip: Ip) -> bool:
    if item == name:
        return True
    try:
        return ip in ipaddress.ip_network(item, strict=False)
    except ValueError:
        return False


def named_addresses() -> list[tuple[str, Ip]]:
    """Every address of this host with the name of its interface."""
    import ifaddr  # not needed by a world of one

    return [
        (adapter.nice_name, ipaddress.ip_address(ip.ip if isinstance(ip.ip, str) else ip.ip[0]))
        for adapter in ifaddr.get_adapters()
        for ip in adapter.ips
    ]


def hardware(name: str) -> str:
    """The address of a card by which its network knows it, "" if there is none."""
    try:
        return Path("/sys/class/net", name, "address").read_text().strip()
    except OSError:
        return ""


def _speed(name: str) -> int:
    """Mbit/s as the driver reports it, -1 if it does not."""
    try:
        return int(Path("/sys/class/net", name, "speed").read_text())
    except (OSError, ValueError):
        return -1
