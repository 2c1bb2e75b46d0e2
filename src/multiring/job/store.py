"""The key-value store through which the ranks of a job find each other: its server, its client, torch's as another.

A request is (operation, key length, value length, seconds) followed by key and value; a reply is (status, length)
followed by a value. To swap, the value is the length of what is expected, that, and the new one. Both ends have proved
the job's secret before (net/auth.py), and every length is checked.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from multiring.env import join_address
from multiring.errors import RendezvousError
from multiring.net import auth, dial, interfaces, listen
from multiring.net.channel import ProvenChannel
from multiring.net.loop import LoopThread, within

MAX_KEY = 1 << 10
MAX_VALUE = 1 << 26
RETRY_SECONDS = 0.2

NOTICE_SECONDS = 10.0
"""After this long a store that does not answer is named, then at doubling intervals."""

SHORT_SECONDS, POLL_SECONDS = 2.0, 0.01
"""Waits of at most ``SHORT_SECONDS`` ask torch's store every ``POLL_SECONDS``, since each wait of the store itself that
ends in vain logs lines."""

_log = logging.getLogger("multiring")
_T = TypeVar("_T")

_REQUEST = struct.Struct("!BIId")
_REPLY = struct.Struct("!BI")
_EXPECTED = struct.Struct("!I")
_SET, _GET, _ADD, _SWAP, _SET_AT_END = range(5)
_DONE, _TIMED_OUT, _INVALID, _ENDED = range(4)


class KeyValueStore(Protocol):
    """Operations of a store that rounds of all ranks need."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout: float) -> bytes:
        """The value of ``key``, waiting up to ``timeout`` seconds for it to be set; TimeoutError after that."""


class JobStore(KeyValueStore, Protocol):
    """Operations of a store that ranks of several restarts need, which share it."""

    served_by: int
    """The rank in whose process it is, -1 if it is in that of a launcher, or nobody knows."""

    def swap(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Set ``key`` if it has the value ``expected`` (b"": if it is unset); the value that it has then."""


class Server:
    """Serves a store from a thread of this process.

    ``bind`` are the addresses to listen on (all if empty), ``ports`` the ports to choose from (any if None). The
    server outlives generations and restarts of the job. ResourceError if no port is free.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        job: str = "",
        bind: Sequence[str] = (),
        ports: range | None = None,
        interface: str = "",
        forgets: bool = False,
        encrypt: bool = False,
        rank: int = -1,
    ) -> None:
        """``forgets``: whenever no client is left, so is nothing of what they stored. ``encrypt`` is as the clients
        have it. ``rank`` serves it (-1: none does) until all ranks have met: if another one encrypts and it does not,
        or the reverse, they never meet, and every client is told so at once."""
        self._forgets = forgets
        self._end = ""  # the reason why no operation is done any more
        self._clients = 0
        self._values: dict[str, bytes] = {}
        self._waiters: dict[str, list[asyncio.Future[bytes]]] = {}
        sockets = []
        try:
            for host in bind or ("",):
                sockets.append(listen.bind(host, ports))
        except BaseException:
            for sock in sockets:
                sock.close()
            raise
        self.port: int = sockets[0].getsockname()[1]
        if bind:
            found = [(host, sock.getsockname()[1]) for host, sock in zip(bind, sockets, strict=True)]
        else:
            found = [(host, self.port) for host in interfaces.addresses(interface) or ["127.0.0.1"]]
        self.addresses = tuple(join_address(*address) for address in found)
        """Addresses of the store, as MULTIRING_STORE lists them."""
        self._loop = LoopThread("multiring-store")
        hello = auth.Hello(auth.STORE, rank, job=job, encrypted=encrypt)
        self._listener = listen.Listener(
            self._loop, sockets, lambda: self._handshake(secret, hello), self._serve, "the job's store"
        )

    def close(self, drain: float = 0.0) -> None:
        """Stop serving, after giving the clients ``drain`` seconds to finish. May be called twice."""
        if self._loop.closed:
            return
        if drain:
            self._loop.run(self._listener.drain(drain))
        self._listener.close()
        self._loop.close()

    def _handshake(self, secret: bytes, hello: auth.Hello) -> auth.Step:
        try:
            return (yield from auth.server(secret, hello))
        except auth.EncryptionDiffers as error:
            if hello.rank < 0 or not error.is_proven:
                raise
            self._end_all(str(error))
            raise ConnectionError("every client is told why") from error  # and raises it: the log need not say it, too

    def _end_all(self, reason: str) -> None:
        self._end = reason
        for key in list(self._waiters):
            self._wake(key, b"")

    async def _serve(self, channel: ProvenChannel) -> None:
        bequests: dict[str, bytes] = {}
        self._clients += 1
        try:
            with channel, contextlib.suppress(OSError):  # closed, or its host is out of reach: TimeoutError
                await self._answer_all(channel, bequests)
        finally:
            for key, value in bequests.items():
                if key not in self._values:
                    self._set(key, value)
            self._clients -= 1
            if self._forgets and not self._clients:
                self._values.clear()

    async def _answer_all(self, channel: ProvenChannel, bequests: dict[str, bytes]) -> None:
        while True:
            operation, key_size, value_size, seconds = _REQUEST.unpack(await channel.receive_async(_REQUEST.size))
            if key_size > MAX_KEY or value_size > MAX_VALUE:
                return
            try:
                key = (await channel.receive_async(key_size)).decode()
            except UnicodeDecodeError:
                return
            value = await channel.receive_async(value_size)
            if operation == _SET_AT_END:
                bequests[key] = value
                status, result = _DONE, b""
            else:
                status, result = await self._answer(operation, key, value, seconds)
            if self._end:
                status, result = _ENDED, self._end.encode()
            await channel.send_async(_REPLY.pack(status, len(result)) + result)

    async def _answer(self, operation: int, key: str, value: bytes, seconds: float) -> tuple[int, bytes]:
        if operation == _SWAP:
            if len(value) < _EXPECTED.size:
                return _INVALID, b""
            (size,) = _EXPECTED.unpack_from(value)
            expected, new = value[_EXPECTED.size :][:size], value[_EXPECTED.size + size :]
            return _DONE, self._swap(key, expected, new)
        if operation == _SET:
            self._set(key, value)
            return _DONE, b""
        if operation == _GET:
            return await self._wait(key, seconds)
        if operation == _ADD:
            try:
                total = b"%d" % (int(self._values.get(key, b"0")) + int(value))
            except ValueError:
                return _INVALID, b""
            self._set(key, total)
            return _DONE, total
        return _INVALID, b""

    def peek(self, key: str) -> bytes | None:
        """The value of ``key`` as it is now, for the process that serves."""
        return self._values.get(key)

    def at_once(self, action: Callable[[], _T]) -> _T:
        """Run ``action`` between two answers and return its result, for the process that serves."""

        async def act() -> _T:
            return action()

        return self._loop.run(act())

    def settle(self, key: str, value: bytes) -> None:
        """Set ``key`` unless it is set; within `at_once`."""
        self._swap(key, b"", value)

    def _swap(self, key: str, expected: bytes, value: bytes) -> bytes:
        if self._values.get(key) == expected if expected else key not in self._values:
            self._set(key, value)
        return self._values.get(key, b"")

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._wake(key, value)

    def _wake(self, key: str, value: bytes) -> None:
        for waiter in self._waiters.pop(key, ()):
            if not waiter.done():
                waiter.set_result(value)

    async def _wait(self, key: str, seconds: float) -> tuple[int, bytes]:
        if key in self._values:
            return _DONE, self._values[key]
        if seconds <= 0 or self._end:
            return _TIMED_OUT, b""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key, []).append(waiter)
        try:
            return _DONE, await within(seconds, waiter)
        except asyncio.TimeoutError:
            return _TIMED_OUT, b""


