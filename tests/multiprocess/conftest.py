from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import SSH, Launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.kill_all()


@pytest.fixture
def hosts(launch: Launch) -> Launch:
    """A launch that finds a stand-in as ssh."""
    script = launch.directory / "bin/ssh"
    script.parent.mkdir()
    script.write_text(SSH)
    script.chmod(0o755)
    launch.environment["PATH"] = f"{script.parent}:{launch.environment['PATH']}"
    return launch
