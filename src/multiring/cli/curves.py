"""Curves of a sweep as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def plot_efficiency(file: Path, key: str, values: Sequence[int], curves: Mapping[str, Sequence[float | None]]) -> None:
    """Draw scaling efficiency over what was swept, a line a strategy; the suffix of the file says its format."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, efficiencies in curves.items():
        shown = [(x, 100 * y) for x, y in zip(values, efficiencies, strict=True) if y is not None]
        axes.plot([x for x, _ in shown], [y for _, y in shown], marker="o", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.set_ylim(0, 102)
    axes.set_xlabel(key)
    axes.set_ylabel("scaling efficiency, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file)
    pyplot.close(figure)
