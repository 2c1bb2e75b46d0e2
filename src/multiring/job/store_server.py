"""The store of jobs that no launcher started, held by the program that starts their ranks."""

from __future__ import annotations

import secrets
from types import TracebackType

from multiring import _native, env
from multiring.job.given import checked_secret
from multiring.job.store import Server
from multiring.net import interfaces


class StoreServer:
    """A store in which ranks meet that no launcher started, served by a thread of this process until `close`.

    ``secret`` is bytes or text, 16 bytes or more; one is drawn if there is none. ``interface``, ``ports`` and
    ``encrypt`` are the settings of these names (docs/settings.md). Each rank is handed `addresses` and `secret`, for
    `init`, and has the same ``encrypt``. Jobs may meet here one after the other, and at once under names of their own
    (``job`` of `init`). Ranks need it until `init` returns. ResourceError if no port is free, or if it is to encrypt
    and cannot.
    """

    def __init__(
        self,
        secret: bytes | str | None = None,
        *,
        interface: str | None = None,
        ports: str | range | None = None,
        encrypt: bool | None = None,
    ) -> None:
        settings = env.read(env.Settings, interface=interface, ports=ports, encrypt=encrypt)
        if settings.encrypt:
            _native.load_libcrypto()
        self._secret = secrets.token_bytes(32) if secret is None else checked_secret(secret)
        bind = interfaces.reachable(settings.interface) if settings.interface else ()
        self._server = Server(self._secret, bind=bind, ports=settings.ports, forgets=True, encrypt=settings.encrypt)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses at which ranks may reach it, as "host:port": the ``store`` of `init`."""
        return self._server.addresses

    @property
    def secret(self) -> bytes:
        """Secret of its ranks, which nobody else knows: the ``secret`` of `init`."""
        return self._secret

    def close(self) -> None:
        """Stop serving; jobs that have come together go on.

        May be called twice. In a process that was forked it does nothing: the one that made the store serves it.
        """
        self._server.close()

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StoreServer at {', '.join(self.addresses)}>"
