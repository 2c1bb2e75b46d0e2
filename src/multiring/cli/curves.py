"""Curves of a sweep as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multiring.bench.curves import label_ends, said, save
from multiring.pages.pictures import percent, round_ticks


def plot_efficiency(
    file: Path, key: str, values: Sequence[int], curves: Mapping[str, Sequence[float | None]], answer: str, about: str
) -> None:
    """Draw scaling efficiency over what was swept, a line a strategy; the suffix of the file says its format.

    ``answer`` is the title, and ``about`` says in a line what is trained where.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    ends: dict[str, tuple[float, float, Any]] = {}
    for name, efficiencies in curves.items():
        shown = [(x, 100 * y) for x, y in zip(values, efficiencies, strict=True) if y is not None]
        x, y = [each for each, _ in shown], [each for _, each in shown]
        width = 2.5 if name.startswith("multiring") else 1.5
        (line,) = axes.plot(x, y, marker="o", markersize=4, linewidth=width)
        if shown:
            ends[f"{name} {percent(shown[-1][1] / 100)}"] = (*shown[-1], line.get_color())
    known = [100 * part for parts in curves.values() for part in parts if part is not None]
    ticks = round_ticks(min(known, default=0.0), max(known, default=100.0))
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [str(value) for value in values])
    axes.set_yticks(ticks, [f"{tick:g} %" for tick in ticks])
    axes.set_ylim(ticks[0], ticks[-1])
    axes.set_xlabel(key)
    axes.grid(alpha=0.3)
    label_ends(axes, ends)
    said(axes, answer, f"scaling efficiency; {about}")
    save(figure, file)
    pyplot.close(figure)
