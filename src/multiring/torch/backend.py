"""The backend of a group for one kind of device, which torch asks where it does not ask the group itself."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class DeviceBackend:
    """A group as its own backend: what is not said here is the group's, such as its rank, size and collectives."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Gloo's: torch's ``_set_pg_timeout`` sets the time limits of Gloo's and NCCL's backends, and passes over all
        others with a warning."""
        return dist.ProcessGroupGloo if dist.is_gloo_available() else DeviceBackend

    def name(self) -> str:
        """``multiring``."""
        return self._group.name()

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """True if it has memory of its own to offer."""
        return False

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)
