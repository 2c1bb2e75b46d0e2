"""Options and measurements that `multiring bench` and `multiring lab peers` share: ours beside peers, in turns."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from multiring import env
from multiring.bench import curves, devices, parse_sizes, replay, report
from multiring.bench.contestants import Api, Measurable, MemoryKind
from multiring.bench.launches import Entry, Start, Written, alternate, unnamed_file
from multiring.bench.measure import Figure, size_of_buffer
from multiring.bench.peers import BY_SOCKETS, ON_CUDA, ONE_HOST, ONLY_ALL_REDUCE, PEERS, remedy
from multiring.bench.report import through
from multiring.cli import output
from multiring.cli.errors import leave_out
from multiring.cli.options import number, output_file, whole
from multiring.errors import RendezvousError, ResourceError
from multiring.files import write_text
from multiring.job.checks import check_settings
from multiring.planning import topology_file
from multiring.planning.bound import cut_bound
from multiring.planning.planner import plan
from multiring.planning.topology import Topology
from multiring.simulate.models import MODELS
from multiring.simulate.recording import Recording, load, save
from multiring.simulate.training import simulate_step
from multiring.units import count, duration, size

LEAST_OF_A_RANK = 24 << 20
"""Bytes that Python and NumPy take."""

Collective = Annotated[Measurable, typer.Option("--collective", help="What to measure.")]
Sizes = Annotated[
    str, typer.Option(help="Sizes of the buffer, all blocks together, rounded up to equal blocks of float32.")
]
MOST, MOST_SECONDS, MOST_SPEED = 1_000_000, 86400.0, 1e12
"""Upper limits of options: launches, steps or samples; seconds for a size; samples a second."""

Launches = Annotated[
    int, typer.Option(parser=whole(1, MOST), metavar="N", help="How often each is launched, in turns.")
]
Seconds = Annotated[
    float,
    typer.Option(parser=number(0.01, MOST_SECONDS), metavar="N", help="How long to measure each size in a launch."),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", parser=output_file, metavar="FILE", help="Also write figures and conditions here."),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", parser=output_file, metavar="FILE.png", help="Also draw time over size (needs matplotlib)."),
]
ThroughApi = Annotated[
    Api | None, typer.Option(help="What multiring is called through.", show_default="what each peer takes; numpy alone")
]

Replayed = Annotated[
    str | None,
    typer.Option(
        "--replay",
        metavar="FILE|MODEL",
        help=f"Measure training steps instead: those of a recording, or of {', '.join(MODELS)}.",
        show_default=False,
    ),
]
Samples = Annotated[
    int, typer.Option(parser=whole(1, MOST), metavar="N", help="With --replay MODEL: samples a rank and step.")
]
Speed = Annotated[
    float,
    typer.Option(
        parser=number(1e-3, MOST_SPEED),
        metavar="N",
        help="With --replay MODEL: samples that a rank trains on in a second.",
    ),
]
Steps = Annotated[int, typer.Option(parser=whole(1, MOST), metavar="N", help="With --replay: steps in a launch.")]


@dataclass(frozen=True)
class Site:
    """Place of the measurement: number of ranks, how they start, the links between them (None: one host), and what
    else a result should tell."""

    about: str
    world_size: int
    start: Start
    topology: Topology | None = None
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Calls that are measured beside peers, their number and seconds, and the files that the figures go to."""

    collective: str
    sizes: str
    api: Api | None
    peers: Sequence[str]
    launches: int
    seconds: float
    json_file: Path | None
    plot: Path | None
    device: MemoryKind = MemoryKind.cpu
    apart: bool = False

    def check(self) -> None:
        """ValueError for what cannot be measured."""
        _check_environment()
        parse_sizes(self.sizes)
        for peer in self.peers:
            if peer in ONLY_ALL_REDUCE and self.collective != "all_reduce":
                raise ValueError(f"--peers {peer}: it has all_reduce only, no {self.collective}")
            if self.apart and peer not in BY_SOCKETS:
                raise ValueError(f"--peers {peer}: it shares memory within a host, and --apart makes ranks hosts")
        if self.plot is not None:
            curves.check(self.plot)
            if self.json_file is not None and self.json_file.resolve() == self.plot.resolve():
                raise ValueError(f"--json {self.json_file} and --plot {self.plot} are one file")

    def run(self, site: Site) -> None:
        """Measure, print, and write what was asked for."""
        self.check()
        largest = max(parse_sizes(self.sizes))
        _check_memory(site.world_size, largest, "buffers", "measure smaller --sizes")
        if self.apart:
            site = replace(site, about=f"{site.about}, each as a host of its own on loopback")
        if self.device is MemoryKind.cuda:
            site = _with_devices(site, largest, self.peers, apart=self.apart)
        options = ["--collective", self.collective, "--sizes", self.sizes, "--seconds", str(self.seconds)]
        options += ["--device", self.device.value] if self.device is MemoryKind.cuda else []
        options += ["--apart"] if self.apart else []
        apis = [Api.torch] if self.device is MemoryKind.cuda else _apis(self.api, self.peers)
        written = alternate(_entries(apis, self.peers, options), self.launches, site.start, _times)
        figures = {name: [_figures(launch) for launch in done] for name, done in written.launches.items()}
        ours = {api.value: figures.pop(_ours(api)) for api in apis if _ours(api) in figures}
        rows = report.summarise(ours, figures, self.collective, site.world_size, self._bounds(site))
        title = f"{self.collective}, {site.world_size} ranks {site.about}, float32"
        fewest = min(map(len, written.launches.values()))
        try:
            report.show(rows, f"{title}, {count(fewest, 'launch')}; algbw, busbw in GB/s")
        finally:  # whether or not somebody reads what is printed
            if self.json_file:
                found = report.record(
                    [asdict(row) for row in rows], self.peers, collective=self.collective, **_conditions(site)
                )
                write_text(self.json_file, json.dumps(found, indent=1) + "\n")
            if self.plot:
                curves.plot(self.plot, rows, title)
        _end(written)

    def _bounds(self, site: Site) -> dict[int, float] | None:
        if site.topology is None:
            return None
        sizes = [size_of_buffer(nbytes, site.world_size) for nbytes in parse_sizes(self.sizes)]
        return {nbytes: cut_bound(site.topology, self.collective, nbytes) for nbytes in sizes}


