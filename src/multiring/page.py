"""One page about a job or a simulation: HTML with its pictures inside, which opens without a network.

Pure: from values to text. ``Communicator.report`` and ``multiring report`` gather what is shown and write the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import log2

from . import explain, topology_file
from .cost import LinkLoad
from .explain import Table
from .planner import Choice
from .topology import Place, Topology
from .units import count, duration

SHOWN_PLACES = 8
"""Of the places in one place; the others are counted."""

LONGEST_CELL = 40
"""Letters of a cell that is kept in one line."""

COLUMN, ROW, BOX_WIDTH, BOX_HEIGHT = 270, 46, 220, 36
LONGEST_NAME = 16
"""Letters of a place's name that fit its box beside its level and its ranks."""

SECURITY = "default-src 'none'; style-src 'unsafe-inline'"
"""What the browser is told: nothing is to be fetched, and nothing run."""

COLOURS = ("#b2182b", "#2166ac", "#1b7837", "#762a83", "#e08214", "#4d4d4d", "#35978f", "#c51b7d", "#8c510a")

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; margin: .6rem 0 } caption { text-align: left; font-weight: 600; padding: .3rem 0 }
th, td { text-align: left; padding: .15rem .9rem .15rem 0; border-bottom: 1px solid #ddd; white-space: nowrap }
td.long { white-space: normal; min-width: 12rem } td.long, h1, p { overflow-wrap: anywhere }
pre { background: #f5f5f5; padding: .6rem .8rem; overflow-x: auto } svg { max-width: 100%; height: auto }
text { font: 12px system-ui, sans-serif } .small { font-size: 11px; fill: #555 }
"""


@dataclass(frozen=True)
class Rank:
    """What a rank of a job says of itself: seconds that it was in calls, and of these with nothing to do but wait."""

    rank: int
    host: str
    in_calls: float
    waiting: float


def document(title: str, *sections: str) -> str:
    """A whole file; it refers to nothing outside."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{SECURITY}"/>'
    head = f'<meta charset="utf-8"/>{policy}<title>{escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join(sections)
    return f"<!DOCTYPE html>\n<html><head>{head}</head><body>\n<h1>{escape(title)}</h1>\n{body}\n</body></html>\n"


def of_job(title: str, topology: Topology, used: Sequence[Choice], ranks: Sequence[Rank]) -> str:
    """The page of a job: its topology, who was late, and each plan that its calls used."""
    busiest = max(used, key=lambda choice: choice.measured.seconds if choice.measured else 0.0, default=None)
    loads = busiest.chosen.prediction.links if busiest else ()
    hosts = len(set(topology.hosts))
    about = f"{topology.world_size} ranks on {count(hosts, 'host')}"
    return document(title, paragraph(about), tree(topology, loads), _late(ranks), *map(plan, used))


def of_simulation(
    title: str, topology: Topology, choice: Choice, results: Table, curve: str, about: Sequence[str]
) -> str:
    """The page of a simulation: the cluster, every strategy, the plan for a bucket of gradients, a sweep if any."""
    sections = [*map(paragraph, about), tree(topology, choice.chosen.prediction.links), table(results), curve]
    return document(title, *filter(None, sections), plan(choice))


def paragraph(text: str) -> str:
    """Text between others."""
    return f"<p>{escape(text)}</p>"


def plan(choice: Choice) -> str:
    """A plan phase by phase: predicted and measured time, the bound, the links it loads, what was rejected."""
    shown = "".join(table(each) for each in explain.tables(choice))
    heading = f"Plan {choice.plan.id}: {choice.plan.collective}"
    return f"<h2>{escape(heading)}</h2><pre>{escape(explain.summary(choice))}</pre>{shown}"


def table(content: Table) -> str:
    """Rows of text."""
    head = "".join(f"<th>{escape(text)}</th>" for text in content.headings)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in content.rows)
    return (
        f"<table><caption>{escape(content.title)}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _cell(text: str) -> str:
    kind = ' class="long"' if len(text) > LONGEST_CELL else ""
    return f"<td{kind}>{escape(text)}</td>"


def _late(ranks: Sequence[Rank]) -> str:
    """Who was in calls how long. Who waits least is the one that the others wait for."""
    if len(ranks) < 2:
        return ""
    slowest = min(ranks, key=lambda rank: rank.waiting)
    rows = [(str(each.rank), each.host, duration(each.in_calls), duration(each.waiting)) for each in ranks]
    verdict = (
        f"Rank {slowest.rank} on {slowest.host} waited least, {duration(slowest.waiting)}: the others wait for it."
    )
    found = Table("time in collectives", ("rank", "host", "in calls", "of it waiting"), tuple(rows))
    return f"<h2>Who waits for whom</h2>{paragraph(verdict)}{table(found)}"


# ---- pictures -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    text: tuple[str, str]
    depth: int
    busy: float | None
    inner: tuple[_Node, ...]
    name: str = ""


def tree(topology: Topology, loads: Sequence[LinkLoad] = ()) -> str:
    """The topology with the rate of each link; a link is redder, the nearer it is to the busiest one."""
    height = len(topology.levels) - 1
    inner = tuple(_shown(topology.places, height, topology.levels, _Heat(topology, loads), 1))
    about = f"{topology.world_size} ranks", "joined by a switch"
    boxes, rows = _drawn(_Node(about, 0, None, inner), 0.0)
    width = COLUMN * (height + 1)
    said = "A box is a place with the rate and latency of the link that leads out of it."
    if loads:
        said += " The redder a link, the nearer it is to the one that the plan keeps busy longest."
    return f"<h2>Topology</h2>{paragraph(said)}{_svg(width, ROW * rows, boxes)}"


class _Heat:
    """How busy the link of each place is, as a part of the busiest. A load stands for all places that are like its own:
    of the same level and link, around as many ranks."""

    def __init__(self, topology: Topology, loads: Sequence[LinkLoad]) -> None:
        self._worst = max((load.seconds for load in loads), default=0.0)
        self._own = {(load.level, load.rank): load for load in loads}
        self._alike: dict[object, LinkLoad] = {}
        places = topology.places
        for level in reversed(topology.levels[1:]):
            for place in places:
                ranks = list(place.ranks())
                found = [self._own[level, rank] for rank in ranks if (level, rank) in self._own]
                self._alike.update(((level, place.link, len(ranks)), load) for load in found)
            places = tuple(inner for place in places for inner in place.places)

    def __call__(self, level: str, place: Place) -> float | None:
        ranks = list(place.ranks())
        own = (self._own[level, rank] for rank in ranks if (level, rank) in self._own)
        load = next(own, self._alike.get((level, place.link, len(ranks))))
        return load.seconds / self._worst if load and self._worst else None


def _shown(places: Sequence[Place], height: int, levels: Sequence[str], heat: _Heat, depth: int) -> Iterator[_Node]:
    """Nodes for places; below hosts only the number of ranks is said."""
    for place in places[:SHOWN_PLACES]:
        ranks = sum(1 for _ in place.ranks())
        name = place.name if len(place.name) <= LONGEST_NAME else f"{place.name[: LONGEST_NAME - 1]}\u2026"
        said = f"{levels[height]} {name}" + (f", {count(ranks, 'rank')}" if height == 1 else "")
        inner = tuple(_shown(place.places, height - 1, levels, heat, depth + 1)) if height > 1 else ()
        yield _Node((said, topology_file.describe(place)), depth, heat(levels[height], place), inner, place.name)
    if len(places) > SHOWN_PLACES:
        yield _Node((f"and {len(places) - SHOWN_PLACES} more", ""), depth, None, ())


def _drawn(node: _Node, top: float) -> tuple[list[str], float]:
    """The shapes of a node and of all in it, from row ``top``; and how many rows they take."""
    shapes: list[str] = []
    rows = 0.0
    middles = []
    for inner in node.inner:
        drawn, height = _drawn(inner, top + rows)
        shapes += drawn
        middles.append(top + rows + height / 2)
        rows += height
    rows = rows or 1.0
    x, y = COLUMN * node.depth, ROW * (top + rows / 2)
    for inner, middle in zip(node.inner, middles, strict=True):
        colour = "#bbb" if inner.busy is None else _heat(inner.busy)
        line = f'x1="{x + BOX_WIDTH}" y1="{y:.1f}" x2="{x + COLUMN}" y2="{ROW * middle:.1f}"'
        shapes.append(f'<line {line} stroke="{colour}" stroke-width="{1 if inner.busy is None else 3}"/>')
    corner = f'x="{x + 1}" y="{y - BOX_HEIGHT / 2:.1f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4"'
    title = f"<title>{escape(node.name)}</title>" if node.name else ""
    shapes.append(f'<rect {corner} fill="#fafafa" stroke="#888">{title}</rect>')
    for number, text in enumerate(node.text):
        kind = ' class="small"' if number else ""
        shapes.append(f'<text x="{x + 8}" y="{y - 3 + 14 * number:.1f}"{kind}>{escape(text)}</text>')
    return shapes, rows


def _heat(part: float) -> str:
    """From grey to red."""
    red, other = 0x99 + round(part * (0xC0 - 0x99)), round(0x99 * (1 - part))
    return f"#{red:02x}{other:02x}{other:02x}"


def curves(title: str, key: str, values: Sequence[int], lines: Mapping[str, Sequence[float | None]]) -> str:
    """Efficiencies, 0 to 1, over positive ``values`` on a logarithmic axis, a line each."""
    width, height, left, bottom = 560, 300, 50, 40
    low, high = log2(min(values)), log2(max(values))
    known = [part for parts in lines.values() for part in parts if part is not None]
    floor = min(int(10 * min(known, default=0.0)), 9) * 10

    def at(value: float, part: float) -> tuple[float, float]:
        x = left + (log2(value) - low) / ((high - low) or 1) * (width - left)
        return x, (height - bottom) * (1 - part) / (1 - floor / 100) + 8

    shapes = []
    for percent in range(floor, 101, 2 if floor == 90 else 10):
        y = at(values[0], percent / 100)[1]
        shapes.append(f'<line x1="{left}" y1="{y:.1f}" x2="{width}" y2="{y:.1f}" stroke="#ddd"/>')
        shapes.append(f'<text x="4" y="{y + 4:.1f}" class="small">{percent} %</text>')
    for value in values:
        x = at(value, 0)[0]
        shapes.append(f'<text x="{x:.1f}" y="{height - bottom + 26}" text-anchor="middle" class="small">{value}</text>')
    shapes.append(f'<text x="{width / 2}" y="{height}" class="small">{escape(key)}</text>')
    for number, (name, parts) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [at(value, part) for value, part in zip(values, parts, strict=True) if part is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        shapes.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        shapes.append(f'<text x="{width + 16}" y="{22 + 18 * number}" fill="{colour}">{escape(name)}</text>')
    return f"<h2>{escape(title)}</h2>{_svg(width + 160, height + 8, shapes)}"


def _svg(width: float, height: float, shapes: Sequence[str]) -> str:
    box = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">{"".join(shapes)}</svg>'
