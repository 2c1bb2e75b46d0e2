"""Data sets as tar files with an index, and one shuffle of them for any number of ranks."""

from multiring.data.batches import Batches
from multiring.data.dataset import Dataset
from multiring.data.errors import DataError
from multiring.data.order import EpochOrder, Progress, cuts
from multiring.data.packing import pack
from multiring.data.permutation import Permutation

__all__ = ["Batches", "DataError", "Dataset", "EpochOrder", "Permutation", "Progress", "cuts", "pack"]
