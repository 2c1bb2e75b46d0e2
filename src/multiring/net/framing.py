"""Messages over a proven connection: JSON, each behind its length in four bytes; a length of 0 is a sign of life."""

from __future__ import annotations

import json
import struct
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]

_LENGTH = struct.Struct("!I")

SIGN_OF_LIFE = _LENGTH.pack(0)
"""Empty frame that shows that this side lives; the receiver of messages skips it."""


def pack(message: Message) -> bytes:
    """A message as it is sent."""
    content = json.dumps(message).encode()
    return _LENGTH.pack(len(content)) + content


def receive(read: Callable[[int], bytes], limit: int) -> Message:
    """The next message, where ``read(n)`` returns exactly n bytes, and raises what ends the connection.

    ConnectionError if the other side announces more than ``limit`` bytes.
    """
    while True:
        size = _size(read(_LENGTH.size), limit)
        if size:
            return _message(read(size))


async def receive_async(read: Callable[[int], Awaitable[bytes]], limit: int) -> Message:
    """The same where ``read(n)`` yields them."""
    while True:
        size = _size(await read(_LENGTH.size), limit)
        if size:
            return _message(await read(size))


def _size(header: bytes, limit: int) -> int:
    size: int = _LENGTH.unpack(header)[0]
    if size > limit:
        raise ConnectionError(f"a message of {size} bytes")
    return size


def _message(content: bytes) -> Message:
    message: Message = json.loads(content)
    return message
