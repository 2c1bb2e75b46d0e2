"""What ``multiring probe`` runs on every rank: measure, and show what was found on rank 0."""

from __future__ import annotations

import sys
from pathlib import Path

import multiring
from multiring import topology_file


def main(output: str = "") -> int:
    """Measure whatever is known already; the exit code. ``output`` is a file to write, on rank 0's host."""
    world = multiring.init(probe="refresh", topology="").world
    alone = len(set(world.topology.hosts)) == 1
    if world.rank == 0:
        if alone:
            print("one host: there are no links to measure")
        elif world.known:
            print("\n".join(topology_file.outline(world.topology)))
            if output:
                Path(output).write_text(topology_file.text(world.topology))
    multiring.shutdown()
    return int(not alone and not world.known)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
