"""One page about a job or a simulation: HTML with its pictures inside, which opens without a network.

Pure: from values to text. ``Communicator.report`` and ``multiring report`` gather what is shown and write the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import inf, log2

from multiring.planning import topology_file
from multiring.planning.choice import Choice, Table, summary, tables
from multiring.planning.prediction import LinkLoad, Prediction
from multiring.planning.topology import Place, Topology
from multiring.units import count, duration

from .pictures import apart, percent, round_ticks

SHOWN_PLACES = 8
"""Number of places that are shown within one place; the others are counted."""

LONGEST_CELL = 40
"""Letters of a cell that is kept in one line."""

WIDTH = 1100
"""Width of every picture, in its own units: the page is as wide."""

ROW, BOX_WIDTH, BOX_HEIGHT = 46, 205, 36
SHORTEST_LINK = 90
"""Between the boxes of two levels: room for a link's load. A picture of many levels is wider, and shown smaller."""

LONGEST_NAME = 16
"""Letters of a place's name that fit its box beside its level and its ranks."""

LONGEST_LABEL = 28
"""Letters of a strategy's name in a picture."""

LABEL_ROW = 16

MOST_DOTS = 40
"""Pairs of a line that are marked; a line of more is drawn without marks."""

ALIKE = 0.9
"""Fraction of the others' mean wait from which a rank is not blamed."""

SECURITY = "default-src 'none'; style-src 'unsafe-inline'"
"""Policy for the browser: it fetches nothing and runs nothing."""

COLOURS = ("#b2182b", "#2166ac", "#1b7837", "#762a83", "#b35806", "#4d4d4d", "#01665e", "#c51b7d", "#8c510a")

