"""What ``multiring probe`` runs on every rank: measure, and show what was found on rank 0."""

from __future__ import annotations

import sys
from pathlib import Path

import multiring
from multiring import topology_file


def main(output: str = "") -> int:
    """Measure whatever is known already; the exit code. ``output`` is a file to write, on rank 0's host."""
    world = multiring.init(probe="refresh", topology="").world
    alone, failed = len(set(world.topology.hosts)) == 1, False
    if world.rank == 0:
        if alone:
            print("one host: there are no links to measure")
        elif world.known:
            print("\n".join(topology_file.outline(world.topology)))
            if output:
                failed = _write(Path(output), topology_file.text(world.topology))
    multiring.shutdown()
    return int(failed or (not alone and not world.known))


def _write(file: Path, text: str) -> bool:
    """Whether that failed; then it has said why."""
    try:
        file.write_text(text)
    except OSError as error:
        print(f"multiring probe: --output {file}: {error.strerror}", file=sys.stderr)
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
