"""The values of options, options that people mistype, and those that they know from other launchers."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import typer
from typer.models import OptionInfo

from multiring.env import MOST_RANKS, Settings, parse_whole, read

PROGRAM_FOLLOWS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""Settings of a command that runs a PROGRAM: options after it are the program's own."""

OF_OTHERS = {
    "--host": "-H",
    "--hostlist": "-H",
    "--machinefile": "--hostfile",
    "--nnodes": "--hosts",
    "--node-rank": "--host-index",
    "--master-addr": "--rendezvous",
    "--master-port": "--rendezvous",
    "--rdzv-endpoint": "--rendezvous",
    "--module": "-m",
    "--num-proc": "-n",
    "--nproc": "-n",
    "--bind-to": "--bind",
    "--restarts": "--max-restarts",
}
"""Our names of options, by the names that torchrun, mpirun and horovodrun have for them."""


def wire_of_environment() -> str:
    """MULTIRING_WIRE, "" if it is not set; ValueError for text that names no formats by level."""
    name = "MULTIRING_WIRE"
    return read(Settings, {name: os.environ.get(name, "")}).wire


def whole(least: int, most: int = MOST_RANKS) -> Callable[[str | int], int]:
    """Parses a whole number from ``least`` to ``most``; the error shows what was given."""

    def parse(text: str | int) -> int:
        try:
            return parse_whole(str(text), least, most)
        except ValueError as error:
            raise typer.BadParameter(f"{text!r} is not {error}") from None

    return parse


def number(least: float, most: float = math.inf) -> Callable[[str | float], float]:
    """Parses a finite number from ``least`` to ``most``; the error shows what was given."""

    def parse(text: str | float) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if "_" in str(text) or not str(text).isascii():
            value = math.nan  # Python takes 1_0 and other digits
        if not least <= value <= most or math.isinf(value):
            wanted = f"of {least:g} or more" if math.isinf(most) else f"from {least:g} to {most:g}"
            raise typer.BadParameter(f"{str(text)!r} is not a number {wanted}")
        return value

    return parse


def ranks_option(about: str, default: str | bool = True) -> OptionInfo:
    """The number of ranks, spelt as launchers of MPI spell it; ``about`` and ``default`` are shown as help."""
    option: OptionInfo = typer.Option(
        "-n", "-np", "--np", parser=whole(1), metavar="N", help=about, show_default=default
    )
    return option


def output_file(text: str | Path) -> Path:
    """Parses the name of a file to be written at the end of what takes long; the error says why it could not be."""
    file = Path(text)
    if reason := why_not_written(file):
        raise typer.BadParameter(f"{file}: {reason}")
    return file


def check_kept(written: Mapping[str, Path | None], read: Mapping[str, Path | None]) -> None:
    """ValueError if a file to be written is one of those that are read, which would be lost; both by their options."""
    for option, file in written.items():
        for other, source in read.items():
            if file is not None and source is not None and file.exists() and source.exists() and file.samefile(source):
                raise ValueError(f"{option} {file} would be written over {other} {source}: name another file")


def why_not_written(file: Path) -> str:
    """Return why a file could not be written; "" if it could."""
    if file.is_symlink() and file.resolve().is_file() and file.parent != Path("/dev"):
        return f"it is a symbolic link, to {file.resolve()}; name the file itself"
    if file.is_dir():
        return "it is a directory; name a file"
    if file.exists() and not os.access(file, os.W_OK):
        return "it cannot be written to"
    if not os.access(file.parent, os.W_OK | os.X_OK):
        return f"{file.parent} {'cannot be written to' if file.parent.is_dir() else 'is no directory'}"
    if not file.exists():
        try:
            file.touch()  # root may everything, and still makes no file in /proc
            file.resolve().unlink()
        except OSError as error:
            return f"it cannot be made ({error.strerror})"
    return ""


def check_program(context: typer.Context, program: Sequence[str]) -> None:
    """ValueError where an option that the command does not have stands in the place of the program."""
    if program and program[0].startswith("-") and program[0] != "-m":
        raise ValueError(no_such_option(context, program[0]))


def no_such_option(context: typer.Context, word: str) -> str:
    """An error about an option that the command does not have, with the one that was perhaps meant."""
    name = word.partition("=")[0].replace("_", "-")
    known = [option for parameter in context.command.params for option in parameter.opts if option.startswith("-")]
    meant = OF_OTHERS.get(name, "") or _nearest(name, known)
    return f"no such option: {word}" + (f"; did you mean {meant}?" if meant else f"; see {context.command_path} --help")


def _nearest(name: str, known: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name, known, n=1)), "")
