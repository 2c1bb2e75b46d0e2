"""A running job as data and as a picture, made of what its launcher tells (`launch/watch.py`)."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from multiring.cli.output import folded
from multiring.launch.summary import in_words
from multiring.launch.watch import program_name
from multiring.units import count, ranges

OLD_SECONDS = 3.0
"""Seconds after which a rank's last status is marked as old: a rank sends one each second."""

SHOWN_LINES = 8
"""Last lines of the ranks' output in a picture that has room for them."""

SHOWN_FAILURES = 3
"""Ranks whose failure is shown."""

SHOWN_LINKS = 4
"""Links of hosts that are shown: the busiest."""

SHOWN_WAITS = 3
"""Lines about calls that have not ended for long."""

FEWEST_COLUMNS = 40
"""Columns below which the table would be broken into single characters."""

FEWEST_ROWS = 3
"""Rows of ranks or hosts that are shown in a terminal however low."""

KEEPS = {
    "computes": "computes",
    "has no core": "is ready to run and has no core",
    "sleeps": "sleeps, or waits for data, a lock or another process",
    "does not run": "does not run",
}
"""Words for what a slow rank does between collectives, by the engine's word."""

STYLES = {
    "runs": "green",
    "replaced": "green",
    "ended": "dim",
    "left": "dim",
    "lost": "bold red",
    "stopped": "bold red",
    "excluded": "bold red",
}

_WORKING = ("runs", "replaced", "stopped")
"""States of ranks whose last words still say something."""

Look = Mapping[str, Any]


def described(look: Look) -> dict[str, Any]:
    """Return a launcher's report and what follows from it: the slow ranks or link, the plan, the traffic of links."""
    ranks = [{**rank, "host": _host(rank), "old": _is_old(rank)} for rank in look["ranks"]]
    told = {name: value for name, value in look.items() if name != "kind"}
    return {
        **told,
        "ranks": ranks,
        "slowest": _slowest(ranks),
        "slow_link": _slow_link(ranks),
        "plan": _plan(ranks),
        "links": _links(ranks),
    }


def _host(rank: Look) -> str:
    """The host that a rank says it is on, which MULTIRING_HOST may have named, or the one of its agent."""
    return str((rank["status"] or {}).get("host", rank["host"]))


def _is_old(rank: Look) -> bool:
    return rank["age"] is not None and rank["age"] > OLD_SECONDS


def _fresh(ranks: Iterable[Look]) -> list[Look]:
    """Return the statuses of ranks that run now."""
    told = [rank["status"] for rank in ranks if rank["state"] in _WORKING and rank["status"] and not rank["old"]]
    return [status for status in told if status["stage"] == "runs"]


def _slowest(ranks: Sequence[Look]) -> dict[str, Any] | None:
    """Return the ranks that most say they wait for, and ``where`` each of these is, as it says itself."""
    told = [status["slowest"] for status in _fresh(ranks) if status["slowest"] and _calls(status)]
    if not told:
        return None
    (named, _), *_ = Counter(tuple(slow["ranks"]) for slow in told).most_common(1)
    slow = max((each for each in told if tuple(each["ranks"]) == named), key=lambda each: float(each["share"]))
    places = {rank["rank"]: (rank["status"] or {}).get("where", "") for rank in ranks}
    return {**slow, "where": [places.get(rank, "") for rank in named]}


def _slow_link(ranks: Sequence[Look]) -> dict[str, Any] | None:
    """The link that keeps the ranks waiting, as most of them say."""
    told = [status["slow_link"] for status in _fresh(ranks) if status["slow_link"] and _calls(status)]
    if not told:
        return None
    (named, _), *_ = Counter(slow["name"] for slow in told).most_common(1)
    slow: dict[str, Any] = next(slow for slow in told if slow["name"] == named)
    return slow


def _calls(status: Look) -> bool:
    """True if a rank made calls or waited in one since its last status: who calls nothing waits for nobody."""
    rates = status["rates"]
    return bool(rates and (rates["calls"] or rates["in_calls"]))


def _plan(ranks: Sequence[Look]) -> Any:
    """The plan that moves most now, from the lowest rank that reports one."""
    return next((status["plan"] for status in _fresh(ranks) if status["plan"]), None)


def _links(ranks: Sequence[Look]) -> list[dict[str, Any]]:
    """Return the bytes a second into and out of each host, and the rate of its link if that is known."""
    found: dict[str, dict[str, Any]] = {}
    for status in _fresh(ranks):
        outside = [of for level, of in ((status["rates"] or {}).get("links", {})).items() if level != "rank"]
        if outside:
            link = status["link"] or {"up": None, "down": None}
            host = found.setdefault(status["host"], {"host": status["host"], "sent": 0.0, "received": 0.0, **link})
            host["sent"] += sum(of["sent"] for of in outside)
            host["received"] += sum(of["received"] for of in outside)
    return list(found.values())