class Client:
    """A connection to a `Server`, for one thread at a time.

    All ``addresses`` ((host, port) pairs) are tried until one answers or ``timeout`` seconds have passed;
    RendezvousError then, or at once if what answers has another secret, job or version, unless the server is ``sought``
    at addresses of which others may be those of other jobs. RendezvousError, too, if it encrypts and this does not
    ``encrypt``, or the reverse. ``rank`` is who asks (-1: no rank).
    """

    def __init__(
        self,
        addresses: Sequence[dial.Address],
        secret: bytes,
        *,
        job: str = "",
        timeout: float = 120.0,
        sought: bool = False,
        served_by: int = -1,
        encrypt: bool = False,
        rank: int = -1,
    ):
        self.served_by = served_by
        loop = LoopThread("multiring-store-client")
        try:
            hello = auth.Hello(auth.STORE, rank, job=job, encrypted=encrypt)
            self._channel = loop.run(_reach(addresses, secret, hello, timeout, sought=sought))
        except RendezvousError as error:
            error.rank = served_by
            raise
        finally:
            loop.close()
        self._channel.sock.setblocking(True)

    def set(self, key: str, value: bytes) -> None:
        """Set ``key`` to ``value``."""
        self._call(_SET, key, value, 0.0)

    def get(self, key: str, timeout: float) -> bytes:
        """The value of ``key``, waiting up to ``timeout`` seconds for it to be set; TimeoutError after that."""
        return self._call(_GET, key, b"", max(0.0, timeout))

    def add(self, key: str, amount: int) -> int:
        """Add to the whole number at ``key`` (0 if unset) and return the sum."""
        return int(self._call(_ADD, key, b"%d" % amount, 0.0))

    def settle(self, key: str, value: bytes) -> bytes:
        """Set ``key`` unless it is set; the value that it has then."""
        return self.swap(key, b"", value)

    def swap(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Set ``key`` if it has the value ``expected`` (b"": if it is unset); the value that it has then."""
        return self._call(_SWAP, key, _EXPECTED.pack(len(expected)) + expected + value, 0.0)

    def set_at_end(self, key: str, value: bytes) -> None:
        """Let the server settle ``key`` when this connection ends, however that comes about."""
        self._call(_SET_AT_END, key, value, 0.0)

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self._channel.close()

    def _call(self, operation: int, key: str, value: bytes, seconds: float) -> bytes:
        name = key.encode()
        if len(name) > MAX_KEY or len(value) > MAX_VALUE:
            raise ValueError(f"key of {len(name)} bytes, value of {len(value)}: limits are {MAX_KEY} and {MAX_VALUE}")
        self._channel.sock.settimeout(seconds + auth.HANDSHAKE_SECONDS)
        try:
            self._channel.send(_REQUEST.pack(operation, len(name), len(value), seconds) + name + value)
            status, size = _REPLY.unpack(self._channel.receive(_REPLY.size))
            if size > MAX_VALUE:
                raise ConnectionError(f"a reply of {size} bytes")
            result = self._channel.receive(size)
        except (BrokenPipeError, ConnectionResetError) as error:  # which one depends on the moment at which it ended
            raise _lost("the job's store", "closed by the other side", self.served_by) from error
        except OSError as error:
            raise _lost("the job's store", error.strerror or str(error), self.served_by) from error
        if status == _ENDED:
            raise RendezvousError(result.decode())
        if status == _TIMED_OUT:
            raise TimeoutError(f"{key!r} was not set within {seconds:g} s")
        if status != _DONE:
            raise ValueError(f"the store refused the operation on {key!r}")
        return result


async def _reach(
    addresses: Sequence[dial.Address], secret: bytes, hello: auth.Hello, timeout: float, *, sought: bool
) -> ProvenChannel:
    began = time.monotonic()
    notice = NOTICE_SECONDS
    numeric = await dial.resolve(addresses)
    while True:
        try:
            return await dial.race(
                numeric, lambda address: dial.connect(address, auth.client(secret, hello)), ProvenChannel.close
            )
        except dial.Unreachable as error:
            differs = error.encryption_differs
            if (differs and differs.is_proven) or (error.refused and not sought):
                raise RendezvousError(f"the job's store cannot be used: {differs or error}") from None
            seconds = time.monotonic() - began
            if seconds > timeout:
                raise RendezvousError(
                    f"the job's store did not answer within {timeout:g} s: {error}; is what serves it (rank 0, the "
                    "launcher, or who holds the StoreServer) running there, and does a firewall let this host reach it?"
                ) from None
            if seconds >= notice:
                _log.warning("the job's store has not answered for %.0f s, and is asked again: %s", seconds, error)
                notice *= 2
        await asyncio.sleep(RETRY_SECONDS)


def _lost(what: str, reason: str, served_by: int) -> RendezvousError:
    server = f" (rank {served_by}, which serves it, has ended, is stopped or cannot be reached)"
    return RendezvousError(f"{what} was lost: {reason}{server if served_by >= 0 else ''}", rank=served_by)


_ANOTHER_GROUPS = (
    "; or rank 0 was still leaving an earlier group, whose store this was, when this rank called init_process_group "
    "again: then start the job by torchrun, whose store stays, or give each init_process_group a port of its own, as "
    "init_method='tcp://HOST:PORT' with rank and world_size"
)


class TorchStore:
    """A torch.distributed Store as a `KeyValueStore`.

    Some of torch's calls wait without end for a server that is stopped: ours end after ``patience`` seconds.
    """

    def __init__(self, store: Any, *, served_by: int = -1, patience: float = 120.0) -> None:
        self.served_by = served_by
        self._store = store
        self._patience = patience

    def set(self, key: str, value: bytes) -> None:
        """Set ``key`` to ``value``."""
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str, timeout: float) -> bytes:
        """The value of ``key``, waiting up to ``timeout`` seconds for it to be set; TimeoutError after that."""
        return self._call(lambda: self._get(key, timeout), timeout)

    def swap(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Set ``key`` if it has the value ``expected`` (b"": if it is unset); the value that it has then."""
        return self._call(lambda: bytes(self._store.compare_set(key, expected, value)))

    def _call(self, call: Callable[[], _T], timeout: float = 0.0) -> _T:
        """Made by a thread of its own, which is left behind where torch does not come back."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def make() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=make, name="multiring-torch-store", daemon=True).start()
        done, _ = concurrent.futures.wait([future], timeout + self._patience)
        with self._errors():
            if not done:
                raise RuntimeError(f"no answer for {self._patience:g} s")
            return future.result()

    def _get(self, key: str, timeout: float) -> bytes:
        if timeout > SHORT_SECONDS and not self._store.check([key]):
            with contextlib.suppress(RuntimeError):
                self._store.wait([key], timedelta(seconds=timeout))
            timeout = 0.0
        until = time.monotonic() + timeout
        while not self._store.check([key]):
            if time.monotonic() >= until:
                raise TimeoutError(f"{key!r} was not set in time")
            time.sleep(POLL_SECONDS)
        return bytes(self._store.get(key))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn torch's errors, RuntimeErrors with a trace of C++ below the first line, into a RendezvousError."""
        try:
            yield
        except RuntimeError as error:
            lost = _lost("torch's store", str(error).splitlines()[0], self.served_by)
            raise RendezvousError(f"{lost}{_ANOTHER_GROUPS}", rank=self.served_by) from error
