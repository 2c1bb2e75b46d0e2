"""Options of ``init_process_group("multiring", pg_options=...)``."""

from __future__ import annotations

from typing import Any

from multiring import env
from multiring.runtime.comm import Communicator


class Options:
    """The settings of `multiring.init` as keyword arguments, such as ``Options(interface="eth1", streams=4)``.

    Each wins over its environment variable (docs/settings.md). TypeError for an unknown name, ValueError for a value.
    """

    def __init__(self, **settings: Any) -> None:
        env.read(env.Settings, **settings)
        self.settings = settings


class Adopted:
    """Options of a process group over the default ``communicator`` that is there.

    ``is_owner``: `multiring.torch` has made both, and ``destroy_process_group`` shuts both down.
    """

    def __init__(self, communicator: Communicator, *, is_owner: bool) -> None:
        self.communicator = communicator
        self.is_owner = is_owner
