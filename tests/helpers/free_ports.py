"""Ports on which nobody listens."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def free_ports(count: int) -> range:
    """A range of them, below those that the system gives to connections meanwhile."""
    for first in random.sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return range(first, first + count)
    raise AssertionError(f"no {count} free ports in a row")
