"""Descriptors 0 to 2: a process may be started without them, and whatever it opens next would then stand for them."""

from __future__ import annotations

import errno
import os
import sys


def fill_standard() -> None:
    """Open /dev/null in the place of standard input, output and error where they are closed.

    Else what a program prints, or what it starts, goes into a socket or file that was opened for something else.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            # The lowest free number is this one; programs that it starts have it, too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def fill_standard_files() -> None:
    """The same, and sys.stdin, sys.stdout and sys.stderr, which Python leaves out then: for commands."""
    fill_standard()
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))