IDLE, HALF, BUSY = (0xFE, 0xE0, 0x8B), (0xF4, 0x6D, 0x43), (0xA5, 0x00, 0x26)
"""Red, green and blue of a link that carries nothing, one that is busy half of a call, and one that always is."""

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin: 0 0 1rem } h2 { font-size: 1.15rem; margin-top: 2rem } .about { color: #555; margin: 0 }
table { border-collapse: collapse; margin: .6rem 0; width: 100% }
caption { text-align: left; font-weight: 600; padding: .3rem 0 }
th, td { text-align: left; padding: .15rem .9rem .15rem 0; border-bottom: 1px solid #ddd; white-space: nowrap }
td.long { white-space: normal; min-width: 12rem } td.long, h1, p { overflow-wrap: anywhere }
pre { background: #f5f5f5; padding: .6rem .8rem; overflow-x: auto } .wide { overflow-x: auto }
svg { width: 100%; min-width: 44rem; height: auto }
text { font: 12px system-ui, sans-serif } .small { font-size: 11px; fill: #555 }
"""


@dataclass(frozen=True)
class RankTimes:
    """Times of a rank by its own account: seconds in calls, and of these the seconds in which it only waited."""

    rank: int
    host: str
    in_calls: float
    waiting: float


@dataclass(frozen=True)
class Bar:
    """Seconds that ranks wait in a step of a strategy, None without a result; ``said`` is the text at the bar's end."""

    name: str
    seconds: float | None
    said: str


def document(title: str, answer: str, *sections: str) -> str:
    """A whole file, which refers to nothing outside; ``answer`` is its first line."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{SECURITY}"/>'
    window = '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
    head = f'<meta charset="utf-8"/>{window}{policy}<title>{escape(title)}</title><style>{STYLE}</style>'
    first = f'<h1>{escape(answer)}</h1>\n<p class="about">{escape(title)}</p>'
    body = "\n".join(filter(None, sections))
    return f"<!DOCTYPE html>\n<html><head>{head}</head><body>\n{first}\n{body}\n</body></html>\n"


def of_job(
    title: str,
    topology: Topology,
    used: Sequence[Choice],
    ranks: Sequence[RankTimes],
    slow: Sequence[str] = (),
    answer: str = "",
    sections: Sequence[str] = (),
) -> str:
    """The page of a job: who was late, ``slow`` ranks in words, its topology, and each plan that its calls used.

    With an ``answer``, that is the first line. ``sections`` are HTML that stands before all else.
    """
    busiest = max(used, key=lambda choice: choice.measured.seconds if choice.measured else 0.0, default=None)
    hosts = len(set(topology.hosts))
    about = f"{topology.world_size} ranks on {count(hosts, 'host')}"
    drawn = tree(topology, busiest.chosen.prediction if busiest else None)
    verdict = _verdict(ranks)
    late = _late(ranks, [f"{verdict}.", *slow] if answer else slow)
    return document(title, answer or verdict, paragraph(about), *sections, late, drawn, *map(plan, used))


def of_simulation(
    title: str,
    answer: str,
    topology: Topology,
    choice: Choice,
    bars: Sequence[Bar],
    results: Table,
    curve: str,
    about: Sequence[str],
) -> str:
    """The page of a simulation: every strategy, a sweep if any, the cluster, the plan for a bucket of gradients."""
    drawn = tree(topology, choice.chosen.prediction)
    return document(title, answer, *map(paragraph, about), exposed(bars), table(results), curve, drawn, plan(choice))


def paragraph(text: str) -> str:
    """Text between others."""
    return f"<p>{escape(text)}</p>"


def plan(choice: Choice) -> str:
    """A plan phase by phase: predicted and measured time, the bound, the links it loads, what was rejected."""
    shown = "".join(table(each) for each in tables(choice))
    heading = f"Plan {choice.plan.id}: {choice.plan.collective}"
    return f"<h2>{escape(heading)}</h2><pre>{escape(summary(choice))}</pre>{shown}"


def table(content: Table) -> str:
    """Rows of text.

    The HTML of rich is a picture of a terminal: it has no cells for a screen reader or a spreadsheet, and a narrow
    window cuts it off.
    """
    head = "".join(f"<th>{escape(text)}</th>" for text in content.headings)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in content.rows)
    return (
        f'<div class="wide"><table><caption>{escape(content.title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(text: str) -> str:
    kind = ' class="long"' if len(text) > LONGEST_CELL else ""
    return f"<td{kind}>{escape(text)}</td>"


def _verdict(ranks: Sequence[RankTimes]) -> str:
    """Return a sentence that names the rank the others wait for: it waits least."""
    if len(ranks) < 2:
        return "One rank, which waits for nobody"
    slowest = min(ranks, key=lambda rank: rank.waiting)
    others = [rank.waiting for rank in ranks if rank is not slowest]
    mean = sum(others) / len(others)
    if slowest.waiting >= ALIKE * mean:
        return (
            f"No rank holds up the others: each waited {duration(slowest.waiting)} to {duration(max(others))} in calls"
        )
    return (
        f"The others wait for rank {slowest.rank} on {slowest.host}: it waited {duration(slowest.waiting)} in calls, "
        f"they {duration(mean)} in the mean"
    )


def _late(ranks: Sequence[RankTimes], slow: Sequence[str]) -> str:
    """Return HTML: a table of the seconds in calls by rank, and the ranks that kept the others waiting."""
    if len(ranks) < 2:
        return ""
    rows = [(str(each.rank), each.host, duration(each.in_calls), duration(each.waiting)) for each in ranks]
    found = Table("time in collectives", ("rank", "host", "in calls", "of it waiting"), tuple(rows))
    return f"<h2>Who waits for whom</h2>{''.join(map(paragraph, slow))}{table(found)}"


# ---- pictures -------------------------------------------------------------------------------------------------------


def exposed(bars: Sequence[Bar]) -> str:
    """A bar for each strategy that has seconds, its value at its end."""
    known = [(bar, bar.seconds) for bar in bars if bar.seconds is not None]
    if not known:
        return ""
    row, left, right = 30, 10 + 8 * max(len(_short(bar.name, LONGEST_LABEL)) for bar, _ in known), 260
    longest = max(seconds for _, seconds in known) or 1.0
    shapes = []
    for number, (bar, seconds) in enumerate(known):
        top, length = row * number, (WIDTH - left - right) * seconds / longest
        colour = COLOURS[0] if bar.name.startswith("multiring") else "#92a5b8"
        shapes.append(f'<text x="0" y="{top + 19}">{_named(bar.name)}</text>')
        shapes.append(f'<rect x="{left}" y="{top + 4}" width="{length:.1f}" height="{row - 8}" fill="{colour}"/>')
        shapes.append(f'<text x="{left + length + 8:.1f}" y="{top + 19}">{escape(bar.said)}</text>')
    heading = "<h2>Time of a step in which ranks wait for communication</h2>"
    return heading + _svg(WIDTH, row * len(known), shapes)


@dataclass(frozen=True)
class _Node:
    text: tuple[str, str]
    depth: int
    busy: float | None
    inner: tuple[_Node, ...]
    name: str = ""


def tree(topology: Topology, prediction: Prediction | None = None) -> str:
    """The topology with the rate of each link; the redder a link and the larger its number, the busier it is."""
    height = len(topology.levels) - 1
    busy = _Busy(topology, prediction)
    inner = tuple(_shown(topology.places, height, topology.levels, busy, 1))
    about = f"{topology.world_size} ranks", "joined by a switch"
    column = max((WIDTH - BOX_WIDTH - 2) / (height + 1), BOX_WIDTH + SHORTEST_LINK)
    boxes, rows = _drawn(_Node(about, 0, None, inner), 0.0, column)
    said = "A box is a place with the rate and latency of the link that leads out of it."
    if prediction and prediction.links:
        said += (
            " The number at a link is the part of the call's time in which it is busy: pale means idle, dark red busy"
            " all the time."
        )
    drawn = _svg(column * (height + 1) + BOX_WIDTH + 2, ROW * rows, boxes)
    return f"<h2>{escape(busy.heading)}</h2>{paragraph(said)}{drawn}"


class _Busy:
    """The part of a call in which the link of each place is busy.

    A load stands for all places that are like its own: of the same level and link, around as many ranks.
    """

    def __init__(self, topology: Topology, prediction: Prediction | None) -> None:
        self._whole = prediction.seconds if prediction else 0.0
        loads = prediction.links if prediction else ()
        self._own = {(load.level, load.rank): load for load in loads}
        self._alike: dict[object, LinkLoad] = {}
        places = topology.places
        for level in reversed(topology.levels):
            for place in places:
                ranks = list(place.ranks())
                found = [self._own[level, rank] for rank in ranks if (level, rank) in self._own]
                self._alike.update(((level, place.link, len(ranks)), load) for load in found)
            places = tuple(inner for place in places for inner in place.places)

    def __call__(self, level: str, place: Place) -> float | None:
        ranks = list(place.ranks())
        own = (self._own[level, rank] for rank in ranks if (level, rank) in self._own)
        load = next(own, self._alike.get((level, place.link, len(ranks))))
        return min(1.0, load.seconds / self._whole) if load and self._whole else None

    @property
    def heading(self) -> str:
        """The heading of the topology: it names the busiest link."""
        if not self._own or not self._whole:
            return "Topology"
        load = max(self._own.values(), key=lambda load: load.seconds)
        part = min(1.0, load.seconds / self._whole)
        place = f"{load.level}'s link" if load.count == 1 else f"{load.count} {load.level}s' links"
        return f"Topology: the {place} {'is' if load.count == 1 else 'are'} busiest, {100 * part:.0f} % of the time"


def _shown(places: Sequence[Place], height: int, levels: Sequence[str], busy: _Busy, depth: int) -> Iterator[_Node]:
    """Nodes for places; the ranks of a host are one."""
    for place in places[:SHOWN_PLACES]:
        ranks = sum(1 for _ in place.ranks())
        said = f"{levels[height]} {_short(place.name, LONGEST_NAME)}" + (
            f", {count(ranks, 'rank')}" if height == 1 else ""
        )
        inner = (
            tuple(_shown(place.places, height - 1, levels, busy, depth + 1))
            if height > 1
            else (_ranks(place.places, levels[0], busy, depth + 1),)
        )
        yield _Node((said, topology_file.describe(place)), depth, busy(levels[height], place), inner, place.name)
    if len(places) > SHOWN_PLACES:
        yield _Node((f"and {len(places) - SHOWN_PLACES} more", ""), depth, None, ())


def _ranks(places: Sequence[Place], level: str, busy: _Busy, depth: int) -> _Node:
    """The ranks of a host, by the busiest of their links."""
    parts = [busy(level, place) for place in places]
    busiest = max(range(len(places)), key=lambda number: parts[number] or 0.0)
    link = topology_file.describe(places[busiest])
    numbers = [place.rank for place in places]
    text = f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {numbers[0]} to {numbers[-1]}"
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        text = f"{len(numbers)} ranks, {numbers[0]} to {numbers[-1]}"
    return _Node((text, link if len(numbers) == 1 else f"each {link}"), depth, parts[busiest], ())


def _drawn(node: _Node, top: float, column: float) -> tuple[list[str], float]:
    """The shapes of a node and of all in it, from row ``top``; and how many rows they take."""
    shapes: list[str] = []
    rows = 0.0
    middles = []
    for inner in node.inner:
        drawn, height = _drawn(inner, top + rows, column)
        shapes += drawn
        middles.append(top + rows + height / 2)
        rows += height
    rows = rows or 1.0
    x, y = column * node.depth, ROW * (top + rows / 2)
    for inner, middle in zip(node.inner, middles, strict=True):
        shapes += _link((x + BOX_WIDTH, y), (x + column, ROW * middle), inner.busy)
    corner = f'x="{x + 1:.1f}" y="{y - BOX_HEIGHT / 2:.1f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4"'
    title = f"<title>{escape(node.name)}</title>" if node.name else ""
    shapes.append(f'<rect {corner} fill="#fafafa" stroke="#888">{title}</rect>')
    for number, text in enumerate(node.text):
        kind = ' class="small"' if number else ""
        shapes.append(f'<text x="{x + 8:.1f}" y="{y - 3 + 15 * number:.1f}"{kind}>{escape(text)}</text>')
    return shapes, rows


def _link(start: tuple[float, float], end: tuple[float, float], busy: float | None) -> list[str]:
    """A line with its load as a label at 65 % of its length, where lines diverge."""
    where = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
    if busy is None:
        return [f'<line {where} stroke="#bbb"/>']
    x, y = (start[i] + 0.65 * (end[i] - start[i]) for i in (0, 1))
    label = f'x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" stroke="#fff" stroke-width="7" paint-order="stroke"'
    return [
        f'<line {where} stroke="{_heat(busy)}" stroke-width="{1.5 + 4 * busy:.1f}"/>',
        f"<text {label}>{100 * busy:.0f} %</text>",
    ]


def _heat(part: float) -> str:
    """The colour of a link that is busy for a part of the time."""
    first, last, between = (IDLE, HALF, 2 * part) if part < 0.5 else (HALF, BUSY, 2 * part - 1)
    return "#" + "".join(f"{round(a + between * (b - a)):02x}" for a, b in zip(first, last, strict=True))


def _colours(names: Iterable[str]) -> dict[str, str]:
    """Red for what is multiring's, another one for each of the others."""
    others = [name for name in names if not name.startswith("multiring")]
    own = [name for name in names if name.startswith("multiring")]
    rest = COLOURS[1:]
    return {
        **{name: rest[number % len(rest)] for number, name in enumerate([*others, *own[1:]])},
        **dict.fromkeys(own[:1], COLOURS[0]),
    }


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}\u2026"


def _named(name: str) -> str:
    """A name that fits its place in a picture, the whole of it where the pointer rests."""
    whole = f"<title>{escape(name)}</title>" if len(name) > LONGEST_LABEL else ""
    return whole + escape(_short(name, LONGEST_LABEL))


def curves(title: str, key: str, values: Sequence[int], lines: Mapping[str, Sequence[float | None]]) -> str:
    """Efficiencies, 0 to 1, over positive ``values`` on a logarithmic axis, a line each, named at its end."""
    points = {
        name: [(log2(value), 100 * part) for value, part in zip(values, parts, strict=True) if part is not None]
        for name, parts in lines.items()
    }
    low, high = (0.0, 100.0) if not any(points.values()) else (inf, -inf)
    return _chart(title, key, [(log2(value), str(value)) for value in values], points, (low, high), "%")


def history(title: str, key: str, lines: Mapping[str, Sequence[tuple[float, float]]], unit: str = "") -> str:
    """Pairs of a place and a value on plain axes, of which the first begins at 0; nothing without any pair."""
    places = [place for pairs in lines.values() for place, _ in pairs]
    if not places:
        return ""
    ticks = [(tick, f"{tick:g}") for tick in round_ticks(min(0.0, *places), max(places))]
    return _chart(title, key, ticks, lines, (inf, -inf), unit)


def _chart(
    title: str,
    key: str,
    places: Sequence[tuple[float, str]],
    lines: Mapping[str, Sequence[tuple[float, float]]],
    least: tuple[float, float],
    unit: str,
) -> str:
    """Lines between pairs over an axis with named ``places``; the other axis spans ``least`` and all values.

    Drawn here, as `multiring report` works without matplotlib, an extra. Its SVG of one such picture takes 20 KB, more
    than the whole page, and is full of references, which the page has none of.
    """
    height, left, right, bottom = 340, 60, 270, 44
    low, high = min(place for place, _ in places), max(place for place, _ in places)
    known = [value for pairs in lines.values() for _, value in pairs]
    ticks = round_ticks(min([least[0], *known]), max([least[1], *known]))

    def at(place: float, value: float) -> tuple[float, float]:
        x = left + (place - low) / ((high - low) or 1) * (WIDTH - left - right)
        return x, (height - bottom - 10) * (ticks[-1] - value) / (ticks[-1] - ticks[0]) + 10

    shapes = []
    for tick in ticks:
        y = at(low, tick)[1]
        shapes.append(f'<line x1="{left}" y1="{y:.1f}" x2="{WIDTH - right}" y2="{y:.1f}" stroke="#ddd"/>')
        shapes.append(f'<text x="4" y="{y + 4:.1f}" class="small">{escape(f"{tick:g} {unit}".strip())}</text>')
    for place, text in places:
        x = at(place, ticks[0])[0]
        shapes.append(f'<text x="{x:.1f}" y="{height - bottom + 20}" text-anchor="middle" class="small">{text}</text>')
    middle = (left + WIDTH - right) / 2
    shapes.append(f'<text x="{middle}" y="{height - 6}" text-anchor="middle" class="small">{escape(key)}</text>')
    ends = {}
    colours = _colours(lines)
    for name, pairs in lines.items():
        colour, thick = colours[name], 3.5 if name.startswith("multiring") else 2
        points = [at(*pair) for pair in pairs]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        shapes.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{thick}"/>')
        if len(points) <= MOST_DOTS:
            shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{thick + 0.5}" fill="{colour}"/>' for x, y in points]
        if points:
            ends[name] = (*points[-1], colour, pairs[-1][1])
    labels = apart([y for _, y, _, _ in ends.values()], LABEL_ROW, 10, height - bottom)
    for (name, (x, y, colour, value)), label in zip(ends.items(), labels, strict=True):
        edge = WIDTH - right + 24
        said = percent(value / 100) if unit == "%" else f"{value:.4g} {unit}".strip()
        line = f'x1="{x + 6:.1f}" y1="{y:.1f}" x2="{edge - 4}" y2="{label:.1f}"'
        shapes.append(f'<line {line} stroke="{colour}" stroke-width="0.6"/>')
        shapes.append(f'<text x="{edge}" y="{label + 4:.1f}" fill="{colour}">{said} {_named(name)}</text>')
    return f"<h2>{escape(title)}</h2>{_svg(WIDTH, height, shapes)}"


def _svg(width: float, height: float, shapes: Sequence[str]) -> str:
    box = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<div class="wide"><svg xmlns="http://www.w3.org/2000/svg" {box} role="img">{"".join(shapes)}</svg></div>'
