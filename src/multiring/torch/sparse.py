"""All-reduce of sparse tensors, as embeddings with ``sparse=True`` make them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from multiring.runtime.buffers import Piece, gathered
from multiring.runtime.comm import Communicator, group_of
from multiring.torch.buffers import raw
from multiring.training.labels import label


def all_reduce_sparse(communicator: Communicator, tensor: Tensor, op: str, timeout: float) -> None:
    """Replace a sparse COO tensor by the sum over all ranks; blocks.

    The ranks have different numbers of elements, so each learns the largest, and all gather that many indices and
    values, of which the padding is dropped again. Mismatch where types or shapes differ.
    """
    if op != "sum":
        raise ValueError(f"sparse tensors can be reduced by sum only, not by {op}")
    own = tensor.detach().coalesce()
    counts = _counts(communicator, own, timeout)
    most = max(counts)
    indices = _gather(communicator, _pad(own.indices().T, most), timeout)
    values = _gather(communicator, _pad(own.values(), most), timeout)
    present = torch.cat([torch.arange(int(n)) + rank * most for rank, n in enumerate(counts)])
    total = torch.sparse_coo_tensor(indices[present].T, values[present], tensor.shape, check_invariants=False)
    with torch.no_grad():
        tensor.copy_(total.coalesce())


def _counts(communicator: Communicator, own: Tensor, timeout: float) -> list[int]:
    """Return each rank's number of elements. Indices of another shape could lie outside of this rank's tensor."""
    counts = np.zeros(communicator.size, np.int64)
    counts[communicator.rank] = own._nnz()
    form = f"{str(own.dtype).removeprefix('torch.')} {tuple(own.shape)}, {own.sparse_dim()} of its dimensions sparse"
    what = label("sparse tensor", [form])
    piece = Piece(counts, counts.ctypes.data, 1, "int64")
    group_of(communicator).run("all_gather", piece, timeout=timeout, label=what)
    return [int(count) for count in counts]


def _pad(rows: Tensor, count: int) -> Tensor:
    padded = rows.new_zeros((count, *rows.shape[1:]))
    padded[: len(rows)] = rows
    return padded


def _gather(communicator: Communicator, rows: Tensor, timeout: float) -> Tensor:
    out = rows.new_empty((communicator.size * len(rows), *rows.shape[1:]))
    group = group_of(communicator)
    group.run("all_gather", gathered(raw(rows), raw(out), group.rank), timeout=timeout)
    return out
