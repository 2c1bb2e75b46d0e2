"""Introduction of a rank to all others in the first round, and how another rank finds it by that."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multiring import _native, env, version
from multiring.errors import RendezvousError
from multiring.job.checks import Terms
from multiring.job.cores import cgroup_quota, format_list, parse_list
from multiring.job.exchange import Record
from multiring.net import interfaces, local
from multiring.net.dial import Address
from multiring.planning.speeds import RankPlacement

_MOST_CONNECTIONS = 256
"""Most connections of a rank to all others: a process has 1024 descriptors, unless it was given more."""


@dataclass(frozen=True)
class Introduction:
    """A rank's version, settings, host and processors, and the addresses at which it can be reached."""

    version: str
    agreed: Mapping[str, str]
    """The settings that must be the same on all ranks, by name."""
    host: str
    machine: str
    """Text that ranks share which may share memory."""
    kernel: str
    unix: str
    """The name of its abstract unix socket."""
    addresses: tuple[Address, ...]
    """Addresses for other hosts, loopback included; the fastest interfaces first."""
    cards: tuple[str, ...]
    """The interface of each address."""
    fastest: tuple[str, ...]
    """The interfaces between which traffic can be divided equally."""
    hardware: tuple[str, ...]
    """The addresses by which networks know its cards."""
    cpus: frozenset[int]
    quota: float | None
    """The CPU time that its control group grants, in CPUs; None for no limit."""

    def encode(self) -> Record:
        """Return the fields as a record for JSON."""
        return {**vars(self), "cpus": format_list(sorted(self.cpus))}

    @classmethod
    def decode(cls, record: Record, rank: int) -> Introduction:
        """The reverse of `encode`; RendezvousError if ``rank`` introduces itself otherwise than this version does."""
        try:
            return cls(
                version=record["version"],
                agreed=dict(record["agreed"]),
                host=record["host"],
                machine=record["machine"],
                kernel=record["kernel"],
                unix=record["unix"],
                addresses=tuple((str(host), int(port)) for host, port in record["addresses"]),
                cards=tuple(record["cards"]),
                fastest=tuple(record["fastest"]),
                hardware=tuple(record["hardware"]),
                cpus=frozenset(parse_list(record["cpus"])),
                quota=record["quota"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else f"cannot be read ({error})"
            raise RendezvousError(
                f"what rank {rank} says of itself {what}: it is not that of multiring {version.__version__}, so "
                "install the same version everywhere",
                rank=rank,
            ) from error

    @property
    def terms(self) -> Terms:
        """Return the settings that must be the same on all ranks."""
        return Terms(self.host, self.agreed)

    def claims_host_of(self, other: Introduction) -> bool:
        """True if both say that they share a host, and may share its memory."""
        return (self.host, self.machine) == (other.host, other.machine)

    def addresses_for(self, other: Introduction) -> list[Address]:
        """Return this rank's addresses for ``other``; loopback is one on the same machine alone, and first there."""
        same = self.machine == other.machine
        found = [address for address in self.addresses if same or not _is_loopback(address)]
        return found[::-1] if same else found

    def cards_for(self, other: Introduction) -> list[list[Address]]:
        """The addresses at which ``other`` may find this rank, by card; on the same machine there are none."""
        return [self.addresses_for(other)] if self.machine == other.machine else self.usable_cards()

    def usable_cards(self) -> list[list[Address]]:
        """The addresses at which other machines may find this rank, by card, for the cards that are used as equals."""
        cards: dict[str, list[Address]] = {}
        for address, card in zip(self.addresses, self.cards, strict=True):
            if card in self.fastest and not _is_loopback(address):
                cards.setdefault(card, []).append(address)
        return list(cards.values())

    def placement(self, host: str) -> RankPlacement:
        """Return the rank's placement, with ``host`` as the one that it has proved to be on."""
        return RankPlacement(host, self.kernel, self.cpus, self.quota)

    def identity(self, host: str) -> list[str]:
        """Return the texts that tell its ``host`` from others: name, cards and addresses."""
        return [host, *self.hardware, *sorted(address for address, _ in self.addresses)]


def introduce(world_size: int, settings: env.Settings, unix_name: str, own: Sequence[Address]) -> Introduction:
    """Return the introduction of this rank; ``own`` are the addresses at which it listens.

    ResourceError where the machine cannot be told from others.
    """
    ports = dict(own)
    cards = [card for card in interfaces.admitted(settings.interface, loopback=True) if str(card[1]) in ports]
    return Introduction(
        version=version.__version__,
        agreed={"the number of ranks": str(world_size), **env.agreed(settings)},
        host=settings.host_name,
        machine=local.machine(),
        kernel=local.kernel(),
        unix=unix_name,
        addresses=tuple((str(ip), ports[str(ip)]) for _, ip in cards),
        cards=tuple(name for name, _ in cards),
        fastest=tuple(interfaces.fastest(name for name, ip in cards if not ip.is_loopback)),
        hardware=tuple(sorted({interfaces.hardware(name) for name, ip in cards if not ip.is_loopback})),
        cpus=frozenset(os.sched_getaffinity(0)),
        quota=cgroup_quota(),
    )


def fitting_streams(introductions: Sequence[Introduction]) -> int:
    """The connections between two ranks on different hosts that the cores of all ranks have threads for.

    A caller and the progress thread take two cores of a rank, and serve one connection; each further one has a thread
    of its own (csrc/socket_threads.cpp), where the rank has a core for that.
    """
    machines: dict[str, list[Introduction]] = {}
    for each in introductions:
        machines.setdefault(each.kernel, []).append(each)
    least = float(_native.MOST_STREAMS + 1)
    for ranks in machines.values():
        cores = float(len(frozenset().union(*(rank.cpus for rank in ranks))))
        least = min(least, min([cores, *(rank.quota for rank in ranks if rank.quota is not None)]) / len(ranks))
    return max(1, min(int(least) - 1, _native.MOST_STREAMS, _MOST_CONNECTIONS // len(introductions)))


def _is_loopback(address: Address) -> bool:
    return ipaddress.ip_address(address[0]).is_loopback
