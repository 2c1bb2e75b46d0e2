"""The page about a job or a simulation: well formed, complete, and without a reference to anything outside."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from topologies import CORE, card, nested

from multiring import page, planner
from multiring.cli.errors import check_output
from multiring.machines import machine
from multiring.models import MODELS
from multiring.planner import Measured
from multiring.recording import buckets
from multiring.simulate.training import BUCKET_BYTES
from multiring.topology import Topology

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


def multiring(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "multiring", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_a_job_has_its_tree_its_plans_and_its_slowest_rank() -> None:
    topology = two_racks()
    choice = replace(planner.choose(topology, "all_reduce", 8 * MB), measured=Measured(4, 32 * MB, 2.0))
    ranks = [page.Rank(r, topology.hosts[r], 2.0, 1.5 if r != 3 else 0.1) for r in range(topology.world_size)]
    root = parsed(page.of_job("<eight> & more", topology, [choice], ranks))
    assert root.findtext("body/h1") == "<eight> & more"
    shown = words(root)
    assert f"Plan {choice.plan.id}: all_reduce" in shown
    assert "measured   500 ms, mean of 4 calls" in shown
    assert "cut bound" in shown
    assert f"Rank 3 on {topology.hosts[3]} waited least" in shown
    tree = next(root.iter("{http://www.w3.org/2000/svg}svg"))
    texts = [text.text for text in tree.iter("{http://www.w3.org/2000/svg}text")]
    for host in dict.fromkeys(topology.hosts):
        assert any(f"host {host}, " in str(text) for text in texts)
    # Every place but the outermost hangs from a line.
    boxes, lines = (len(list(tree.iter("{http://www.w3.org/2000/svg}" + kind))) for kind in ("rect", "line"))
    assert boxes == lines + 1


def test_links_of_the_busiest_level_stand_out() -> None:
    topology = two_racks()
    links = planner.choose(topology, "all_reduce", 8 * MB).chosen.prediction.links
    assert 'stroke="#c00000"' in page.tree(topology, links)
    assert 'stroke="#c00000"' not in page.tree(topology)


def test_many_places_are_counted_and_not_drawn() -> None:
    drawn = page.tree(Topology.flat([4] * 100))
    assert f"and {100 - page.SHOWN_PLACES} more" in drawn
    assert drawn.count("<rect") == 1 + page.SHOWN_PLACES + 1


def test_curves_leave_out_what_is_not_known() -> None:
    drawn = page.curves("efficiency", "hosts", [1, 2, 4], {"ring": [1.0, 0.5, None], "multiring": [1.0, 0.9, 0.8]})
    assert drawn.count("<circle") == 5
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', drawn)]
    assert heights[0] < heights[1]  # 50 % stands lower than 100 %


def test_a_running_job_writes_its_page(tmp_path: Path) -> None:
    program, file = tmp_path / "job.py", tmp_path / "job.html"
    program.write_text(JOB)
    done = multiring("run", "-n", "3", str(program), str(file))
    assert done.returncode == 0, done.stderr
    shown = words(parsed(file.read_text()))
    assert "3 ranks on 1 host " in shown
    assert "mean of 3 calls here of 1.144 MB" in shown
    assert ": broadcast" in shown
    assert "waited least" in shown


def test_a_simulation_is_written(tmp_path: Path) -> None:
    file = tmp_path / "minsky.html"
    options = ["--machine", "minsky", "--hosts", "4", "--strategy", "ring,multiring", "--sweep", "hosts=1..4"]
    done = multiring("report", str(file), *options)
    assert done.returncode == 0, done.stderr
    root = parsed(file.read_text())
    assert root.findtext("body/h1") == "resnet50 on minsky"
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
    refused = multiring("report", str(tmp_path / "page.html"), *options)
    assert refused.returncode == 2
    assert offending in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_page_is_not_written_through_a_symbolic_link(tmp_path: Path) -> None:
    target, link = tmp_path / "precious", tmp_path / "page.html"
    target.write_text("mine")
    link.symlink_to(target)
    with pytest.raises(ValueError, match=r"page\.html: it is a symbolic link, to .*precious; name the file itself$"):
        check_output("FILE.html", link)
    assert target.read_text() == "mine"
