"""Feeds mutated bytes to the handshake, the store and the engine's parsers: ``make fuzz``, or

    python tests/fuzz/fuzz.py [--seconds 60] [--seed N] [TARGET...]

Inputs are made of those in ``corpus/TARGET`` and of the well-formed ones in ``targets.py``: bytes changed, repeated,
cut, several joined. What a target does not survive is kept in the corpus, and is replayed by every run of the suite.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import secrets
import struct
import time
from pathlib import Path

from targets import SEEDS, TARGETS

CORPUS = Path(__file__).parent / "corpus"
EDGES = [0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 30, 1 << 63, (1 << 64) - 1]


def corpus(target: str) -> list[bytes]:
    """The inputs that a target is known to be interested in."""
    return SEEDS[target] + [path.read_bytes() for path in sorted((CORPUS / target).glob("*.bin"))]


def mutated(dice: random.Random, known: list[bytes]) -> bytes:
    """A new input."""
    data = bytearray(b"".join(dice.choices(known, k=dice.choice([1, 1, 2, 3]))))
    for _ in range(dice.choice([0, 1, 1, 2, 4, 16])):
        at = dice.randrange(len(data) + 1)
        how = dice.randrange(5)
        if how == 0 and data:
            data[at % len(data)] = dice.randrange(256)
        elif how == 1:
            width = dice.choice([1, 2, 4, 8])
            edge = dice.choice(EDGES) & ((1 << 8 * width) - 1)
            data[at : at + width] = struct.pack("<Q", edge)[:width]
        elif how == 2:
            del data[at : at + dice.choice([1, 4, 16, 64])]
        elif how == 3:
            data[at:at] = dice.randbytes(dice.choice([1, 4, 64, 1000]))
        else:
            data[at:at] = data[: dice.randrange(len(data) + 1)]
    return bytes(data)


def fuzz(target: str, seconds: float, seed: int) -> int:
    """How many inputs a target survived; an input that it did not is kept, and its error raised."""
    dice, known, count = random.Random(f"{seed} {target}"), corpus(target), 0
    end = time.monotonic() + seconds
    kept = CORPUS / target / "last.bin"
    kept.parent.mkdir(parents=True, exist_ok=True)
    while time.monotonic() < end:
        data = mutated(dice, known)
        kept.write_bytes(data)  # a crash leaves it
        try:
            TARGETS[target](data)
        except BaseException:
            kept.rename(kept.with_name(f"{hashlib.sha256(data).hexdigest()[:16]}.bin"))
            raise
        count += 1
    kept.unlink()
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description="mutated bytes")
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    for target in options.targets or TARGETS:
        print(f"{target}: {fuzz(target, options.seconds, seed)} inputs survived", flush=True)


if __name__ == "__main__":
    main()
