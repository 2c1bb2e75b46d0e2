"""Speed of one core at narrowing and widening float32, by format of `MULTIRING_WIRE`, as a table in Markdown.

Rates are GB of float32 a second, the best of many turns; 64 KiB lie in the caches, 64 MiB do not.
"""

from __future__ import annotations

import time

import numpy as np

from multiring import _native
from multiring.planning.plan import WIRES

SIZES = {"64 KiB": 1 << 16, "64 MiB": 1 << 26}


def rate(nbytes: int, turn: object) -> float:
    """GB a second of the best turn, each of 16 MiB at least."""
    assert callable(turn)
    calls, best = max(1, (16 << 20) // nbytes), float("inf")
    for _ in range(15):
        begin = time.perf_counter()
        for _ in range(calls):
            turn()
        best = min(best, (time.perf_counter() - begin) / calls)
    return nbytes / best / 1e9


def main() -> None:
    words = [f"{what}, {size}" for size in SIZES for what in ("narrow", "widen", "narrow and keep what is lost")]
    print(f"{_native.features()['instruction_set']}\n\n| format | {' | '.join(words)} |\n|---|{'---|' * len(words)}")
    for code, wire in enumerate(WIRES, 1):
        found = []
        for nbytes in SIZES.values():
            count = nbytes // 4
            values = np.random.default_rng(1).standard_normal(count).astype(np.float32)
            back, residual = values.copy(), np.zeros(count, np.float32)
            message = np.zeros(_native.narrow_bytes(code, count), np.uint8)
            x, y, m, r = (array.ctypes.data for array in (values, back, message, residual))
            found += [
                rate(nbytes, lambda c=code, n=count, m=m, x=x: _native.narrow(c, m, x, n)),
                rate(nbytes, lambda c=code, n=count, m=m, y=y: _native.widen(c, y, m, n)),
                rate(nbytes, lambda c=code, n=count, r=r, y=y: _native.round(c, y, r, n)),
            ]
        print(f"| `{wire}` | {' | '.join(f'{each:.1f}' for each in found)} |", flush=True)


if __name__ == "__main__":
    main()
