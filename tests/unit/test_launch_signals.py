"""Signals that come by the thousand while the event loop is busy."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from multiring.launch.signals import on_signal


def test_no_signal_is_lost_behind_thousands_of_another(capfd: pytest.CaptureFixture[str]) -> None:
    counts = {signal.SIGUSR1: 0, signal.SIGUSR2: 0}

    def count(number: signal.Signals) -> None:
        counts[number] += 1

    async def main() -> None:
        for number in counts:
            on_signal(number, lambda number=number: count(number))
        for _ in range(3000):  # the loop's socket holds a few hundred
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        deadline = time.monotonic() + 30
        while not all(counts.values()) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        before = counts[signal.SIGUSR1]
        os.kill(os.getpid(), signal.SIGUSR1)
        while counts[signal.SIGUSR1] == before and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert counts == {signal.SIGUSR1: 2, signal.SIGUSR2: 1}
    assert capfd.readouterr().err == ""
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
