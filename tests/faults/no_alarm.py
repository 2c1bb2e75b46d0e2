"""Eight ranks on a machine whose cores are all kept busy: nobody may be called silent, late or lost.

    python tests/faults/no_alarm.py [--seconds 600] [--timeout 5]

Half of the ranks say that they are on another host, so that both shared memory and connections tell who lives.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from jobs_under_fault import World, started

BUSY = [sys.executable, "-c", "while True: pass"]


def main() -> None:
    parser = argparse.ArgumentParser(description="no false alarm")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--timeout", type=float, default=5.0, help="of heartbeats and of calls")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # leaves nothing behind
    world = World(tuple("xxxxyyyy"))
    limit = str(options.timeout)
    environment = {"MULTIRING_HEARTBEAT_TIMEOUT": limit, "MULTIRING_TIMEOUT": limit, "MULTIRING_LATE_WARNING": limit}
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="no-alarm-")))
        job = undo.enter_context(started(world, folder, "medium", pause=0.05, environment=environment))
        for _ in os.sched_getaffinity(0):
            undo.callback(subprocess.Popen(BUSY).kill)
        end = time.monotonic() + options.seconds
        while time.monotonic() < end and all(process.poll() is None for process in job.ranks):
            time.sleep(1)
        load = os.getloadavg()
        job.write("stop")
        job.end(range(world.size))
        outcomes = [job.outcome(rank) for rank in range(world.size)]
        said = {line for rank in range(world.size) for line in job.log(rank).splitlines()} - {"running"}
    print(f"{options.seconds:g} s, {outcomes[0]['steps']} steps, load {load[0]:.1f} {load[1]:.1f} {load[2]:.1f}")
    raised = [outcome for outcome in outcomes if outcome["kind"]]
    if raised or said:
        sys.exit(f"raised: {raised}\nsaid: {sorted(said)}")
    print("not one line")


if __name__ == "__main__":
    main()
