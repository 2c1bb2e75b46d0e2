"""Data sets as tar files with an index, and one shuffle of them for any number of ranks."""

from multiring.data.batches import Batches
from multiring.data.broken import Skipping
from multiring.data.dataset import Dataset
from multiring.data.errors import BrokenSample, DataError
from multiring.data.folders import ClassFolders
from multiring.data.order import EpochOrder, Progress, cuts
from multiring.data.packing import pack
from multiring.data.permutation import Permutation

__all__ = [
    "Batches",
    "BrokenSample",
    "ClassFolders",
    "DataError",
    "Dataset",
    "EpochOrder",
    "Permutation",
    "Progress",
    "Skipping",
    "cuts",
    "pack",
]
