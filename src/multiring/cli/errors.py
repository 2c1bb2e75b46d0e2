"""Messages of commands about what a user did wrong."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

import typer

from multiring.cli.options import no_such_option
from multiring.errors import MultiringError
from multiring.files import is_output_failure

USAGE_ERROR = 2

_UsageError: type[Any] = typer.BadParameter.__mro__[1]  # typer exports some of its kinds, not what they have in common


def call(app: typer.Typer, program: str, command: str = "") -> NoReturn:
    """Run a command line and end; what typer itself finds wrong in it is one line too, and not the usage besides.

    ``program`` is its name, and ``command`` what the user typed besides, for errors of which typer does not know where.
    """
    try:
        code = app(prog_name=program, standalone_mode=False)
    except _UsageError as error:
        typer.echo(_usage_error(error, f"{program} {command}".rstrip()), err=True)
        sys.exit(USAGE_ERROR)
    sys.exit(code)


def _usage_error(error: Any, command: str) -> str:
    """The line about a command line that typer refused; the help where nothing was given."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.format_message())
    context = error.ctx
    command = context.command_path if context else command
    if context and hasattr(error, "possibilities") and hasattr(error, "option_name"):
        return f"{command}: {no_such_option(context, error.option_name)}"
    told = " ".join(error.format_message().replace("Value error, ", "").split()).removesuffix(".")
    # A value is refused with those that are known; what else is wrong, the help says.
    remedy = "" if type(error) is typer.BadParameter else f"; see {command} --help"
    return f"{command}: {told[:1].lower()}{told[1:]}{remedy}"


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
    """True if nobody reads what is printed any more, as after ``| head``."""
    poll = select.poll()
    poll.register(output, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))  # a pipe's, a socket's


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
        if is_output_failure(error):
            raise
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except (MultiringError, ValueError, ImportError) as error:
        reason = str(error)
    else:
        return
    typer.echo(f"multiring {command}: {reason}", err=True)
    raise typer.Exit(USAGE_ERROR)