def picture(look: Look, screen: Console | None = None) -> RenderableType:
    """A picture of what `described` returns, in full, or cut to fit ``screen``.

    Where the ranks do not fit, each host has a row, and where the hosts do not, the first ones have.
    """
    said = [_title(look), *_words(look)]
    output = [_line(rank, text) for rank, text in look["output"][-SHOWN_LINES:]]
    room = None
    if screen is not None:
        left = screen.height - len(screen.render_lines(Group(*said))) - 3  # two empty lines, and the headings
        output = output[-max(left - FEWEST_ROWS, 1) :]
        room = max(left - len(output), FEWEST_ROWS)
    parts: list[RenderableType] = [*said, Text(""), _WhereItFits(_table(look["ranks"], room))]
    if output:
        parts += [Text(""), *output]
    return Group(*parts)


@dataclass(frozen=True)
class _WhereItFits:
    """A table, or a line that says how wide the terminal has to be."""

    table: Table

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if options.max_width >= FEWEST_COLUMNS:
            yield self.table
        else:
            yield Text(
                f"the table of ranks needs {FEWEST_COLUMNS} columns, and there are {options.max_width}", "yellow"
            )


def _title(look: Look) -> Text:
    hosts = len({rank["host"] for rank in look["ranks"]})
    name = _plain(program_name(look["program"]))
    text = Text(f"job {look['process']} ({name}): {count(len(look['ranks']), 'rank')}")
    text.append(f" on {count(hosts, 'host')}, for {_elapsed(look['seconds'])}")
    if look["restart"]:
        text.append(f", restart {look['restart']} of {look['max_restarts']}")
    return text


def _words(look: Look) -> list[Text]:
    ranks, found = look["ranks"], []
    states = Counter(rank["state"] for rank in ranks)
    if set(states) != {"runs"}:
        text = Text()
        for state, number in states.most_common():
            text.append(", " if text else "")
            text.append(f"{number} {state}", STYLES.get(state, "yellow"))
        found.append(text)
    if (plan := look["plan"]) is not None:
        found.append(Text(f"plan {plan['id']}: {plan['words']}"))
    if (slow := look["slowest"]) is not None:
        several = len(slow["ranks"]) > 1
        told = in_words(slow["ranks"], {rank["rank"]: rank["host"] for rank in ranks})
        told += f" keep{'' if several else 's'} the others waiting for {slow['share']:.0%} of the time: between "
        told += f"collectives {'the latest of them' if several else 'it'} {KEEPS[slow['reason']]}"
        for rank, where in zip(slow["ranks"], slow["where"], strict=True):
            told += f"; {f'rank {rank} ' * several}at {_plain(where)}" if where else ""
        found.append(Text(told, "yellow"))
    if (slow := look["slow_link"]) is not None:
        part = f"{slow['bytes_per_second'] / slow['expected']:.0%} of the {_mega(slow['expected'])}"
        told = f"{slow['name']}: {_mega(slow['bytes_per_second'])} MB/s while all wait, {part}"
        told += " that the plan counts on"
        found.append(Text(told, "yellow"))
    found += [Text(line, "yellow") for line in _blocked(ranks)]
    for link in sorted(look["links"], key=_load, reverse=True)[:SHOWN_LINKS]:
        told = f"link of host {link['host']}: {_mega(link['sent'])}"
        if link["up"] is None:
            told += f" MB/s out, {_mega(link['received'])} in; its rate is not known"
        else:
            told += f" of {_mega(link['up'])} MB/s out, {_mega(link['received'])} of {_mega(link['down'])} in"
        found.append(Text(told))
    kind = ""
    if (failure := look["failure"]) is not None:
        kind = f"{failure['kind']}: " if failure["kind"] else ""
        found.append(Text(kind + _plain(failure["text"].partition(chr(10))[0]), "red"))
    failed = [rank for rank in ranks if rank["state"] in _WORKING and (rank["status"] or {}).get("failure")]
    untold = [rank for rank in failed if not (kind and rank["status"]["failure"].startswith(kind))]
    for rank in untold[:SHOWN_FAILURES]:
        found.append(Text(f"rank {rank['rank']}: {_plain(rank['status']['failure'].partition(chr(10))[0])}", "red"))
    return found


