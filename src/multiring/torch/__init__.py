"""Multiring in PyTorch: the backend ``multiring`` of ``torch.distributed``, and what cannot be said through torch.

``init_process_group("multiring")`` needs no import of this module.
"""

from multiring.torch.hooks import comm_hook
from multiring.torch.options import Options
from multiring.torch.start import init

__all__ = ["Options", "comm_hook", "init"]
