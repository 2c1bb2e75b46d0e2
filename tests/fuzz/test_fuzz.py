"""The fuzzed parsers for a moment, and everything that one of them has ever stumbled over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from targets import TARGETS, close_store

from fuzz import corpus, fuzz


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    yield
    close_store()


@pytest.mark.parametrize("target", TARGETS)
def test_what_was_found_before(target: str) -> None:
    for data in corpus(target):
        TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
def test_new_inputs_for_a_moment(target: str) -> None:
    assert fuzz(target, 1.0, seed=0) > 3
