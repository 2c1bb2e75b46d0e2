"""Train a tiny vision transformer on handwritten digits by the Hugging Face Trainer; nothing is downloaded.

    two ranks       multiring run -n 2 examples/trainer_digits.py

The one line that Trainer needs is marked: it has a list of known backends, and uses a group that is there.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification


class Digits(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, part: slice) -> None:
        data = load_digits()
        order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))[part]
        self.images = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 8 - 1
        self.labels = torch.tensor(data.target)[order]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def accuracy(outcome: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((outcome.predictions.argmax(1) == outcome.label_ids).mean())}


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("multiring")  # the one line
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=64, num_labels=10,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=48, num_train_epochs=12, learning_rate=5e-3,
            save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            ViTForImageClassification(config), arguments, train_dataset=Digits(slice(1437)),
            eval_dataset=Digits(slice(1437, None)), compute_metrics=accuracy,
        )  # fmt: skip
        trainer.train()
        found = trainer.evaluate()["eval_accuracy"]
    if trainer.is_world_process_zero():
        print(f"accuracy {found:.1%} on {dist.get_world_size()} rank(s) over {dist.get_backend()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
