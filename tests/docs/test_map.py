"""The map in docs/design.md names every room of the source and no other, each in its layer of the contract."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src/multiring"


def rows_below(words: str) -> list[list[str]]:
    """The rows of the first table of docs/design.md after some words, each as its cells."""
    _, found, rest = (ROOT / "docs/design.md").read_text().partition(words)
    assert found, words
    table = re.search(r"^\|.*?\|\n(?!\|)", rest, re.MULTILINE | re.DOTALL)
    assert table, words
    _, _, *rows = table[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def names_below(words: str) -> set[str]:
    """The names in the first cells of that table."""
    return {name for first, _ in rows_below(words) for name in re.findall(r"`([\w.]+)`", first)}


def layers_below(words: str) -> dict[str, int]:
    """The layer of each room or module of that table."""
    rows = rows_below(words)
    rooms = {re.sub(r"\.py$|/$", "", room.strip("`")): int(layer) for layer, room, _ in rows}
    assert len(rooms) == len(rows)
    return rooms


def contract_of(package: str) -> dict[str, int]:
    """The layer of each room or module in the contract of a package, counted from the bottom."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each.get("containers") == [package])
    return {room: layer for layer, rooms in enumerate(reversed(layers), 1) for room in rooms.split(" | ")}


def test_the_maps_have_the_layers_of_the_contracts() -> None:
    assert layers_below("## The map") == {**contract_of("multiring"), "csrc": 0}
    assert layers_below("Inside `planning/`") == contract_of("multiring.planning")


def test_the_map_goes_from_the_top_down_and_that_of_planning_from_the_bottom_up() -> None:
    layers = list(layers_below("## The map").values())
    assert layers == sorted(layers, reverse=True)
    layers = list(layers_below("Inside `planning/`").values())
    assert layers == sorted(layers)


def test_every_room_is_on_the_map_as_the_file_or_folder_that_it_is() -> None:
    modules = {path.name for path in SOURCE.glob("*.py") if path.name != "__init__.py"}
    packages = {f"{path.parent.name}/" for path in SOURCE.glob("*/__init__.py")}
    assert len(packages) > 10
    assert {room.strip("`") for _, room, _ in rows_below("## The map")} == modules | packages | {"csrc/"}


def test_every_module_of_planning_is_on_its_map() -> None:
    present = {path.stem for path in (SOURCE / "planning").iterdir() if not path.name.startswith("_")}
    assert layers_below("Inside `planning/`").keys() == present


def test_every_source_of_the_engine_is_on_its_map() -> None:
    sources = {path.stem for path in (ROOT / "csrc").glob("*.[ch]pp")}
    others = {path.name for path in (ROOT / "csrc").iterdir() if path.stem not in sources}
    assert names_below("Inside `csrc/`") == sources | others


def test_sources_of_the_engine_include_none_of_a_row_below() -> None:
    """Nor do those of a row include each other in a circle."""
    rows = [re.findall(r"`([\w.]+)`", first) for first, _ in rows_below("Inside `csrc/`")]
    row_of = {name: number for number, row in enumerate(rows) for name in row}
    includes: dict[str, set[str]] = {}
    for path in (ROOT / "csrc").glob("*.[ch]pp"):
        found = set(re.findall(r'^#include "(\w+)\.hpp"', path.read_text(), re.MULTILINE))
        includes.setdefault(path.stem, set()).update(found - {path.stem})
    assert sum(map(len, includes.values())) > 100
    assert {(a, b) for a, found in includes.items() for b in found if row_of[b] > row_of[a]} == set()

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        ahead = [name]
        while ahead:
            found = includes[ahead.pop()] - seen
            seen |= found
            ahead += found
        return seen

    in_circles = {name for name in includes if name in reached(name)}
    assert in_circles == set()


def test_modules_take_nothing_from_the_package_itself_but_modules() -> None:
    """The package's own names come from the rooms at the top: taking one imports upwards, which no layer forbids."""
    names = {path.stem for path in SOURCE.iterdir()} | {"_native"}
    taken = {
        (path.name, alias.name)
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "multiring" and not node.level
        for alias in node.names
    }
    assert len(taken) > 50
    assert {(module, name) for module, name in taken if name not in names} == set()
