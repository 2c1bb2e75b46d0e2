"""multiring.torch.Loader in real processes whose workers read ahead."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from forking_launcher import TORCH, TORCH_LIBRARIES
from framework_jobs import Worlds, needs, succeeds

pytestmark = needs("torch", seconds=600)

CHECKS = (
    "each_sample_once",
    "state_is_that_of_the_loop",
    "workers_that_stay",
    "a_state_that_is_set_ends_the_loop",
    "tar_files",
    "dataloaders_of_others",
    "dataloaders_of_others_whose_workers_are_late_or_others",
    "dataloaders_of_others_go_on_in_the_middle",
    "mistakes",
    "world_of_torch",
)


@pytest.fixture(scope="module")
def worlds() -> Worlds:
    return Worlds("loader_ranks.py", {1: CHECKS[-4:-2], 2: CHECKS, 3: CHECKS}, imports=TORCH)


@pytest.mark.parametrize("check", CHECKS[-4:-2])
def test_dataloaders_of_one_rank(check: str, worlds: Worlds) -> None:
    worlds.succeed(check, ranks=1)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("check", CHECKS)
def test_loader(check: str, ranks: int, worlds: Worlds) -> None:
    worlds.succeed(check, ranks=ranks)


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed: pip install --group frameworks")
def test_lightning_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    printed = succeeds("lightning_loader_ranks.py", str(tmp_path), ranks=2, imports=TORCH_LIBRARIES)
    assert printed.count("went on in the middle") == 2


@pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install --group frameworks"
)
def test_trainer_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    printed = succeeds("trainer_loader_ranks.py", str(tmp_path), ranks=2, imports=TORCH_LIBRARIES)
    assert printed.count("each sample twice") == 2
