"""Printed tables of commands: their width, and cells that are folded."""

from __future__ import annotations

import shutil

from rich.console import Console
from rich.table import Table

WIDTH = 120
"""Columns where neither a terminal nor COLUMNS says."""


def console() -> Console:
    """Standard output, for names as their owners wrote them."""
    return Console(width=columns(), markup=False, emoji=False)


def columns() -> int:
    """The width of what is printed now: rich prints nothing at all where COLUMNS is 0."""
    return shutil.get_terminal_size((WIDTH, 1)).columns


def folded(table: Table) -> Table:
    """The table, whose cells are folded where the terminal is narrow, and not cut off."""
    for column in table.columns:
        column.overflow = "fold"
    return table
