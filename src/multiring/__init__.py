"""Multiring: topology-aware multi-ring all-reduce for synchronous data-parallel training."""

__version__ = "0.1.0"
