"""The site that `make docs` builds: its links, its reference, and that it asks nobody for anything."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import multiring

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium")

pytestmark = [
    pytest.mark.skipif(find_spec("zensical") is None, reason="zensical is not installed: make docs"),
    pytest.mark.timeout(300),
]

LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "use": "href"}
"""The attribute by which an element makes a browser fetch something."""


class Page(HTMLParser):
    """Links of a page, files that it fetches, and anchors that links may name."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}
        if tag == "a" and (target := given.get("href")):
            self.links.append(target)
        if tag in LOADS and (target := given.get(LOADS[tag])):
            self.loads.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "tools" / "build_site.py"), str(directory)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return directory / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in sorted(site.rglob("*.html")) if file.name != "404.html"}


def is_outside(target: str) -> bool:
    return re.match(r"(?:[a-z]+:)?//|mailto:", target) is not None


def led_to(file: Path, link: str) -> tuple[Path, str]:
    """The file and the anchor that a link on a page leads to."""
    path, _, anchor = link.partition("#")
    return (file.parent / unquote(path)).resolve() if path else file, unquote(anchor)


def test_every_link_leads_somewhere(pages: dict[Path, Page]) -> None:
    assert sum(len(page.links) for page in pages.values()) > 3000
    broken = []
    for file, page in pages.items():
        for link in page.links:
            if is_outside(link):
                continue
            target, anchor = led_to(file, link)
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].anchors):
                broken.append(f"{file.name}: {link}")
    assert broken == []


def test_every_page_is_two_clicks_from_the_front_page(site: Path, pages: dict[Path, Page]) -> None:
    reached = {site / "index.html"}
    for _ in range(2):
        reached |= {led_to(file, link)[0] for file in reached & pages.keys() for link in pages[file].links}
    assert sorted(str(file.relative_to(site)) for file in pages.keys() - reached) == []


def test_nothing_is_fetched_from_outside(site: Path, pages: dict[Path, Page]) -> None:
    assert [
        f"{file.name}: {target}" for file, page in pages.items() for target in page.loads if is_outside(target)
    ] == []
    sheets = "\n".join(file.read_text() for file in site.rglob("*.css"))
    assert re.findall(r"@import[^;]*|url\(\s*['\"]?(?:[a-z]+:)?//[^)]*", sheets) == []


def test_the_four_kinds_of_pages_are_apart(site: Path) -> None:
    navigation = re.findall(
        r'<nav class="md-nav md-nav--primary".*?</nav>\s*</div>', (site / "index.html").read_text(), re.S
    )
    text = re.sub(r"<[^>]*>", "\n", navigation[0])
    kinds = [
        line.strip() for line in text.splitlines() if line.strip() in {"Tutorial", "How to", "Reference", "Explanation"}
    ]
    assert list(dict.fromkeys(kinds)) == ["Tutorial", "How to", "Reference", "Explanation"]


def test_the_reference_has_every_public_name_with_types_and_nothing_else(pages: dict[Path, Page], site: Path) -> None:
    reference = site / "reference" / "multiring.html"
    errors = {
        f"multiring.errors.{name}"
        for name in multiring.__all__
        if name.endswith(("Error", "Lost", "Timeout", "Mismatch"))
    }
    assert len(errors) == 6
    assert errors <= pages[site / "reference" / "errors.html"].anchors
    names = {f"multiring.{name}" for name in multiring.__all__ if name != "__version__"}
    expected = names - {name.replace(".errors", "") for name in errors}
    anchors = {name.replace("multiring.api.", "multiring.") for name in pages[reference].anchors}
    documented = {name for name in anchors if name.startswith("multiring.")}
    assert {name for name in documented if name.count(".") == 1} == expected
    assert {name.split(".")[1] for name in documented if name.count(".") > 1} == {"Communicator", "StoreServer", "Work"}
    methods = {
        name.rpartition(".")[2] for name in pages[reference].anchors if name.startswith("multiring.Communicator.")
    }
    assert "all_reduce" in methods
    assert methods & {"internal", "publish", "send_part", "all_reduce_plain", "start_on_device"} == set()
    text = html.unescape(re.sub(r"<[^>]*>", "", reference.read_text()))
    assert re.search(r"all_reduce\(\s*x: Any,\s*op: str = .sum.,.*?timeout: float \| None = None", text, re.S)


def test_every_name_in_the_reference_says_what_it_is(site: Path) -> None:
    without = []
    for file in sorted((site / "reference").glob("*.html")):
        heading = r'<h\d id="(multiring\.[\w.]+)"'
        _, *parts = re.split(heading, file.read_text().partition("</article>")[0])
        without += [name for name, text in zip(parts[::2], parts[1::2], strict=True) if "<p>" not in text]
    assert without == []


def test_the_reference_of_front_ends_and_commands(pages: dict[Path, Page], site: Path) -> None:
    for module in ("torch", "jax", "tensorflow", "keras", "chainer", "theano", "caffe", "spark", "dask", "ray", "data"):
        (public,) = re.findall(r"^__all__ = \[(.*?)\]", _source(module).read_text(), re.M | re.S)
        names = {f"multiring.{module}.{name}" for name in re.findall(r'"(\w+)"', public)}
        documented = {name for name in pages[site / "reference" / f"{module}.html"].anchors if name.count(".") == 2}
        assert documented == names
    text = html.unescape(re.sub(r"<[^>]*>", "", (site / "reference" / "cli.html").read_text()))
    for words in ("multiring run", "multiring lab up", "--min-ranks", "multiring simulate", "--topology FILE"):
        assert words in text


def _source(module: str) -> Path:
    source = ROOT / "src" / "multiring"
    return next(file for file in (source / f"{module}.py", source / module / "__init__.py") if file.exists())


SEEN = """
<script>
addEventListener("load", () => setTimeout(() => {
  const found = document.createElement("pre");
  found.id = "seen";
  found.textContent = JSON.stringify({
    title: document.title,
    headings: [...document.querySelectorAll("article h1, article h2, article h3")].map(each => each.innerText.trim()),
    fetched: performance.getEntriesByType("resource").map(entry => entry.name),
    width: document.querySelector("article").getBoundingClientRect().width,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  });
  document.body.append(found);
}, 500));
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")
@pytest.mark.parametrize(
    ("page", "title", "headings"),
    [
        ("index.html", "Start here - Multiring", ["Multiring", "Two commands", "The first hour", "Where to go next"]),
        (
            "reference/multiring.html",
            "multiring - Multiring",
            ["multiring", "The job", "init", "all_reduce", "Communicator"],
        ),
    ],
)
def test_a_browser_shows(page: str, title: str, headings: list[str], site: Path, tmp_path: Path) -> None:
    file = (site / page).with_suffix(".probe.html")
    file.write_text((site / page).read_text().replace("</body>", f"{SEEN}</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    logging = [
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}",
        "--window-size=1300,900",
        "--virtual-time-budget=5000",
    ]
    shown = subprocess.run(
        [str(CHROMIUM), *options, *logging, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=100
    )
    file.unlink()
    assert shown.returncode == 0, shown.stderr
    assert [line for line in shown.stderr.splitlines() if "CONSOLE" in line] == []
    found = re.search(r'<pre id="seen">(.*?)</pre>', shown.stdout, re.S)
    assert found, shown.stdout[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert seen["title"] == title
    assert [
        heading for heading in headings if heading not in [each.rstrip("¶").strip() for each in seen["headings"]]
    ] == []
    assert [name for name in seen["fetched"] if not name.startswith("file:")] == []
    assert seen["width"] > 500
    assert seen["overflow"] <= 0  # no scrolling sideways
