"""Every public name says what it is."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import multiring


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
