"""Pages in a real browser: what they show, where it was laid out, and what they ask for."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from multiring.pages import page

CHROMIUM = shutil.which("chromium")

MEASURE = """
<script>
const box = shape => { const b = shape.getBBox(); return [b.x, b.y, b.x + b.width, b.y + b.height] };
const all = (root, what) => [...root.querySelectorAll(what)];
const seen = {
  fetched: performance.getEntriesByType("resource").map(entry => entry.name),
  title: document.title,
  headings: all(document, "h1, h2").map(each => each.innerText),
  tables: all(document, "table").map(table => ({
    caption: table.caption.innerText,
    rows: all(table, "tr").map(row => all(row, "th, td").map(cell => cell.innerText)),
    size: [table.offsetWidth, table.offsetHeight],
  })),
  pictures: all(document, "svg").map(svg => ({
    size: [svg.viewBox.baseVal.width, svg.viewBox.baseVal.height],
    shown: [svg.getBoundingClientRect().width, svg.getBoundingClientRect().height],
    texts: all(svg, "text").map(text => [text.textContent, box(text)]),
    boxes: all(svg, "rect").map(box),
    curves: all(svg, "polyline").length,
    links: all(svg, "line[stroke-width]").map(line => line.getAttribute("stroke")),
  })),
  width: window.innerWidth,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
};
const found = document.createElement("pre");
found.id = "seen";
found.textContent = JSON.stringify(seen);
document.body.append(found);
</script>
"""


def opened(file: Path, profile: Path, width: int = 1200) -> dict[str, Any]:
    """Return what a browser of this width measures of a page; AssertionError for a fault of the page."""
    text = file.read_text()
    assert "<script" not in text
    assert page.SECURITY in text
    probe = file.with_suffix(".probe.html")
    allowing = f"{page.SECURITY}; script-src 'unsafe-inline'"
    probe.write_text(text.replace(page.SECURITY, allowing).replace("</body>", f"{MEASURE}</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    logging = ["--enable-logging=stderr", f"--user-data-dir={profile}", f"--window-size={width},900"]
    done = subprocess.run(
        [str(CHROMIUM), *options, *logging, "--dump-dom", probe.as_uri()], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stdout[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert seen["fetched"] == []
    assert seen["overflow"] <= 0  # no scrolling sideways
    for table in seen["tables"]:
        assert len({len(row) for row in table["rows"]}) == 1, table
        assert min(table["size"]) > 20
    for picture in seen["pictures"]:
        wide, high = picture["size"]
        # As wide as the page; on a telephone it keeps its letters large, and moves sideways in a box of its own.
        assert picture["shown"][0] > (1000 if width > 1000 else 700)
        assert picture["shown"][1] > 20
        for text, (left, top, right, bottom) in picture["texts"]:
            assert left >= 0, text
            assert top >= 0, text
            assert right <= wide, text
            assert bottom <= high, text
    return seen


def table_of(seen: dict[str, Any], caption: str) -> list[list[str]]:
    (rows,) = [table["rows"] for table in seen["tables"] if table["caption"] == caption]
    return rows
