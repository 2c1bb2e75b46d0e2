"""Train on handwritten digits by Lightning.

    two ranks       multiring run -n 2 examples/lightning_digits.py

The one line that Lightning needs is marked.
"""

from __future__ import annotations

import os

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.005)


def main() -> None:
    lightning.seed_everything(0)
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(images))
    training, held_out = (TensorDataset(images[part], labels[part]) for part in (order[:1437], order[1437:]))
    trainer = lightning.Trainer(
        strategy=DDPStrategy(process_group_backend="multiring"),  # the one line
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(training, 48, shuffle=True), DataLoader(held_out, 90))
    if trainer.is_global_zero:
        backend = torch.distributed.get_backend()
        print(f"accuracy {trainer.callback_metrics['accuracy']:.1%} on {trainer.world_size} rank(s) over {backend}")


if __name__ == "__main__":
    main()
