"""Rows as a picture: time over size, a line a system."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from multiring.bench.report import Row
from multiring.units import size


def check(file: Path) -> None:
    """ImportError with the remedy where matplotlib is missing, ValueError for a format that it does not know."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'multiring[plot]'") from None
    known = FigureCanvasBase.get_supported_filetypes()
    if file.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"--plot {file}: the suffix says the format; known are {', '.join(known)}")


def plot(file: Path, rows: Sequence[Row], title: str) -> None:
    """Draw median times on logarithmic axes, the bound dotted; the suffix of the file says its format."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    systems: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        systems.setdefault(f"multiring, {row.api}, {row.buffer}", []).append((row.nbytes, row.seconds))
        if row.buffer == rows[0].buffer:
            for name, launches in row.peers.items():
                systems.setdefault(name, []).append((row.nbytes, min(launches)))
    for name, points in systems.items():
        width = 2.0 if name.startswith("multiring") else 1.0
        x, y = [nbytes for nbytes, _ in points], [1e3 * seconds for _, seconds in points]
        axes.plot(x, y, marker="o", markersize=4, linewidth=width, label=name)
    least = "bound" if rows[0].enqueue_seconds is None else "bare copies"
    bounds = {row.nbytes: row.bound for row in rows}
    sizes = list(bounds)
    axes.plot(sizes, [1e3 * bound for bound in bounds.values()], linestyle=":", color="black", label=least)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size(nbytes) for nbytes in sizes])
    axes.set_xlabel("size of the buffer")
    axes.set_ylabel("time, ms")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file)
    pyplot.close(figure)
