"""Signal handlers of the tests' process, and the seconds of each directory and file of tests."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import fork_server
import pytest

# A shell that starts the suite in the background ignores Ctrl-C for it, and what it starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

_MARK = 1.0  # seconds of wall time from which a file has a line of its own

_spent: defaultdict[Path, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])


def _clocks() -> list[float]:
    """Wall time, processor time of this process, and that of its children that have ended."""
    times = os.times()
    children = times.children_user + times.children_system + fork_server.seconds()
    return [time.monotonic(), times.user + times.system, children]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = _clocks()
    try:
        return (yield)
    finally:
        spent = _spent[item.path]
        for i, (start, end) in enumerate(zip(before, _clocks(), strict=True)):
            spent[i] += end - start


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    directories: defaultdict[Path, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for path, spent in _spent.items():
        for i, seconds in enumerate(spent):
            directories[path.parent][i] += seconds
    terminalreporter.section("seconds: wall time, processors of the tests, processors of their children")
    for directory, total in sorted(directories.items(), key=lambda each: -sum(each[1][1:])):
        terminalreporter.write_line(_line(directory, total, config))
        files = [(path, spent) for path, spent in _spent.items() if path.parent == directory and spent[0] >= _MARK]
        for path, spent in sorted(files, key=lambda each: -sum(each[1][1:])):
            terminalreporter.write_line("  " + _line(path, spent, config))


def _line(path: Path, spent: list[float], config: pytest.Config) -> str:
    wall, own, children = spent
    return f"{wall:8.1f} {own:8.1f} {children:8.1f}  {os.path.relpath(path, config.rootpath)}"
