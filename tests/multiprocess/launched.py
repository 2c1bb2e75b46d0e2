"""``multiring run -n 2`` of a program with each of several lists of words: what it wrote, as JSON.

    python launched.py PROGRAM '{"NAME": ["WORD", ...], ...}'

Those with the word torch have a fork server that has imported it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import forking_launcher

TORCH = ("torch.distributed", "multiring.torch", "multiring._torch_entry")


def launched(program: str, words: Sequence[str]) -> list[str]:
    """Return the output and error of the run."""
    done = forking_launcher.run(
        *("run", "-n", "2", program, *words),
        imports=TORCH if "torch" in words else (),
        environment=os.environ,
        directory=".",
        timeout=90,
    )
    return [done.stdout, done.stderr]


if __name__ == "__main__":
    program, programs = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps({name: launched(program, words) for name, words in programs.items()}))
