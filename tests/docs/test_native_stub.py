"""The types of the native engine that mypy and editors read are those of the engine that was built."""

from __future__ import annotations

import re

from native_stub import PATTERNS, STUB, native_stub


def test_the_stub_is_what_stubgen_makes_of_the_engine() -> None:
    assert STUB.read_text() == native_stub(), "csrc/bindings.cpp has changed since `make stub` was run"


def test_every_pattern_is_of_a_name_that_the_engine_has() -> None:
    names = re.findall(r"^_native\\\.(\w+)\$:$", PATTERNS.read_text(), re.MULTILINE)
    assert len(names) == PATTERNS.read_text().count("$:")
    assert [name for name in names if f"\n{name}: " not in STUB.read_text()] == []
