"""Rows as a picture: time over size, a line a system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any

from multiring.bench.report import SizeRow
from multiring.pages.pictures import apart
from multiring.units import duration, size

LABEL_POINTS = 13
"""Height of a label at the end of a line."""

TITLE_LETTERS, SUBTITLE_LETTERS = 78, 105
"""Letters that fit a line of a picture's width."""


def check(file: Path, option: str = "--plot") -> None:
    """ImportError with the remedy where matplotlib is missing, ValueError for a format that it cannot write here.

    Both name the ``option`` that the file was given by.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ImportError(f"{option} needs matplotlib: pip install 'multiring[plot]'") from None
    known = FigureCanvasBase.get_supported_filetypes()
    if file.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"{option} {file}: the suffix says the format; known are {', '.join(known)}")
    from matplotlib.figure import Figure

    kind = file.suffix.removeprefix(".").lower()
    try:
        trial = Figure(figsize=(1, 1))
        trial.text(0.5, 0.5, "text")
        trial.savefig(BytesIO(), format=kind)
    except Exception as error:  # each format has its own, where a program or a library that it needs is not here
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{option} {file}: matplotlib cannot write {kind} here ({reason}); png needs nothing"
        ) from None


def plot(file: Path, rows: Sequence[SizeRow], title: str) -> None:
    """Draw median times on logarithmic axes, the bound dotted; the suffix of the file says its format."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    ends: dict[str, tuple[float, float, Any]] = {}
    for name, points in _systems(rows).items():
        width = 2.5 if name.startswith("multiring") else 1.5
        (line,) = axes.plot(*_in_milliseconds(points), marker="o", markersize=4, linewidth=width)
        ends[f"{name} {duration(points[-1][1])}"] = (points[-1][0], 1e3 * points[-1][1], line.get_color())
    bounds = list({row.nbytes: row.bound for row in rows}.items())
    axes.plot(*_in_milliseconds(bounds), linestyle=":", color="black")
    least = "bound" if rows[0].enqueue_seconds is None else "bare copies"
    ends[f"{least} {duration(bounds[-1][1])}"] = (bounds[-1][0], 1e3 * bounds[-1][1], "black")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([nbytes for nbytes, _ in bounds], [size(nbytes) for nbytes, _ in bounds])
    axes.yaxis.set_major_formatter(lambda milliseconds, _: duration(milliseconds / 1e3))
    axes.set_xlabel("size of the buffer")
    axes.grid(alpha=0.3)
    label_ends(axes, ends)
    said(axes, answer(rows), f"time of a call; {title}")
    save(figure, file)
    pyplot.close(figure)


def save(figure: Any, file: Path) -> None:
    """Write a picture; OSError with its file's name."""
    try:
        figure.savefig(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None


def answer(rows: Sequence[SizeRow]) -> str:
    """Return the result in a sentence: the ratio to the fastest peer, at the smallest and at the largest size."""
    sizes = sorted({row.nbytes for row in rows})
    ends = [_fastest([row for row in rows if row.nbytes == nbytes]) for nbytes in dict.fromkeys((sizes[0], sizes[-1]))]
    compared = [(row, *min(_peers(row), key=lambda each: each[1])) for row in ends if row.peers]
    if len(compared) < len(ends):
        return ", ".join(f"{size(row.nbytes)} in {duration(row.seconds)}" for row in ends)
    of_one = len({name for _, name, _ in compared}) == 1
    said = [
        f"{seconds / row.seconds:.3g} times{'' if number and of_one else f' as fast as {name}'} at {size(row.nbytes)}"
        for number, (row, name, seconds) in enumerate(compared)
    ]
    return f"multiring is {', '.join(said)}"


def _fastest(rows: Sequence[SizeRow]) -> SizeRow:
    """The fastest call on private buffers, which the peers have too, where these were measured."""
    private = [row for row in rows if row.buffer == "private"] or rows
    return min(private, key=lambda row: (not row.peers, row.seconds))


def _peers(row: SizeRow) -> list[tuple[str, float]]:
    return [(name, min(launches)) for name, launches in row.peers.items()]


def _systems(rows: Sequence[SizeRow]) -> dict[str, list[tuple[int, float]]]:
    """Size and seconds of each point, by the name of the line."""
    systems: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        systems.setdefault(f"multiring, {row.api}, {row.buffer}", []).append((row.nbytes, row.seconds))
        if row.buffer == rows[0].buffer:
            for name, seconds in _peers(row):
                systems.setdefault(name, []).append((row.nbytes, seconds))
    return systems


def _in_milliseconds(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [nbytes for nbytes, _ in points], [1e3 * seconds for _, seconds in points]


def label_ends(axes: Any, ends: Mapping[str, tuple[float, float, Any]]) -> None:
    """Name each line at its last point (x, y, colour), in its colour, none over another; needs the axes' limits."""
    figure = axes.figure
    figure.draw_without_rendering()
    shown = axes.get_window_extent()
    gap = LABEL_POINTS * figure.dpi / 72
    places = [float(axes.transData.transform((x, y))[1]) for x, y, _ in ends.values()]
    for (text, (x, y, colour)), place, found in zip(
        ends.items(), places, apart(places, gap, shown.y0, shown.y1), strict=True
    ):
        right = axes.transAxes.inverted().transform((shown.x1, found))
        axes.annotate(
            text,
            (x, y),
            (right[0] + 0.015, right[1]),
            textcoords="axes fraction",
            color=colour,
            fontsize=9,
            verticalalignment="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5} if abs(found - place) > 1 else None,
        )


def said(axes: Any, title: str, subtitle: str) -> None:
    """The answer above a picture, and in small letters what it is an answer to."""
    shown = fill(subtitle, SUBTITLE_LETTERS)
    axes.set_title(shown, loc="left", fontsize=9, color="0.35")
    points = 8 + 12 * (1 + shown.count("\n"))
    axes.annotate(
        fill(title, TITLE_LETTERS),
        (0, 1),
        (0, points),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=12,
        fontweight="bold",
        annotation_clip=False,
    )
