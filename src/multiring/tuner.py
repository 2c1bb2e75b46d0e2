"""Tries plans on the calls that a job makes anyway, and keeps the fastest (``tuning`` decides which).

The ranks agree without talking on what each call tries. After a heat the next call waits for those of the heat to
complete on all ranks; then their times, from the last entry to the last exit, go to rank 0, which tells everybody how
to go on. What won is kept in the user's cache, by topology and settings.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from dataclasses import asdict, dataclass, field
from datetime import date
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from multiring import _native, cache, tuning
from multiring.planner import Tuned
from multiring.plans import Key, Plans
from multiring.tuning import Heat
from multiring.units import duration, size

if TYPE_CHECKING:
    from multiring.comm import Communicator
    from multiring.engine import Part
    from multiring.plan import Plan

METHOD = 5
"""Counts the ways in which plans were measured: what another found is not used."""

BARRIERS = 4
"""By which the clocks of hosts are compared."""

_log = logging.getLogger("multiring")


@dataclass
class Trial:
    """A call that tries a plan: when this rank entered it and left it, in seconds of its own clock."""

    handle: int
    entered: float = 0.0
    left: float = inf
    work: Part | None = None

    def __enter__(self) -> None:
        self.entered = time.monotonic()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.left = time.monotonic()

    def started(self, work: Part) -> Part:
        """The call goes on without the caller."""
        self.work = work
        return work

    def complete(self) -> None:
        """Wait until it has; raises what the call raises."""
        if self.work is not None:
            self.work.wait()
            self.left = self.work.ended
            self.work = None


@dataclass
class Course:
    """A heat that is being run, its plans by id, and the calls so far."""

    heat: Heat
    plans: dict[str, Plan]
    trials: list[Trial] = field(default_factory=list)


class Tuner:
    """The trials of one communicator. All members make it together, and ask it for the same calls in the same order."""

    def __init__(self, communicator: Communicator, plans: Plans) -> None:
        self._communicator = communicator
        self._plans = plans
        self._courses: dict[Key, Course] = {}
        self._settled = plans.tried = set[Key]()
        self._file = _file(plans, communicator)
        kept = communicator.aside.broadcast_object(read(self._file) if communicator.rank == 0 else None)
        for key, tuned in kept.items():
            plans.settle(key, tuned)

    def trial(self, collective: int, nbytes: int, root: int, timeout: float) -> Trial | None:
        """What the next call for a buffer of ``nbytes`` tries; None if it is to use the plan that is settled."""
        key = collective, nbytes.bit_length(), root
        if nbytes == 0 or key in self._settled:
            return None
        course = self._courses.get(key) or self._begin(key, nbytes)
        if course and len(course.trials) == course.heat.calls:
            course = self._conclude(key, course)
        if course is None:
            self._settled.add(key)
            self._courses.pop(key, None)
            return None
        plan = course.heat.plan(len(course.trials))
        course.trials.append(Trial(self._plans.install(course.plans[plan], timeout)))
        return course.trials[-1]

    def _begin(self, key: Key, nbytes: int) -> Course | None:
        collective, _, root = key
        choice = self._plans.choose(_native.COLLECTIVES[collective], nbytes, root)
        if choice.plan.collective not in tuning.TRIED or choice.tuned:
            return None
        found = [choice.plan_of(candidate) for candidate in tuning.contestants(choice)]
        plans = {plan.id: plan for plan in found}
        if len(plans) == 1:
            return None
        self._courses[key] = Course(tuning.opening(list(plans), choice.chosen.prediction.seconds), plans)
        return self._courses[key]

    def _conclude(self, key: Key, course: Course) -> Course | None:
        """The course of the next heat, or None when the plan is settled."""
        seconds = self._seconds(course.trials)
        first = self._communicator.rank == 0
        verdict = tuning.after(course.heat, seconds, str(date.today())) if first else None
        verdict = self._communicator.aside.broadcast_object(verdict)
        if isinstance(verdict, Heat):
            self._courses[key] = Course(verdict, course.plans)
            return self._courses[key]
        self._plans.settle(key, verdict)
        if first:
            self._keep(key, course.heat.plans[0], verdict)
        return None

    def _seconds(self, trials: list[Trial]) -> list[float]:
        """From the last entry to the last exit of each; on rank 0."""
        for trial in trials:
            trial.complete()
        stamps = np.array([[trial.entered, trial.left] for trial in trials]) + self._offset()
        self._communicator.aside.reduce(stamps, "max")
        found: list[float] = (stamps[:, 1] - stamps[:, 0]).tolist()
        return found

    def _offset(self) -> float:
        """Of this rank's clock from that of rank 0; the ranks of a host have one clock."""
        if len(set(self._communicator.hosts)) == 1:
            return 0.0
        stamps = np.empty((BARRIERS, 2))
        for row in stamps:
            row[0] = time.monotonic()
            self._communicator.aside.barrier()
            row[1] = time.monotonic()
        reference = stamps.copy()
        self._communicator.aside.broadcast(reference)
        return tuning.offset(stamps, reference)

    def _keep(self, key: Key, chosen: str, tuned: Tuned) -> None:
        collective, bits, _ = key
        _log.info(
            "tuned %s from %s over %d ranks: plan %s takes %s, the planner's choice %s %s",
            _native.COLLECTIVES[collective],
            size(1 << bits - 1),
            self._communicator.size,
            tuned.plan,
            duration(tuned.seconds[tuned.plan]),
            chosen,
            duration(tuned.seconds[chosen]),
        )
        try:
            cache.write(self._file, text({**read(self._file), key: tuned}))
        except OSError as error:
            _log.warning("the plan found by tuning cannot be kept in %s: %s", self._file, error.strerror)


