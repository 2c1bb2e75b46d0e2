"""What ``multiring probe`` runs on every rank: measure the links, and show them on rank 0."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from multiring import api
from multiring.planning import topology_file


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"multiring probe: {message}; known is --output FILE\n")

    def print_help(self, file: object = None) -> None:
        if os.environ.get("RANK", "0") == "0":  # once a job
            print(self.format_help(), end="")


def main(words: Sequence[str]) -> int:
    """Measure whatever is known already; the exit code."""
    output = _output(words)
    world = api.init(probe="refresh", topology="").world
    alone, failed = len(set(world.topology.hosts)) == 1, False
    if world.rank == 0:
        if alone:
            print("one host: there are no links to measure")
        elif world.known:
            print("\n".join(topology_file.outline(world.topology)))
            if output:
                failed = _write(output, topology_file.text(world.topology))
    api.shutdown()
    return int(failed or (not alone and not world.known))


def _output(words: Sequence[str]) -> Path | None:
    """The file to write, on rank 0's host; SystemExit for words that are no options."""
    about = "Measure the links between the hosts of this job, and show them as a tree."
    parser = _Parser("multiring run -m multiring.cli.probe_rank", description=about, allow_abbrev=False)
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the topology file there")
    found: Path | None = parser.parse_args(words).output
    return found


def _write(file: Path, text: str) -> bool:
    """Whether that failed; then it has said why."""
    try:
        file.write_text(text)
    except OSError as error:
        print(f"multiring probe: --output {file}: {error.strerror}", file=sys.stderr)
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
