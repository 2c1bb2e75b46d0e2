"""How commands say what a user did wrong."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import typer

USAGE_ERROR = 2


@contextmanager
def one_line_errors(command: str, also: type[Exception] = ValueError) -> Iterator[None]:
    """Turn a user's errors into one line and an exit code."""
    try:
        yield
    except subprocess.CalledProcessError as error:  # it has said why
        raise typer.Exit(error.returncode) from None
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except (also, ValueError, ImportError) as error:
        reason = str(error)
    else:
        return
    typer.echo(f"multiring {command}: {reason}", err=True)
    raise typer.Exit(USAGE_ERROR)
