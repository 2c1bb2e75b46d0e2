"""Multiring in PyTorch: the backend ``multiring`` of ``torch.distributed``, and what cannot be said through torch.

``init_process_group("multiring")`` needs no import of this module.
"""

from multiring.api import broadcast_object
from multiring.torch.broadcast import broadcast_optimizer_state, broadcast_parameters, sync_state
from multiring.torch.epochs import EpochSampler, EpochStream
from multiring.torch.factors import Factors
from multiring.torch.feedback import Feedback
from multiring.torch.hooks import Weighted, comm_hook
from multiring.torch.lars import use_lars
from multiring.torch.loader import Loader
from multiring.torch.optimizer import DistributedOptimizer
from multiring.torch.options import Options
from multiring.torch.outer import Outer
from multiring.torch.start import grow, init, shrink

__all__ = [
    "DistributedOptimizer",
    "EpochSampler",
    "EpochStream",
    "Factors",
    "Feedback",
    "Loader",
    "Options",
    "Outer",
    "Weighted",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "comm_hook",
    "grow",
    "init",
    "shrink",
    "sync_state",
    "use_lars",
]
