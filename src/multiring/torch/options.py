"""Options of ``init_process_group("multiring", pg_options=...)``."""

from __future__ import annotations

from typing import Any

from multiring import env


class Options:
    """The settings of `multiring.init` as keyword arguments, such as ``Options(interface="eth1", streams=4)``.

    Each wins over its environment variable (docs/settings.md). TypeError for an unknown name, ValueError for a value.
    """

    def __init__(self, **settings: Any) -> None:
        env.read(env.Settings, **settings)
        self.settings = settings
