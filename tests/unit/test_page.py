"""The page about a job or a simulation: well formed, complete, and without a reference to anything outside."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from commands import multiring
from topologies import CORE, card, nested
from typer.testing import CliRunner, Result

from multiring.cli import report
from multiring.files import write_text
from multiring.pages import page
from multiring.planning import planner
from multiring.planning.choice import Measured
from multiring.planning.topology import Topology
from multiring.runtime import trace
from multiring.simulate.machines import machine
from multiring.simulate.models import MODELS
from multiring.simulate.recording import buckets
from multiring.simulate.training import BUCKET_BYTES

MB = 1 << 20

JOB = """
import sys
import numpy as np
import multiring as mr

mr.init()
for _ in range(3):
    mr.all_reduce(np.ones(300_000, np.float32))
mr.broadcast(np.ones(10, np.float32), root=1)
mr.report(sys.argv[1], "a <job>")
mr.shutdown()
"""


def two_racks() -> Topology:
    return nested([[2, 2], [2, 2]], [card(200), card(400), CORE])


def parsed(text: str) -> ElementTree.Element:
    """The page as a tree: it is XML too."""
    body = text.removeprefix("<!DOCTYPE html>\n")
    # Style sheets and namespaces are the only addresses that may be there, and neither is fetched.
    assert re.findall(r"(?:src|href|url|@import)\s*[=(]", body) == []
    assert set(re.findall(r"https?://[^\"' ]+", body)) <= {"http://www.w3.org/2000/svg"}
    return ElementTree.fromstring(body)


def words(root: ElementTree.Element) -> str:
    return " ".join(root.itertext())


def reported(file: Path, *options: str) -> Result:
    """The same for `multiring report`, in this process."""
    app = typer.Typer(rich_markup_mode=None)
    report.register(app)
    return CliRunner().invoke(app, [str(file), *options])


def test_a_job_has_its_tree_its_plans_and_its_slowest_rank() -> None:
    topology = two_racks()
    choice = replace(planner.choose(topology, "all_reduce", 8 * MB), measured=Measured(4, 32 * MB, 2.0))
    ranks = [page.RankTimes(r, topology.hosts[r], 2.0, 1.5 if r != 3 else 0.1) for r in range(topology.world_size)]
    root = parsed(page.of_job("<eight> & more", topology, [choice], ranks))
    assert root.findtext("body/h1") == (
        f"The others wait for rank 3 on {topology.hosts[3]}: it waited 100 ms in calls, they 1.5 s in the mean"
    )
    shown = words(root)
    assert "<eight> & more" in shown
    assert f"Plan {choice.plan.id}: all_reduce" in shown
    assert "measured   500 ms, mean of 4 calls" in shown
    assert "cut bound" in shown
    tree = next(root.iter("{http://www.w3.org/2000/svg}svg"))
    texts = [text.text for text in tree.iter("{http://www.w3.org/2000/svg}text")]
    for host in dict.fromkeys(topology.hosts):
        assert any(f"host {host}, " in str(text) for text in texts)
    # Every place but the outermost hangs from a line.
    boxes, lines = (len(list(tree.iter("{http://www.w3.org/2000/svg}" + kind))) for kind in ("rect", "line"))
    assert boxes == lines + 1


def test_each_link_has_the_colour_and_the_number_of_its_load() -> None:
    topology = two_racks()
    prediction = planner.choose(topology, "all_reduce", 8 * MB).chosen.prediction
    parts = {load.level: load.seconds / prediction.seconds for load in prediction.links}
    assert parts["rack"] > parts["host"] > parts["rank"]
    drawn = page.tree(topology, prediction)
    for level, alike in (("rack", 2), ("host", 4), ("rank", 4)):  # the ranks of a host are one
        assert drawn.count(f'stroke="{page._heat(parts[level])}"') == alike
        assert drawn.count(f">{100 * parts[level]:.0f} %</text>") == alike
    assert f"the 2 racks&#x27; links are busiest, {100 * parts['rack']:.0f} % of the time" in drawn
    assert " %" not in page.tree(topology)


def test_slow_ranks_are_told_in_words() -> None:
    ranks = [page.RankTimes(r, "a", 2.0, 1.0 + r / 100) for r in range(4)]
    slow = ["rank 3 (host a) kept the others waiting for 7 s: it slept, at train.py:7: x < 8 & y"]
    shown = words(parsed(page.of_job("a job", Topology.flat([4]), [], ranks, slow)))
    assert f"Who waits for whom {slow[0]} time in collectives" in " ".join(shown.split())
    assert "kept the others" not in words(parsed(page.of_job("a job", Topology.flat([4]), [], ranks)))


def test_a_simulation_tells_what_a_timeline_says_of_slow_ranks(tmp_path: Path) -> None:
    timeline, file = tmp_path / "t.json", tmp_path / "page.html"
    slow = [{"ranks": [5], "host": "b", "began": 3.0, "seconds": 7.0, "share": 0.25, "reason": "has no core"}]
    for rank in (4, 5):
        trace.prepare(str(timeline), rank, "b", 0).write([], slow, {"has no core": "train.py:7 in load"})
    options = ["--machine", "minsky", "--hosts", "2", "--strategy", "multiring"]
    assert reported(file, *options, "--timeline", str(timeline)).exit_code == 0
    assert (
        "In t.json, rank 5 (host b) kept the others waiting for 1.75 s in 7 s: it was ready to run between collectives "
        "and had no core, most often at train.py:7 in load."
    ) in words(parsed(file.read_text()))
    trace.prepare(str(tmp_path / "none.json"), 0, "a", 0).write([])
    assert reported(file, *options, "--timeline", str(tmp_path / "none.json")).exit_code == 0
    assert "In none.json, no rank kept the others waiting." in words(parsed(file.read_text()))
    refused = reported(file, *options, "--timeline", str(file))
    assert refused.exit_code == 2


def test_ranks_that_wait_alike_are_not_blamed() -> None:
    ranks = [page.RankTimes(r, "a", 2.0, 1.0 + r / 100) for r in range(4)]
    shown = words(parsed(page.of_job("a job", Topology.flat([4]), [], ranks)))
    assert "No rank holds up the others: each waited 1 s to 1.03 s in calls" in shown


def test_links_have_room_in_a_picture_of_many_levels() -> None:
    drawn = page.tree(machine("two-sites").topology(8))
    lengths = [float(b) - float(a) for a, b in re.findall(r'x1="([\d.]+)" y1="[\d.]+" x2="([\d.]+)"', drawn)]
    assert len(lengths) == 2 + 2 + 8 + 8
    assert min(lengths) >= page.SHORTEST_LINK - 0.1
    (width,) = re.findall(r'viewBox="0 0 (\d+)', drawn)
    right = max(float(x) + float(w) for x, w in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="(\d+)"', drawn))
    assert right <= float(width)


def test_colours_go_from_pale_to_dark() -> None:
    found = [page._heat(part) for part in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert (found[0], found[-1]) == ("#fee08b", "#a50026")
    greens = [int(colour[3:5], 16) for colour in found]
    assert greens == sorted(greens, reverse=True)
    assert len(set(greens)) == 5


def test_many_places_are_counted_and_not_drawn() -> None:
    drawn = page.tree(Topology.flat([4] * 100))
    assert f"and {100 - page.SHOWN_PLACES} more" in drawn
    assert drawn.count("<rect") == 1 + 2 * page.SHOWN_PLACES + 1


def test_curves_leave_out_what_is_not_known() -> None:
    drawn = page.curves("efficiency", "hosts", [1, 2, 4], {"ring": [1.0, 0.5, None], "multiring": [1.0, 0.9, 0.8]})
    assert drawn.count("<circle") == 5
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', drawn)]
    assert heights[0] < heights[1]  # 50 % stands lower than 100 %
    for label in ("50.0 % ring", "80.0 % multiring"):
        assert f">{label}</text>" in drawn


def test_a_history_has_places_and_values_to_scale() -> None:
    points = {"training": [(10.0, 4.0), (20.0, 2.0), (40.0, 1.0)], "validation": [(40.0, 3.0)]}
    drawn = page.history("Loss & more", "steps", points)
    assert drawn.startswith("<h2>Loss &amp; more</h2>")
    x, y = ([float(found) for found in re.findall(rf'c{axis}="([\d.]+)"', drawn)] for axis in "xy")
    assert (x[2] - x[1]) / (x[1] - x[0]) == pytest.approx(2, abs=0.01)
    assert (y[1] - y[0]) / (y[2] - y[1]) == pytest.approx(2, abs=0.01)
    assert x[3] == x[2]
    for label in ("1 training", "3 validation"):
        assert f">{label}</text>" in drawn
    many = page.history("Loss", "steps", {"training": [(float(step), 1.0) for step in range(page.MOST_DOTS + 1)]})
    assert "<circle" not in many
    assert len(re.findall(r"[\d.]+,[\d.]+", many)) == page.MOST_DOTS + 1
    assert page.history("Loss", "steps", {"training": []}) == ""


def test_an_answer_and_sections_of_a_job_come_first() -> None:
    ranks = [page.RankTimes(r, "a", 2.0, 1.0 + r / 100) for r in range(4)]
    own = page.paragraph("7 < 8 of 9")
    shown = words(parsed(page.of_job("a job", Topology.flat([4]), [], ranks, answer="top-1 90 %", sections=[own])))
    order = [
        "top-1 90 %",
        "a job",
        "4 ranks on 1 host",
        "7 < 8 of 9",
        "Who waits for whom",
        "No rank holds up",
        "Topology",
    ]
    places = [shown.rindex(each) for each in order]
    assert places == sorted(places)


def test_near_values_fill_the_picture() -> None:
    drawn = page.curves("efficiency", "hosts", [1, 2], {"ring": [0.991, 0.986], "multiring": [0.992, 0.9905]})
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', drawn)]
    assert max(heights) - min(heights) > 200


def test_a_running_job_writes_its_page(tmp_path: Path) -> None:
    program, file = tmp_path / "job.py", tmp_path / "job.html"
    program.write_text(JOB)
    done = multiring("run", "-n", "3", str(program), str(file))
    assert done.returncode == 0, done.stderr
    shown = words(parsed(file.read_text()))
    assert "3 ranks on 1 host " in shown
    assert "mean of 3 calls here of 1.144 MB" in shown
    assert ": broadcast" in shown
    assert "The others wait for rank " in shown or "No rank holds up the others" in shown


def test_a_simulation_is_written(tmp_path: Path) -> None:
    file = tmp_path / "minsky.html"
    options = ["--machine", "minsky", "--hosts", "4", "--strategy", "ring,multiring", "--sweep", "hosts=1..4"]
    done = multiring("report", str(file), *options)
    assert done.returncode == 0, done.stderr
    root = parsed(file.read_text())
    first = re.fullmatch(
        r"(\w+) reaches (9\d\.\d) % efficiency on 4 hosts, (\w+) (9\d\.\d) %", root.findtext("body/h1") or ""
    )
    assert first
    assert {first[1], first[3]} == {"ring", "multiring"}
    assert float(first[2]) >= float(first[4])
    assert [h.text for h in root.iter("h2")].count(first[0]) == 1  # the sweep ends there
    bars = next(root.iter("{http://www.w3.org/2000/svg}svg"))
    lengths = [float(rect.attrib["width"]) for rect in bars.iter("{http://www.w3.org/2000/svg}rect")]
    values = [float(v) for v in re.findall(r"([\d.]+) ms of [\d.]+ ms, efficiency", words(bars))]
    assert lengths[0] / lengths[1] == pytest.approx(values[0] / values[1], rel=0.01)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 2
    assert "16 ranks" in words(root)
    assert "multiring" in words(root)
    cluster, speeds = machine("minsky").topology(4), machine("minsky").speeds()
    recording = MODELS["resnet50"].recording(32, machine("minsky").speed(MODELS["resnet50"]))
    nbytes = max(bucket.nbytes for bucket in buckets(recording, BUCKET_BYTES))
    planned = planner.plan(cluster, "all_reduce", nbytes, speeds=speeds)
    assert planned.id != planner.plan(cluster, "all_reduce", nbytes).id
    assert f"Plan {planned.id}: all_reduce" in words(root)


@pytest.mark.parametrize(
    ("options", "offending"),
    [
        ([], "--machine"),
        (["--machine", "abacus"], "abacus"),
        (["--machine", "minsky", "--sweep", "ranks=2"], "ranks=2"),
        (["--machine", "minsky", "--strategy", "ring,rings"], "'rings'"),
    ],
)
def test_what_cannot_be_reported_is_named(tmp_path: Path, options: list[str], offending: str) -> None:
    refused = reported(tmp_path / "page.html", *options)
    assert refused.exit_code == 2
    assert offending in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_page_is_not_written_through_a_symbolic_link(tmp_path: Path) -> None:
    target, link = tmp_path / "precious", tmp_path / "page.html"
    target.write_text("mine")
    link.symlink_to(target)
    done = reported(link, "--machine", "minsky")
    assert done.exit_code == 2
    assert f"'FILE.html': {link}: it is a symbolic link, to {target}; name the file itself" in done.output
    assert target.read_text() == "mine"


def test_a_file_is_not_written_through_a_symbolic_link(tmp_path: Path) -> None:
    target, link = tmp_path / "precious", tmp_path / "page.html"
    target.write_text("mine")
    link.symlink_to(target)
    with pytest.raises(OSError, match=f"it is a symbolic link, to {target}; name the file itself"):
        write_text(link, "a page")
    assert target.read_text() == "mine"
