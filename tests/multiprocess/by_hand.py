"""Two ranks by variables set by hand, for each MASTER_ADDR among the arguments: what they wrote, as JSON."""

from __future__ import annotations

import json
import os
import sys

import fork_server


def ranks(address: str, port: int) -> list[str]:
    """Return the output of rank 1, which starts first, and of rank 0."""
    meets = {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    started = [
        fork_server.start(
            "import launchers; launchers.main()", environment={**os.environ, **meets, "RANK": str(rank)}, seat=rank
        )
        for rank in (1, 0)
    ]
    return ["".join(process.communicate(timeout=60)) for process in started]


if __name__ == "__main__":
    print(json.dumps({address: ranks(address, 29500 + index) for index, address in enumerate(sys.argv[1:])}))
