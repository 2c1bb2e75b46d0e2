"""Lightning trains on a Loader, keeps its state in a checkpoint, and goes on from there in the middle of an epoch."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

import multiring as mr
from multiring.torch import EpochSampler, EpochStream, Loader

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


class Remember(lightning.Callback):
    """Keeps the state of an order, which a checkpoint of Lightning does not have."""

    def __init__(self, order: EpochSampler | EpochStream) -> None:
        self._order = order
        self.state: dict[str, int] = {}

    def on_train_batch_end(self, trainer: lightning.Trainer, model: Any, outputs: Any, batch: Any, number: int) -> None:
        if (trainer.current_epoch, number) == (0, SAVED_AFTER - 1):
            self.state = self._order.state_after(SAVED_AFTER)


def whole_loader() -> Loader:
    return Loader(torch.arange(float(LENGTH)).view(LENGTH, 1), 8, seed=3, num_workers=1)


def ordered(kind: type[EpochSampler] | type[EpochStream]) -> tuple[Any, DataLoader[Any]]:
    """An order, and a DataLoader that reads ahead in it."""
    numbers = torch.arange(float(LENGTH)).view(LENGTH, 1)
    order = kind(numbers, 4, seed=3)
    if isinstance(order, EpochSampler):
        return order, DataLoader(numbers, 4, sampler=order, num_workers=1)
    return order, DataLoader(order, 4, num_workers=2)


def trained(
    epochs: int, loader: DataLoader[Any], *callbacks: lightning.Callback, checkpoint: str | None = None
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
    trainer.fit(model, loader, ckpt_path=checkpoint)
    return model.seen


def whole(mine: list[tuple[int, list[float]]], epoch: int) -> bool:
    """True if all ranks together were given each sample of an epoch once."""
    given = chain(*mr.all_gather_object([sample for each, batch in mine if each == epoch for sample in batch]))
    return sorted(given) == list(range(LENGTH))


def main(folder: str) -> None:
    mr.init()
    file = str(Path(folder) / "saved.ckpt")
    first = trained(2, whole_loader(), Save(file))
    assert whole(first, 0)
    assert whole(first, 1)
    rest = trained(1, whole_loader(), checkpoint=file)
    assert len(rest) == -(-LENGTH // 8) - SAVED_AFTER
    assert first[SAVED_AFTER : SAVED_AFTER + len(rest)] == rest
    for kind in (EpochSampler, EpochStream):
        order, loader = ordered(kind)
        remember = Remember(order)
        whole_run = trained(2, loader, Save(file), remember)
        assert whole(whole_run, 0)
        assert whole(whole_run, 1)
        order, loader = ordered(kind)
        order.load_state_dict(remember.state)
        rest = trained(2, loader, checkpoint=file)
        assert rest == whole_run[SAVED_AFTER:], (rest, whole_run)
    print("went on in the middle")


if __name__ == "__main__":
    main(sys.argv[1])
