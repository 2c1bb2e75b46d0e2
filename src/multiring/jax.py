"""Multiring in JAX: collectives inside ``jit``, ``grad`` and ``scan``, and averaged gradients for Optax.

A collective is one call of XLA to the native engine, in place where XLA allows it. A token leads from one collective to
the next, so that every rank calls them in the order in which its program names them, whatever XLA runs side by side.
One device a process, a CPU.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import dispatch, effects  # tokens, in the words of JAX: only its inside has them
from jax._src.interpreters import mlir
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from multiring import _native, api
from multiring.errors import MultiringError
from multiring.runtime.buffers import COLLECTIVES, OPS, OPS_OF
from multiring.runtime.comm import Communicator, group_of
from multiring.training.alike import fingerprints
from multiring.training.apart import check_keys
from multiring.training.buckets import BUCKET_BYTES, GradientSpec, arrange, bucket_label, check_bucket_bytes
from multiring.training.labels import label as label_of
from multiring.training.labels import part
from multiring.training.shared import SharedParameters
from multiring.training.weights import valid

__all__ = [
    "Outer",
    "all_gather",
    "all_reduce",
    "all_reduce_gradients",
    "all_to_all",
    "average",
    "barrier",
    "broadcast",
    "broadcast_parameters",
    "reduce_scatter",
]

_LINEAR = ("sum", "avg")


class _Ordered(effects.Effect):  # type: ignore[misc]
    """All collectives of a process happen in one order."""

    def __str__(self) -> str:
        return "multiring"


_EFFECT = _Ordered()
for _kind in ("ordered", "lowerable", "control_flow_allowed", "custom_derivatives_allowed", "remat_allowed"):
    getattr(effects, f"{_kind}_effects").add_type(_Ordered)


def all_reduce(x: Any, op: str = "sum", *, group: Communicator | None = None) -> jax.Array:
    """``x`` of all ranks combined, element by element.

    ``op`` is sum, avg, min, max or prod, on integers also band, bor or bxor. sum and avg have derivatives: of what
    all ranks compute, added up.
    """
    return _bind(x, "all_reduce", op, 0, group)


def broadcast(x: Any, root: int = 0, *, group: Communicator | None = None) -> jax.Array:
    """``x`` of rank ``root``."""
    return _bind(x, "broadcast", "sum", root, group)


def all_gather(x: Any, *, group: Communicator | None = None) -> jax.Array:
    """``x`` of all ranks, which has the same shape everywhere, along a new first axis."""
    return _bind(x, "all_gather", "sum", 0, group)


def reduce_scatter(x: Any, op: str = "sum", *, group: Communicator | None = None) -> jax.Array:
    """Combine ``x`` of all ranks and keep one of as many equal blocks along its first axis: rank r block r."""
    return _bind(x, "reduce_scatter", op, 0, group)


def all_to_all(x: Any, *, group: Communicator | None = None) -> jax.Array:
    """Send block r of ``x``, along its first axis, to rank r, and receive a block from each."""
    return _bind(x, "all_to_all", "sum", 0, group)


def barrier(*, group: Communicator | None = None) -> None:
    """Return when every rank has called it and all its earlier collectives are done.

    MultiringError inside ``jit``, ``scan`` and what else JAX traces, where collectives have their order without it.
    """
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise MultiringError(
            "barrier() inside jit, scan or another function that JAX traces would be called once, while it is traced, "
            "and not by its steps: call it between them; collectives inside happen in the order of the program without"
        )
    _joined(group)
    jax.effects_barrier()
    api.barrier(group=group)


def broadcast_parameters(tree: Any, root: int = 0, *, group: Communicator | None = None) -> Any:
    """``tree`` of rank ``root``: parameters, an optimizer's state, or any other tree of arrays and numbers.

    The structures must be the same, or a Mismatch shows them. Every leaf comes back as an array.
    """
    leaves, names, structure = _flattened(tree)

    def collective(flat: Any, label: int) -> Any:
        return _bind(flat, "broadcast", "sum", root, group, label)

    return jax.tree.unflatten(structure, _fused(leaves, names, collective, BUCKET_BYTES, "parameters"))


def average(
    tree: Any,
    *,
    weight: Any = None,
    bucket_bytes: int = BUCKET_BYTES,
    group: Communicator | None = None,
    names: Sequence[str] | None = None,
) -> Any:
    """The mean over the ranks of a tree of gradients or metrics, fused in buckets of ``bucket_bytes``.

    With ``weight`` the ranks count by their weights: the number of samples that each has in this step. It may be
    traced; what a rank of weight 0 has may be NaN, and weights that add up to 0 give NaN. Trees that are not the same
    on all ranks are a Mismatch, which names leaves by their paths, or by ``names`` where given. Over a wire of
    blocks metrics need a call of their own, as small leaves beside large ones may come back as 0.
    """
    leaves, paths, structure = _flattened(tree)
    check_bucket_bytes(bucket_bytes)
    op = "avg" if weight is None else "sum"
    if weight is not None:
        mine = jnp.asarray(weight if isinstance(weight, jax.core.Tracer) else valid(weight), float)
        share = mine / all_reduce(mine, group=group)
        leaves = [_weighted(_array(leaf, path), share) for leaf, path in zip(leaves, paths, strict=True)]

    def collective(flat: Any, label: int) -> Any:
        return _bind(flat, "all_reduce", op, 0, group, label)

    return jax.tree.unflatten(structure, _fused(leaves, names or paths, collective, bucket_bytes, "gradients"))


def all_reduce_gradients(*, bucket_bytes: int = BUCKET_BYTES, group: Communicator | None = None) -> Any:
    """An Optax transformation that replaces gradients by their `average`: the first of an ``optax.chain``.

    ``update(..., weight=n)`` makes the ranks count by the number of samples that each has in this step.
    """
    import optax

    check_bucket_bytes(bucket_bytes)

    def update(updates: Any, state: Any, params: Any = None, *, weight: Any = None, **_: Any) -> tuple[Any, Any]:
        return average(updates, weight=weight, bucket_bytes=bucket_bytes, group=group), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


class Outer:
    """Exchanges parameters between groups of ranks every some steps, through an outer Optax transformation.

    Within a group gradients are averaged in each step, as ever: ``average(gradients, group=outer.group)``. After each
    step all ranks call `step`; every ``every`` steps the change of the parameters since the last exchange is averaged
    over all samples of all ranks, and the outer optimizer takes it for its gradient. Then all ranks have the same
    parameters, bit for bit where they have the same JAX and the same kind of processor. Source: DiLoCo (Douillard et
    al. 2023, arXiv 2311.08105); with ``delay`` Streaming DiLoCo (arXiv 2501.18512).

    With ``unequal`` groups make unequal numbers of steps in the same time. Then a training goes on ``while
    outer.rounds < number`` or ``outer.samples < number``, which all groups reach at the same exchange.
    """

    def __init__(
        self,
        params: Any,
        every: int,
        *,
        groups: Any = None,
        optimizer: Any = None,
        delay: int = 0,
        keep: float = 0.5,
        unequal: bool = False,
    ) -> None:
        """All ranks make it together, outside of ``jit``; go on from `shared`, which is what the oldest rank gave.

        ``groups``: a level of the topology (rank, host, rack, site), whose places are the groups; lists of ranks, each
        rank in one; None: the outermost level that has several places. ``optimizer``: an Optax transformation; None:
        ``optax.sgd(1.0)``, which averages the parameters.

        ``delay``: steps between sending changes and applying their average, during which training goes on, less than 4
        times ``every``. The rank's own values then count with weight ``keep``: own = keep x own + (1 - keep) x shared,
        as `multiring.torch.Outer` has it. With delay 0 ranks wait, and nothing is kept. ``unequal``: the slowest group
        makes ``every`` steps between exchanges, and a faster one as many as it can in that time; ``samples`` are given
        in every step then, and each step is waited for, whose time counts.

        ValueError on the rank that gives invalid numbers or groups; on all where they differ in parameters, arguments
        or the form of the outer optimizer's state. Other settings of it are told by the values that they make.
        """
        import optax

        communicator = _joined(None)
        leaves, names, self._structure = _flattened(params)
        arrays = [_array(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
        for array, name in zip(arrays, names, strict=True):
            if not jnp.issubdtype(array.dtype, jnp.floating):
                raise ValueError(f"parameter {name} is {array.dtype}: only real numbers are averaged")
        self._optimizer = optax.sgd(1.0) if optimizer is None else optimizer
        if not all(callable(getattr(self._optimizer, name, None)) for name in ("init", "update")):
            raise TypeError(f"optimizer={optimizer!r}: give a transformation of Optax, such as optax.sgd(1.0)")
        jax.effects_barrier()
        self._exchange = SharedParameters(communicator, every, groups, delay=delay, keep=keep, unequal=unequal)
        self._unequal = unequal
        self._exchange.begin(names, [np.asarray(array) for array in arrays], self._move)
        self._state = self._optimizer.init(self.shared)
        leaves, names, structure = _flattened(self._state)
        forms = [f"{jnp.result_type(leaf)} of shape {jnp.shape(leaf)}" for leaf in leaves]
        self._exchange.check_optimizer(
            {
                "structure of the outer optimizer's state": _outline(structure),
                "its arrays": list(zip(names, forms, strict=True)),
                **fingerprints("the outer optimizer's state at the start", _real(self._state)),
            }
        )

    @property
    def group(self) -> Communicator:
        """The communicator of this rank's group, as `average` and `all_reduce_gradients` take it."""
        return self._exchange.group

    @property
    def shared(self) -> Any:
        """The parameters that all ranks share since the last exchange, in float32 or more."""
        return jax.tree.unflatten(self._structure, [jnp.array(array) for array in self._exchange.values])

    @property
    def steps(self) -> int:
        """Number of counted steps."""
        return self._exchange.steps

    @property
    def rounds(self) -> int:
        """Number of exchanges that were begun, with `finish`; all ranks come to it at the same exchange."""
        return self._exchange.rounds

    @property
    def samples(self) -> float:
        """Samples of all ranks that are in the shared values, the same on all ranks after an exchange was applied."""
        return self._exchange.samples

    @property
    def period(self) -> int:
        """Steps of this rank's group in the present round: ``every``, or with ``unequal`` as many or more."""
        return self._exchange.period

    def step(self, params: Any, samples: float | None = None) -> Any:
        """Count a step of this rank; its ``params``, or, where an average is applied, those that it goes on with.

        ``samples``: how many this rank has trained on in the step, by which its change counts; on all ranks or on none.
        All ranks call it equally often, with ``unequal`` those of a group.
        """
        if self._unequal:
            jax.block_until_ready(params)  # what is computed later would count for a later step
        values = self._exchange.step(samples, lambda: self._own(params))
        return params if values is None else self._given(values, params)

    def finish(self, params: Any) -> Any:
        """Apply what is on its way, and exchange now what was done since, as at the end of training; all ranks call it.

        With ``unequal`` a group that comes to it while others still train takes part in their exchanges until all have
        come.
        """
        return self._given(self._exchange.finish(self._own(params)), params)

    def _own(self, params: Any) -> list[np.ndarray[Any, Any]]:
        leaves, _, structure = _flattened(params)
        if structure != self._structure:
            raise ValueError(f"these parameters are {structure}, and Outer was made for {self._structure}")
        jax.effects_barrier()
        return [np.asarray(leaf) for leaf in leaves]

    def _given(self, values: list[np.ndarray[Any, Any]], params: Any) -> Any:
        pairs = zip(values, jax.tree.leaves(params), strict=True)
        return jax.tree.unflatten(self._structure, [jnp.asarray(array, leaf.dtype) for array, leaf in pairs])

    def _move(self, shared: list[np.ndarray[Any, Any]], mean: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        """The outer step."""
        import optax

        gradient = jax.tree.unflatten(self._structure, [jnp.asarray(array) for array in mean])
        before = jax.tree.unflatten(self._structure, [jnp.array(array) for array in shared])
        updates, self._state = self._optimizer.update(gradient, self._state, before)
        return [np.array(array) for array in jax.tree.leaves(optax.apply_updates(before, updates))]

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which `load_state_dict` goes on bit for bit, beside this rank's own parameters.

        What is on its way is waited for, and is in it.
        """
        return {"outer": self._state, **self._exchange.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; all ranks call it.

        With ``unequal`` they do so before the loop, as they come to its steps at different times. ValueError, on all
        ranks, if one gives a state of other parameters, or of another ``every``, ``delay`` or ``unequal``, or they give
        states of different checkpoints. So is a state of other groups, unless it is from after `finish`, without
        ``unequal``. Then all is as before.
        """

        def optimizer() -> list[tuple[str, np.ndarray[Any, Any]]]:
            check_keys(state, ["outer"], "multiring.jax.Outer")
            return _real(state["outer"])

        self._exchange.load(state, optimizer)
        self._state = state["outer"]


def _outline(structure: Any) -> str:
    """A structure in words that are the same in every process; JAX prints the addresses of functions in it."""
    node = structure.node_data()
    if node is None:
        return "*"
    kind, keys = node
    parts = [_outline(child) for child in structure.children()]
    if kind is dict:
        parts = [f"{key!r}: {part}" for key, part in zip(keys, parts, strict=True)]
    return "None" if kind is type(None) else f"{kind.__module__}.{kind.__qualname__}({', '.join(parts)})"


def _real(tree: Any) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """The leaves of a tree that are real numbers, as NumPy arrays, told apart by what would hide the others."""
    found = []
    for leaf in jax.tree.leaves(tree):
        kind = jnp.result_type(leaf)
        if jnp.issubdtype(kind, jnp.floating):
            found.append(("arrays" if jnp.ndim(leaf) else "single numbers", np.asarray(leaf)))
        elif jnp.issubdtype(kind, jnp.integer) or jnp.issubdtype(kind, jnp.bool_):
            found.append(("whole numbers", np.asarray(leaf)))
    return found


def _weighted(leaf: Any, share: Any) -> Any:
    _check_op(_movable(leaf), "avg")
    weighted = leaf * share.astype(leaf.dtype)
    return jnp.where(share == 0, jnp.zeros_like(weighted), weighted)  # 0 times NaN would be NaN on all ranks


def _array(x: Any, name: str = "the array") -> Any:
    """``x`` as JAX has it; ValueError where JAX would cut a 64-bit integer of NumPy to what 32 bits hold."""
    array = jnp.asarray(x)
    if isinstance(x, (np.ndarray, np.generic)) and x.dtype.kind in "iu" and x.dtype.itemsize > array.dtype.itemsize:
        known = np.iinfo(array.dtype)
        if x.size and (x.min() < known.min or x.max() > known.max):
            raise ValueError(
                f"{name} has numbers of {x.dtype} that do not fit {array.dtype}, to which JAX cuts them: "
                "jax.config.update('jax_enable_x64', True) keeps all 64 bits"
            )
    return array


def _flattened(tree: Any) -> tuple[list[Any], list[str], Any]:
    """Leaves, their paths, and the structure."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [leaf for _, leaf in leaves], [jax.tree_util.keystr(path) for path, _ in leaves], structure


def _fused(
    leaves: Sequence[Any], names: Sequence[str], collective: Callable[[Any, int], Any], bucket_bytes: int, what: str
) -> list[Any]:
    """Apply ``collective`` to the leaves, laid end to end in buckets, the last first: as a backward pass has them.

    Its second argument is the label of a bucket.
    """
    arrays = [_array(leaf, name or "the array") for leaf, name in zip(leaves, names, strict=True)]
    sizes = [
        GradientSpec(array.size, _movable(array).dtype.name, part(name, array.shape))
        for array, name in zip(arrays, names, strict=True)
    ]
    results: list[Any] = [None] * len(arrays)
    for members in arrange(sizes, reversed(range(len(arrays))), bucket_bytes):
        label = bucket_label([sizes[i] for i in members], what)
        flat = collective(jnp.concatenate([arrays[i].ravel() for i in members]), label)
        ends = np.cumsum([arrays[i].size for i in members])
        for i, piece in zip(members, jnp.split(flat, ends[:-1]), strict=True):
            results[i] = piece.reshape(arrays[i].shape)
    return results


# ---- the primitive ------------------------------------------------------------------------------------------------

_collective_p = Primitive("multiring")


def _movable(x: Any) -> Any:
    if x.dtype.name not in OPS_OF:
        known = ", ".join(OPS_OF)
        raise TypeError(
            f"an array of {x.dtype} is not moved: known are {known}; jax.random.key_data makes one of a key"
        )
    return x


def _check_op(x: Any, op: str) -> None:
    if op not in OPS_OF[x.dtype.name]:
        raise ValueError(f"{op} is not defined for {x.dtype.name}: it has {', '.join(OPS_OF[x.dtype.name])}")


_last = threading.local()  # as JAX keeps tokens for each thread


def _joined(group: Communicator | None) -> Communicator:
    """The communicator of a call; the first one of a job forgets what failed in the one before."""
    communicator = api.joined(group)
    world = communicator.world
    before = getattr(_last, "world", None)
    if before is not None and before() is not world:
        _forget_failures()
    _last.world = weakref.ref(world)
    return communicator


def _forget_failures() -> None:
    """JAX hands the token of a call that failed, in a thread of XLA, to the next one, which fails of the same."""
    for tokens in (dispatch.runtime_tokens.current_tokens, dispatch.runtime_tokens.output_runtime_tokens):
        for key, token in list(tokens.items()):
            try:
                token.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                if "multiring" in str(error):
                    del tokens[key]


def _bind(x: Any, collective: str, op: str, root: int, group: Communicator | None, label: int | None = None) -> Any:
    """Check what can be checked while tracing; the rest happens when XLA calls."""
    communicator = _joined(group)
    if label is None:  # a call of NumPy's that overtakes it on one rank is a Mismatch
        label = label_of("array", ["of a JAX program"])
    x = _array(x)
    _movable(x)
    if op not in OPS:
        raise ValueError(f"op={op!r}: known are {', '.join(OPS)}")
    if "reduce" in collective:
        _check_op(x, op)
    root = group_of(communicator).valid_rank("root", root)
    if collective in ("reduce_scatter", "all_to_all") and (x.ndim == 0 or x.shape[0] % communicator.size):
        raise ValueError(
            f"{collective}: an array of shape {x.shape} cannot be cut into {communicator.size} equal blocks"
        )
    return _collective_p.bind(
        x,
        collective=collective,
        op=op,
        root=root,
        label=label,
        communicator=group_of(communicator).publish(),
        size=communicator.size,
        rank=communicator.rank,
    )


@_collective_p.def_effectful_abstract_eval  # type: ignore[untyped-decorator]
def _abstract(x: Any, *, collective: str, size: int, **_: Any) -> Any:
    shape = x.shape
    if collective == "all_gather":
        shape = (size, *shape)
    elif collective == "reduce_scatter":
        shape = (shape[0] // size, *shape[1:])
    return x.update(shape=shape, weak_type=False), {_EFFECT}


@functools.lru_cache(maxsize=1024)  # labels may change with each step
def _compiled(parameters: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(_collective_p.bind, **dict(parameters)))


@_collective_p.def_impl  # type: ignore[untyped-decorator]
def _outside_jit(x: Any, **parameters: Any) -> Any:
    with jax.disable_jit(False):  # XLA alone calls the engine, also where a user looks for a mistake without jit
        return _compiled(tuple(parameters.items()))(x)


def _lower(ctx: Any, x: Any, *, collective: str, op: str, root: int, label: int, communicator: int, **_: Any) -> Any:
    token = ctx.tokens_in.get(_EFFECT)
    (arrives,), (result,) = ctx.avals_in, ctx.avals_out
    in_place = arrives.shape == result.shape
    attributes = {
        "communicator": communicator,
        "collective": COLLECTIVES[collective],
        "op": OPS[op],
        "root": root,
        "label": label,
    }
    call = mlir.custom_call(
        "multiring",
        result_types=[mlir.token_type(), mlir.ir.RankedTensorType.get(result.shape, x.type.element_type)],
        operands=[token, x],
        backend_config={name: mlir.ir_attribute(np.int64(value)) for name, value in attributes.items()},
        operand_layouts=[[], range(arrives.ndim - 1, -1, -1)],
        result_layouts=[[], range(result.ndim - 1, -1, -1)],
        operand_output_aliases={1: 1} if in_place else None,
        has_side_effect=True,
        api_version=4,
    )
    ctx.set_tokens_out(mlir.TokenSet({_EFFECT: call.results[0]}))
    return [call.results[1]]


mlir.register_lowering(_collective_p, _lower, platform="cpu")
api.before_leaving(jax.effects_barrier)  # what was dispatched is not done
jax.ffi.register_ffi_target("multiring", _native.xla_handler(), platform="cpu")


def _jvp(primals: Any, tangents: Any, **parameters: Any) -> Any:
    collective, op = parameters["collective"], parameters["op"]
    if "reduce" in collective and op not in _LINEAR:
        raise NotImplementedError(f"{collective} by {op} has no derivative here: sum and avg have")
    result = _collective_p.bind(*primals, **parameters)
    (tangent,) = tangents
    if isinstance(tangent, ad.Zero):
        return result, ad.Zero.from_primal_value(result)
    return result, _collective_p.bind(tangent, **parameters)


def _transpose(cotangent: Any, x: Any, **parameters: Any) -> Any:
    collective, root = parameters["collective"], parameters["root"]
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval)]
    if collective == "broadcast":
        total = _collective_p.bind(cotangent, **{**parameters, "collective": "all_reduce"})
        return [total if parameters["rank"] == root else jnp.zeros_like(total)]
    mirror = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}.get(collective, collective)
    if mirror == "reduce_scatter":  # block r is what all ranks made of rank r's contribution
        size, *shape = cotangent.shape
        flat = _collective_p.bind(cotangent.reshape(size, -1), **{**parameters, "collective": mirror})
        return [flat.reshape(shape)]
    back = _collective_p.bind(cotangent, **{**parameters, "collective": mirror})
    if mirror == "all_gather":
        size, rows, *shape = back.shape
        back = back.reshape(size * rows, *shape)
        if parameters["op"] == "avg":
            back = back / size
    return [back]


def _batch(arguments: Any, axes: Any, **parameters: Any) -> Any:
    if parameters["collective"] not in ("all_reduce", "broadcast"):
        raise NotImplementedError(f"vmap of {parameters['collective']}: all_reduce and broadcast have it")
    return _collective_p.bind(*arguments, **parameters), axes[0]


batching.primitive_batchers[_collective_p] = _batch
ad.primitive_jvps[_collective_p] = _jvp
ad.primitive_transposes[_collective_p] = _transpose
