"""Ports on which nobody listens."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> range:
    """A range of them, below those that the system gives to connections meanwhile."""
    for first in random.sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return range(first, first + count)
    raise AssertionError(f"no {count} free ports in a row")
