"""Multiring under a DistributedDataParallel whose group is another backend's."""

# DistributedDataParallel compares the annotations of a hook with classes, so they must not become strings here.

import torch
from torch._C._distributed_c10d import GradBucket

import multiring
from multiring.comm import Communicator
from multiring.torch.buffers import reducible
from multiring.torch.work import OrderedWatcher, Work

_watcher = OrderedWatcher()


def comm_hook(state: Communicator | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients: ``net.register_comm_hook(None, multiring.torch.comm_hook)``.

    ``state`` is the communicator, None for the default one, which `multiring.init` has made.
    """
    buffer = bucket.buffer()
    part = multiring.all_reduce(reducible(buffer), "avg", group=state, async_op=True)
    future = Work([part], [buffer], watcher=_watcher).get_future()
    return future.then(lambda done: done.value()[0])
