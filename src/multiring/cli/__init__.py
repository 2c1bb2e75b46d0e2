"""The command ``multiring``; each subcommand is a module here with a function ``register(app)``."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

import multiring
from multiring import descriptors

COMMANDS = ("run", "plan", "probe", "simulate", "doctor", "bench", "lab", "report")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"multiring {multiring.__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Synchronous data-parallel training on the machines you have."""


def main() -> None:
    """Run the subcommand named on the command line; only its module is imported."""
    descriptors.fill_standard_files()
    app = typer.Typer(callback=_root, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    named = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    for command in (named,) if named in COMMANDS else COMMANDS:
        import_module(f"multiring.cli.{command}").register(app)
    app(prog_name="multiring")
