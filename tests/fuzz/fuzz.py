"""Feeds the handshake, the store and the engine's parsers with bytes that libFuzzer makes, guided by coverage.

``make fuzz`` builds an engine whose branches it sees. By hand, Python's alone:

    python tests/fuzz/fuzz.py                                     # the names of the targets
    python tests/fuzz/fuzz.py TARGET DIRECTORY [-max_total_time=60] [-seed=N] [-help=1]

It starts from the well-formed inputs of ``targets.py``, those in ``corpus/TARGET`` and those in DIRECTORY, which gets
what else it finds to be of interest. What a target does not survive is written to ``corpus/TARGET``, and is replayed by
every run of the suite.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["multiring"]):
    from targets import SEEDS, TARGETS

CORPUS = Path(__file__).parent / "corpus"


def main() -> None:
    if len(sys.argv) == 1:
        print(*TARGETS, sep="\n")
        return
    if len(sys.argv) == 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: fuzz.py {{{','.join(TARGETS)}}} DIRECTORY [options of libFuzzer]")
    target, directory, *options = sys.argv[1:]
    kept = CORPUS / target
    kept.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS[target]):
        Path(directory, f"seed-{number}").write_bytes(seed)
    atheris.Setup(
        [sys.argv[0], "-timeout=60", f"-artifact_prefix={kept}/", *options, directory, str(kept)], TARGETS[target]
    )
    atheris.Fuzz()  # ends the process


if __name__ == "__main__":
    main()
