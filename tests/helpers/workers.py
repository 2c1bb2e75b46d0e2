"""Functions that a program of the tests offers by their names: each registers itself, and the command line chooses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_offered: defaultdict[str, dict[str, Callable[..., Any]]] = defaultdict(dict)


def worker(function: _Function) -> _Function:
    """Offer a function by its name, in the module that defines it."""
    _offered[function.__module__][function.__name__] = function
    return function


def workers(module: str) -> list[Callable[..., Any]]:
    """Return the functions that a module has offered so far, in its order."""
    return list(_offered[module].values())


def named(name: str, module: str = "__main__") -> Callable[..., Any]:
    """The function that a module offers by this name; LookupError lists those that it does offer."""
    known = _offered[module]
    if name not in known:
        raise LookupError(f"{name!r} is not offered: {', '.join(known) or 'nothing'} can be run")
    return known[name]


def run(names: Iterable[str]) -> None:
    """Call, one after the other, what the program offers by these names, and print which of them returned."""
    for each in [named(name) for name in names]:
        each()
        print(f"finished {each.__name__}\n", end="", flush=True)  # at once: others may write between two writes
