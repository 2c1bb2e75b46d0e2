"""Entry point that torch runs when it is imported: it learns the name ``multiring`` and nothing else is loaded.

Registered as entry point ``torch.backends``. An exception here would make ``import torch`` fail for everyone who has
multiring installed, so none leaves.
"""

from __future__ import annotations

import logging
from typing import Any


def register() -> None:
    """Make ``torch.distributed.init_process_group("multiring")`` known."""
    try:
        import torch.distributed as dist

        if dist.is_available():
            dist.Backend.register_backend("multiring", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception as error:
        logging.getLogger("multiring").warning("torch does not know the backend multiring: %s", error)


def _create(settings: Any, options: Any) -> Any:
    """Called by ``init_process_group`` and ``new_group``."""
    from multiring.torch.create import create

    return create(settings, options)
