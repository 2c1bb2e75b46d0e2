"""Values that decide a fit, told such that another process knows the checkpoint of another fit by them."""

from __future__ import annotations

import dis
import functools
import hashlib
import json
import re
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

SHOWN = 200
"""Characters of what is told as it is; a digest stands for more."""


def told(value: Any) -> str:
    """Return plain values as they are, functions of a module by name, others by code, and objects by what they hold."""
    text = json.dumps(_told(value, ()), sort_keys=True)
    return text if len(text) <= SHOWN else f"{type(value).__name__} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def digest(arrays: Iterable[tuple[str, Any]]) -> str:
    """Return a digest of named arrays."""
    found = hashlib.sha256()
    for name, array in arrays:
        found.update(f"{name} {array.dtype} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def _told(value: Any, above: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in above:
        return "above"
    again = functools.partial(_told, above=(*above, id(value)))
    if isinstance(value, Mapping):
        return {str(again(key)): again(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [again(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(again(each), sort_keys=True) for each in value)
    if isinstance(value, types.CodeType):
        return [value.co_code.hex(), list(value.co_names), [again(each) for each in value.co_consts]]
    if isinstance(value, types.MethodType):
        return [again(value.__func__), again(value.__self__)]
    if isinstance(value, functools.partial):
        return [again(value.func), again(value.args), again(value.keywords)]
    if hasattr(type(value), "__array__"):
        return digest([("", np.asarray(value.detach().cpu().double() if hasattr(value, "detach") else value))])
    named = value if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) else type(value)
    name = f"{named.__module__}.{named.__qualname__}"
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, types.FunctionType) and not _is_imported(value):
        code, known = value.__code__, value.__globals__
        used = {each: again(known[each]) for each in sorted(_globals(code)) if each in known}
        held = [again(cell.cell_contents) for cell in value.__closure__ or ()]
        return [again(code), used, held, again(value.__defaults__), again(value.__kwdefaults__)]
    if named is value:
        return name
    if hasattr(value, "__dict__"):
        methods = (
            [] if _is_imported(named) else [one for one in vars(named).values() if isinstance(one, types.FunctionType)]
        )
        return [name, again(vars(value)), again(methods)]
    return [name, re.sub(r" at 0x[0-9a-f]+", "", repr(value))]


def _is_imported(named: Any) -> bool:
    """True if another process finds the function or the class by its name."""
    found: Any = sys.modules.get(named.__module__)
    for part in named.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is named and named.__module__ != "__main__"


def _globals(code: types.CodeType) -> set[str]:
    """The names of globals that a function reads, and functions within it."""
    inner = (_globals(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}.union(*inner)