@dataclass(frozen=True)
class Replay:
    """Training steps that are measured beside peers, and their number."""

    recording: Recording
    api: Api | None
    peers: Sequence[str]
    launches: int
    steps: int
    json_file: Path | None

    def check(self) -> None:
        """ValueError for what cannot be measured."""
        _check_environment()
        for peer in self.peers:
            if peer in ONLY_ALL_REDUCE:
                raise ValueError(f"--peers {peer}: it has no asynchronous all_reduce to replay a training step with")

    def run(self, site: Site) -> None:
        """Measure, print, and write what was asked for."""
        self.check()
        _check_memory(site.world_size, self.recording.nbytes, "gradients", "replay a smaller recording")
        with unnamed_file() as file:
            save(self.recording, file)
            options = ["--replay", str(file), "--steps", str(self.steps)]
            entries = _entries(_apis(self.api, self.peers), self.peers, options)
            written = alternate(entries, self.launches, site.start, lambda steps: f"step {duration(median(steps))}")
        rows = replay.rows(self.recording, written.launches, self._predicted(site))
        computing, gradients = duration(self.recording.seconds), size(self.recording.nbytes)
        about = f"{computing} of computation, {gradients} of gradients, on {site.world_size} ranks {site.about}"
        console = output.console()
        try:
            console.print(f"training steps of {self.recording.name}: {about}", highlight=False)
            console.print(replay.table(rows))
        finally:
            if self.json_file:
                found = report.record(
                    [asdict(row) for row in rows],
                    self.peers,
                    computing_seconds=self.recording.seconds,
                    **_conditions(site),
                )
                write_text(self.json_file, json.dumps(found, indent=1) + "\n")
        _end(written)

    def _predicted(self, site: Site) -> float | None:
        """Seconds of a step with our plans, by the simulator; None on one host, whose memory it does not know."""
        topology = site.topology
        if topology is None:
            return None
        return simulate_step(topology, self.recording, lambda nbytes: plan(topology, "all_reduce", nbytes)).seconds


def _conditions(site: Site) -> dict[str, object]:
    """The conditions of a result: how many ranks, where, and the topology file of a cluster."""
    cluster = {} if site.topology is None else {"topology": topology_file.text(site.topology)}
    return {"ranks": site.world_size, "where": site.about, **cluster, **site.settings}


def _check_environment() -> None:
    """ValueError for settings that every rank of ours would refuse."""
    try:
        check_settings(env.read(env.Settings))
    except (RendezvousError, ResourceError) as error:
        raise ValueError(str(error)) from None


def _check_memory(ranks: int, nbytes: int, what: str, remedy: str) -> None:
    """ValueError for ranks with ``nbytes`` each that this machine, on which all of them are, cannot hold."""
    wanted, there = ranks * (LEAST_OF_A_RANK + nbytes), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if wanted > there:
        raise ValueError(
            f"{count(ranks, 'rank')} with {what} of {size(nbytes)} take {size(wanted)} at least, and this machine has "
            f"{size(there)}: {remedy} on fewer ranks"
        )


