"""Where commands print their tables."""

from __future__ import annotations

import os
import sys

from rich.console import Console

WIDTH = 120
"""Columns where neither a terminal nor COLUMNS says."""


def console() -> Console:
    """Standard output, for names as their owners wrote them."""
    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_known else WIDTH, markup=False, emoji=False)
