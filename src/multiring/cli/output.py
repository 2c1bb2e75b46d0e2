"""Where commands print their tables."""

from __future__ import annotations

import shutil

from rich.console import Console
from rich.table import Table

WIDTH = 120
"""Columns where neither a terminal nor COLUMNS says."""


def console() -> Console:
    """Standard output, for names as their owners wrote them."""
    # Where COLUMNS is 0, rich prints nothing at all.
    return Console(width=shutil.get_terminal_size((WIDTH, 1)).columns, markup=False, emoji=False)


def folded(table: Table) -> Table:
    """The table, whose cells are folded where the terminal is narrow, and not cut off."""
    for column in table.columns:
        column.overflow = "fold"
    return table
