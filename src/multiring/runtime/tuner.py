"""Tries plans on the calls that a job makes anyway, and keeps the fastest (``tuning`` decides which).

The ranks agree without talking on what each call tries. After a rung the next call waits for those of the rung to
complete on all ranks; then their times, from the last entry to the last exit, go to rank 0, which tells everybody how
to go on. What won is kept in the user's cache, by topology and settings.

A rung is handed as a whole to what makes the calls, native code where it can be: where ranks share cores, steps of
Python around each call would change which plan is the fastest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from multiring import _native, cache
from multiring.errors import CollectiveTimeout, MultiringError
from multiring.files import read_text
from multiring.planning.choice import Tuned
from multiring.planning.plan import Plan
from multiring.runtime import clocks, tuning
from multiring.runtime.buffers import writable
from multiring.runtime.clocks import GroupCalls
from multiring.runtime.plans import Key, Plans
from multiring.runtime.tuning import Rung
from multiring.runtime.work import seconds_until
from multiring.runtime.world import World
from multiring.units import duration, size

METHOD = 6
"""Version of the way in which plans are measured: results of other versions are not used."""

_log = logging.getLogger("multiring")


@dataclass
class TrialRun:
    """A rung that is being run, its plans by id, and the calls."""

    rung: Rung
    plans: dict[str, Plan]
    trials: _native.Trials


class Tuner:
    """The trials of one group. All members make it together, and ask it for the same calls in the same order."""

    def __init__(self, world: World, group: GroupCalls, plans: Plans) -> None:
        """``group`` makes the tuner's own calls; ``plans`` are those of the group that is tuned."""
        self._world, self._group = world, group
        self._plans = plans
        self._trial_runs: dict[Key, TrialRun] = {}
        self._settled: set[Key] = set()
        self._file = _file(plans, world, group)
        kept = group.broadcast_object(read(self._file) if group.rank == 0 else None)
        for key, tuned in kept.items():
            plans.settle(key, tuned)

    def trials(self, collective: int, nbytes: int, root: int, timeout: float) -> _native.Trials | None:
        """Return the trials of this call and later ones for a buffer of ``nbytes``, not all of them taken; None if they
        use the plan that is settled."""
        trial_run = self._trial_run(collective, nbytes, root, timeout)
        return trial_run.trials if trial_run else None

    def is_settled(self, collective: int, nbytes: int, root: int = 0) -> bool:
        """True if all has been tried for a buffer of ``nbytes``."""
        return nbytes == 0 or (collective, nbytes.bit_length(), root) in self._settled

    def _trial_run(self, collective: int, nbytes: int, root: int, timeout: float) -> TrialRun | None:
        """The rung of the next call, not all of whose calls are taken."""
        key = collective, nbytes.bit_length(), root
        if self.is_settled(collective, nbytes, root):
            return None
        trial_run = self._trial_runs.get(key) or self._begin(key, nbytes, timeout)
        if trial_run and trial_run.trials.over:
            trial_run = self._conclude(key, trial_run, timeout)
        if trial_run is None:
            self._settled.add(key)
            self._trial_runs.pop(key, None)
        return trial_run

    def _begin(self, key: Key, nbytes: int, timeout: float) -> TrialRun | None:
        collective, _, root = key
        choice = self._plans.choose(_native.COLLECTIVES[collective], nbytes, root)
        if choice.plan.collective not in tuning.TRIED or choice.tuned:
            return None
        found = [candidate.plan for candidate in tuning.candidates_to_try(choice)]
        plans = {plan.id: plan for plan in found}
        if len(plans) == 1:
            return None
        return self._run(key, tuning.first_rung(list(plans), choice.chosen.prediction.seconds), plans, timeout)

    def _run(self, key: Key, rung: Rung, plans: dict[str, Plan], timeout: float) -> TrialRun:
        """Make the calls that come next this rung's; the first of them has ``timeout`` seconds."""
        handles = {plan: self._plans.install(plans[plan], timeout) for plan in rung.plans}
        trials = _native.Trials([handles[rung.plan(call)] for call in range(rung.calls)])
        self._trial_runs[key] = TrialRun(rung, plans, trials)
        return self._trial_runs[key]

    def _conclude(self, key: Key, trial_run: TrialRun, timeout: float) -> TrialRun | None:
        """The calls of the next rung, or None when the plan is settled."""
        try:
            verdict = self._verdict(trial_run, time.monotonic() + timeout)
        except MultiringError as error:
            self._explain(error, _native.COLLECTIVES[key[0]])
            raise
        if isinstance(verdict, Rung):
            return self._run(key, verdict, trial_run.plans, timeout)
        self._plans.settle(key, verdict)
        if self._group.rank == 0:
            self._keep(key, trial_run.rung.plans[0], verdict)
        return None

    def _explain(self, error: MultiringError, collective: str) -> None:
        """Tell the caller, who knows nothing of the calls that this makes, what it was that failed."""
        what = str(error).removesuffix("; the work goes on")  # it does not: the job has failed
        error.args = (f"{collective} waited for the end of the trials of its plans: {what}",)
        error.collective, error.number = collective, -1
        if isinstance(error, CollectiveTimeout):  # the engine has not heard of one that a work raised
            rank = error.rank if error.rank >= 0 else self._world.rank
            self._world.engine.fail("CollectiveTimeout", rank, str(error))

    def _verdict(self, trial_run: TrialRun, until: float) -> Rung | Tuned:
        """Return the next step after a rung, as rank 0 decides once all ranks have completed its calls."""
        trial_run.trials.complete(seconds_until(until))
        seconds = self._seconds(np.array(trial_run.trials.stamps), until)
        first = self._group.rank == 0
        mine = tuning.after(trial_run.rung, seconds, str(date.today())) if first else None
        verdict: Rung | Tuned = self._group.broadcast_object(mine, timeout=seconds_until(until))
        return verdict

    def _seconds(self, stamps: np.ndarray, until: float) -> list[float]:
        """Seconds from the last entry to the last exit of each call, on rank 0. ``stamps`` has a row for each call: the
        times at which this rank entered it and left it."""
        stamps = stamps + clocks.offset_by_barriers(self._group, until)
        self._group.run("reduce", writable(stamps), "max", timeout=seconds_until(until))
        found: list[float] = (stamps[:, 1] - stamps[:, 0]).tolist()
        return found

    def _keep(self, key: Key, chosen: str, tuned: Tuned) -> None:
        collective, bits, _ = key
        _log.info(
            "tuned %s from %s over %d ranks: plan %s takes %s, the planner's choice %s %s",
            _native.COLLECTIVES[collective],
            size(1 << bits - 1),
            self._group.size,
            tuned.plan,
            duration(tuned.seconds[tuned.plan]),
            chosen,
            duration(tuned.seconds[chosen]),
        )
        try:
            cache.write(self._file, text({**read(self._file), key: tuned}))
        except OSError as error:
            _log.warning("the plan found by tuning cannot be kept in %s: %s", self._file, error.strerror)


