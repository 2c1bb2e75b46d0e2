"""Trainer of Hugging Face trains on DataLoaders in the order of a data set, and goes on in the middle of it."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from multiring.data import Batches
from multiring.torch import EpochSampler, EpochStream, Loader

LENGTH, BATCH, SEED, SAVED_AFTER = 29, 3, 4, 2


class Samples(TorchDataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, sample: int) -> dict[str, torch.Tensor]:
        return {"sample": torch.tensor([float(sample)])}


class Model(torch.nn.Module):
    """Learns nothing, and notes which samples it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def forward(self, sample: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append([int(each) for each in sample[:, 0].tolist()])
        return {"loss": self.layer(sample).sum() * 1e-9}


class OneOrder(Trainer):
    """Trainer, whose own data loaders would cut the order of ours among the ranks once more."""

    kind = "sampler"

    def get_train_dataloader(self) -> DataLoader[Any]:
        if self.kind == "loader":
            return Loader(self.train_dataset, BATCH * dist.get_world_size(), seed=SEED, num_workers=1)
        if self.kind == "sampler":
            sampler = EpochSampler(self.train_dataset, BATCH, seed=SEED)
            return DataLoader(self.train_dataset, BATCH, sampler=sampler, num_workers=1)
        return DataLoader(EpochStream(self.train_dataset, BATCH, seed=SEED), BATCH, num_workers=2)


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == SAVED_AFTER:
            control.should_save = control.should_training_stop = True


def trained(folder: str, kind: str, *callbacks: TrainerCallback, resume: bool = False) -> list[list[int]]:
    """The samples of this rank's steps in two epochs, or of those that are left of them."""
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=BATCH, num_train_epochs=2, save_strategy="no",
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    model = Model()
    trainer = OneOrder(model, arguments, train_dataset=Samples(), callbacks=list(callbacks))
    trainer.kind = kind
    trainer.train(resume_from_checkpoint=resume or None)
    return model.seen


def main(folder: str) -> None:
    dist.init_process_group("multiring")
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = Batches(range(LENGTH), BATCH * size, rank, size, seed=SEED)
    expected = [*alone, *alone]
    for kind in ("loader", "sampler", "stream"):
        place = str(Path(folder) / kind)
        mine = trained(place, kind)
        assert mine == expected, (kind, mine, expected)
        everybody: list[Any] = [None] * size
        dist.all_gather_object(everybody, mine)
        assert sorted(chain(*chain(*everybody))) == sorted([*range(LENGTH)] * 2)
        first = trained(place, kind, Stop())
        assert first == expected[:SAVED_AFTER]
        dist.barrier()
        rest = trained(place, kind, resume=True)
        assert rest == expected[SAVED_AFTER:], (kind, rest)
    print("each sample twice")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
