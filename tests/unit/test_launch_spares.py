"""Lost hosts that are awaited: when they are tried, what is told of them, and for what they are used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from multiring.launch import LaunchError
from multiring.launch.hosts import Assignment, HostEntry
from multiring.launch.spares import Spare, Spares
from multiring.launch.ssh import SshAgent


class Agent(SshAgent):
    """An agent at the end of no ssh."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.closed = 0

    async def close(self, seconds: float = 0.0) -> None:
        self.closed += 1


class Hosts:
    """Spares whose hosts are reached as ``answers`` say, one after the other, and the pauses between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: LaunchError | None) -> None:
        self.answers = list(answers)
        self.pauses: list[float] = []
        self.notes: list[str] = []
        self.used: list[Spare] = []
        self.lost: list[SshAgent] = []
        self.unready: dict[str, str] = {}
        self.spares = Spares([], self.prepare, self.reach, self.use, self.notes.append)
        self._sleep = asyncio.sleep
        monkeypatch.setattr(asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await self._sleep(0)

    async def prepare(self, assignment: Assignment, agent: Any) -> None:
        if agent.host in self.unready:
            raise LaunchError(self.unready[agent.host])

    async def reach(self, entry: HostEntry, lost: SshAgent) -> SshAgent | None:
        self.lost.append(lost)
        if not self.answers:
            return Agent(entry.name)
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer
        return None

    async def use(self, spare: Spare) -> None:
        self.used.append(spare)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._sleep(0)


def test_a_lost_host_is_tried_at_growing_pauses_and_then_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def awaited() -> None:
        hosts = Hosts(monkeypatch, *[None] * 5)
        former = Agent("b")
        assert hosts.spares.expect(HostEntry("b", 2), former)
        await hosts.until(lambda: bool(hosts.used))
        assert former.closed == 1
        assert hosts.lost == [former] * 6
        assert hosts.pauses == [5, 10, 20, 40, 60, 60]
        assert hosts.notes == ["host b is back"]
        assert await hosts.spares.take(Assignment("c", 4, 3)) is None  # it has two slots
        taken = await hosts.spares.take(Assignment("c", 4, 2))
        assert taken == (Assignment("b", 4, 2), hosts.used[0])
        assert hosts.spares.agents == []
        hosts.spares.give_back(hosts.used[0])
        assert hosts.spares.agents == [hosts.used[0].agent]
        await hosts.spares.close()

    asyncio.run(awaited())


def test_each_reason_why_a_host_cannot_be_used_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def awaited() -> None:
        one, other = LaunchError("host b: no directory"), LaunchError("host b: no room")
        hosts = Hosts(monkeypatch, one, None, one, other, one)
        hosts.spares.expect(HostEntry("b", 1), Agent("b"))
        await hosts.until(lambda: bool(hosts.used))
        again = "it is tried again until it can be used"
        assert hosts.notes == [f"{one}; {again}", f"{other}; {again}", "host b is back"]
        await hosts.spares.close()

    asyncio.run(awaited())


def test_a_spare_host_that_was_lost_itself_is_awaited_with_all_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    async def awaited() -> None:
        hosts = Hosts(monkeypatch)
        spare = Spare(HostEntry("d", 4), Agent("d"))
        spares = hosts.spares = Spares([spare], hosts.prepare, hosts.reach, hosts.use, hosts.notes.append)
        hosts.unready["d"] = "host d: ssh has ended"
        assert await spares.take(Assignment("b", 0, 2)) is None
        await hosts.until(lambda: bool(hosts.used))
        assert hosts.notes == ["host d: ssh has ended; it cannot take the place of host b", "host d is back"]
        hosts.unready.clear()
        assert await spares.take(Assignment("b", 0, 2)) == (Assignment("d", 0, 2), hosts.used[0])
        spares.expect(HostEntry("d", 2), hosts.used[0].agent)
        await hosts.until(lambda: len(hosts.used) == 2)
        assert hosts.used[1].entry == HostEntry("d", 4)
        await spares.close()

    asyncio.run(awaited())


def test_nobody_is_awaited_once_the_job_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def awaited() -> None:
        hosts = Hosts(monkeypatch, *[None] * 1000)
        hosts.spares.expect(HostEntry("b", 1), Agent("b"))
        await hosts.until(lambda: len(hosts.pauses) > 2)
        await hosts.spares.close()
        tried = len(hosts.pauses)
        for _ in range(5):
            await hosts._sleep(0)
        assert len(hosts.pauses) == tried

    asyncio.run(awaited())


def test_an_agent_that_ssh_did_not_start_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    here: Any = object()
    assert not Hosts(monkeypatch).spares.expect(HostEntry("a", 1), here)
