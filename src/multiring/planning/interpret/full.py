"""The full proof: the schedules of all ranks run against each other, message by message, on sets of contributors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..plan import Plan, shortened
from ..schedule import REDUCE, SEND, Instruction, Schedule, in_blocks, schedule
from .conditions import ANYTHING, CONDITIONS, UNDEFINED, Value


def prove_in_full(plan: Plan, schedules: Sequence[Schedule] | None = None) -> None:
    """Run the schedules of all ranks (those of the plan unless given) and check what they leave.

    Messages between two ranks are matched in order and must agree in phase and span. ValueError, naming phase, ring
    and rank, for a wait that nobody answers, a message that nobody takes, a span that is sent before it is there, a
    contribution that is counted twice or missing, a sum that is not marked final.
    """
    execution = _Execution(plan, schedules or [schedule(plan, rank) for rank in range(plan.world_size)])
    execution.run()
    execution.check()


@dataclass(frozen=True, slots=True)
class _Message:
    sent: Instruction
    extent: tuple[int, int]
    values: list[Value]


class _Execution:
    """All ranks at once. A rank's buffer is a list of values, one for each block and elementary span of it."""

    def __init__(self, plan: Plan, schedules: Sequence[Schedule]):
        self._plan = plan
        self._condition = CONDITIONS[plan.collective]
        self._todo = [deque(i for i in s.instructions if i.peers) for s in schedules]  # what moves
        ratios = {f.as_integer_ratio() for s in schedules for i in s.instructions for f in (i.lo, i.hi)}
        self._cuts = sorted(Fraction(*ratio) for ratio in ratios | {(0, 1), (1, 1)})
        self._number = {cut.as_integer_ratio(): number for number, cut in enumerate(self._cuts)}
        self._buffers = [self._values(self._condition.before, rank) for rank in range(plan.world_size)]
        self._channels: dict[tuple[int, int], deque[_Message]] = {}

    def _values(self, state: Callable[[Plan, int, int], Value], rank: int) -> list[Value]:
        cells = len(self._cuts) - 1
        return [value for block in range(self._plan.blocks) for value in [state(self._plan, rank, block)] * cells]

    def _extent(self, instruction: Instruction) -> tuple[int, int]:
        """The elementary spans of a block that an instruction is about."""
        return self._number[instruction.lo.as_integer_ratio()], self._number[instruction.hi.as_integer_ratio()]

    def _cells(self, block: int, extent: tuple[int, int]) -> slice:
        start = block * (len(self._cuts) - 1)
        return slice(start + extent[0], start + extent[1])

    def run(self) -> None:
        """Let every rank go on until it waits for a message that is not there; wake it when one comes."""
        ready = deque(range(len(self._todo)))
        while ready:
            rank = ready.popleft()
            todo = self._todo[rank]
            while todo and self._has_come(rank, todo[0]):
                instruction = todo.popleft()
                if instruction.kind == SEND:
                    self._send(rank, instruction)
                    ready.extend(instruction.peers)
                else:
                    self._receive(rank, instruction)

    def _has_come(self, rank: int, instruction: Instruction) -> bool:
        return instruction.kind == SEND or all(
            self._channels.get((peer, rank)) for peer in instruction.peers if peer != rank
        )

    def _send(self, rank: int, instruction: Instruction) -> None:
        extent = self._extent(instruction)
        values = self._buffers[rank][self._cells(instruction.block, extent)]
        if UNDEFINED in values:
            raise self._error(rank, instruction, "sends what it has not got")
        for peer in instruction.peers:
            self._channels.setdefault((rank, peer), deque()).append(_Message(instruction, extent, values))

    def _receive(self, rank: int, instruction: Instruction) -> None:
        extent = self._extent(instruction)
        cells = self._cells(instruction.block, extent)
        parts = [
            self._buffers[rank][cells] if peer == rank else self._take(rank, instruction, extent, peer)
            for peer in instruction.peers
        ]
        if instruction.kind == REDUCE:
            self._buffers[rank][cells] = [self._sum(rank, instruction, values) for values in zip(*parts, strict=True)]
        else:
            (self._buffers[rank][cells],) = parts

    def _take(self, rank: int, instruction: Instruction, extent: tuple[int, int], peer: int) -> list[Value]:
        message = self._channels[peer, rank].popleft()
        sent = message.sent
        if sent.phase != instruction.phase or message.extent != extent:
            raise self._error(
                rank,
                instruction,
                f"rank {peer} sends it [{sent.lo},{sent.hi}) of block {sent.block} in phase {sent.phase}",
            )
        if sent.block != instruction.block and self._plan.collective != "all_to_all":
            raise self._error(rank, instruction, f"rank {peer} sends it block {sent.block}")
        return message.values

    def _sum(self, rank: int, instruction: Instruction, values: Sequence[Value]) -> int:
        total = 0
        for value in values:
            if not isinstance(value, int) or value == UNDEFINED:
                raise self._error(rank, instruction, f"cannot sum {value}")
            if total & value:
                raise self._error(rank, instruction, f"counts {_ranks(total & value)} twice")
            total |= value
        everybody = (1 << self._plan.world_size) - 1
        if instruction.final != (total == everybody):
            fault = (
                "is not marked final" if total == everybody else f"is marked final without {_ranks(everybody & ~total)}"
            )
            raise self._error(rank, instruction, f"its sum {fault}")
        return total

    def check(self) -> None:
        """Nothing waits, nothing is left over, and every rank has what it was promised."""
        stuck = [(todo[0].phase, rank) for rank, todo in enumerate(self._todo) if todo]
        if stuck:
            _, rank = min(stuck)
            wait = self._todo[rank][0]
            missing = [peer for peer in wait.peers if peer != rank and not self._channels.get((peer, rank))]
            raise self._error(rank, wait, f"waits for rank {missing[0]} for ever")
        for (rank, peer), messages in self._channels.items():
            if messages:
                raise self._error(rank, messages[0].sent, f"sends to rank {peer} what that never takes")
        for rank, buffer in enumerate(self._buffers):
            for cell, (value, promised) in enumerate(
                zip(buffer, self._values(self._condition.after, rank), strict=True)
            ):
                if promised not in (value, ANYTHING):
                    raise ValueError(self._broken(rank, cell, value, promised))

    def _broken(self, rank: int, cell: int, value: Value, promised: Value) -> str:
        block, number = divmod(cell, len(self._cuts) - 1)
        lo, hi = self._cuts[number : number + 2]
        return (
            f"plan {self._plan.id} ({self._plan.collective}): rank {rank} ends with {_shown(value)} in [{lo},{hi}) of "
            f"block {block}, not {_shown(promised)}"
        )

    def _error(self, rank: int, instruction: Instruction, fault: str) -> ValueError:
        phase = self._plan.phases[instruction.phase]
        where = f"phase {instruction.phase} ({phase.kind}, level {phase.level}), {self._ring(rank, instruction)}"
        what = f"{instruction.kind} of [{instruction.lo},{instruction.hi}) of block {instruction.block}"
        return ValueError(f"plan {self._plan.id}, {where}, rank {rank}, {what}: {fault}")

    def _ring(self, rank: int, instruction: Instruction) -> str:
        for number, ring in enumerate(self._plan.phases[instruction.phase].rings):
            if {rank, *instruction.peers} <= set(ring.members):
                parts = in_blocks(ring.spans, self._plan.blocks)
                if any(b == instruction.block and lo <= instruction.lo < hi for b, lo, hi in parts):
                    return f"ring {number} {shortened(ring.members)}"
        return "in no ring"


def _ranks(mask: int) -> str:
    ranks = [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {shortened(ranks)}"


def _shown(value: Value) -> str:
    if isinstance(value, tuple):
        return f"block {value[1]} of rank {value[0]}"
    return "nothing" if value == UNDEFINED else f"the contributions of {_ranks(value)}"
