"""Exceptions of the user's own, as ranks raise them."""

from __future__ import annotations

from typing import Any


class OddData(Exception):
    """One with arguments of its own."""

    def __init__(self, row: int, column: int) -> None:
        super().__init__(row, column)
        self.cell = row, column


class Sealed(Exception):
    """One that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("sealed")
