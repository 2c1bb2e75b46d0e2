"""Resources that are opened in several steps, and closed again if one of these fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol


class _Closes(Protocol):
    def close(self) -> object: ...


@contextlib.contextmanager
def closed_on_error(opened: _Closes) -> Iterator[None]:
    """Close ``opened`` if the block raises, be it an interrupt or a cancellation, which goes on to the caller."""
    try:
        yield
    except BaseException:
        opened.close()
        raise
