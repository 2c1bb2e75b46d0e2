"""What a job did, in three lines: how much, how long its ranks waited, and for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from multiring.units import duration, size


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
    ]


def _slowest(accounts: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> str:
    """Who was waited for in the end: those that wait for a late rank are waited for themselves meanwhile."""
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


def _part(seconds: float, whole: float) -> str:
    return f"{duration(seconds)} ({seconds / whole:.0%})" if whole > 0 else duration(seconds)
