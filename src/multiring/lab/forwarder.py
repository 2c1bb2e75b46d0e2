"""Delays what passes between two TAP devices: the kernel's own way to do so (netem) is missing on many machines."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
import time
from collections import deque
from pathlib import Path

# <linux/if_tun.h>
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
_TUN_F_CSUM = 0x01
_TUN_F_TSO4 = 0x02
_TUN_F_TSO6 = 0x04

MAX_FRAME = 1 << 17
"""Bytes; more than a packet of 64 kB with its headers."""


def open_tap(name: str) -> int:
    """A new TAP device in this process's network namespace; it goes when the descriptor is closed.

    As in a pair of virtual Ethernet interfaces, large TCP packets pass in one piece and without checksums: a header
    before each frame says what the kernel left undone.
    """
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
    return tap


class _DelayLine:
    """One direction: frames and when they are due, in order. The token bucket before it bounds their number."""

    def __init__(self, source: int, sink: int, delay: float) -> None:
        self._source = source
        self._sink = sink
        self._delay = delay
        self._due: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Take in all frames that the source has now."""
        due = time.monotonic() + self._delay
        try:
            while True:
                self._due.append((due, os.read(self._source, MAX_FRAME)))
        except BlockingIOError:
            pass

    def deliver(self) -> None:
        """Pass on the frames that are due. One that the sink does not take is lost, as on any link."""
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, frame = self._due.popleft()
            try:
                os.write(self._sink, frame)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EIO):  # full, or down
                    raise

    @property
    def next_due(self) -> float:
        return self._due[0][0] if self._due else float("inf")


def forward(inner: int, outer: int, delay: float, until: int) -> None:
    """Pass frames between two TAP devices, ``delay`` seconds later, until the pipe ``until`` is closed at its end."""
    os.setpriority(os.PRIO_PROCESS, 0, -20)  # a wire does not wait for a busy core
    Path("/proc/self/timerslack_ns").write_text("1")
    ways = {inner: _DelayLine(inner, outer, delay), outer: _DelayLine(outer, inner, delay)}
    while True:
        due = min(way.next_due for way in ways.values())
        timeout = max(0.0, due - time.monotonic()) if due < float("inf") else None
        ready, _, _ = select.select([inner, outer, until], [], [], timeout)
        for source in ready:
            if source == until:
                return
            ways[source].take()
        for way in ways.values():
            way.deliver()
