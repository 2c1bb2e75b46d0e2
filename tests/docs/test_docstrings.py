"""Every public name says what it is, and no docstring opens as a question."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import multiring

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "benchmarks", "examples", "tools")
QUESTION = re.compile(r"(?:as|how|that|those|to|what|when|where|whether|which|who|whose|why)\b", re.IGNORECASE)


def docstrings() -> Iterator[tuple[str, str]]:
    """Docstrings of modules, classes, functions and values, with the places of their first lines."""
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py*") if path.suffix != ".pyc"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value.value.lstrip()


def public_names() -> list[str]:
    names = [name for name in multiring.__all__ if name != "__version__"]
    classes = [name for name in names if inspect.isclass(getattr(multiring, name))]
    methods = [
        f"{name}.{method}"
        for name in classes
        for method, value in vars(getattr(multiring, name)).items()
        if not method.startswith("_") and (inspect.isroutine(value) or isinstance(value, property))
    ]
    return [*names, *methods]


@pytest.mark.parametrize("name", public_names())
def test_public_name_has_a_docstring(name: str) -> None:
    value = multiring
    for part in name.split("."):
        value = getattr(value, part)
    assert inspect.getdoc(value), f"multiring.{name} has no docstring"


def test_no_docstring_opens_as_a_question() -> None:
    found = dict(docstrings())
    assert len(found) > 3000
    assert {place: text for place, text in found.items() if QUESTION.match(text)} == {}


def test_importing_multiring_starts_nothing_and_imports_no_framework() -> None:
    code = (
        "import sys, threading, logging, multiring\n"
        "assert threading.active_count() == 1\n"
        "assert not logging.getLogger('multiring').handlers\n"
        "heavy = ('torch', 'jax', 'tensorflow', 'keras', 'typer', 'rich', 'asyncio')\n"
        "print([name for name in heavy if name in sys.modules])"
    )

    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
