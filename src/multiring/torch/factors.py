"""Gradients of large linear layers from the factors of all ranks, where these are fewer bytes than the sums."""

from __future__ import annotations

import contextlib
import math
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from multiring import api
from multiring.planning.choice import Choice
from multiring.runtime.comm import Communicator, group_of
from multiring.runtime.work import Work
from multiring.torch.broadcast import broadcast_parameters

LEAST_WEIGHTS = 1 << 20
"""Smaller layers are left as they are unless they are named."""

WORTH = 0.5
"""Part of the time of a sum that gathering may take: it leaves each rank the products of all."""

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

HEADER = np.dtype([("rows", "i8"), ("weight", "f8"), ("check", "i8"), ("type", "i8")])
HEADER_BYTES = 64
"""The bytes before the factors in a message, which keep these aligned."""

MARK = 2.0**-60
"""Number in zeros that stand for a gradient to come: less than any gradient's rounding, and not 0 when it is scaled."""

CHECKED = 16
"""One of so many rows of a gradient is compared with those of other ranks."""

CHARGE = "_multiring_layer"
"""Attribute of a module in the charge of `Factors`."""

_averaging = WeakTensorKeyDictionary()
"""Reference to the `Factors` of each parameter."""


class Factors:
    """The weights of large linear layers get the mean gradient from the factors of all ranks.

    A weight's gradient is the product of two factors: the gradients of the layer's outputs and its inputs, a row for
    each sample. Where a sum of gradients over the ranks is predicted to take twice as long as a gather of factors, or
    longer, they are gathered while the backward pass goes on, and each rank multiplies those of all; else gradients are
    summed. Gradients are added to ``grad`` when ``backward()`` returns, in every pass. Source: sufficient factor
    broadcasting (Xie et al. 2016, arXiv 1511.08486; Zhang et al. 2017, Poseidon).
    """

    def __init__(
        self, model: nn.Module, layers: Iterable[str] | None = None, *, group: Communicator | None = None
    ) -> None:
        """Take charge of ``layers``, by name; None: all `torch.nn.Linear` of at least a million weights.

        All ranks make it for the same model, before `DistributedDataParallel` or `DistributedOptimizer`, which leave
        these layers to it. They get the values of the rank that has been in the job longest. ``group`` is a
        communicator, None for the default one. ValueError for a layer whose weights are shared, pruned or normalized,
        lie elsewhere than in memory of the CPU, or have hooks; TypeError for one that is not a `torch.nn.Linear`.
        """
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise ValueError(
                "the model is in a DistributedDataParallel already, which averages all of it: make Factors first"
            )
        outer = api.joined(group)
        self._weight: float | None = None
        self._paused = False
        self._leader: AveragesOthers | None = None
        # A step that torch compiles leaves it to Python, as it does the layers.
        self.finish: Callable[[int], None] = torch.compiler.disable(self._finish)  # type: ignore[no-untyped-call]
        found = dict(_chosen(model) if layers is None else _named(model, list(layers)))
        forms = {
            name: (tuple(layer.weight.shape), layer.bias is not None, str(layer.weight.dtype).removeprefix("torch."))
            for name, layer in found.items()
        }
        for rank, theirs in enumerate(outer.all_gather_object(forms)):
            if theirs != forms:
                raise ValueError(
                    f"Factors has the layers {_shown(forms)} here and {_shown(theirs)} on rank {rank}: all ranks need "
                    "the same model"
                )
        self.layers: tuple[str, ...] = tuple(found) if outer.size > 1 else ()
        """The names of the layers, none where there is one rank alone."""
        self._layers: list[_Layer] = []
        self._passes: dict[int, dict[_Layer, _Uses]] = {}
        self._without_pass: dict[_Layer, _Uses] = {}
        self._model = model
        for module in found.values():
            if (earlier := module.__dict__.get(CHARGE)) is not None:
                earlier.detach()
        parameters = dict(_parameters(found))
        self._leave_out(parameters if self.layers else (), of=parameters)
        if not self.layers:
            return
        broadcast_parameters(parameters, root=outer.oldest, group=outer)
        for name, module in found.items():
            # A communicator for each layer: ranks may come to the layers of a pass in different orders.
            communicator = outer.new_group(range(outer.size))
            assert communicator is not None
            self._layers.append(_Layer(name, module, communicator))
            self._layers[-1].attach(self)

    def remove(self) -> None:
        """Leave the layers as they were; all ranks call it between two passes."""
        if not self._layers:
            return
        self._leave_out((), of=dict(_parameters({layer.name: layer.module for layer in self._layers})))
        for layer in self._layers:
            layer.detach()
            layer.communicator.close()
        self._layers, self.layers = [], ()

    def _leave_out(self, names: Iterable[str], of: Iterable[str]) -> None:
        """Have DistributedDataParallel leave out the parameters ``names``, of these, and what others told it to."""
        before = getattr(self._model, "_ddp_params_and_buffers_to_ignore", ())
        others = set(before) - set(of)
        mine = {*names, *(getattr(before, "mine", set()) - set(of))}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            self._model, _LeftOut(others | mine, mine)
        )

    @property
    def weight(self) -> float | None:
        """The weight of this rank in the means, such as its number of samples; None: all ranks count alike.

        Set on all ranks or on none, before the backward pass; under a `DistributedOptimizer` it is that one's.
        """
        return self._weight if self._leader is None else self._leader.weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        if self._leader is not None:
            raise ValueError(
                f"weight={weight}: these layers count by the weight of their DistributedOptimizer: set that"
            )
        self._weight = weight

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within only keep their factors; the next one outside that has some sends them with its own.

        It goes with that of DistributedDataParallel; that of `DistributedOptimizer` is enough by itself.
        """
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # --- for DistributedOptimizer ---

    def follow(self, leader: AveragesOthers) -> None:
        """Go by the weight and the pauses of one that averages the other parameters."""
        self._leader = leader

    @torch.no_grad()
    def begin_without_pass(self, has_passes_elsewhere: bool) -> None:
        """Begin what this rank sends without a backward pass; others have one, ``has_passes_elsewhere``."""
        for layer in self._layers:
            if layer.kept or (has_passes_elsewhere and any(p.requires_grad for p in layer.parameters)):
                self._without_pass[layer] = _Uses(0, layer.begin(self.weight))

    @torch.no_grad()
    def complete(self) -> None:
        """Wait for all that has begun to be sent, before this rank waits for other gradients of a pass."""
        self._begin_kept(next(iter(self._passes.values()), self._without_pass))
        for uses in (*self._passes.values(), self._without_pass):
            self._complete(uses)
        self._without_pass = {}

    # --- for the layers ---

    def begin_forward(self) -> None:
        """ValueError if a pass has ended in an error, on which other ranks have counted."""
        if self._passes and torch._C._current_graph_task_id() == -1:
            raise ValueError(
                "the backward pass before this one ended before all gradients were there: the other ranks have counted "
                "on it, so end the job, or go on from a checkpoint with a new model and Factors on all ranks"
            )

    def take(self, layer: _Layer, inputs: Tensor, gradients: Tensor) -> None:
        """Keep the factors of a use of a layer in a backward pass, and begin to send them with its last one."""
        task = torch._C._current_graph_task_id()
        if task not in self._passes:
            self._passes[task] = {}
            Variable._execution_engine.queue_callback(lambda: self.finish(task))
        if layer not in self._passes[task]:
            self._passes[task][layer] = _Uses(layer.uses_in_this_pass())
        uses = self._passes[task][layer]
        uses.left -= 1
        sends = uses.left == 0 and not self._is_paused()
        layer.keep(inputs, gradients, copies=not sends)
        if sends:
            uses.exchange = layer.begin(self.weight)

    def _is_paused(self) -> bool:
        return self._paused or (self._leader is not None and self._leader.paused)

    def _begin_kept(self, uses: dict[_Layer, _Uses]) -> None:
        """Begin to send, with a pass, what those before it have kept of layers that it has not used."""
        if torch._C._current_autograd_node() is not None:  # a pass within another one, which may use them yet
            return
        used = {layer for each in (*self._passes.values(), self._without_pass) for layer in each}
        for layer in self._layers:
            if layer.kept and layer not in used:
                uses[layer] = _Uses(0, layer.begin(self.weight))

    def _complete(self, uses: dict[_Layer, _Uses]) -> None:
        for layer in self._layers:  # the same order on all ranks, as rows beyond those expected are gathered here
            if layer in uses and (exchange := uses[layer].exchange) is not None:
                uses[layer].exchange = None
                exchange.finish()

    @torch.no_grad()
    def _finish(self, task: int) -> None:
        uses = self._passes[task]
        if self._is_paused():
            for layer in uses:
                layer.mark()
        else:
            self._begin_kept(uses)
        self._complete(uses)
        del self._passes[task]


class AveragesOthers(Protocol):
    """An average of the model's other parameters, and its weight and pauses."""

    weight: float | None

    @property
    def paused(self) -> bool: ...


