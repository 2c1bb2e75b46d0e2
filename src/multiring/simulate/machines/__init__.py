"""Known machines as data, for the simulator: the clusters of the published results, and some to compare them with.

Rates are what a program gets, so wires stand with what their framing leaves. Many numbers are not published; those
are assumed, once and for all rows alike, and say so. Nothing here is fitted to a result that it should explain.
"""

from __future__ import annotations

from dataclasses import replace

from .machine import Machine, SourcedFigure

__all__ = ["MACHINES", "Figure", "Machine", "machine"]


def _ethernet(gigabits: float) -> SourcedFigure:
    return SourcedFigure(
        gigabits * 1e9 / 8 * 1460 / 1538, "IEEE 802.3, frames of 1500 bytes, IPv4 and TCP headers", 2015
    )


_EDR = 12.1e9
_EDR_SOURCE = "OSU micro-benchmarks over ConnectX-4 EDR: 12.1 GB/s of 12.5"
_OMNI_PATH = SourcedFigure(12.3e9, "Intel Omni-Path 100 product brief: 12.3 GB/s MPI bandwidth", 2015)
_GPU_STEP = SourcedFigure(10e-6, "assumed: launch of a copy kernel and its flag", 2017)
_GPU_WIRE = SourcedFigure(15e-6, "assumed: the same, and a message by RDMA", 2017)
_TCP = SourcedFigure(30e-6, "assumed: a message by kernel TCP through one switch", 2017)
_MPI = SourcedFigure(3e-6, "assumed: an MPI message on cores of a many-core processor; 1 us on the wire", 2017)
_GPU_MESSAGE = SourcedFigure(1e-6, "assumed: one more message in a step", 2017)
_CPU_MESSAGE = SourcedFigure(1e-6, "assumed: one more MPI message in a step", 2017)
_TCP_MESSAGE = SourcedFigure(5e-6, "one more send and receive through the kernel, as the planner has it", 2026)
_P100_ADDS = SourcedFigure(720e9 / 3, "P100 memory 720 GB/s (NVIDIA whitepaper): two reads and a write a byte", 2016)
_P40_ADDS = SourcedFigure(346e9 / 3, "P40 memory 346 GB/s (NVIDIA data sheet): two reads and a write a byte", 2016)
_V100_ADDS = SourcedFigure(900e9 / 3, "V100 memory 900 GB/s (NVIDIA whitepaper): two reads and a write a byte", 2017)
_CORE_ADDS = SourcedFigure(8e9, "one core adding float32 from its cache, as the planner has it", 2026)
_CORES_ADD = SourcedFigure(32e9, "assumed: four cores set aside for communication", 2017)
_SPREAD = SourcedFigure(
    0.015, "Sinha et al. 2022 (arXiv 2208.11035): 8 % from whisker to whisker, 5.4 deviations", 2022
)

_TF = "TensorFlow benchmarks, DGX-1, synthetic data, batch 32"
_P100 = {
    "resnet50": SourcedFigure(195, _TF, 2017),
    "resnet152": SourcedFigure(82.7, _TF, 2017),
    "vgg16": SourcedFigure(144, _TF, 2017),
}
_P40 = {
    name: SourcedFigure(figure.value * 11.76 / 10.6, f"{figure.source}, times the peaks of P40 and P100", 2017)
    for name, figure in _P100.items()
}
_V100 = {"resnet50": SourcedFigure(747, "NVIDIA DeepLearningExamples, PyTorch, half precision, DGX-1V, of 8", 2019)}