def _file(plans: Plans, communicator: Communicator) -> Path:
    """Where the results for this topology are kept, with the settings that times depend on."""
    world = communicator.world
    wire, reproducible, streams = world.settings.wire, world.settings.reproducible, world.settings.streams
    about = repr((METHOD, plans.topology, wire, reproducible, streams, world.speeds, len(os.sched_getaffinity(0))))
    identity = hashlib.sha256(about.encode()).hexdigest()[:12]
    return cache.folder("plans") / f"{cache.plain(communicator.hosts[0])}-{communicator.size}-ranks-{identity}.json"


def text(found: dict[Key, Tuned]) -> str:
    """What a file says of plans that were tried."""
    rows = [
        {
            "collective": _native.COLLECTIVES[collective],
            "bytes": 1 << bits - 1,
            "root": root,
            **asdict(tuned),
        }
        for (collective, bits, root), tuned in sorted(found.items())
    ]
    about = "The fastest plans by size class, with the seconds of those tried. Remove the file to have them tried anew."
    return json.dumps({"about": about, "tuned": rows}, indent=1) + "\n"


def read(file: Path) -> dict[Key, Tuned]:
    """The reverse of `text`; nothing if there is no such file, nor if it is spoilt: that is logged."""
    try:
        rows: list[dict[str, Any]] = json.loads(file.read_text())["tuned"]
        return {_key(row): _tuned(row) for row in rows}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        _log.warning("what tuning found cannot be read from %s (%r): remove it; plans are tried anew", file, error)
        return {}


def _tuned(row: dict[str, Any]) -> Tuned:
    seconds = {str(plan): float(taken) for plan, taken in row["seconds"].items()}
    if row["plan"] not in seconds:
        raise LookupError(f"plan {row['plan']} has no seconds")
    return Tuned(row["plan"], seconds, str(row["day"]))


def _key(row: dict[str, Any]) -> Key:
    return _native.COLLECTIVES.index(row["collective"]), int(row["bytes"]).bit_length(), int(row["root"])
