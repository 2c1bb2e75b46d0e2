"""Engines of several ranks in one process, whose buffers lie on the device of the stand-in driver."""

from __future__ import annotations

from typing import Any

from engines import COLLECTIVE, DTYPE, OP, Rank, all_reduce_plan, blocked_plan, in_threads, rooted_plan, world
from standin_device import COLLECTIVES, Case, Stream, case

from multiring._native import Call
from multiring.planning.plan import Plan


def plan_of(one: Case, segment_bytes: int) -> Plan:
    if one.collective == "all_reduce":
        return all_reduce_plan(one.size, "direct", segment_bytes)
    if one.collective in ("broadcast", "reduce"):
        return rooted_plan(one.collective, one.size, one.root, "direct", segment_bytes)
    return blocked_plan(one.collective, one.size, segment_bytes)


def start(rank: Rank, one: Case, segment_bytes: int, stream: Stream) -> Any:
    plan, buffer = plan_of(one, segment_bytes), one.buffer(stream)
    call = Call(COLLECTIVE[one.collective], 0, buffer.count, DTYPE[buffer.dtype], 30.0, OP["sum"], plan.root)
    return rank.calls(plan).start_on_device(call, buffer.owner, buffer.device, buffer.stream, buffer.out, buffer.into)


def every_collective(size: int) -> None:
    """Small segments and large ones, all calls of a size in flight at once."""
    with world(size, arena_bytes=96 << 20) as ranks:

        def program(rank: Rank) -> None:
            stream = Stream()
            for segment_bytes, counts in ((64, (0, 1, 17, 3001)), (1 << 16, (16_384, 300_007))):
                for count in counts:
                    calls = [case(each, rank.rank, size, count, root=size - 1) for each in COLLECTIVES]
                    works = [start(rank, one, segment_bytes, stream) for one in calls]
                    for work, one in zip(works, calls, strict=True):
                        work.wait(30)
                        one.check(count, segment_bytes)

        in_threads(ranks, program)
