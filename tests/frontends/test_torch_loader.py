"""multiring.torch.Loader in real processes whose workers read ahead."""

from __future__ import annotations

import pytest
from framework_jobs import Worlds, needs

pytestmark = needs("torch", seconds=600)

CHECKS = (
    "each_sample_once",
    "state_is_that_of_the_loop",
    "workers_that_stay",
    "a_state_that_is_set_ends_the_loop",
    "tar_files",
    "mistakes",
    "world_of_torch",
)


@pytest.fixture(scope="module")
def worlds() -> Worlds:
    return Worlds("loader_ranks.py", {2: CHECKS, 3: CHECKS})


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("check", CHECKS)
def test_loader(check: str, ranks: int, worlds: Worlds) -> None:
    worlds.succeed(check, ranks=ranks)
