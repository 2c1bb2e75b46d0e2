"""``multiring data``: data sets as tar files with an index."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multiring.cli.errors import one_line_errors
from multiring.data import folders, index, packing
from multiring.data.dataset import Dataset
from multiring.env import parse_size
from multiring.units import count, size

Folder = Annotated[Path, typer.Argument(metavar="OUT", help="The folder with the tar files.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="Data sets as tar files with an index.")
    group.command("pack")(pack)
    group.command("index")(make_index)
    group.command("check")(check)
    app.add_typer(group, name="data")


def pack(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with a folder of files for each class.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where to write; made if it is not there.")],
    file_size: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of a tar file, about.")] = "256MB",
    extensions: Annotated[
        str, typer.Option(metavar="EXT,EXT", help="Files whose names end so are samples.")
    ] = ",".join(folders.IMAGES),
) -> None:
    """Make tar files, an index and classes.json of a folder of classes.

    The label of a class, a sample's member `cls`, is the place of its name among all, sorted. The same folder gives the
    same bytes.
    """
    with one_line_errors("data pack"):
        try:
            nbytes = parse_size(file_size)
        except ValueError as error:
            raise ValueError(f"--file-size {file_size!r} is not {error}") from None
        wanted = [each for each in extensions.split(",") if each.strip(". ")]
        if not wanted:
            raise ValueError(f"--extensions {extensions!r} names none, such as jpg,png")
        packed = packing.pack(source, out, nbytes, [each.strip() for each in wanted])
        typer.echo(
            f"{out}: {count(packed.samples, 'sample')} of {count(packed.classes, 'class')} in "
            f"{count(packed.files, 'file')}, {size(packed.nbytes)}"
        )
        if packed.left_out:
            typer.echo(f"left out: {count(packed.left_out, 'file')} in no class, or with another ending")


def make_index(out: Folder) -> None:
    """Make the index of the tar files that are in a folder; it reads all of them."""
    with one_line_errors("data index"):
        made = index.build(out)
        typer.echo(f"{out / index.NAME}: {count(len(made), 'sample')} in {count(len(made.files), 'file')}")


def check(out: Folder) -> None:
    """Read all members of a data set, and name each that is not what it was when the index was made."""
    with one_line_errors("data check"):
        dataset = Dataset(out)
        found = 0
        for fault in dataset.faults():
            typer.echo(str(fault))
            found += 1
        if found:
            typer.echo(f"multiring data check: {count(found, 'fault')}", err=True)
            raise typer.Exit(1)
        typer.echo(f"{out}: {count(len(dataset), 'sample')} as indexed")
