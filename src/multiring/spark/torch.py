"""Models of PyTorch in the Estimators: on the ranks that train them, and in the tasks that predict."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from pyspark import cloudpickle
from torch.overrides import TorchFunctionMode

from multiring.spark.columns import Array, Block
from multiring.spark.identity import digest, told
from multiring.torch.broadcast import broadcast_parameters
from multiring.torch.optimizer import DistributedOptimizer


def check(model: Any, optimizer: Any, loss: Any, metrics: Any) -> None:
    """TypeError or ValueError, in the driver, for what no rank could train with."""
    if not callable(model):
        raise TypeError(f"model={model!r}: expected a torch.nn.Module, or a function that makes one")
    if not callable(optimizer):
        raise TypeError(
            f"optimizer={optimizer!r}: expected a function of the model, such as "
            "lambda model: torch.optim.Adam(model.parameters())"
        )
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        name = f"torch.optim.{optimizer.__name__}"
        raise TypeError(f"optimizer={name}: expected a function of the model, lambda model: {name}(model.parameters())")
    if not callable(loss):
        raise TypeError(
            f"loss={loss!r}: expected a function of outputs and labels, such as torch.nn.CrossEntropyLoss()"
        )
    if getattr(loss, "reduction", "mean") != "mean":
        raise ValueError(f"loss={loss!r}: its reduction has to be 'mean', since ranks count by their rows")
    if not isinstance(metrics, Mapping) or not all(callable(metric) for metric in metrics.values()):
        raise TypeError(
            f"metrics={metrics!r}: expected a dictionary of functions of outputs and labels, by their names"
        )
    if "loss" in metrics:
        raise ValueError("metrics has 'loss', which is the name of the loss itself: give that metric another one")


def portable(part: Any) -> Any:
    """Return the part itself: torch's objects can be pickled."""
    return part


def isolated() -> AbstractContextManager[Any]:
    """Gives the process its random numbers back, as Spark uses it again."""
    return torch.random.fork_rng(devices=[])


class _NoBroadcast(TorchFunctionMode):
    """Refuses operations that would pair an output with the label of another row, or with several labels."""

    def __init__(self, outputs: Any, labels: Any, columns: str) -> None:
        super().__init__()
        self._outputs, self._labels, self._columns = outputs, labels, columns

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        takes = [any(each is one for each in given) for one in (self._outputs, self._labels)]
        if any(takes):
            rows, shapes = len(self._labels), {tuple(each.shape) for each in given}
            if rows > 1 and {(rows,), (rows, 1)} <= shapes:
                self._refuse(func, f"tensors of shapes {(rows,)} and {(rows, 1)}", "index the second with [:, 0]")
            if all(takes) and (self._repeats_numbers() or self._repeats_rows(func, args, kwargs)):
                shapes_of_both = (
                    f"outputs of shape {tuple(self._outputs.shape)} and labels of {tuple(self._labels.shape)}"
                )
                self._refuse(
                    func, shapes_of_both, "give the model an output for each label, or index the wider one with [:, i]"
                )
        return func(*args, **kwargs)

    def _repeats_numbers(self) -> bool:
        widths = [each.shape[1] for each in (self._outputs, self._labels) if each.dim() == 2]
        return len(widths) == 2 and min(widths) == 1 < max(widths)

    def _repeats_rows(self, func: Any, args: Any, kwargs: Any) -> bool:
        """True if the shapes fit by chance: a loss of classes takes any number of rows, a difference does not."""
        shapes = {self._outputs.shape[1:], self._labels.shape[1:]}
        width, rows = max(shape.numel() for shape in shapes), len(self._labels)
        if len(shapes) == 1 or torch.Size() not in shapes or rows not in (1, width):
            return False
        more = 2 if 2 * rows != width else 3

        def with_more_rows(value: Any) -> Any:
            return torch.cat([value] * more) if value is self._outputs or value is self._labels else value

        try:
            func(*map(with_more_rows, args), **{name: with_more_rows(value) for name, value in kwargs.items()})
        except (RuntimeError, ValueError):
            return True
        return False

    def _refuse(self, func: Any, what: str, remedy: str) -> None:
        raise ValueError(
            f"the loss or a metric calls {func.__name__} on {what} (label column(s) {self._columns}), which would pair "
            f"a number with several: {remedy}"
        )


