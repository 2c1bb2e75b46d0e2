"""``multiring top``: watch a job that runs on this host."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from multiring.cli import output, standing
from multiring.cli.errors import one_line_errors
from multiring.launch import LaunchError
from multiring.launch.watch import ANSWER_SECONDS, JobView, RunningJob, find

EVERY = 1.0
"""Seconds between two pictures."""


def register(app: typer.Typer) -> None:
    app.command("top")(top)


def top(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]",
            help="The process of its launcher, or the name of its program; needed where several jobs run.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what is known once, as JSON.")] = False,
) -> None:
    """Watch a job that `multiring run` started on this host: its ranks, who waits for whom, its links and its output.

    It changes nothing, and ends with the job, or by q. Only the user who started the job may watch it.
    """
    with one_line_errors("top"):
        found = find(job)
        console = output.console()
        is_live = not once and not as_json and console.is_terminal and not console.is_dumb_terminal
        if not is_live:
            _print(found, as_json=as_json)
            if not once and not as_json:
                told = "the output is no terminal that shows pictures: this was one, as by --once"
                typer.echo(f"multiring top: {told}", err=True)
            return
        _watch(found)


def _print(found: RunningJob, *, as_json: bool) -> None:
    try:
        with JobView(found.socket) as view:
            look = view.ask("look")
    except ConnectionRefusedError:
        look = {"kind": "ended", "code": None, "reason": "its launcher has gone"}
    except TimeoutError:
        raise LaunchError(
            f"job {found} does not answer within {ANSWER_SECONDS:g} s: if its launcher is stopped, let it go on "
            f"(kill -CONT {found.process})"
        ) from None
    if as_json:
        ended = look["kind"] == "ended"
        told: dict[str, Any] = {**look, "process": found.process} if ended else standing.described(look)
        typer.echo(json.dumps({"ended": ended, **{name: value for name, value in told.items() if name != "kind"}}))
    elif look["kind"] == "ended":
        typer.echo(_ended(found, look))
    else:
        output.console().print(standing.picture(standing.described(look)))


def _watch(found: RunningJob) -> None:
    """Show pictures until the job ends, or somebody has had enough."""
    console = output.console()
    shown: RenderableType = Text(f"job {found}")
    end = ""
    with (
        _signals(),
        _keys(),
        Live(console=console, screen=True, auto_refresh=False) as live,
        contextlib.suppress(KeyboardInterrupt),
    ):
        for look in _looks(found):
            console.width = output.columns()  # the terminal may have another width by now
            if look is None:
                if _is_enough(0.0):
                    break
                warning = f"the launcher does not answer for {ANSWER_SECONDS:g} s; below is what was seen before"
                live.update(Group(Text(warning, "bold red"), shown), refresh=True)
                continue
            if look["kind"] == "ended":
                end = _ended(found, look)
                break
            shown = standing.picture(standing.described(look), console)
            live.update(shown, refresh=True)
            if _is_enough(EVERY):
                break
    if end:
        console.print(shown)
        typer.echo(end)


def _looks(found: RunningJob) -> Iterator[dict[str, Any] | None]:
    """Yield each report of the launcher; None if it does not answer in time."""
    while True:
        try:
            with JobView(found.socket) as view:
                while True:
                    yield view.ask("look")
        except TimeoutError:  # what comes late on this connection would be taken for what is asked next
            yield None
        except ConnectionRefusedError:
            yield {"kind": "ended", "code": None, "reason": "its launcher has gone"}


def _ended(found: RunningJob, look: dict[str, Any]) -> str:
    code, reason = look["code"], look["reason"]
    told = "" if code is None else f" with exit code {code}"
    return f"job {found} has ended{told}" + (f": {reason}" if reason else "")


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Leave the terminal as it was when this is ended; Ctrl-Z would hand it to the shell as it is."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    handlers: dict[int, Any] = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT), end)
    handlers[signal.SIGTSTP] = signal.SIG_IGN
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Let a key be read when it is pressed, where there is a keyboard."""
    if not _has_keyboard():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _has_keyboard() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()  # None where it was closed


def _is_enough(seconds: float) -> bool:
    """Wait ``seconds`` at most for a q; return True as soon as it is pressed."""
    until = time.monotonic() + seconds
    if not _has_keyboard():
        time.sleep(seconds)
        return False
    while select.select([sys.stdin], [], [], max(until - time.monotonic(), 0.0))[0]:
        pressed = os.read(sys.stdin.fileno(), 1024)
        if not pressed or b"q" in pressed.lower():
            return True
    return False
