"""Multiring under a DistributedDataParallel whose group is another backend's."""

# DistributedDataParallel compares the annotations of a hook with classes, so they must not become strings here.

import torch
from torch._C._distributed_c10d import GradBucket

from multiring import api
from multiring.runtime.buffers import check_residual, writable
from multiring.runtime.comm import Communicator, group_of
from multiring.runtime.engine import Part
from multiring.torch.buffers import reducible
from multiring.torch.cuda import all_reduce_on_device
from multiring.torch.feedback import Feedback, Layout
from multiring.torch.work import OrderedWatcher, TorchWork
from multiring.training.weights import share

_watcher = OrderedWatcher()


class Weighted:
    """State of `comm_hook` for ranks with different numbers of samples: set ``weight`` before each backward pass.

    ``group`` is the communicator, None for that of ``feedback``, or the default one. ``feedback`` as for `comm_hook`.
    """

    def __init__(
        self, weight: float = 1.0, group: Communicator | None = None, *, feedback: Feedback | None = None
    ) -> None:
        self.weight = weight
        self.group = feedback.group if group is None and feedback is not None else group
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
    `Feedback`, made with the model's named parameters, and with its group if that is not all ranks, for what narrow
    wires lose. ValueError where that is given, and the gradients lie on a CUDA device. A hook is not told the group of
    DistributedDataParallel: with a ``process_group`` of some ranks give it their communicator.
    """
    buffer = bucket.buffer()
    if isinstance(state, Weighted):
        state.scale(bucket)
        op, group, feedback = "sum", state.group, state.feedback
    elif isinstance(state, Feedback):
        op, group, feedback = "avg", state.group, state
    else:
        op, group, feedback = "avg", state, None
    if feedback is not None and buffer.is_cuda:
        raise ValueError(
            f"Feedback keeps what gradients in memory of the CPU lose, and these lie on {buffer.device}: leave it out"
        )
    communicator = api.joined(group)
    if buffer.is_cuda:
        future = all_reduce_on_device(communicator, buffer, op, _watcher).get_future()
    elif feedback is not None and buffer.dtype == torch.float32:  # no wire narrows another type
        future = _with_feedback(feedback, communicator, bucket, op).get_future()
    else:
        part = group_of(communicator).start("all_reduce", reducible(buffer), op)
        future = TorchWork([part], [buffer], watcher=_watcher).get_future()
    return future.then(lambda done: done.value()[0])


def _with_feedback(feedback: Feedback, communicator: Communicator, bucket: GradBucket, op: str) -> TorchWork:
    """Reduce a bucket, in pieces in the first pass after a state was loaded.

    That pass has buckets of its own, before DistributedDataParallel makes those by which the saved training went on:
    what is rounded in one block would be other gradients, so these are put together as they were.
    """
    if feedback.bind(communicator):
        feedback.agree_on_buckets()
    feedback.in_units(op)
    buffer = bucket.buffer()
    slots = feedback.slots(bucket.parameters(), bucket.gradients(), buffer)
    here = slots, buffer.numel()
    buckets = feedback.take_buckets(slots) or [here]
    if buckets == [here]:
        return TorchWork([_start(feedback, communicator, here, buffer, op)], [buffer], watcher=_watcher)
    gradients = {slot.name: buffer[slot.start : slot.start + slot.elements] for slot in slots}
    pieces = [torch.zeros(count, dtype=torch.float32, device="cpu") for _, count in buckets]
    places = [
        (piece[slot.start : slot.start + slot.elements], gradients[slot.name])
        for piece, (held, _) in zip(pieces, buckets, strict=True)
        for slot in held
    ]
    for place, gradient in places:
        place.copy_(gradient)

    def finish() -> None:
        for place, gradient in places:
            gradient.copy_(place)

    parts = [_start(feedback, communicator, *each, op) for each in zip(buckets, pieces, strict=True)]
    return TorchWork(parts, [buffer], [finish], watcher=_watcher)


def _start(feedback: Feedback, communicator: Communicator, layout: Layout, buffer: torch.Tensor, op: str) -> Part:
    piece, kept = reducible(buffer), writable(feedback.of_bucket(*layout))
    check_residual(piece, op, kept)
    return group_of(communicator).start("all_reduce", piece, op, residual=kept)