def _blocked(ranks: Sequence[Look]) -> list[str]:
    """The ranks that have waited long in one call, and for whom: those of them together that wait for the same."""
    waiting: defaultdict[tuple[str, tuple[int, ...]], list[tuple[int, float]]] = defaultdict(list)
    for rank in ranks:
        for status in _fresh([rank]):
            for call in status["in_flight"][:1]:
                waiting[call["collective"], tuple(call["waits_for"])].append((rank["rank"], call["seconds"]))
    lines = []
    longest_first = sorted(waiting.items(), key=lambda each: -max(seconds for _, seconds in each[1]))
    for (collective, waits_for), who in longest_first[:SHOWN_WAITS]:
        named = f"rank{'s' * (len(who) > 1)} {ranges(rank for rank, _ in who)}"
        them = f"rank{'s' * (len(waits_for) > 1)} {ranges(waits_for)}" if waits_for else "what is on its way"
        seconds = _elapsed(max(seconds for _, seconds in who))
        lines.append(f"{named} {'wait' if len(who) > 1 else 'waits'} for {them} in {collective}, for {seconds} now")
    return lines


def _load(link: Look) -> float:
    """Return the load of a link: a part of its rate, or bytes a second if the rate is not known."""
    return float(max(link["sent"] / (link["up"] or 1.0), link["received"] / (link["down"] or 1.0)))


def _line(rank: int | None, text: str) -> Text:
    """A line of output, cut to the picture's width, without what does something in a terminal but show characters."""
    line = Text("multiring: " if rank is None else f"[{rank}] ", "dim", no_wrap=True, overflow="crop")
    return line.append(_plain(text))


def _plain(text: str) -> str:
    """Text of ranks without what does something in a terminal but show characters."""
    with contextlib.suppress(ValueError):  # an escape sequence with a number of thousands of digits
        text = Text.from_ansi(text.replace("\t", " ")).plain
    return "".join(character for character in text if character.isprintable())


def _table(ranks: Sequence[Look], room: int | None) -> Table:
    table = Table("host", "rank", "state", box=None, pad_edge=False)
    for heading in ("calls/s", "in calls", "waits for", "sent MB/s"):
        table.add_column(heading, justify="left" if heading == "waits for" else "right")
    hosts: defaultdict[str, list[Look]] = defaultdict(list)
    for rank in ranks:
        hosts[rank["host"]].append(rank)
    if room is None or len(ranks) <= room:
        for host, here in hosts.items():
            for number, rank in enumerate(here):
                table.add_row(host if number == 0 else "", *_of_rank(rank))
    else:
        shown = list(hosts.items())[: len(hosts) if len(hosts) <= room else room - 1]
        for host, here in shown:
            table.add_row(host, *_of_host(here))
        if len(shown) < len(hosts):
            table.add_row("...", "", f"{count(len(hosts) - len(shown), 'host')} more")
    return folded(table)


def _of_rank(rank: Look) -> list[Text | str]:
    state = Text(rank["state"], STYLES.get(rank["state"], "yellow"))
    if rank["replacement"]:
        state.append(f" (replacement {rank['replacement']})")
    if rank["state"] not in _WORKING or rank["status"] is None:
        return [str(rank["rank"]), state]
    if rank["old"]:
        state.append(f", {_elapsed(rank['age'])} old")
    style = "dim" if rank["old"] else ""
    return [str(rank["rank"]), state, *(Text(cell, style) for cell in _rates([rank["status"]]))]


def _of_host(ranks: Sequence[Look]) -> list[Text | str]:
    states = Text()
    for state, number in Counter(rank["state"] for rank in ranks).most_common():
        states.append(", " if states else "")
        states.append(f"{number} {state}", STYLES.get(state, "yellow"))
    return [ranges(rank["rank"] for rank in ranks), states, *_rates(_fresh(ranks))]


def _rates(statuses: Iterable[Look]) -> list[str]:
    """The cells of some ranks: the median of their calls, whom they wait for, and all that they send."""
    rates = [status["rates"] for status in statuses if status.get("rates")]
    if not rates:
        return []
    waited_for: Counter[int] = Counter()
    for each in rates:
        waited_for.update({rank: share / len(rates) for rank, share in each["waits_for"]})
    named = [f"{rank} ({share:.0%})" for rank, share in waited_for.most_common(1) if share >= 0.005]
    return [
        f"{median(each['calls'] for each in rates):.3g}",
        f"{median(each['in_calls'] for each in rates):.0%}",
        *(named or ["-"]),
        _mega(sum(of["sent"] for each in rates for of in each["links"].values())),
    ]


def _mega(bytes_a_second: float) -> str:
    """MB/s, of 1e6 bytes."""
    number = bytes_a_second / 1e6
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _elapsed(seconds: float) -> str:
    """Return a time in whole units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, left = divmod(whole, 60)
    return f"{minutes} min {left} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
