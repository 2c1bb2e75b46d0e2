"""The map in docs/design.md names every room of the source, and no room that is not there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def rooms_on_the_map() -> set[str]:
    text = (ROOT / "docs/design.md").read_text()
    table = text.partition("## The map")[2].partition("\n## ")[0]
    cells = []
    for row in re.findall(r"^\| (`.*) \|$", table, re.MULTILINE):
        room, holds = row.split(" | ")
        cells += [room, holds] if room == "`csrc/`" else [room]
    return {name.strip("/") for cell in cells for name in re.findall(r"`([\w./]+)`", cell)}


def test_every_module_is_on_the_map() -> None:
    modules = {path.name for path in (ROOT / "src/multiring").glob("*.py") if not path.name.startswith("_")}
    modules |= {path.stem for path in (ROOT / "src/multiring/planning").glob("*.py") if path.stem != "__init__"}
    rooms = {path.parent.name for path in (ROOT / "src/multiring").glob("*/__init__.py")}
    assert (modules | rooms) - rooms_on_the_map() == set()


def test_every_source_of_the_engine_is_on_the_map() -> None:
    sources = {path.stem for path in (ROOT / "csrc").glob("*.[ch]pp")}
    named = {Path(name).stem for name in rooms_on_the_map()}
    assert sources - named == set()


def test_modules_take_nothing_from_the_package_itself_but_modules() -> None:
    """What it offers comes from the rooms at the top: to take it would be to import upwards, which no layer forbids."""
    source = ROOT / "src/multiring"
    names = {path.stem for path in source.iterdir()} | {"_native"}
    taken = {
        (path.name, alias.name)
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "multiring" and not node.level
        for alias in node.names
    }
    assert len(taken) > 50
    assert {(module, name) for module, name in taken if name not in names} == set()


def test_nothing_on_the_map_is_missing() -> None:
    present = {path.name for path in (ROOT / "src/multiring").iterdir()} | {"csrc"}
    present |= {path.stem for path in (ROOT / "src/multiring/planning").iterdir()}
    present |= {path.stem for path in (ROOT / "csrc").iterdir()} | {path.name for path in (ROOT / "csrc").iterdir()}
    assert rooms_on_the_map() - present == set()
