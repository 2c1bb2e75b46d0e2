"""How commands say what a user did wrong."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TextIO

import typer

from multiring.errors import MultiringError
from multiring.files import is_of_output

USAGE_ERROR = 2


def given(context: typer.Context) -> set[str]:
    """The options on the command line, by the names of their parameters."""
    return {
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    }


def leave_out(context: typer.Context, names: Collection[str], why: str) -> None:
    """ValueError for options on the command line, among ``names``, that have no meaning there, and why."""
    useless = given(context) & set(names)
    if useless:
        shown = [option.opts[0] for option in context.command.params if option.name in useless]
        raise ValueError(f"{why}: leave out {', '.join(shown)}")


def _is_unread(output: TextIO) -> bool:
    """Whether nobody reads what is printed any more, as after ``| head``."""
    poll = select.poll()
    poll.register(output, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))  # of a pipe, of a socket


@contextmanager
def one_line_errors(command: str) -> Iterator[None]:
    """Turn a user's errors into one line and an exit code."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        if error.returncode >= 0:
            raise typer.Exit(error.returncode) from None  # it has said why
        number = -error.returncode
        typer.echo(f"multiring {command}: what it started was ended by {signal.Signals(number).name}", err=True)
        raise typer.Exit(128 + number) from None
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _is_unread(sys.stdout):
            raise  # typer ends the command quietly
        if is_of_output(error):
            raise
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except (MultiringError, ValueError, ImportError) as error:
        reason = str(error)
    else:
        return
    typer.echo(f"multiring {command}: {reason}", err=True)
    raise typer.Exit(USAGE_ERROR)
