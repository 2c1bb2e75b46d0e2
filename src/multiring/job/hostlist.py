"""Lists of hosts with ranges of numbers, as Slurm writes them: "n[03-05,7],m1"."""

from __future__ import annotations

import itertools
import re

MOST = 1 << 16
"""Hosts in a list: more are a slip of the keyboard."""

_NUMBER = "[0-9]{1,18}"
_HOST = rf"([^][,\s]|\[{_NUMBER}(-{_NUMBER})?(,{_NUMBER}(-{_NUMBER})?)*\])+"


def expand(listed: str) -> list[str]:
    """The hosts in their order; ValueError says what is wrong with ``listed``."""
    if not re.fullmatch(rf"{_HOST}(,{_HOST})*", listed):
        raise ValueError("expected hosts such as n[1-3],m2")
    hosts: list[str] = []
    for word in re.findall(r"(?:[^][,]|\[[^]]*\])+", listed):
        parts = re.split(r"[][]", word)  # every second one was within brackets
        choices = [_numbers(part) if index % 2 else [part] for index, part in enumerate(parts)]
        hosts += itertools.islice(map("".join, itertools.product(*choices)), MOST + 1)
        if len(hosts) > MOST:
            raise ValueError(f"more than {MOST} hosts")
    return hosts


def _numbers(ranges: str) -> list[str]:
    """The numbers in a list of ranges: "03", "04" and "7" for "03-04,7"."""
    numbers: list[str] = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        lowest, highest = int(first), int(last or first)
        if highest < lowest:
            raise ValueError(f"the range {each} is empty")
        if highest - lowest >= MOST:
            raise ValueError(f"more than {MOST} hosts")
        numbers += [str(number).zfill(len(first)) for number in range(lowest, highest + 1)]
    return numbers
