"""Train on handwritten digits with Horovod; test_migration.py rewrites it by docs/migrating.md and runs that.

horovodrun -np 2 python horovod_digits.py
"""

import argparse

import horovod
import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--num-proc", type=int, help="start so many ranks from here, without horovodrun")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 12, kernel_size=3)
        self.hidden = nn.Linear(12 * 3 * 3, 64)
        self.scores = nn.Linear(64, 10)

    def forward(self, images):
        found = functional.max_pool2d(functional.relu(self.convolution(images)), 2)
        return functional.log_softmax(self.scores(functional.relu(self.hidden(found.flatten(1)))), dim=1)


def digits(first, last):
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images[first:last], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(images, torch.tensor(labels[first:last]))


def metric_average(value, name):
    tensor = torch.tensor(value)
    average = hvd.allreduce(tensor, name=name)
    return average.item()


def train_epoch(model, optimizer, loader, clip):
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = functional.nll_loss(model(images), labels)
        loss.backward()
        optimizer.synchronize()  # clipping needs the averages
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        with optimizer.skip_synchronize():
            optimizer.step()


def evaluate(model, loader, samples):
    model.eval()
    loss = correct = 0.0
    with torch.no_grad():
        for images, labels in loader:
            scores = model(images)
            loss += functional.nll_loss(scores, labels, reduction="sum").item()
            correct += (scores.argmax(1) == labels).sum().item()
    return metric_average(loss / samples, "loss"), metric_average(correct / samples, "accuracy")


def main(args):
    hvd.init()
    torch.manual_seed(42 + hvd.rank())  # the broadcasts make all ranks equal
    torch.set_num_threads(1)

    train, test = digits(0, 1500), digits(1500, 1796)
    train_sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    test_sampler = DistributedSampler(test, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train, batch_size=args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test, batch_size=128, sampler=test_sampler)

    model = Net()
    lr_scaler = hvd.size() if not args.use_adasum else 1
    if args.use_adasum and hvd.nccl_built():
        lr_scaler = hvd.local_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train_epoch(model, optimizer, train_loader, args.clip)
    loss, accuracy = evaluate(model, test_loader, len(test_sampler))
    seen = hvd.allgather(torch.tensor([len(train_sampler)]))
    total = hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum)
    settings = hvd.broadcast_object(vars(args), root_rank=0)
    hvd.barrier()
    print(
        f"rank {hvd.rank()} of {hvd.size()}: loss {loss:.6f}, accuracy {accuracy:.4f}, samples {seen.tolist()}, "
        f"total {total.item():.0f}, epochs {settings['epochs']}"
    )
    hvd.shutdown()


if __name__ == "__main__":
    arguments = parser.parse_args()
    if arguments.num_proc:
        horovod.run(main, args=(arguments,), np=arguments.num_proc)
    else:
        main(arguments)
