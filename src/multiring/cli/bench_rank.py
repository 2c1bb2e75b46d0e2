"""``multiring run -n N -m multiring.cli.bench_rank``: measure one launch of multiring, or of a peer."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from multiring.bench import DEFAULT_SIZES, contestants, parse_sizes, peers, replay, report
from multiring.bench.contestants import Api, Measurable, MemoryKind
from multiring.bench.measure import measure, size_of_buffer
from multiring.cli import output
from multiring.cli.errors import call, one_line_errors
from multiring.cli.options import number, whole
from multiring.files import write_text
from multiring.simulate.recording import load
from multiring.units import count

SETTLING_SECONDS = 0.5
"""After which nobody waits otherwise because others were starting: csrc/wait.cpp remembers that for 0.4 at most."""


def main(
    collective: Annotated[Measurable, typer.Option(help="What to measure.")] = Measurable.all_reduce,
    sizes: Annotated[str, typer.Option(help="Sizes of the buffer, all blocks together.")] = DEFAULT_SIZES,
    api: Annotated[Api, typer.Option(help="What multiring is called through.")] = Api.numpy,
    library: Annotated[str, typer.Option(help=f"multiring, or a peer: {', '.join(peers.ALL)}.")] = "multiring",
    device: Annotated[
        MemoryKind, typer.Option(help="Where the buffers lie; on cuda they are torch's.")
    ] = MemoryKind.cpu,
    apart: Annotated[bool, typer.Option("--apart", help="Make each rank a host of its own, on loopback.")] = False,
    seconds: Annotated[
        float, typer.Option(parser=number(0.01), metavar="N", help="How long to measure each size.")
    ] = 0.5,
    replayed: Annotated[
        Path | None, typer.Option("--replay", metavar="FILE", help="Measure the steps of this recording instead.")
    ] = None,
    steps: Annotated[int, typer.Option(parser=whole(1), metavar="N", help="With --replay: how many.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here instead of a table.")] = None,
) -> None:
    """Measure a collective, or training steps, over the ranks of this job."""
    with one_line_errors("bench"):
        wanted = parse_sizes(sizes)
        recording = load(replayed) if replayed else None
        if recording and device is MemoryKind.cuda:
            raise ValueError("--replay: steps are replayed on the CPU; leave out --device")
        contestant = contestants.join(library, api, device, apart=apart)
    if recording:
        found: list[Any] = replay.replay(contestant, recording, steps)
    else:
        contestant.barrier()
        time.sleep(SETTLING_SECONDS)
        rounded = dict.fromkeys(size_of_buffer(nbytes, contestant.world_size) for nbytes in wanted)
        kinds = [(nbytes, kind) for nbytes in rounded for kind in contestant.buffers]
        figures = [measure(contestant, collective.value, size, kind, seconds) for size, kind in kinds]
        found = [asdict(figure) for figure in figures]
    if contestant.rank == 0:
        if json_file:
            write_text(json_file, json.dumps(found))
        elif recording:
            output.console().print(replay.table(replay.rows(recording, {library: [found]}, None)))
        else:
            rows = report.summarise({_api(api, device).value: [figures]}, {}, collective.value, contestant.world_size)
            report.show(rows, f"{collective.value}, {count(contestant.world_size, 'rank')}, {library}")
    contestant.close()


def _api(api: Api, device: MemoryKind) -> Api:
    return Api.torch if device is MemoryKind.cuda else api


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
app.command()(main)
if __name__ == "__main__":
    call(app, "multiring run -m multiring.cli.bench_rank")
