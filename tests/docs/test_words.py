"""Each class name means one thing: no two modules of the package, the engine among them, define a class of the same
name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src/multiring"
ALIKE = {"Engine", "Work"}
"""What the native engine has for a Python class of the same purpose."""


def classes() -> dict[str, list[str]]:
    """The modules that define a class of each name, at their top level."""
    found = defaultdict(list)
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    return found


def test_no_class_name_stands_for_two_things() -> None:
    known = classes()
    assert len(known) > 200
    assert {name: modules for name, modules in known.items() if len(modules) > 1 and name not in ALIKE} == {}


def test_no_docstring_opens_with_a_riddle() -> None:
    """A docstring that opens with one of these words makes sense only after a second reading."""
    openings = {"Of", "By", "For", "So", "In"}
    riddles = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if is_text and isinstance(text := node.value.value, str) and text.split(" ", 1)[0] in openings:
                riddles.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {text.splitlines()[0]}")
    assert riddles == []