class TorchTrainer:
    """Ranks train replicas; the model's parameters say on which device."""

    def __init__(self, parts: Mapping[str, bytes], zeros: Block, columns: str, seed: int) -> None:
        torch.manual_seed(seed)
        model = pickle.loads(parts["model"])
        if not isinstance(model, torch.nn.Module):
            model = model()
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"the function given as model made a {type(model).__name__}: expected a torch.nn.Module")
        self._model = model
        self.output_shape = tuple(self._outputs(zeros[:-1], training=False).shape[1:])
        broadcast_parameters(model.state_dict())
        optimizer = pickle.loads(parts["optimizer"])(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"the function given as optimizer made a {type(optimizer).__name__}: expected one of torch")
        groups = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
        decisive = [{name: value for name, value in group.items() if value} for group in groups]
        self._described = f"{type(optimizer).__name__} {told(decisive)}"
        self._optimizer = DistributedOptimizer(optimizer, model.named_parameters(), weight=0)
        self._loss: Callable[..., Any] = pickle.loads(parts["loss"])
        self._metrics: dict[str, Callable[..., Any]] = pickle.loads(parts["metrics"])
        self._label_columns = columns
        self.begin(seed)

    def begin(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._rows = 0
        self._sums = dict.fromkeys(["loss", *self._metrics], 0.0)

    def _outputs(self, inputs: Block, *, training: bool) -> Any:
        self._model.train(training)
        first = next(self._model.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        with torch.set_grad_enabled(training):
            return _outputs(self._model, [torch.from_numpy(each).to(device) for each in inputs])

    def _loss_of(self, block: Block, *, training: bool) -> Any:
        *inputs, last = block
        outputs = self._outputs(inputs, training=training)
        labels = torch.from_numpy(last).to(outputs.device)
        if labels.numel() == outputs.numel():  # a label for each output: no classes
            labels = labels.reshape(outputs.shape).to(outputs.dtype)
        with _NoBroadcast(outputs, labels, self._label_columns):
            loss = self._loss(outputs, labels)
            with torch.no_grad():
                found = {name: float(metric(outputs, labels)) for name, metric in self._metrics.items()}
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise TypeError(f"the loss is {what}: expected a tensor with one number, the mean over the rows")
        self._rows += len(last)
        self._sums["loss"] += len(last) * loss.item()
        for name, value in found.items():
            self._sums[name] += len(last) * value
        return loss

    def train(self, block: Block | None) -> None:
        self._optimizer.zero_grad()
        self._optimizer.weight = 0 if block is None else len(block[-1])
        if block is not None:
            self._loss_of(block, training=True).backward()
        self._optimizer.step()

    def evaluate(self, block: Block) -> None:
        self._loss_of(block, training=False)

    def metrics(self) -> dict[str, float]:
        return {name: value / max(1, self._rows) for name, value in self._sums.items()}

    def buffers(self) -> list[Array]:
        return [one.detach().cpu().double().numpy() for one in self._floats()]

    def set_buffers(self, values: list[Array]) -> None:
        for one, value in zip(self._floats(), values, strict=True):
            one.copy_(torch.from_numpy(value).reshape(one.shape))

    def _floats(self) -> list[Any]:
        return [one for one in self._model.buffers() if one.is_floating_point()]

    def identity(self) -> dict[str, str]:
        state = [(name, one) for name, one in self._model.state_dict().items() if isinstance(one, torch.Tensor)]
        bits = ((name, one.cpu().reshape(-1).view(torch.uint8).numpy()) for name, one in state)
        return {"model": f"{type(self._model).__name__} {digest(bits)}", "optimizer": self._described}

    def saved(self) -> bytes:
        torch.save({"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}, file := io.BytesIO())
        return file.getvalue()

    def restore(self, saved: bytes) -> None:
        state = torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def result(self) -> bytes:
        packed: bytes = cloudpickle.dumps(self._model.cpu().eval())
        return packed


trainer = TorchTrainer


def _outputs(model: Any, inputs: list[Any]) -> Any:
    outputs = model(*inputs)
    if not isinstance(outputs, torch.Tensor) or not outputs.dim() or len(outputs) != len(inputs[0]):
        shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else None
        what = f"a {type(outputs).__name__}" if shape is None else f"a tensor of shape {shape}"
        raise TypeError(
            f"the model gives {what} for {len(inputs[0])} row(s): expected a tensor with an entry for each row"
        )
    return outputs


def predictor(model: Any) -> Callable[[Block], Array]:
    """A function from inputs to outputs."""

    def predict(inputs: Block) -> Array:
        with torch.inference_mode():
            outputs: Array = _outputs(model, [torch.from_numpy(each) for each in inputs]).numpy()
            return outputs

    return predict


def loaded(packed: bytes) -> Any:
    """The model that `TorchTrainer.result` has packed."""
    return pickle.loads(packed)
