"""Multiring under a DistributedDataParallel whose group is another backend's."""

# DistributedDataParallel compares the annotations of a hook with classes, so they must not become strings here.

import torch
from torch._C._distributed_c10d import GradBucket

from multiring import api
from multiring.runtime.buffers import check_residual, writable
from multiring.runtime.comm import Communicator, group_of
from multiring.torch.buffers import reducible
from multiring.torch.cuda import all_reduce_on_device
from multiring.torch.feedback import Feedback
from multiring.torch.work import OrderedWatcher, TorchWork
from multiring.training.weights import share

_watcher = OrderedWatcher()


class Weighted:
    """State of `comm_hook` for ranks with different numbers of samples: set ``weight`` before each backward pass.

    ``group`` is the communicator, None for the default one. ``feedback`` as for `comm_hook`.
    """

    def __init__(
        self, weight: float = 1.0, group: Communicator | None = None, *, feedback: Feedback | None = None
    ) -> None:
        self.weight = weight
        self.group = group
        self.feedback = feedback
        self._share = 1.0

    def scale(self, bucket: GradBucket) -> None:
        """Multiply a bucket by this rank's share, which the ranks settle before the first bucket of a pass."""
        if bucket.index() == 0:
            self._share = share(api.joined(self.group), self.weight)
        if self._share:
            bucket.buffer().mul_(self._share)
        else:  # also where it is NaN
            bucket.buffer().zero_()


def comm_hook(
    state: Communicator | Weighted | Feedback | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients: ``net.register_comm_hook(None, multiring.torch.comm_hook)``.

    ``state`` is the communicator, None for the default one, which `multiring.init` has made, or `Weighted`; or a
    `Feedback`, made with the model's named parameters, for what narrow wires lose. ValueError where that is given, and
    the gradients lie on a CUDA device.
    """
    buffer = bucket.buffer()
    if isinstance(state, Weighted):
        state.scale(bucket)
        op, group, feedback = "sum", state.group, state.feedback
    elif isinstance(state, Feedback):
        op, group, feedback = "avg", None, state
    else:
        op, group, feedback = "avg", state, None
    residual = None if feedback is None else _residual(feedback, api.joined(group), bucket, op)
    if buffer.is_cuda:
        future = all_reduce_on_device(api.joined(group), buffer, op, _watcher).get_future()
    else:
        piece, kept = reducible(buffer), None
        if residual is not None:
            kept = writable(residual)
            check_residual(piece, op, kept)
        part = group_of(api.joined(group)).start("all_reduce", piece, op, residual=kept)
        future = TorchWork([part], [buffer], watcher=_watcher).get_future()
    return future.then(lambda done: done.value()[0])


def _residual(feedback: Feedback, communicator: Communicator, bucket: GradBucket, op: str) -> torch.Tensor | None:
    """Return the residual of a bucket; None if no wire narrows it."""
    buffer = bucket.buffer()
    if buffer.is_cuda:
        raise ValueError(
            f"Feedback keeps what gradients in memory of the CPU lose, and these lie on {buffer.device}: leave it out"
        )
    if buffer.dtype != torch.float32:
        return None
    feedback.bind(communicator)
    feedback.in_units(op)
    return feedback.of_bucket(feedback.slots(bucket.parameters(), bucket.gradients(), buffer), buffer.numel())
