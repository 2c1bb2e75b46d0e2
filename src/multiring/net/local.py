"""Ranks of one host: that they share it is proved by a unix socket, over which they pass each other their memory.

An abstract unix socket can be reached from its own network namespace only, and the kernel names the user at the other
end (unix.py). Both ranks then prove the job's secret, and each passes the descriptors of its memory and its doorbell.
The socket stays open: its end tells of the rank's death.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from multiring.errors import RendezvousError, ResourceError, system_message
from multiring.net import auth, unix
from multiring.net.local_engine import LocalEngine

LOOK_SECONDS = 1.0
"""Between two looks whether those that have not come yet are still there."""

PROC = Path("/proc")

_log = logging.getLogger("multiring")


def kernel() -> str:
    """Text that ranks of one machine share, in containers or not; ResourceError without /proc."""
    with _in_words():
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def machine() -> str:
    """Text of kernel, network namespace and user of ranks that may share memory; ResourceError without /proc."""
    with _in_words():
        return f"{kernel()} {os.stat(PROC / 'self/ns/net').st_ino} {os.getuid()}"


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "mount /proc in this container or chroot (mount -t proc proc /proc)"
        raise ResourceError(
            f"cannot tell which machine this is: {error.filename}: {error.strerror}; {remedy}"
        ) from None


def attach(
    engine: LocalEngine,
    listening: socket.socket,
    names: Mapping[int, str],
    secret: bytes,
    mine: auth.Hello,
    deadline: float,
    failure: Callable[[], BaseException | None] = lambda: None,
) -> list[int]:
    """Attach the ranks that can be reached by their sockets' ``names``, and return them.

    The higher rank of a pair connects. A rank dials the lower ones before it answers the higher ones, so each waits
    only for lower ranks, and there is no cycle. RendezvousError names a rank that has ended meanwhile, and those that
    have not come at ``deadline``; what ``failure`` returns in the meantime is raised.
    """
    mine = replace(mine, role=auth.LOCAL, encrypted=False)  # nothing leaves the host
    present = [peer for peer in sorted(names) if unix.exists(names[peer])]
    lower = [peer for peer in present if peer < mine.rank]
    higher = {peer for peer in present if peer > mine.rank}
    for peer in lower:
        sock = None
        try:
            sock = unix.connect(names[peer], _remaining(deadline, [peer]))
            auth.run(sock, auth.client(secret, replace(mine, peer=peer)), _remaining(deadline, [peer]))
            sock.settimeout(_remaining(deadline, [peer]))
            _exchange(engine, sock, peer)
        except (OSError, auth.Refused) as error:
            if sock is not None:
                sock.close()
            raise RendezvousError(
                f"rank {mine.rank} cannot attach rank {peer} of its host: {error}", rank=peer
            ) from error
    strangers: set[str] = set()
    next_look = time.monotonic() + LOOK_SECONDS
    while higher:
        lost = failure()
        if lost is not None:
            raise lost
        if time.monotonic() >= next_look:  # however many strangers knock meanwhile
            _check_presence({peer: names[peer] for peer in higher})
            next_look = time.monotonic() + LOOK_SECONDS
        listening.settimeout(min(_remaining(deadline, higher), LOOK_SECONDS))
        higher.discard(_answer(engine, listening, secret, mine, higher, strangers))
    return present


def _check_presence(names: Mapping[int, str]) -> None:
    """A rank closes its socket when it has attached all others, or when it ends."""
    for peer, name in names.items():
        if not unix.exists(name):
            raise RendezvousError(f"rank {peer} of this host has ended before it was attached", rank=peer)


def _answer(
    engine: LocalEngine,
    listening: socket.socket,
    secret: bytes,
    mine: auth.Hello,
    expected: Iterable[int],
    strangers: set[str],
) -> int:
    """Attach who connects; -1 if nobody does in time, or who only looked, or is not expected: logged once for each
    reason."""
    try:
        sock = unix.accept(listening)
    except TimeoutError:
        return -1
    except auth.Refused as error:
        _refuse(mine.rank, error, strangers)
        return -1
    except OSError as error:
        raise ResourceError(f"cannot accept the ranks of this host: {system_message(error)}") from error
    try:
        peer = auth.run(sock, auth.server(secret, mine)).hello.rank
        if peer not in expected:
            raise auth.Refused(f"rank {peer} is not expected")
        sock.settimeout(auth.HANDSHAKE_SECONDS)
        _exchange(engine, sock, peer)
    except (OSError, auth.Refused) as error:
        sock.close()
        if not isinstance(error, ConnectionError):
            _refuse(mine.rank, error, strangers)
        return -1
    return peer


def _refuse(rank: int, reason: Exception, strangers: set[str]) -> None:
    if str(reason) not in strangers:
        strangers.add(str(reason))
        _log.warning("rank %d refused a connection on its host: %s", rank, reason)


def _exchange(engine: LocalEngine, sock: socket.socket, peer: int) -> None:
    socket.send_fds(sock, [b"\0"], [engine.memory_fd, engine.doorbell_fd])
    received, descriptors, _, _ = socket.recv_fds(sock, 1, 2, socket.MSG_CMSG_CLOEXEC)
    if not received:
        raise ConnectionResetError("it has ended")
    if len(descriptors) != 2:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ResourceError(f"the memory of rank {peer} did not arrive: out of descriptors (raise ulimit -n)")
    memory, doorbell = descriptors
    sock.setblocking(False)
    engine.attach_local(peer, memory, doorbell, sock.detach())


def _remaining(deadline: float, waited_for: Iterable[int]) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        ranks = ", ".join(str(rank) for rank in sorted(waited_for))
        raise RendezvousError(f"rank {ranks} of this host did not attach in time", rank=min(waited_for))
    return remaining
