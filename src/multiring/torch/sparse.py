"""All-reduce of sparse tensors, as embeddings with ``sparse=True`` make them."""

from __future__ import annotations

import torch
from torch import Tensor

from multiring.runtime.comm import Communicator
from multiring.torch.buffers import raw


def all_reduce_sparse(communicator: Communicator, tensor: Tensor, op: str, timeout: float) -> None:
    """Replace a sparse COO tensor by the sum over all ranks; blocks.

    The ranks have different numbers of elements, so each learns the largest, and all gather that many indices and
    values, of which the padding is dropped again.
    """
    if op != "sum":
        raise ValueError(f"sparse tensors can be reduced by sum only, not by {op}")
    own = tensor.detach().coalesce()
    counts = _gather(communicator, torch.tensor([own._nnz()]), timeout)
    most = int(counts.max())
    indices = _gather(communicator, _pad(own.indices().T, most), timeout)
    values = _gather(communicator, _pad(own.values(), most), timeout)
    present = torch.cat([torch.arange(int(n)) + rank * most for rank, n in enumerate(counts)])
    total = torch.sparse_coo_tensor(indices[present].T, values[present], tensor.shape, check_invariants=False)
    with torch.no_grad():
        tensor.copy_(total.coalesce())


def _pad(rows: Tensor, count: int) -> Tensor:
    padded = rows.new_zeros((count, *rows.shape[1:]))
    padded[: len(rows)] = rows
    return padded


def _gather(communicator: Communicator, rows: Tensor, timeout: float) -> Tensor:
    out = rows.new_empty((communicator.size * len(rows), *rows.shape[1:]))
    communicator.all_gather(raw(rows), out=raw(out), timeout=timeout)
    return out
