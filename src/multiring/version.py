"""The version of multiring, where its build and its ranks read it."""

__version__ = "0.2.0.dev0"
