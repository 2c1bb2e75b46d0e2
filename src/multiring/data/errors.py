"""Errors in a data set's files."""

from __future__ import annotations

from multiring.errors import MultiringError


class DataError(MultiringError):
    """A file of a data set cannot be read as what it should be; the message says what to do.

    ``file`` is its path, ``member`` the member of a tar file, ``sample`` the sample's index: "" and -1 where unknown.
    """

    def __init__(self, message: str, *, file: str = "", member: str = "", sample: int = -1) -> None:
        super().__init__(message)
        self.file = file
        self.member = member
        self.sample = sample


class BrokenSample(DataError):
    """One sample is broken, and others need not be: it may be left out."""

    is_told = False
    """True if what is wrong with all samples of a file was logged."""
