"""The history of a training, which checkpoints keep too, and the page that it becomes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from multiring.pages import page
from multiring.planning.choice import Table

MOST_POINTS = 1000
"""Points of a curve that are kept; of more, neighbours become one."""

WORST = 10
"""Classes whose mistakes are shown."""

SHOWN_MISTAKES = 3
"""Other classes that are shown beside one that was taken for them."""

History = dict[str, Any]
"""``points``, ``epochs``, ends of ``cycles``, ``changes`` of who takes part, and the last epoch's ``worst`` classes.

A point is a step, and of the steps since the last point the sum of losses, the number of images, and the seconds; of
the steps since the last one these are in ``open``. ``sums`` are losses, images and broken images of the epoch that is
not over. All are of all ranks, and the same on each but for the seconds.
"""


def begun() -> History:
    """The history of a training that has not begun."""
    return {
        "points": [],
        "open": [0.0, 0, 0.0],
        "sums": [0.0, 0, 0],
        "epochs": [],
        "cycles": [],
        "changes": [],
        "worst": [],
    }


def add_step(history: History, losses: float, images: int, broken: int, seconds: float) -> None:
    """Remember a step."""
    for name, values in (("open", (losses, images, seconds)), ("sums", (losses, images, broken))):
        history[name] = [before + value for before, value in zip(history[name], values, strict=True)]


def close_point(history: History, step: int) -> None:
    """Make a point of the steps since the last one, if there were any."""
    losses, images, seconds = history["open"]
    if images:
        add_point(history, step, losses, images, seconds)
    history["open"] = [0.0, 0, 0.0]


class Pace:
    """The seconds of a step in the present world; the first, in which workers start, counts only if it is alone."""

    def __init__(self) -> None:
        self._first = 0.0
        self._seconds, self._steps = 0.0, 0

    def add(self, seconds: float) -> None:
        """Count a step."""
        if not self._first:
            self._first = seconds
        else:
            self._seconds, self._steps = self._seconds + seconds, self._steps + 1

    def left(self, steps: int, validations: int, history: History) -> float:
        """The seconds that steps and validations will take, each of these as long as the last one."""
        step = self._seconds / self._steps if self._steps else self._first
        validation = history["epochs"][-1]["validated in"] if history["epochs"] else 0.0
        return steps * step + validations * validation


def add_point(history: History, step: int, losses: float, images: float, seconds: float) -> None:
    """Remember the steps up to ``step``; two old points become one where there are too many."""
    points = history["points"]
    points.append([step, losses, images, seconds])
    if len(points) > MOST_POINTS:
        whole = len(points) // 2 * 2
        merged = [
            [later[0], *(a + b for a, b in zip(earlier[1:], later[1:], strict=True))]
            for earlier, later in zip(points[:whole:2], points[1:whole:2], strict=True)
        ]
        history["points"] = merged + points[whole:]


def worst_classes(seen: Tensor, right: Tensor) -> list[int]:
    """The classes with the smallest part of their images right, at most ``WORST``, of those with a mistake."""
    mistaken = [label for label in range(len(seen)) if right[label] < seen[label]]
    return sorted(mistaken, key=lambda label: (float(right[label] / seen[label]), label))[:WORST]


def confused(names: list[str], worst: list[int], seen: Tensor, right: Tensor, taken: Tensor) -> list[dict[str, Any]]:
    """Return the mistakes of the worst classes; ``taken`` has a row for each of them, a column for each class."""
    rows = []
    for number, label in enumerate(worst):
        others = sorted((-int(times), other) for other, times in enumerate(taken[number].tolist()) if times)
        mistakes = [[names[other], -times] for times, other in others[:SHOWN_MISTAKES]]
        rows.append({"name": names[label], "seen": int(seen[label]), "right": int(right[label]), "taken": mistakes})
    return rows


def sections(history: History, ensemble: dict[str, float]) -> list[str]:
    """The parts of the page about the training itself; ``ensemble`` is empty where there is none."""
    points, epochs = history["points"], history["epochs"]
    losses = {
        "training": [(step, summed / images) for step, summed, images, _ in points],
        "validation": [(each["step"], each["validation loss"]) for each in epochs],
    }
    accuracy = {name: [(each["step"], 100 * each[name]) for each in epochs] for name in ("top-1", "top-5")}
    speed = {"all ranks": [(step, images / seconds) for step, _, images, seconds in points]}
    rows = tuple(map(_epoch, epochs))
    return [
        page.history("Loss", "steps", losses),
        page.history("Accuracy on the validation images", "steps", accuracy, "%"),
        page.history("Images that all ranks train on in a second", "steps", speed),
        page.paragraph(EXPECTED),
        page.table(Table("epochs", EPOCH, rows)),
        *_cycles(history["cycles"], ensemble),
        _changes(history["changes"]),
        _worst(history["worst"]),
    ]


EXPECTED = (
    "Expected are the images/s of all ranks if none waited: their number times what the slowest of them passes forward "
    "and backward by itself, without reading images, sending gradients or an optimizer. Unknown where batch norms are "
    "over all ranks, or an epoch was trained without --page."
)
EPOCH = (
    "epoch",
    "ranks",
    "training loss",
    "images/s",
    "expected",
    "efficiency",
    "top-1",
    "top-5",
    "validation loss",
    "left out",
)


def _epoch(each: dict[str, Any]) -> tuple[str, ...]:
    loss, speed, expected = each["loss"], each["speed"], each["expected"]
    parts = f"{each['top-1']:.2%}", f"{each['top-5']:.2%}", f"{each['validation loss']:.6f}"
    return (
        str(each["epoch"]),
        str(each["ranks"]),
        "" if loss is None else f"{loss:.6f}",
        "" if speed is None else f"{speed:.1f}",
        "" if expected is None else f"{expected:.1f}",
        "" if speed is None or expected is None else f"{speed / expected:.1%}",
        *parts,
        str(each["broken"]),
    )


def _cycles(cycles: list[dict[str, Any]], ensemble: dict[str, float]) -> list[str]:
    """A table of the cycles' ends, and of their ensemble below; nothing where there are no cycles."""
    if not cycles:
        return []
    found = [(str(each["cycle"]), str(each["epoch"]), each) for each in cycles]
    found += [("ensemble", "", ensemble)] if ensemble else []
    rows = tuple(
        (name, epoch, f"{each['top1']:.2%}", f"{each['top5']:.2%}", f"{each['loss']:.6f}")
        for name, epoch, each in found
    )
    names = ("cycle", "epoch of its end", "top-1", "top-5", "validation loss")
    return [page.table(Table("networks at the ends of cycles", names, rows))]


def _changes(changes: list[list[Any]]) -> str:
    if not changes:
        return page.paragraph("No rank was lost.")
    rows = tuple((str(epoch), str(step), what) for epoch, step, what in changes)
    return page.table(Table("ranks lost and admitted", ("epoch", "step", "what happened"), rows))


def _worst(worst: list[dict[str, Any]]) -> str:
    if not worst:
        return page.paragraph("No validation image was taken for another class.")
    rows = []
    for each in worst:
        taken = ", ".join(f"{name} ({times})" for name, times in each["taken"])
        rows.append((each["name"], str(each["seen"]), str(each["right"]), taken))
    return page.table(
        Table("the worst classes of the last validation", ("class", "images", "right", "taken for"), tuple(rows))
    )
