"""Places of arriving messages in the engine over MPI."""

from __future__ import annotations

import pytest

from multiring._native import PlanFacts
from multiring.planning.planner import choose
from multiring.planning.schedule import schedule
from multiring.planning.topology import Topology
from multiring.runtime.mpi.program import SEND, Program, staged_bytes


@pytest.mark.parametrize("less", [0, 1, 255, 256])
@pytest.mark.parametrize("narrows", [True, False], ids=["float32", "int32"])
def test_every_message_of_every_segment_has_its_place(narrows: bool, less: int) -> None:
    """Cuts are rounded down to blocks, so that of two slices the shorter may have the longer messages."""
    choice = choose(Topology.flat([8] * 4), "all_reduce", 4 * 327_679, wire={"host": "int8"})
    for plan in (choice.plan, *(each.plan for each in choice.rejected)):
        for rank in (0, 1, 13, 31):
            mine = schedule(plan, rank)
            table, peers = mine.table()
            program = Program(
                0, table, peers, rank, PlanFacts(mine.blocks, mine.segment_bytes, plan.window, 0, mine.grain)
            )
            slice = program.slice_elements(4)
            for elements in (0, 1, slice - less, 2 * slice - less, 327_679):
                whole = program.staging_bytes(elements, 4, narrows)
                for first in range(0, max(elements, 1), slice):
                    assert end_of_messages(program, min(slice, elements - first), narrows) <= whole


def end_of_messages(program: Program, elements: int, narrows: bool) -> int:
    """Bytes from the beginning of the staging of a segment to the end of its last message."""
    extents = program.layout(elements, 4, narrows).extents
    staged = [
        (1 if step.kind == SEND else len(step.peers), extent)
        for index, (step, extent) in enumerate(zip(program.steps, extents, strict=True))
        if index in program.early or (narrows and step.wire)
    ]
    return max((extent.staging + copies * staged_bytes(4 * extent.elements) for copies, extent in staged), default=0)
