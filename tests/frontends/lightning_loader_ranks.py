"""Lightning trains on a Loader, keeps its state in a checkpoint, and goes on from there in the middle of an epoch."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy

import multiring as mr
from multiring.torch import Loader

LENGTH, SAVED_AFTER = 59, 3


class Model(lightning.LightningModule):
    """Learns nothing, and notes which samples it was given in which epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[int, list[float]]] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch[:, 0].tolist()))
        return self.layer(batch).sum() * 1e-6

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Save(lightning.Callback):
    def __init__(self, file: str) -> None:
        self._file = file

    def on_train_batch_end(self, trainer: lightning.Trainer, model: Any, outputs: Any, batch: Any, number: int) -> None:
        if (trainer.current_epoch, number) == (0, SAVED_AFTER - 1):
            trainer.save_checkpoint(self._file)


def trained(
    epochs: int, *callbacks: lightning.Callback, checkpoint: str | None = None
) -> list[tuple[int, list[float]]]:
    """Train with a loader that reads ahead, and return the batches that this rank was given, with their epochs."""
    model = Model()
    trainer = lightning.Trainer(
        strategy=DDPStrategy(process_group_backend="multiring"),
        accelerator="cpu",
        devices=mr.world_size(),
        max_epochs=epochs,
        callbacks=list(callbacks),
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = Loader(torch.arange(float(LENGTH)).view(LENGTH, 1), 8, seed=3, num_workers=1)
    trainer.fit(model, loader, ckpt_path=checkpoint)
    return model.seen


def whole(mine: list[tuple[int, list[float]]], epoch: int) -> bool:
    """True if all ranks together were given each sample of an epoch once."""
    given = chain(*mr.all_gather_object([sample for each, batch in mine if each == epoch for sample in batch]))
    return sorted(given) == list(range(LENGTH))


def main(folder: str) -> None:
    mr.init()
    file = str(Path(folder) / "saved.ckpt")
    first = trained(2, Save(file))
    assert whole(first, 0)
    assert whole(first, 1)
    rest = trained(1, checkpoint=file)
    assert len(rest) == -(-LENGTH // 8) - SAVED_AFTER
    assert first[SAVED_AFTER : SAVED_AFTER + len(rest)] == rest
    print("went on in the middle")


if __name__ == "__main__":
    main(sys.argv[1])
