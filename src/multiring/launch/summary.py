"""Summary of a job in a few lines: calls, waits of its ranks, the ranks they waited for, and why these were late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from multiring.units import duration, ranges, size

if TYPE_CHECKING:  # which imports NumPy
    from multiring.runtime.trace import SlowSpan

MOST_SLOW = 3
"""Lines about ranks, and about links, that were slow while the job ran."""

KEPT_BY = {
    "computes": "computed between collectives",
    "has no core": "was ready to run between collectives and had no core",
    "sleeps": "slept between collectives, or waited for data, a lock or another process",
    "does not run": "did not run between collectives",
}


def summary(accounts: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> list[str]:
    """The lines, from what the ranks said in `bootstrap.report`; none where ranks did nothing together."""
    if len(accounts) < 2 or not any(account["calls"] for account in accounts.values()):
        return []
    whole = max(account["seconds"] for account in accounts.values())
    calls = max(account["calls"] for account in accounts.values())
    sent = max(account["bytes"] for account in accounts.values())
    blocked = median(account["in_calls"] for account in accounts.values())
    waiting = median(account["waiting"] for account in accounts.values())
    return [
        f"{len(accounts)} ranks in {duration(whole)}; of one rank at most {calls} calls and {size(sent)} sent",
        f"the median rank was in calls for {_part(blocked, whole)}, of these waiting for {_part(waiting, whole)}",
        _slowest(accounts, hosts),
        *slow_ranks(accounts, hosts),
        *slow_links(accounts),
    ]


def _slowest(accounts: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> str:
    """Return a line on the slowest rank: those that wait for a late rank are waited for themselves meanwhile."""
    caused: Counter[int] = Counter()
    suffered = {}
    for rank, account in accounts.items():
        waited_for = {int(other): seconds for other, seconds in account["waited_for"].items()}
        caused.update(waited_for)
        suffered[rank] = sum(waited_for.values())
    slowest = max(accounts, key=lambda rank: (caused[rank] - suffered[rank], -rank))
    return (
        f"slowest: rank {slowest} (host {hosts[slowest]}): others waited {duration(caused[slowest])} for it, "
        f"it waited {duration(suffered[slowest])} for others"
    )


def slow_ranks(accounts: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> list[str]:
    """The ranks that were named as slow while the job ran, by the rank that saw most of it: those longest first.

    Of an account only ``slow`` and ``places`` are looked at.
    """
    seen = max((account["slow"] for account in accounts.values()), key=lambda slow: sum(s["seconds"] for s in slow))
    seconds: Counter[tuple[tuple[int, ...], str]] = Counter()
    waited: Counter[tuple[tuple[int, ...], str]] = Counter()
    for slow in seen:
        of = tuple(slow["ranks"]), slow["reason"]
        seconds[of] += slow["seconds"]
        waited[of] += slow["seconds"] * slow["share"]
    # An entry of no time stands for those that are left where another is named no longer, until the next look at them.
    longest = [(of, lasted) for of, lasted in seconds.most_common(MOST_SLOW) if lasted]
    return [_told(*of, waited[of], lasted, accounts, hosts) for of, lasted in longest]


def slow_links(accounts: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """The links between hosts that were slow for longest; reads only ``slow_links``."""
    seen = max(
        (account["slow_links"] for account in accounts.values()), key=lambda slow: sum(s["seconds"] for s in slow)
    )
    seconds: Counter[str] = Counter()
    least: dict[str, tuple[float, float]] = {}
    for slow in seen:
        name = slow["name"]
        seconds[name] += slow["seconds"]
        part = slow["bytes_per_second"] / slow["expected"]
        least[name] = min(least.get(name, (part, slow["bytes_per_second"])), (part, slow["bytes_per_second"]))
    return [
        f"{name} carried {least[name][1] / 1e6:.3g} MB/s, {least[name][0]:.0%} of what the plan counts on, "
        f"for {duration(lasted)}"
        for name, lasted in seconds.most_common(MOST_SLOW)
    ]


def slow_spans(spans: Sequence[SlowSpan]) -> list[str]:
    """The same from a timeline, which knows of each rank by itself."""
    accounts: dict[int, dict[str, Any]] = {span.rank: {"slow": [], "places": []} for span in spans}
    for span in spans:
        accounts[span.rank]["places"] += [(span.reason, span.where)] if span.where else []
    seen = [
        {"ranks": [span.rank], "seconds": span.seconds, "share": span.share, "reason": span.reason} for span in spans
    ]
    hosts = {span.rank: span.host for span in spans}
    return slow_ranks({**accounts, -1: {"slow": seen, "places": []}}, hosts) if spans else []


def _told(
    ranks: tuple[int, ...],
    reason: str,
    waited: float,
    seconds: float,
    accounts: Mapping[int, Mapping[str, Any]],
    hosts: Mapping[int, str],
) -> str:
    """The line on ranks that were late for some seconds, of which the others ``waited``."""
    places = {
        rank: place for rank in ranks if rank in accounts for why, place in accounts[rank]["places"] if why == reason
    }
    several = len(ranks) > 1
    where = "; ".join(f"{f'rank {rank} ' * several}most often at {place}" for rank, place in places.items())
    text = f"{in_words(ranks, hosts)} kept the others waiting for {duration(waited)} in {duration(seconds)}: "
    text += f"{'the latest of them' if several else 'it'} {KEPT_BY[reason]}"
    return text + (f"{';' if several else ','} {where}" if where else "")


def in_words(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Ranks in words, each with its host where they are on several."""
    if len({hosts[rank] for rank in ranks}) == 1:
        return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)} (host {hosts[ranks[0]]})"
    first = ", ".join(f"rank {rank} (host {hosts[rank]})" for rank in ranks[:-1])
    return f"{first} and rank {ranks[-1]} (host {hosts[ranks[-1]]})"


def _part(seconds: float, whole: float) -> str:
    return f"{duration(seconds)} ({seconds / whole:.0%})" if whole > 0 else duration(seconds)
