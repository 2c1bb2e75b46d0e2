"""The CUDA devices of this host as torch sees them, and buffers that lie there.

``python -m multiring.bench.devices`` tells: who looks takes memory of a device for as long as it lives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNSEEN = "nvidia-smi shows those of the host, CUDA_VISIBLE_DEVICES hides some"


@dataclass(frozen=True)
class Devices:
    """Number and names of the CUDA devices, bytes of the smallest, and the versions of CUDA and NCCL."""

    count: int
    name: str
    memory: int
    cuda: str
    nccl: str | None


def look() -> Devices:
    """The devices that this process can use, with torch imported; ValueError where there are none, with the reason."""
    try:
        import torch
    except ImportError as error:
        raise ValueError(f"--device cuda: it needs torch, and here it cannot be imported ({error})") from None
    if torch.version.cuda is None:
        raise ValueError(
            f"--device cuda: torch {torch.__version__} is built without CUDA; install one that is built with it"
        )
    if not torch.cuda.is_available():
        raise ValueError(f"--device cuda: torch {torch.__version__} finds no CUDA device ({UNSEEN})")
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, _nccl_version())) if torch.distributed.is_nccl_available() else None
    names = ", ".join(dict.fromkeys(device.name for device in found))
    return Devices(len(found), names, min(device.total_memory for device in found), torch.version.cuda, nccl)


def _nccl_version() -> tuple[int, ...]:
    from torch.cuda import nccl

    found: tuple[int, ...] = nccl.version()  # type: ignore[no-untyped-call]
    return found


def ask() -> Devices:
    """The same, found by a process of its own."""
    asked = subprocess.run([sys.executable, "-m", "multiring.bench.devices"], capture_output=True, text=True)
    if asked.returncode:
        raise ValueError((asked.stderr.strip().splitlines() or [f"--device cuda: exit code {asked.returncode}"])[-1])
    return Devices(**json.loads(asked.stdout))


def check_nccl(devices: Devices) -> None:
    """ValueError where this torch has no NCCL."""
    if devices.nccl is None:
        raise ValueError(f"--peers nccl: the torch that is installed, for CUDA {devices.cuda}, has no NCCL")


def own_device(count: int) -> int:
    """The device of this rank: ranks of a host take turns."""
    return int(os.environ.get("LOCAL_RANK", "0")) % count


def all_are_here() -> bool:
    """True if all ranks of the job are on this host."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def ranks_share(count: int) -> bool:
    """True if this host has fewer CUDA devices than ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > count


def make_nccl_send_by_sockets(rank: int) -> None:
    """Make NCCL take the ranks for hosts of their own: it refuses ranks that share a device otherwise."""
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    if all_are_here():
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"


class OnDevice:
    """Elements of a tensor on a CUDA device, which are written and read as those of an array."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def __setitem__(self, where: slice, value: Any) -> None:
        import torch

        self.tensor[where] = torch.as_tensor(np.asarray(value, np.float32))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self.tensor.cpu().numpy(), dtype)


class BareCopies:
    """Moves ``out`` from its device to pinned memory, and after that ``into`` back from there; None is nothing."""

    def __init__(self, out: OnDevice | None, into: OnDevice | None) -> None:
        import torch

        self._torch = torch
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._out, self._into = out, into
        self._pinned = torch.zeros(max(len(each) for each in (out, into) if each is not None), pin_memory=True)

    def __call__(self) -> None:
        with self._torch.cuda.stream(self._stream):
            if self._out is not None:
                self._pinned[: len(self._out)].copy_(self._out.tensor, non_blocking=True)
            if self._into is not None:
                self._into.tensor.copy_(self._pinned[: len(self._into)], non_blocking=True)
        self._stream.synchronize()


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(look())))
    except ValueError as error:
        sys.exit(str(error))
