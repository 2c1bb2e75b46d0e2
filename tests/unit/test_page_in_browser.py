"""The page of `multiring report` in a real browser: what it shows, where it was laid out, and what it asks for."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from browser import CHROMIUM, opened, table_of
from topologies import CORE, card
from typer.testing import CliRunner

from multiring.cli import report
from multiring.pages import page
from multiring.planning import planner
from multiring.planning.choice import Measured
from multiring.planning.topology import LEVELS, Place, Topology, ranks_in_host
from multiring.simulate.recording import Gradient, Recording, save

MB = 1 << 20

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")


def test_a_job(tmp_path: Path) -> None:
    name = "ip-10-0-{}.eu-west-1.compute.internal"
    hosts = [Place(name.format(h), card(400), ranks_in_host([2 * h, 2 * h + 1], CORE)) for h in range(4)]
    racks = [Place(f"rack{r}", card(200), tuple(hosts[2 * r : 2 * r + 2])) for r in range(2)]
    topology = Topology(LEVELS[:3], tuple(racks))
    choice = replace(planner.choose(topology, "all_reduce", 8 * MB), measured=Measured(4, 32 * MB, 2.0))
    ranks = [page.RankTimes(r, topology.hosts[r], 2.0, 0.1 if r == 3 else 1.5) for r in range(8)]
    file = tmp_path / "job.html"
    file.write_text(page.of_job("8 < 9 & <b>more</b>", topology, [choice], ranks))
    seen = opened(file, tmp_path / "profile")
    assert seen["title"] == "8 < 9 & <b>more</b>"
    assert seen["headings"][0].startswith(f"The others wait for rank 3 on {name.format(1)}: it waited 100 ms")
    assert f"Plan {choice.plan.id}: all_reduce" in seen["headings"]
    assert [row[1:] for row in table_of(seen, "time in collectives")][4] == [name.format(1), "2 s", "100 ms"]
    assert len(table_of(seen, "phases")) == 1 + len(choice.plan.phases)
    (tree,) = seen["pictures"]
    assert len(tree["boxes"]) == 1 + 2 + 4 + 4
    assert sorted(Counter(tree["links"]).values()) == [2, 4, 4]  # uplinks, cards and ranks are not equally busy
    loads = [text for text, _ in tree["texts"] if re.fullmatch(r"\d+ %", text)]
    assert sorted(Counter(loads).values()) == [2, 4, 4]
    for text, (left, _, right, _) in tree["texts"]:
        is_inside = any(box[0] <= left and right <= box[2] for box in tree["boxes"])
        assert is_inside != (text in loads), f"{text} does not fit its box"


def test_a_simulation(tmp_path: Path) -> None:
    file = tmp_path / "minsky.html"
    app = typer.Typer()
    report.register(app)
    options = ["--machine", "minsky", "--hosts", "4", "--strategy", "ring,halving,multiring", "--sweep", "hosts=1..8"]
    written = CliRunner().invoke(app, [str(file), *options])
    assert written.exit_code == 0, written.output
    seen = opened(file, tmp_path / "profile")
    assert seen["title"] == "resnet50 on minsky"
    assert re.match(r"multiring reaches 9\d\.\d % efficiency on 4 hosts, \w+ 9\d\.\d %$", seen["headings"][0])
    rows = table_of(seen, "a training step by each strategy")
    assert [row[0] for row in rows] == ["strategy", "ring", "halving", "multiring"]
    assert all(90 < float(row[3].rstrip("%")) < 100 for row in rows[1:])
    bars, curves, tree = seen["pictures"]
    assert len(bars["boxes"]) == 3
    assert len(tree["boxes"]) == 1 + 4 + 4
    assert list(Counter(tree["links"]).values()) == [4, 4]  # the cards are alike, and the ranks
    assert curves["curves"] == 3
    texts = [text for text, _ in curves["texts"]]
    assert {"1", "2", "4", "8", "hosts", "98 %"} <= set(texts)
    for name in ("ring", "halving", "multiring"):
        assert any(re.fullmatch(rf"9\d\.\d % {name}", text) for text in texts)
    labels = sorted(place[1] for text, place in curves["texts"] if re.fullmatch(r"9\d\.\d % \w+", text))
    assert all(below - above > 10 for above, below in pairwise(labels))


def test_long_names_and_notes_leave_the_page_as_wide_as_the_window(tmp_path: Path) -> None:
    hosts = ", ".join(
        f'{{ name = "h{i}-{"x" * 60}", ranks = {1 + i % 2}, rate = "{1 + i % 5} Gbit/s" }}' for i in range(30)
    )
    (tmp_path / "cluster.toml").write_text(f'host = [{{ name = "<i>a&b</i>", rate = "1 Gbit/s" }}, {hosts}]')
    save(Recording("m" * 300, 0.1, (Gradient(1 << 20, 0.1),)), tmp_path / "job.json")
    file = tmp_path / "page.html"
    app = typer.Typer()
    report.register(app)
    files = ["--topology", str(tmp_path / "cluster.toml"), "--job", str(tmp_path / "job.json")]
    written = CliRunner().invoke(app, [str(file), *files, "--strategy", "torus,async-server,multiring"])
    assert written.exit_code == 0, written.output
    rows = {row[0]: row for row in table_of(opened(file, tmp_path / "profile"), "a training step by each strategy")}
    assert rows["async-server"][-1].endswith("is not as <i>a&b</i>")
    assert "host <i>a&b</i>" in rows["multiring"][-1]
