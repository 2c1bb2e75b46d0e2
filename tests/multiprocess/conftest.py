from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.kill_all()
