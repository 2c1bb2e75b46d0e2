"""Events for ``torch.profiler``: ``multiring:all_reduce`` and so on, with the sizes of the tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler

from multiring.torch.buffers import tensors_in
from multiring.torch.work import TorchWork

_Method = TypeVar("_Method", bound="Callable[..., TorchWork | None]")


def recorded(name: str, argument: int = 0) -> Callable[[_Method], _Method]:
    """A method that starts a work, shown while a profiler runs as ``multiring:name``.

    The event lasts from the call until the work's outcome is known; ``argument`` is the place of the tensors whose
    sizes it has (-1: none).
    """
    label = f"multiring:{name}"

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **keywords: Any) -> TorchWork | None:
            if not profiler._is_profiler_enabled:
                return method(self, *arguments, **keywords)
            given = (*arguments, *keywords.values())
            event = _RecordFunctionFast(label, [] if argument < 0 else tensors_in(given[argument]), {})
            event.__enter__()
            try:
                work = method(self, *arguments, **keywords)
            except BaseException:
                event.__exit__(None, None, None)
                raise
            if work is None:
                event.__exit__(None, None, None)
            else:
                work.when_known(lambda: event.__exit__(None, None, None))
            return work

        return call  # type: ignore[return-value]

    return decorate
