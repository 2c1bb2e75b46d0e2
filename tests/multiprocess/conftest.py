from __future__ import annotations

from pathlib import Path

import pytest
from launching import Launch


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)