def _file(plans: Plans, world: World, group: GroupCalls) -> Path:
    """Path of the results for this topology, with the settings that times depend on."""
    wire, reproducible, streams = world.settings.wire, world.settings.reproducible, world.links and world.links.streams
    about = repr((METHOD, plans.topology, wire, reproducible, streams, world.speeds, len(os.sched_getaffinity(0))))
    identity = hashlib.sha256(about.encode()).hexdigest()[:12]
    return cache.folder("plans") / f"{cache.plain(group.hosts[0])}-{group.size}-ranks-{identity}.json"


def text(found: dict[Key, Tuned]) -> str:
    """Return the text of a file about plans that were tried."""
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
        rows: list[dict[str, Any]] = json.loads(read_text(file))["tuned"]
        return {_key(row): _tuned(row) for row in rows}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        # An error's repr may hold the whole file.
        what = f"{type(error).__name__}: {shorten(str(error), 100)}"
        _log.warning("what tuning found cannot be read from %s (%s): remove it; plans are tried anew", file, what)
        return {}


def _tuned(row: dict[str, Any]) -> Tuned:
    seconds = {str(plan): float(taken) for plan, taken in row["seconds"].items()}
    if row["plan"] not in seconds:
        raise LookupError(f"plan {row['plan']!r} has no seconds")
    return Tuned(row["plan"], seconds, str(row["day"]))


def _key(row: dict[str, Any]) -> Key:
    return _native.COLLECTIVES.index(row["collective"]), int(row["bytes"]).bit_length(), int(row["root"])
