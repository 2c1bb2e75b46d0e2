"""The front page leads to every page, and the site's navigation has each of them once."""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).resolve().parents[2] / "docs"
ELSEWHERE = {"contributing.md": "../CONTRIBUTING.md", "changelog.md": "../CHANGELOG.md"}
"""Pages that the site has of files outside docs/."""
GENERATED = "reference/cli.md"


FRONT = "index.md"
"""It is headed by the name of the project, and the navigation says that a reader starts there."""


def entries() -> list[tuple[str, str]]:
    """Each page's name in the site's navigation, and its file, in the order that they stand in."""
    sections = tomllib.loads((DOCS / "zensical.toml").read_text())["project"]["nav"]
    found: list[tuple[str, str]] = []
    for section in sections:
        for name, pages in section.items():
            found += [(name, pages)] if isinstance(pages, str) else [pair for entry in pages for pair in entry.items()]
    return found


def navigation() -> list[str]:
    """The pages in the order of the site's navigation."""
    return [page for _, page in entries()]


def test_the_navigation_has_every_page_once() -> None:
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert sorted(navigation()) == sorted(pages | ELSEWHERE.keys() | {GENERATED})


def test_a_page_is_headed_by_its_name_in_the_navigation() -> None:
    named = {page: f"# {name}" for name, page in entries() if page not in {FRONT, GENERATED}}
    headed = {page: (DOCS / ELSEWHERE.get(page, page)).read_text().partition("\n")[0] for page in named}
    assert headed == named


def test_the_front_page_leads_to_every_page() -> None:
    led_to = set(re.findall(r"\]\(([^)#]+)", (DOCS / "index.md").read_text()))
    pages = {ELSEWHERE.get(page, page) for page in navigation()} - {FRONT, GENERATED}
    assert pages - led_to == set()


def test_the_roadmap_is_numbered_in_order() -> None:
    numbers = re.findall(r"^(\d+)\. ", (DOCS / "roadmap.md").read_text(), re.MULTILINE)
    assert len(numbers) > 3
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
