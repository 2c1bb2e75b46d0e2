"""The figures of docs/published-results.md and docs/scaling.md are those that the commands on the pages give.

Tables are read with the commands beside them; the points that take longest (thousands of hosts) are left out, and
figures within sentences are found by the words around them.
"""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from multiring.cli import simulate

DOCS = Path(__file__).parents[2] / "docs"
PUBLISHED, SCALING = ((DOCS / f"{name}.md").read_text() for name in ("published-results", "scaling"))
BLOCKS = [
    block.replace("\\\n", " ") for block in re.findall(r"^```\n(multiring simulate .*?)^```$", SCALING, re.M | re.S)
]
"""Code blocks of scaling.md, each with one command a line."""

_ROUNDING = 0.051
"""Per cent and milliseconds of the last digit shown."""


@cache
def points(command: str) -> list[dict[str, Any]]:
    """Points that a page's command computes, without its picture."""
    app = typer.Typer()
    simulate.register(app)
    options = shlex.split(re.sub(r" --plot \S+", "", command).removeprefix("multiring simulate "))
    shown = CliRunner().invoke(app, [*options, "--json"])
    assert shown.exit_code == 0, f"{command}\n{shown.output}"
    found: list[dict[str, Any]] = json.loads(shown.stdout)
    return found


def results(command: str) -> dict[str, dict[str, Any]]:
    """Return the result of each strategy at a command's only point."""
    (point,) = points(command)
    return {result["strategy"]: result for result in point["results"]}


def efficiency(command: str) -> float:
    """Per cent, of the only strategy."""
    (result,) = results(command).values()
    return 100 * float(result["efficiency"])


def said(page: str, words: str) -> tuple[float, ...]:
    """The numbers in a sentence of a page: ``#`` stands for one."""
    pattern = re.escape(words).replace(r"\#", r"(\d[\d.,]*\d|\d)").replace(r"\ ", r"\s+")
    (found,) = re.findall(pattern, page)
    return tuple(float(number.replace(",", "")) for number in ([found] if isinstance(found, str) else found))


def table(page: str, first_heading: str) -> list[list[str]]:
    """Cells below the headings of the table whose first heading is given."""
    _, _, rest = page.partition(f"\n| {first_heading} |".replace("  ", " "))
    rows = rest.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def number(cell: str) -> float:
    return float(re.sub(r"[ ,%*+]|ms|ranks", "", cell))


# ---- published results ----------------------------------------------------------------------------------------------

ROWS = {int(cells[0].partition(".")[0]): cells for cells in table(PUBLISHED, "")[:12]}
COMMANDS = dict(re.findall(r"^\| (\d+) \| `([^`]*)` \|$", PUBLISHED, re.M))


def test_every_row_has_its_command() -> None:
    assert [str(row) for row in ROWS] == list(COMMANDS) == [str(row) for row in range(1, 13)]


@pytest.mark.parametrize("row", [row for row in ROWS if row != 7])  # that of 2,048 ranks is as row 6
def test_a_published_row(row: int) -> None:
    _, published, network, whole, difference = ROWS[row]
    assert efficiency(f"{COMMANDS[str(row)]} --spread 0") == pytest.approx(number(network), abs=_ROUNDING)
    if row != 6:  # the longest; the spread does nothing else to it
        assert efficiency(COMMANDS[str(row)]) == pytest.approx(number(whole), abs=_ROUNDING)
    nearest = max(map(float, re.findall(r"[\d.]+", published)))
    assert number(difference.replace("-", "")) * (-1) ** ("-" in difference) == pytest.approx(
        number(whole) - nearest, abs=_ROUNDING
    )


def test_how_many_rows_are_near() -> None:
    near = sum(abs(float(cells[-1].strip("*"))) <= 4 for cells in ROWS.values())
    assert ["Six", "Seven", "Eight"][near - 6] + " of twelve are within 4 points" in PUBLISHED


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        ("3", "--hosts 1", "(`--hosts 1`, # %)"),
        ("1", "--no-overlap", "With none overlapped (`--no-overlap`) row 1 comes to # %"),
        ("2", "--no-overlap", "the bytes for as long a computation, to # %"),
        ("8", "--hosts 544", "the same command with `--hosts 544` gives # %"),
    ],
)
def test_a_figure_beside_a_row(row: str, options: str, words: str) -> None:
    """The last of two equal options counts."""
    (figure,) = said(PUBLISHED, words)
    assert efficiency(f"{COMMANDS[row]} {options}") == pytest.approx(figure, abs=_ROUNDING)


def test_the_rows_without_the_speed_of_the_page() -> None:
    figures = said(PUBLISHED, "the rows come to # and # %")
    for row, figure in zip(("11", "12"), figures, strict=True):
        slower = COMMANDS[row].replace("--speed 214 ", "")
        assert efficiency(slower) == pytest.approx(figure, abs=_ROUNDING)