def _with_devices(site: Site, nbytes: int, peers: Sequence[str], *, apart: bool) -> Site:
    """The site and what a result should tell of its devices; ValueError where there are none, or too small ones."""
    found = devices.ask()
    if "nccl" in peers:
        devices.check_nccl(found)
    ranks = -(-site.world_size // found.count)
    if ranks * nbytes > found.memory:
        raise ValueError(
            f"{count(ranks, 'rank')} on a CUDA device with buffers of {size(nbytes)} take {size(ranks * nbytes)} at "
            f"least, and it has {size(found.memory)}: measure smaller --sizes"
        )
    by_sockets = apart or found.count < site.world_size
    nccl = {"nccl": found.nccl, "nccl_by_sockets_on_loopback": by_sockets} if "nccl" in peers else {}
    told = {"devices": found.count, "device": found.name, "cuda": found.cuda, **nccl}
    note = ", nccl by its sockets on loopback" if nccl and by_sockets else ""
    about = f"{site.about}, {count(found.count, 'CUDA device')} ({found.name}){note}"
    return replace(site, about=about, settings={**site.settings, **told})


def check_device(api: Api | None, peers: str) -> None:
    """ValueError for what is not measured on CUDA devices."""
    if api is Api.numpy:
        raise ValueError("--device cuda: NumPy's arrays lie in memory of the CPU; leave out --api numpy")
    for peer in peers.split(","):
        if peer in PEERS and peer not in ON_CUDA:
            raise ValueError(f"--peers {peer}: --device cuda measures beside {' and '.join(ON_CUDA)} only")


def check_kind(context: typer.Context, replayed: str | None) -> None:
    """ValueError for an option on the command line that is for collectives beside --replay, or for it without it."""
    if replayed is None:
        leave_out(context, ("samples", "speed", "steps"), "without --replay collectives are measured")
    else:
        leave_out(
            context, ("collective", "sizes", "seconds", "plot", "device", "apart"), "--replay measures training steps"
        )


def recording_of(context: typer.Context, text: str, samples: int, speed: float) -> Recording:
    """The recording in a file, or of a known model trained at a speed; ValueError if it is neither."""
    if text in MODELS:
        return MODELS[text].recording(samples, speed)
    if not text or not Path(text).exists():
        raise ValueError(f"--replay {text}: no such file, and no known model; known are {', '.join(MODELS)}")
    leave_out(context, ("samples", "speed"), f"--replay {text} says itself how long it computes")
    return load(Path(text))


def _apis(api: Api | None, peers: Sequence[str]) -> list[Api]:
    """Return the libraries that multiring is called through: the one that ``--api`` names, or those of the peers."""
    return [api] if api else sorted({through(peer) for peer in peers} or {Api.numpy})


def _ours(api: Api) -> str:
    """The name of ours, called through ``api``, among what is launched."""
    return f"multiring {api.value}"


def _figures(launch: Any) -> list[Figure]:
    return [Figure(**each) for each in launch]


def _times(launch: Any) -> str:
    """Return in a line what a launch measured of buffers that peers have too."""
    figures = _figures(launch)
    kind = "private" if any(figure.buffer == "private" for figure in figures) else figures[0].buffer
    return ", ".join(f"{size(each.nbytes)} {duration(each.seconds)}" for each in figures if each.buffer == kind)


def _end(written: Written) -> None:
    """The exit code of what was interrupted, once its figures have been shown and written."""
    if not written.complete:
        raise typer.Exit(128 + signal.SIGINT)


def _entries(apis: Sequence[Api], peers: Sequence[str], options: Sequence[str]) -> dict[str, Entry]:
    ours = {_ours(api): Entry("multiring", [*options, "--api", api.value]) for api in apis}
    return {**ours, **{peer: Entry(peer, options) for peer in peers}}


def _why_not(peer: str) -> str:
    if peer in ONE_HOST:
        return "it knows no network, and a lab has one"
    return "it moves tensors of CUDA devices (multiring bench --device cuda)" if peer in ON_CUDA else "no such peer"


def choose_peers(text: str, known: Sequence[str] = PEERS) -> list[str]:
    """The peers of a comma-separated list; ValueError for one that is not ``known``, or not here, with its remedy."""
    named = list(filter(None, text.split(",")))
    for name in named:
        if name not in known:
            raise ValueError(f"--peers {name}: {_why_not(name)}; known: {', '.join(known)}")
        if missing := remedy(name):
            raise ValueError(f"--peers {name}: it is not here. {missing}")
    return named
