"""Data sets as tar files with an index, and one shuffle of them for any number of ranks."""

from multiring.data.order import EpochOrder, Progress, cuts
from multiring.data.permutation import Permutation

__all__ = ["EpochOrder", "Permutation", "Progress", "cuts"]