_MINSKY = Machine(
    name="minsky",
    about="IBM S822LC: 4 P100 with NVLink, two EDR InfiniBand cards (PowerAI DDL 2017)",
    ranks=4,
    rank_rate=SourcedFigure(40e9, "IBM REDP-5405: two NVLinks of 20 GB/s each way between neighbours", 2016),
    rank_latency=_GPU_STEP,
    host_rate=SourcedFigure(2 * _EDR, f"{_EDR_SOURCE}; two cards assumed", 2016),
    host_latency=_GPU_WIRE,
    reduce_rate=_P100_ADDS,
    message_seconds=_GPU_MESSAGE,
    samples_a_second=_P100,
    spread=_SPREAD,
)
_ABCI = replace(
    _MINSKY,
    name="abci",
    about="ABCI: 4 V100 with NVLink 2, two EDR InfiniBand cards (Sony 2018)",
    rank_rate=SourcedFigure(150e9, "V100 whitepaper: six NVLinks of 25 GB/s each way", 2017),
    host_rate=SourcedFigure(2 * _EDR, f"{_EDR_SOURCE}; ABCI system description: two cards", 2018),
    reduce_rate=_V100_ADDS,
    samples_a_second=_V100,
)
_KNL = Machine(
    name="stampede2-knl",
    about="Stampede2: Xeon Phi 7250, Omni-Path (SURFsara 2017)",
    ranks=1,
    rank_rate=SourcedFigure(90e9, "Xeon Phi 7250 DDR4, six channels of 2400 MT/s: 115 GB/s, STREAM about 90", 2016),
    rank_latency=_MPI,
    host_rate=_OMNI_PATH,
    host_latency=_MPI,
    reduce_rate=_CORES_ADD,
    message_seconds=_CPU_MESSAGE,
    samples_a_second={
        "resnet50": SourcedFigure(81.6, "Codreanu et al. 2017 (arXiv 1711.04291): 90 epochs in 46 min on 512", 2017)
    },
    spread=_SPREAD,
)
_COMMODITY = Machine(
    name="commodity",
    about="two-socket servers under 10 Gbit/s Ethernet, a rank a socket",
    ranks=2,
    rank_rate=SourcedFigure(5e9, "one core copying memory, as the planner has it", 2026),
    rank_latency=SourcedFigure(1e-6, "a flag passed between two cores, as the planner has it", 2026),
    host_rate=_ethernet(10),
    host_latency=SourcedFigure(50e-6, "TCP between two processes, as the planner has it", 2026),
    reduce_rate=_CORE_ADDS,
    message_seconds=_TCP_MESSAGE,
    samples_a_second={
        "resnet50": SourcedFigure(
            53, "half a two-socket Skylake server of Codreanu et al. 2017 (arXiv 1711.04291)", 2017
        )
    },
    spread=_SPREAD,
)

_ALL = (
    _MINSKY,
    replace(
        _MINSKY,
        name="big-basin",
        about="Big Basin: 8 P100 with NVLink, one 50 Gbit/s card (Facebook 2017)",
        ranks=8,
        rank_rate=SourcedFigure(80e9, "P100 whitepaper: four NVLinks of 20 GB/s each way", 2016),
        host_rate=_ethernet(50),
        host_latency=_TCP,
        message_seconds=_TCP_MESSAGE,
    ),
    replace(
        _MINSKY,
        name="pascal-25g",
        about="4 Pascal GPUs, one 25 Gbit/s RoCE card (Horovod 2017)",
        rank_rate=SourcedFigure(12e9, "assumed: PCI Express 3.0 x16, 12 of 15.75 GB/s", 2017),
        host_rate=_ethernet(25),
    ),
    replace(
        _MINSKY,
        name="p40-100g",
        about="8 P40, one 100 Gbit/s RoCE card (Tencent 2018)",
        ranks=8,
        rank_rate=SourcedFigure(12e9, "assumed: PCI Express 3.0 x16, 12 of 15.75 GB/s", 2017),
        host_rate=_ethernet(100),
        reduce_rate=_P40_ADDS,
        samples_a_second=_P40,
    ),
    _ABCI,
    replace(
        _ABCI,
        name="dgx1",
        about="DGX-1: 8 V100 with NVLink 2, four EDR InfiniBand cards",
        ranks=8,
        host_rate=SourcedFigure(4 * _EDR, f"{_EDR_SOURCE}; DGX-1 data sheet: four cards", 2017),
    ),
    replace(
        _ABCI,
        name="summit",
        about="Summit: 6 V100 with NVLink 2, two EDR InfiniBand ports",
        ranks=6,
        rank_rate=SourcedFigure(50e9, "Summit user guide: two NVLinks of 25 GB/s each way between neighbours", 2018),
        host_rate=SourcedFigure(2 * _EDR, f"{_EDR_SOURCE}; Summit user guide: two ports", 2018),
    ),
    _KNL,
    replace(
        _KNL,
        name="marenostrum",
        about="MareNostrum 4: two Xeon Platinum 8160, Omni-Path (SURFsara 2017)",
        rank_rate=SourcedFigure(
            180e9, "Xeon Platinum 8160, twelve channels of 2666 MT/s: 256 GB/s, STREAM about 180", 2017
        ),
        samples_a_second={
            "resnet50": SourcedFigure(107, "Codreanu et al. 2017 (arXiv 1711.04291): 90 epochs in 70 min on 256", 2017)
        },
    ),
    _COMMODITY,
    replace(
        _COMMODITY,
        name="two-sites",
        about="the commodity cluster at two sites 900 km of fibre apart, 10 Gbit/s between",
        sites=2,
        site_rate=_ethernet(10),
        site_latency=SourcedFigure(13e-3, "Proficz 2018: Gdansk and Warsaw, 900 km", 2018),
    ),
)

MACHINES = {each.name: each for each in _ALL}
"""The machines, by their names."""


def machine(name: str) -> Machine:
    """One of ``MACHINES``."""
    if name not in MACHINES:
        raise ValueError(f"unknown machine {name!r}; known are {', '.join(MACHINES)}")
    return MACHINES[name]
