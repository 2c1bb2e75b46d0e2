"""Build the documentation as a site in build/site, without a network: ``make docs``.

Zensical builds what lies below one directory, so everything is put into build/docs first: the pages of docs/,
CONTRIBUTING.md and CHANGELOG.md, a page for each file of the repository that one of them links to, and the reference of
the command line, which is made from the commands themselves. Another directory than build/ may be given.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import typer

from multiring.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files of the repository that have a page of their own."""

LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".hpp": "cpp", ".json": "json"}

_LINK = re.compile(r"\]\(([^)#: ]*)(#[^)]*)?\)")
_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)


class Pages:
    """The pages of the site, as they are put together."""

    def __init__(self, stage: Path) -> None:
        self._root = stage
        self._shown: set[Path] = set()

    def add(self, source: Path, page: str) -> None:
        """Add a Markdown file of the repository as ``page``."""
        parts = _FENCE.split(source.read_text())
        text = "".join(part if part.startswith("```") else self._relinked(part, source, page) for part in parts)
        self.write(page, text)

    def write(self, page: str, text: str) -> None:
        """Add a page that no file holds."""
        file = self._root / page
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def _relinked(self, text: str, source: Path, page: str) -> str:
        def relinked(link: re.Match[str]) -> str:
            target, anchor = link[1], link[2] or ""
            if not target:
                return link[0]
            found = (source.parent / target).resolve()
            if found.is_relative_to(DOCS):
                home = str(found.relative_to(DOCS))
            elif found.is_dir() or not found.exists():
                raise SystemExit(
                    f"{source.relative_to(ROOT)} links to {target}: a page of the site can show a file only"
                )
            else:
                home = OUTSIDE.get(str(found.relative_to(ROOT))) or self._show(found)
            return f"]({os.path.relpath(home, Path(page).parent)}{anchor})"

        return _LINK.sub(relinked, text)

    def _show(self, file: Path) -> str:
        """The page that shows a file of the repository."""
        name = file.relative_to(ROOT)
        page = f"files/{name.with_suffix('') if name.suffix == '.md' else name}.md"
        if name in self._shown:
            return page
        self._shown.add(name)
        if name.suffix == ".md":
            self.add(file, page)
        else:
            text = f"```{LANGUAGES.get(name.suffix, '')}\n{file.read_text()}```"
            self.write(page, f"# {name.name}\n\n`{name}`\n\n{text}\n")
        return page


def command_line() -> str:
    """The page about the command line."""
    app = typer.Typer(name="multiring", rich_markup_mode=None, add_completion=False)
    app.callback()(lambda: None)
    for name in COMMANDS:
        import_module(f"multiring.cli.{name}").register(app)
    root = typer.main.get_command(app)
    about = "Generated from the commands; `multiring COMMAND --help` shows the same in a terminal."
    sections = "".join(_sections(root, None, "multiring", 2))
    overview = "".join(f"- `multiring {name}`: {about}\n" for name, about in COMMANDS.items())
    return f"# The command line\n\n{about}\n\n{overview}\n{sections}"


def _sections(command: click.Command, parent: click.Context | None, name: str, level: int) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent)
    if parent is not None:
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        yield f"{'#' * level} {context.command_path}\n\n{_prose(command.help or '')}\n\n```\n{usage}\n```\n\n"
        records = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
        yield "".join(f"- `{_typed(names)}`: {_prose(help)}\n" for names, help in records) + "\n"
        level += 1
    for each, inner in getattr(command, "commands", {}).items():
        yield from _sections(inner, context, each, level)


def _typed(names: str) -> str:
    """An option or argument without the brackets around its type."""
    return re.sub(r" <list\[\w+\]>", "", re.sub(r"<([\w| ]+)>", lambda kind: kind[1].removesuffix(" range"), names))


def _prose(text: str) -> str:
    """A help text as Markdown."""
    return re.sub(r"([*_<\[\]])", r"\\\1", " ".join(text.split()))


def build(directory: Path) -> Path:
    """The site, in a directory of its own below ``directory``; exit if Zensical complains about a page."""
    stage, site = directory / "docs", directory / "site"
    for old in (stage, site):
        shutil.rmtree(old, ignore_errors=True)
    pages = Pages(stage / "pages")
    for source in sorted(DOCS.rglob("*")):
        page = str(source.relative_to(DOCS))
        if source.suffix == ".md":
            pages.add(source, page)
        elif source.is_file() and source.suffix != ".toml":
            (stage / "pages" / page).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, stage / "pages" / page)
    for name, page in OUTSIDE.items():
        if not (DOCS / page).exists():
            pages.add(ROOT / name, page)
    pages.write("reference/cli.md", command_line())
    settings = (DOCS / "zensical.toml").read_text().replace('"../..', f'"{ROOT}')
    (stage / "zensical.toml").write_text(settings)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", str(stage / "zensical.toml")]
    if (code := subprocess.run(command).returncode) != 0:
        raise SystemExit(code)
    return Path(shutil.move(stage / "site", site))


if __name__ == "__main__":
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build") / "index.html")
