"""One order of samples for real ranks of any number, and after some are lost."""

from __future__ import annotations

import io
import signal
import tarfile
from pathlib import Path
from typing import Any

import data_ranks
import jobs
import numpy as np
import pytest

from multiring.data import Permutation, index

LENGTH = 40


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Three tar files whose sample i holds the number i."""
    for file in range(3):
        with tarfile.open(tmp_path / f"{file}.tar", "w") as tar:
            for i in range(file * 15, min(LENGTH, file * 15 + 15)):
                member = tarfile.TarInfo(f"{i:04d}.number")
                member.size = len(str(i))
                tar.addfile(member, io.BytesIO(str(i).encode()))
    index.build(tmp_path)
    return str(tmp_path)


def together(outcomes: list[dict[str, Any]]) -> list[int]:
    """The samples of all steps, the ranks' parts of each in the order of the ranks."""
    return [i for parts in zip(*(each["taken"] for each in outcomes), strict=True) for part in parts for i in part]


def test_another_world_goes_on_in_the_middle_of_an_epoch(folder: str) -> None:
    expected = Permutation(LENGTH, data_ranks.SEED)(np.arange(LENGTH)).tolist()
    first = jobs.run(data_ranks.batches, 3, folder, None, 2)
    state = first[0]["state"]
    assert state == {"seed": data_ranks.SEED, "epoch": 0, "consumed": 14, "length": LENGTH}
    second = jobs.run(data_ranks.batches, 2, folder, state, 99)
    assert together(first) + together(second) == expected
    assert sorted(expected) == list(range(LENGTH))
    assert second[1]["state"] == {"seed": data_ranks.SEED, "epoch": 1, "consumed": 0, "length": LENGTH}


@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_take_the_samples_of_a_rank_that_was_lost(victim: int, folder: str) -> None:
    lost_at = 2
    job = jobs.start(data_ranks.lose, 3, folder, victim, lost_at, environment={"MULTIRING_HEARTBEAT_TIMEOUT": "3"})
    outcomes = job.wait(90)
    assert outcomes[victim].code == -signal.SIGKILL
    left = sorted((each.value for rank, each in enumerate(outcomes) if rank != victim), key=lambda each: each["rank"])
    expected = Permutation(LENGTH, data_ranks.SEED)(np.arange(LENGTH)).tolist()
    begin = lost_at * data_ranks.GLOBAL_BATCH
    after = [{"taken": each["taken"][lost_at:]} for each in left]
    assert together(after) == expected[begin:]
    before = [i for each in left for part in each["taken"][:lost_at] for i in part]
    assert set(before) < set(expected[:begin])
    assert len(before) == len(set(before))
    assert {(each["epoch"], each["blamed"]) for each in left} == {(1, victim)}