def test_rings_of_given_sizes_beside_one_ring() -> None:
    one, several = said(PUBLISHED, "one ring of 192 exposes # ms and rings of 4, 6 and 8 expose # ms")
    shown = results("--machine minsky --hosts 48 --no-overlap --spread 0 --strategy ring,multiring:4x6x8")
    assert 1e3 * shown["ring"]["exposed"] == pytest.approx(one, abs=_ROUNDING)
    assert 1e3 * shown["multiring:4x6x8"]["exposed"] == pytest.approx(several, abs=_ROUNDING)


# ---- scaling --------------------------------------------------------------------------------------------------------


def block(words: str) -> str:
    """The first command of the only block that has some words."""
    (found,) = (each for each in BLOCKS if words in each)
    return found.splitlines()[0]


@pytest.mark.parametrize("hosts", [1, 4, 16, 64, 1280])
def test_a_row_of_the_table_of_hosts(hosts: int) -> None:
    command = block("--machine dgx1")
    _, ranks, *cells = next(cells for cells in table(SCALING, "hosts of 8 GPUs") if number(cells[0]) == hosts)
    assert number(ranks) == 8 * hosts
    names = re.findall(r"--strategy (\S+)", command)[0].split(",")
    if hosts > 1000:
        names, cells = names[-1:], cells[-1:]
    found = results(re.sub(r"--sweep \S+ +--strategy \S+", f"--hosts {hosts} --strategy {','.join(names)}", command))
    for name, cell in zip(names, cells, strict=True):
        assert 100 * found[name]["efficiency"] == pytest.approx(number(cell), abs=_ROUNDING), name


def test_one_point_of_the_table_of_given_rings() -> None:
    (common,) = re.findall(r"^\| `([^`]*)` \| exposed \|", SCALING, re.M)
    (options, exposed, percent), *_ = table(SCALING, f"`{common}`")
    (result,) = results(f"{common} {options.strip('`')}").values()
    assert 1e3 * result["exposed"] == pytest.approx(number(exposed), abs=0.0051)
    assert 100 * result["efficiency"] == pytest.approx(number(percent), abs=_ROUNDING)


@pytest.mark.parametrize("column", [1, 2])
def test_the_table_of_what_to_buy(column: int, tmp_path: Path) -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```$", SCALING, re.M | re.S)
    if column == 2:
        text = text.replace('links.host = { rate = "10 Gbit/s"', 'links.host = { rate = "25 Gbit/s"')
    (tmp_path / "racks.toml").write_text(text)
    names = "ring,server,multiring" if column == 1 else "multiring"  # the others take twice as long
    command = re.sub(r"--strategy \S+", f"--strategy {names}", block("--topology racks.toml"))
    found = results(command.replace("racks.toml", str(tmp_path / "racks.toml")))
    rows = {cells[0]: number(cells[column]) for cells in table(SCALING, "") if cells[0] in names.split(",")}
    assert {name: 100 * each["efficiency"] for name, each in found.items()} == pytest.approx(rows, abs=_ROUNDING)


def test_the_sentences_about_a_fast_network() -> None:
    command = re.sub(
        r"--sweep \S+ +--strategy \S+", "--sweep hosts=8,64,256 --strategy ring,multiring", block("minsky")
    )
    lost = [
        100 * (several["efficiency"] - ring["efficiency"])
        for ring, several in (point["results"] for point in points(command))
    ]
    middle, last = said(SCALING, "at 64 its efficiency is # points below that of several dimensions, at 256 it is #")
    assert lost[0] < 0.5
    assert lost[1] == pytest.approx(middle, abs=_ROUNDING)
    assert lost[2] == pytest.approx(last, abs=0.51)
    (busy,) = said(SCALING, "The busiest card is # % busy with ResNet-50 on 64 hosts")
    planned = points(command)[1]["results"][1]
    assert 100 * planned["busiest"]["seconds"] / planned["seconds"] == pytest.approx(busy, abs=0.51)


def test_the_sentences_about_a_slow_network() -> None:
    at = r"--sweep \S+ +--strategy \S+"
    shown = points(re.sub(at, "--sweep hosts=1,2,64 --strategy ring,multiring", block("commodity")))
    from_one, to_two = said(SCALING, "the step from one host to two costs most: # to # %")
    assert 100 * shown[0]["results"][1]["efficiency"] == pytest.approx(from_one, abs=0.51)
    assert 100 * shown[1]["results"][1]["efficiency"] == pytest.approx(to_two, abs=0.51)
    (lost,) = said(SCALING, "and still # % are lost")
    assert 100 - 100 * shown[2]["results"][1]["efficiency"] == pytest.approx(lost, abs=0.51)
    (whole,) = said(SCALING, "Without overlap the loss is # % at 64 hosts")
    apart = results(re.sub(at, "--hosts 64 --no-overlap --strategy ring,multiring", block("commodity")))
    for result in apart.values():
        assert 100 - 100 * result["efficiency"] == pytest.approx(whole, abs=0.51)
