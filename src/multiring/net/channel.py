"""A connection whose ends have proved themselves, in clear or encrypted: who speaks over it does not see which."""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType

from multiring import _native
from multiring.net import auth


class Altered(ConnectionError):
    """An encrypted connection brought something that the other side did not send."""


class ProvenChannel:
    """A proven socket, what its other end said of itself, and the cipher of the connection (None: in clear)."""

    def __init__(self, sock: socket.socket, proof: auth.Proven) -> None:
        self.sock = sock
        self.hello = proof.hello
        self._cipher = proof.cipher
        self._text = bytearray()  # received, and not asked for yet

    @property
    def is_encrypted(self) -> bool:
        """True if its content is encrypted."""
        return self._cipher is not None

    def sealed(self, content: bytes) -> bytes:
        """The bytes to send for ``content``. Each result is to be sent exactly once, in the order of the calls."""
        return content if self._cipher is None else self._cipher.seal(content)

    def send(self, content: bytes) -> None:
        """Send all of it over a blocking socket."""
        self.sock.sendall(self.sealed(content))

    async def send_async(self, content: bytes) -> None:
        """Send all of it over a non-blocking socket of the running event loop."""
        await asyncio.get_running_loop().sock_sendall(self.sock, self.sealed(content))

    def receive(self, size: int, deadline: float | None = None) -> bytes:
        """Exactly ``size`` bytes from a blocking socket, as `auth.receive`; `Altered` if they are not what was sent."""
        if self._cipher is None:
            return auth.receive(self.sock, size, deadline)
        while len(self._text) < size:
            begin = auth.receive(self.sock, _native.RECORD_SIZE_BYTES, deadline)
            self._open(begin, auth.receive(self.sock, self._left(begin), deadline))
        return self._take(size)

    def receive_some(self, most: int) -> bytes:
        """The next bytes of a blocking socket, ``most`` at most; b"" where it was closed between records."""
        if self._cipher is None:
            return self.sock.recv(most)
        if not self._text:
            begin = self.sock.recv(1)
            if not begin:
                return b""
            begin += auth.receive(self.sock, _native.RECORD_SIZE_BYTES - 1)
            self._open(begin, auth.receive(self.sock, self._left(begin)))
        return self._take(min(most, len(self._text)))

    async def receive_async(self, size: int) -> bytes:
        """Exactly ``size`` bytes from a non-blocking socket; ConnectionError if it closes before, or is `Altered`."""
        if self._cipher is None:
            return await auth.receive_async(self.sock, size)
        while len(self._text) < size:
            begin = await auth.receive_async(self.sock, _native.RECORD_SIZE_BYTES)
            self._open(begin, await auth.receive_async(self.sock, self._left(begin)))
        return self._take(size)

    def _left(self, begin: bytes) -> int:
        """The bytes of a record after its first."""
        size = _native.Records.text_size(begin)
        if not size:
            raise self._altered()
        return size + _native.RECORD_TAG_BYTES

    def _open(self, begin: bytes, rest: bytes) -> None:
        assert self._cipher is not None
        altered = self._altered()
        text = self._cipher.open(begin + rest)
        if text is None:
            raise altered
        self._text += text

    def _altered(self) -> Altered:
        assert self._cipher is not None
        return Altered(
            f"record {self._cipher.next_received} is not what was sent: something on the way has altered, dropped or "
            "repeated it"
        )

    def _take(self, size: int) -> bytes:
        taken = bytes(self._text[:size])
        del self._text[:size]
        return taken

    def detach(self) -> tuple[int, _native.Records | None]:
        """The descriptor and the cipher, for an engine, which reads on where this one has stopped."""
        assert not self._text, "what was received would be lost"
        return self.sock.detach(), self._cipher

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self.sock.close()

    def __enter__(self) -> ProvenChannel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
