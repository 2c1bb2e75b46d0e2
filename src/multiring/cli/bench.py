"""``multiring bench``: collectives and training steps beside their peers, in alternated launches of one run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from multiring.bench import DEFAULT_SIZES
from multiring.bench.contestants import Measurable, MemoryKind
from multiring.bench.peers import ALL, ON_CUDA, PEERS, start_here
from multiring.cli.comparison import (
    Collective,
    Comparison,
    Json,
    Launches,
    Plot,
    Replay,
    Replayed,
    Samples,
    Seconds,
    Site,
    Sizes,
    Speed,
    Steps,
    ThroughApi,
    check_device,
    check_kind,
    choose_peers,
    recording_of,
)
from multiring.cli.errors import given, leave_out, one_line_errors
from multiring.cli.options import PROGRAM_FOLLOWS, check_kept, check_program, output_file, ranks_option


def register(app: typer.Typer) -> None:
    """Add the command; options after PROGRAM are its own."""
    app.command(context_settings=PROGRAM_FOLLOWS)(bench)


def bench(
    context: typer.Context,
    program: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROGRAM", help="With --record: the training script and its arguments."),
    ] = None,
    ranks: Annotated[
        int | None, ranks_option("Number of ranks, all on this host.", default="2; 1 with --record")
    ] = None,
    collective: Collective = Measurable.all_reduce,
    sizes: Sizes = DEFAULT_SIZES,
    api: ThroughApi = None,
    device: Annotated[
        MemoryKind, typer.Option(help=f"Where the buffers lie. On cuda: through torch, peers {' and '.join(ON_CUDA)}.")
    ] = MemoryKind.cpu,
    apart: Annotated[
        bool, typer.Option("--apart", help="Make each rank a host of its own, which TCP over loopback leads to.")
    ] = False,
    peers: Annotated[str, typer.Option(help=f"What to measure beside it: {', '.join(ALL)}.")] = "",
    launches: Launches = 5,
    seconds: Seconds = 0.5,
    json_file: Json = None,
    plot: Plot = None,
    record: Annotated[
        Path | None,
        typer.Option(
            parser=output_file, metavar="FILE", help="Run PROGRAM; write its gradients and backward times here."
        ),
    ] = None,
    replayed: Replayed = None,
    samples: Samples = 32,
    speed: Speed = 32.0,
    steps: Steps = 5,
) -> None:
    """Measure collectives: the median of our launches beside the best launch of each peer."""
    with one_line_errors("bench"):
        if "RANK" in os.environ:
            raise ValueError(
                "this is a rank of a job already: multiring bench starts its own; "
                "`multiring run -n 4 -m multiring.cli.bench_rank` measures the job that it is in"
            )
        check_program(context, program or [])
        if record is not None:
            leave_out(context, given(context) - {"program", "ranks", "record"}, "--record FILE measures nothing")
            _record(record, program or [], ranks or 1)
        if program:
            raise ValueError(f"{program[0]!r}: a program is run with --record FILE only")
        check_kind(context, replayed)
        if ranks == 1:
            raise ValueError("-n 1: a collective needs 2 ranks or more")
        site = Site("on one host", ranks or 2, start_here(ranks or 2))
        if device is MemoryKind.cuda:
            check_device(api, peers)
        chosen = choose_peers(peers, ON_CUDA if device is MemoryKind.cuda else PEERS)
        check_kept({"--json": json_file}, {"--replay": Path(replayed or "")})
        if replayed is None:
            Comparison(
                collective.value, sizes, api, chosen, launches, seconds, json_file, plot, device=device, apart=apart
            ).run(site)
        else:
            step = recording_of(context, replayed, samples, speed)
            Replay(step, api, chosen, launches, steps, json_file).run(site)


def _record(file: Path, program: list[str], ranks: int) -> None:
    """Become `multiring run` of the program under the recorder."""
    if program in ([], ["-m"]):
        raise ValueError("--record FILE: which program? multiring bench --record FILE train.py")
    if program[0] != "-m" and not Path(program[0]).is_file():
        raise ValueError(f"--record {file}: no such script: {program[0]}")
    check_kept({"--record": file}, {"the script": Path(program[0])})
    command = [sys.executable, "-m", "multiring", "run", "-H", f"localhost:{ranks}", "-m", "multiring.bench.recorder"]
    os.execv(sys.executable, [*command, str(file), *program])
