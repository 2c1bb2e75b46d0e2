"""The command ``multiring``; each subcommand is a module here with a function ``register(app)``."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

from multiring.files import is_output_failure
from multiring.job.descriptors import fill_standard_files
from multiring.version import __version__

COMMANDS = {
    "run": "Start the ranks of a job, here or on many hosts.",
    "top": "Watch a job that runs on this host.",
    "plan": "Show the plan for a topology and a size.",
    "probe": "Measure the links between hosts.",
    "simulate": "Predict a training step on a cluster.",
    "doctor": "Check this host for what stops or slows a job.",
    "bench": "Measure collectives, also beside those of others.",
    "lab": "An emulated cluster on this machine.",
    "data": "Data sets as tar files with an index.",
    "report": "Write a page about training on a cluster.",
}
"""The subcommands, in the order of the help, and what it says of each without importing it."""


def main() -> None:
    """Run the subcommand named on the command line; only its module is imported."""
    fill_standard_files()
    try:
        if sys.argv[1:] == ["--version"]:  # what a script asks for often needs nothing else
            print(f"multiring {__version__}", flush=True)
        else:
            _run_command()
    except KeyboardInterrupt:  # while modules are imported; later typer says so
        print("multiring: ended by SIGINT", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        if not is_output_failure(error):
            raise
        print(f"multiring: the output cannot be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it would be an error again
        sys.exit(2)


def _run_command() -> None:
    import typer

    from multiring.cli.errors import call

    def print_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"multiring {__version__}")
            raise typer.Exit

    def root(
        version: bool = typer.Option(
            False, "--version", callback=print_version, is_eager=True, help="Print the version."
        ),
    ) -> None:
        """Synchronous data-parallel training on the machines you have."""

    # Help in two plain columns: boxes leave none of 80 columns for what it says.
    app = typer.Typer(
        callback=root,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    named = next((word for word in _words() if not word.startswith("-")), "")
    for command, about in COMMANDS.items():
        if command == named:
            import_module(f"multiring.cli.{command}").register(app)
        else:
            app.command(command, help=about)(_never_called)
    call(app, "multiring", named if named in COMMANDS else "")


def _words() -> list[str]:
    """The words of the command line; where a shell asks how it could go on, those that it has so far."""
    if "_MULTIRING_COMPLETE" in os.environ:
        typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
        return typed.split()[1:]
    return sys.argv[1:]


def _never_called() -> None:
    """Stands for a command that is not on the command line."""