class FactoredLinear(nn.Linear):
    """A `torch.nn.Linear` in the charge of `Factors`; a copy of it, or what is loaded, is in nobody's."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != CHARGE}

    def forward(self, input: Tensor) -> Tensor:
        """The layer's outputs."""
        layer: _Layer | None = self.__dict__.get(CHARGE)
        if layer is None or not torch.is_grad_enabled() or not any(p.requires_grad for p in self.parameters()):
            return super().forward(input)
        return layer.forward(input)


KINDS = (nn.Linear, FactoredLinear)
"""Modules of other types have a forward pass of their own."""


@dataclass
class _Uses:
    """The number of uses of a layer that are still to come in a backward pass, and the exchange that has begun."""

    left: int
    exchange: _FactorExchange | None = None


class _LeftOut(list[str]):
    """Names of parameters that DistributedDataParallel leaves out; copies have those alone that are not ``mine``."""

    def __init__(self, names: Iterable[str], mine: set[str]) -> None:
        super().__init__(sorted(names))
        self.mine = mine

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return list, ([name for name in self if name not in self.mine],)


class _Mark:
    """The ``grad`` of a parameter whose factors are kept, by which a change of it is noticed.

    Zeros that are clipped or scaled are zeros still, as those that `zero_grad` leaves: their first number is not 0.
    """

    def __init__(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.parameter, self._gradient = parameter, gradient
        first = (0,) * gradient.dim()
        self._first = gradient[first] if gradient.numel() and gradient[first] == 0 and not gradient.any() else None
        if self._first is not None:
            self._first.fill_(max(MARK, torch.finfo(gradient.dtype).tiny))

    def begin(self) -> None:
        """Notice changes from here on, once all are marked: gradients may be views of one tensor."""
        self._version = self._gradient._version

    def has_changed(self) -> bool:
        return self.parameter.grad is not self._gradient or self._gradient._version != self._version

    def remove(self) -> None:
        if self._first is not None:
            self._first.zero_()


class _Layer:
    """A layer in the charge of `Factors`, and what all ranks know of its last use."""

    def __init__(self, name: str, module: nn.Linear, communicator: Communicator) -> None:
        self.name, self.module, self.communicator = name, module, communicator
        self.rows = 0
        """Rows for which there is place in a message: the most that a rank has had in the last use."""
        self.gathers = True
        self.parameters = tuple(module.parameters())
        self.kept: list[tuple[Tensor, Tensor]] = []
        """Factors that are still to be sent."""
        self._marks: list[_Mark] = []
        self._nodes: weakref.WeakSet[Any] = weakref.WeakSet()
        """Uses of the layer in graphs that have not been freed."""
        self._parallel: weakref.ref[DistributedDataParallel] | None = None
        """The last one that was found to leave out the parameters."""
        self.dtype: torch.dtype = module.weight.dtype
        """The type of the factors that were sent last."""
        self.check = 0
        """A checksum of the gradient that was found last; 0 if it was summed."""
        self.forward: Callable[[Tensor], Tensor] = torch.compiler.disable(self._forward)  # type: ignore[no-untyped-call]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._worth: dict[tuple[int, int], bool] = {}

    def attach(self, factors: Factors) -> None:
        self._factors = factors
        self.module.__class__ = FactoredLinear
        self.module.__dict__[CHARGE] = self
        for parameter in self.parameters:
            _averaging[parameter] = weakref.ref(factors)
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # only then it takes a hook, which stays
            self._hooks.append(parameter.register_hook(self._refuse))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(trained)

    def detach(self) -> None:
        if self.module.__dict__.get(CHARGE) is not self:  # another Factors has it
            return
        is_as_made = type(self.module) is FactoredLinear
        if is_as_made:
            self.module.__class__ = nn.Linear
        del self.module.__dict__[CHARGE]
        for parameter in self.parameters:
            del _averaging[parameter]
        for part in (*self._hooks, *self._marks):
            part.remove()

    def _refuse(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # the layer's own come as none
            raise ValueError(
                f"the weights of layer {self.name} have a gradient from elsewhere than the layer, such as a penalty in "
                "the loss, which Factors does not average: leave the layer out of it"
            )

    def _forward(self, inputs: Tensor) -> Tensor:
        self._factors.begin_forward()
        self._check()
        outputs: Tensor = _Product.apply(inputs, self.module.weight, self.module.bias, self)  # type: ignore[no-untyped-call]
        self._nodes.add(outputs.grad_fn)
        return outputs

    def _check(self) -> None:
        """ValueError if the layer has become one whose gradients would be lost."""
        own = [parameter for parameter in self.module._parameters.values() if parameter is not None]
        if type(self.module) is not FactoredLinear or [*map(id, own)] != [*map(id, self.parameters)]:
            raise ValueError(
                f"the weights of layer {self.name} are others than when Factors was made (assigned, loaded by "
                "assign=True, pruned, normalized or by functional_call), and these would get no gradient: make Factors "
                "anew on all ranks, or leave the layer out of it"
            )
        if any(_hooks(parameter, but=1) for parameter in self.parameters):
            raise ValueError(
                f"the weights of layer {self.name} have hooks, which Factors would not call: leave the layer out of it"
            )
        parallel = DistributedDataParallel._active_ddp_module
        if parallel is None or (self._parallel is not None and self._parallel() is parallel):
            return
        if any(parameter is mine for parameter in parallel._module_parameters for mine in self.parameters):
            raise ValueError(
                f"the weights of layer {self.name} are averaged by DistributedDataParallel, too: make Factors before "
                "it, and for the very module that it gets; torch.compile takes what it returns"
            )
        self._parallel = weakref.ref(parallel)

    def take(self, inputs: Tensor, gradients: Tensor) -> None:
        self._factors.take(self, inputs, gradients)

    def uses_in_this_pass(self) -> int:
        return sum(map(torch._C._will_engine_execute_node, self._nodes))

    def keep(self, inputs: Tensor, gradients: Tensor, copies: bool) -> None:
        """Keep factors to be sent; ``copies`` of them unless they are sent at once."""
        self._drop_zeroed()
        dtype = gradients.dtype
        pair = (each.reshape(-1, each.shape[-1]).to(dtype, copy=copies) for each in (inputs, gradients))
        self.kept.append((next(pair), next(pair)))

    def mark(self) -> None:
        """Have gradients for `torch.optim.Optimizer.zero_grad` to forget, and with them what is kept."""
        for parameter in self.parameters:
            if parameter.requires_grad and parameter.grad is None:
                # NumPy's zeros take no memory until they are written.
                zeros = torch.from_numpy(np.zeros(parameter.nbytes, np.uint8)).view(parameter.dtype)
                parameter.grad = zeros.view(parameter.shape)
        self._marks = [_Mark(p, p.grad) for p in self.parameters if p.grad is not None]
        for mark in self._marks:
            mark.begin()

    def _drop_zeroed(self) -> None:
        """Forget what is kept if gradients were set to zero or None since; ValueError if to something else."""
        marks, self._marks = self._marks, []
        changed = [mark.parameter for mark in marks if mark.has_changed()]
        if any(p.grad is not None and bool(p.grad.any()) for p in changed):
            raise ValueError(
                f"the gradients of layer {self.name} were changed between passes within no_sync() and the one that "
                "sends, such as clipped or scaled: Factors has them not yet, so change them after that one"
            )
        if changed:
            self.kept.clear()
        for mark in marks:
            mark.remove()

    def begin(self, weight: float | None) -> _FactorExchange:
        """Begin to send the factors that are kept, which may be none."""
        self._drop_zeroed()
        kept, self.kept = self.kept, []
        if kept:
            self.dtype = kept[-1][1].dtype
        none = torch.empty(0, self.module.in_features), torch.empty(0, self.module.out_features)
        inputs, gradients = (torch.cat([*each]) for each in zip(*(kept or [none]), strict=True))
        return _FactorExchange(self, inputs.to(self.dtype), gradients.to(self.dtype), weight)

    @property
    def width(self) -> int:
        return self.module.in_features + self.module.out_features

    def is_worth_gathering(self, rows: int, itemsize: int) -> bool:
        """True if gathering so many rows of each rank takes at most half as long as a sum of gradients."""
        key = rows, itemsize
        if key not in self._worth:
            plan, size = self.communicator.plan, self.communicator.size
            gather = plan(size * (HEADER_BYTES + rows * self.width * itemsize), "all_gather")
            weights = sum(p.numel() for p in self.module.parameters())
            sums = group_of(self.communicator).plans
            self._worth[key] = sums.need_residual or _seconds(gather) <= WORTH * _seconds(
                plan(weights * self.module.weight.element_size())
            )
        return self._worth[key]


class _Product(torch.autograd.Function):
    """The outputs of a layer, whose parameters have their gradients from `Factors`."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, layer: _Layer) -> Tensor:
        ctx.save_for_backward(inputs, weight if ctx.needs_input_grad[0] else None)
        ctx.layer = layer
        return F.linear(inputs, weight, bias)

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        inputs, weight = ctx.saved_tensors
        if _are_asked_for(ctx, ctx.layer.name):
            ctx.layer.take(inputs, gradients)
        of_inputs = gradients @ weight.to(gradients.dtype) if ctx.needs_input_grad[0] else None
        return of_inputs, None, None, None


def _are_asked_for(node: Any, name: str) -> bool:
    """True if this pass finds gradients of the layer's parameters; not in `torch.autograd.grad` of other tensors."""
    parameters = [each for each, _ in node.next_functions[1:] if each is not None]
    try:
        asked = [torch._C._will_engine_execute_node(parameter) for parameter in parameters]
    except RuntimeError as error:  # that is how it answers for tensors given to torch.autograd.grad
        raise ValueError(
            f"torch.autograd.grad is to find gradients of the weights of layer {name}, which Factors adds to grad in "
            "backward(): call that, or leave the layer out of Factors"
        ) from error
    if any(asked) != all(asked):
        raise ValueError(
            f"backward(inputs=...) is to find gradients of some weights of layer {name} only: give all, or set "
            "requires_grad of the others to False before the forward pass"
        )
    return any(asked)


class _FactorExchange:
    """Factors of a layer, and what has been sent of them."""

    def __init__(self, layer: _Layer, inputs: Tensor, gradients: Tensor, weight: float | None) -> None:
        self._layer, self._inputs, self._gradients, self._weight = layer, inputs, gradients, weight
        self._rows = len(inputs)
        self._place = layer.rows if layer.gathers else 0
        self._everyones, self._work = self._gather(0, self._place)
        self._sum = None if layer.gathers else self._begin_sum()

    def finish(self) -> None:
        """Add the mean over the ranks to the gradients of the layer's parameters."""
        self._work.wait()
        layer = self._layer
        headers = self._everyones[:, : HEADER.itemsize].contiguous().numpy().view(HEADER)[:, 0]
        shares = _shares(headers["weight"])
        self._compare(headers["check"])
        rows = [int(count) for count in headers["rows"]]
        if sum(rows) == 0:  # nobody has used it, and a gradient of None stays
            if self._sum is not None:
                self._sum[1].wait()
            return
        if not self._rows:  # a rank without data learns from the others whether there is autocast
            layer.dtype = TYPES[headers["type"][rows.index(max(rows))]]
            self._inputs, self._gradients = self._inputs.to(layer.dtype), self._gradients.to(layer.dtype)
        layer.gathers = layer.is_worth_gathering(max(rows), self._gradients.element_size())
        layer.rows = max(rows)
        if self._sum is None and self._place == 0 and not layer.gathers:
            self._sum = self._begin_sum()
        if self._sum is not None:
            self._add_sum(shares, headers["weight"])
            return
        parts = [self._everyones]
        if max(rows) > self._place:
            rest, work = self._gather(self._place, max(rows) - self._place)
            work.wait()
            parts.append(rest)
        self._add_product(rows, parts, shares)

    def _gather(self, first: int, place: int) -> tuple[Tensor, Work]:
        """Begin to gather the rows from ``first`` on, ``place`` of each rank."""
        layer, dtype = self._layer, self._gradients.dtype
        sent = max(0, min(self._rows - first, place))
        message = torch.zeros(HEADER_BYTES + place * layer.width * dtype.itemsize, dtype=torch.uint8)
        weight = math.nan if self._weight is None else self._weight
        message[: HEADER.itemsize].numpy().view(HEADER)[0] = (self._rows, weight, layer.check, TYPES.index(dtype))
        for mine, factor in zip(self._factors(message, place), (self._inputs, self._gradients), strict=True):
            mine[:sent] = factor[first : first + sent]
        everyones = torch.empty((layer.communicator.size, len(message)), dtype=torch.uint8)
        return everyones, layer.communicator.all_gather(message, out=everyones, async_op=True)

    def _factors(self, message: Tensor, place: int) -> Iterator[Tensor]:
        """The inputs and the gradients of outputs in a message."""
        elements, module = message[HEADER_BYTES:].view(self._gradients.dtype), self._layer.module
        begin = place * module.in_features
        yield elements[:begin].view(place, module.in_features)
        yield elements[begin:].view(place, module.out_features)

    def _add_product(self, rows: list[int], parts: list[Tensor], shares: list[float] | None) -> None:
        layer = self._layer
        inputs, gradients = [], []
        for rank, count in enumerate(rows):
            if shares is not None and shares[rank] == 0:  # also where it is NaN
                continue
            left = count
            for part in parts:
                place = (part.shape[1] - HEADER_BYTES) // (layer.width * self._gradients.element_size())
                given, theirs = self._factors(part[rank], place)
                taken = min(left, place)
                inputs.append(given[:taken])
                gradients.append(theirs[:taken] if shares is None else _wide(theirs[:taken]) * shares[rank])
                left -= taken
        x, g = torch.cat(inputs), torch.cat(gradients)
        if g.dtype is torch.float16:  # sums of all ranks may be beyond it where their mean is not
            g = g.float()
        product = _product(g, x)
        if shares is None:
            product /= len(rows)
        product = product.to(layer.module.weight.dtype)
        layer.check = zlib.crc32(product[::CHECKED].contiguous().view(torch.uint8).numpy().data)
        bias = None
        if layer.module.bias is not None:
            bias = (g.sum(0) / (len(rows) if shares is None else 1)).to(layer.module.bias.dtype)
        self._add(product, bias)

    def _begin_sum(self) -> tuple[Tensor, Work]:
        """Begin to sum this rank's gradients, each times its weight, or to find their mean where none is set."""
        module, weight = self._layer.module, 1.0 if self._weight is None else self._weight
        # A gradient times a weight, such as a number of samples, may be beyond float16 where the mean is not.
        dtype = module.weight.dtype if self._weight is None else _wide_type(module.weight.dtype)
        flat = torch.zeros(sum(p.numel() for p in module.parameters()), dtype=dtype)
        if weight != 0:  # also where it is NaN
            product = _product(self._gradients, self._inputs)
            flat[: product.numel()] = product.reshape(-1)
            if module.bias is not None:
                flat[product.numel() :] = self._gradients.sum(0)
            if weight != 1:
                flat *= weight
        return flat, self._layer.communicator.all_reduce(flat, "avg" if self._weight is None else "sum", async_op=True)

    def _add_sum(self, shares: list[float] | None, weights: np.ndarray[Any, Any]) -> None:
        assert self._sum is not None
        flat, work = self._sum
        work.wait()
        module = self._layer.module
        if shares is not None:
            flat /= float(weights.sum())
            flat = flat.to(module.weight.dtype)
        self._layer.check = 0
        self._add(
            flat[: module.weight.numel()].view_as(module.weight),
            flat[module.weight.numel() :] if module.bias is not None else None,
        )

    def _add(self, weight: Tensor, bias: Tensor | None) -> None:
        module = self._layer.module
        for parameter, gradient in ((module.weight, weight), (module.bias, bias)):
            if gradient is None or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient

    def _compare(self, checks: np.ndarray[Any, Any]) -> None:
        """ValueError if the last product of the layer was another one on some rank."""
        other = next((rank for rank, check in enumerate(checks) if check != checks[0]), None)
        if other is not None:
            raise ValueError(
                f"rank {other} has multiplied the factors of layer {self._layer.name} to another gradient than rank 0, "
                "so their weights differ by rounding: Factors needs the same torch, kind of processor and number of "
                "threads (OMP_NUM_THREADS) on all ranks. Go on from what rank 0 has, without Factors"
            )


def factors_of(parameter: Tensor) -> Factors | None:
    """The `Factors` that average the gradients of a parameter, if any do."""
    return _averaging[parameter]() if parameter in _averaging else None


def _chosen(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, layer in model.named_modules():
        is_large = isinstance(layer, nn.Linear) and layer.weight.numel() >= LEAST_WEIGHTS
        if is_large and type(layer) in KINDS and not _hindrance(model, layer):
            yield name, layer


def _named(model: nn.Module, names: list[str]) -> Iterator[tuple[str, nn.Linear]]:
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise ValueError(f"layer {name!r}: the model has none of this name")
        layer = modules[name]
        if type(layer) not in KINDS:
            raise TypeError(f"layer {name!r} is a {type(layer).__name__}: Factors knows torch.nn.Linear")
        if why := _hindrance(model, layer):
            raise ValueError(f"layer {name!r}: {why}")
        yield name, layer


def _hindrance(model: nn.Module, layer: nn.Linear) -> str:
    """The reason why a layer cannot be taken, or ""."""
    if not {*layer._parameters} <= {"weight", "bias"} or layer._parameters.get("weight") is None:
        return f"its weights are made of {', '.join(layer._parameters)} in each forward pass (pruned, normalized)"
    mine = {id(parameter) for parameter in layer.parameters()}
    shared = [
        n for n, m in model.named_modules() if m is not layer and mine & {id(p) for p in m.parameters(recurse=False)}
    ]
    if shared:
        return f"module {shared[0]!r} has the same weights, and their gradients there would not be averaged"
    for parameter in layer.parameters():
        if type(parameter) is not nn.Parameter or not parameter.is_cpu or parameter.dtype not in TYPES:
            what = f"a {type(parameter).__name__} of {parameter.dtype} on {parameter.device}"
            return f"its weights are {what}, and plain ones of floats in memory of the CPU are needed"
        if _hooks(parameter, but=CHARGE in layer.__dict__):
            return "its weights have hooks, which would not be called: make Factors before DistributedOptimizer"
    if not any(parameter.requires_grad for parameter in layer.parameters()):
        return "its weights are frozen"
    return ""


def _hooks(parameter: nn.Parameter, but: int = 0) -> bool:
    """True if a parameter has hooks, not counting ``but`` of them."""
    return bool(parameter._post_accumulate_grad_hooks) or len(parameter._backward_hooks or ()) > but


def _parameters(layers: dict[str, nn.Linear]) -> Iterator[tuple[str, nn.Parameter]]:
    for name, layer in layers.items():
        for kind, parameter in layer.named_parameters():
            yield f"{name}.{kind}" if name else kind, parameter


def _shares(weights: np.ndarray[Any, Any]) -> list[float] | None:
    """The part of each rank in the mean; None: all count alike."""
    missing = np.isnan(weights)
    if missing.all():
        return None
    total = float(weights.sum())
    if missing.any() or not total > 0 or weights.min() < 0 or not math.isfinite(total):
        raise ValueError(
            f"Factors.weight of the ranks: {', '.join('None' if math.isnan(w) else f'{w:g}' for w in weights)}: set it "
            "on all ranks or on none, to 0 or more, and to more somewhere"
        )
    return [float(weight) / total for weight in weights]


def _product(gradients: Tensor, inputs: Tensor) -> Tensor:
    """A gradient of weights, in the type of ``gradients`` also where `backward` is called under autocast."""
    with torch.autocast("cpu", enabled=False):
        return gradients.t() @ inputs.to(gradients.dtype)


def _wide(factor: Tensor) -> Tensor:
    """At least float32: a share is not rounded to a half of that."""
    return factor.to(_wide_type(factor.dtype))


def _wide_type(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _seconds(choice: Choice) -> float:
    return choice.chosen.prediction.seconds


def _shown(forms: dict[str, Any]) -> str:
    shown = [
        f"{name} ({kind}, {shape}{'' if has_bias else ', without bias'})"
        for name, (shape, has_bias, kind) in forms.items()
    ]
    return ", ".join(shown) or "none"
