"""Measurements of a collective's speed, made so that the figure can be trusted.

``multiring run -n 2 -m multiring.cli.bench_rank`` measures one launch; ``multiring bench`` takes launches of ours and
of its peers in turns. A time is always that of the slowest rank. Below `BARRIER_BYTES` calls follow each other at once,
since a barrier before each would hide most of their cost; above, each call starts from a barrier.

::

    contestants.py   the libraries that are measured, each behind the same few methods
    devices.py       CUDA devices, and buffers that lie there
    measure.py       one launch: figures of each size
    replay.py        one launch: training steps of a recording
    recorder.py      a recording of a real torch job
    peers.py         which peers are here, and how they are started
    launches.py      launches in turns
    report.py        rows, tables, the dated record
    curves.py        rows as a picture
"""

from multiring.env import parse_size

FEWEST_BYTES = 4
BARRIER_BYTES = 256 << 10
DEFAULT_SIZES = "4KB,64KB,1MB,16MB,64MB"


def parse_sizes(text: str) -> list[int]:
    """Bytes of each of the comma-separated sizes, each once; ValueError for one that is none, or less than a number."""
    try:
        sizes = list(dict.fromkeys(parse_size(size) for size in text.split(",")))
        if min(sizes) < FEWEST_BYTES:
            raise ValueError(f"at least {FEWEST_BYTES} bytes, a float32, not {min(sizes)}")
    except ValueError as error:
        raise ValueError(f"--sizes {text!r}: expected {error}") from None
    return sizes
