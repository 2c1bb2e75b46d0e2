"""Style of the documents: short lines, and links that say what they lead to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted(RESULTS.glob("*.md"))]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LONGEST = 130


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_lines_are_short(document: Path) -> None:
    assert [line for line in document.read_text().splitlines() if len(line) > LONGEST] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_links_say_what_they_lead_to(document: Path) -> None:
    assert re.findall(r"\[[\w./-]+\.md\]\(", document.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_open_with_their_subject(page: Path) -> None:
    """Tables and blocks of code are no sentences."""
    prose = re.sub(r"^```.*?^```$|^\|.*?$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    paragraph, sentence = r"\n(?:\n|[-*] )(?:\*\*.*?\*\*:? )?", r"[.!?:]\)?\s+(?:\*\*)?"
    opening = rf"(?:{paragraph}|{sentence})((?:Of|By|For|So|Whom|Whose)\s[^.]*)"
    assert re.findall(opening, prose) == []


def test_a_version_has_one_line_for_each_change() -> None:
    """And an empty section above, for what comes next."""
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert "\n## Unreleased\n" in changes
    _, *versions = re.split(r"^## ", changes, flags=re.MULTILINE)
    lines = [line for version in versions for line in version.splitlines()[1:] if line]
    assert [line for line in lines if line.startswith(" ")] == []


def test_what_is_unreleased_stands_under_added_changed_or_fixed() -> None:
    unreleased = (ROOT / "CHANGELOG.md").read_text().partition("\n## Unreleased\n")[2].partition("\n## ")[0]
    above, *groups = re.split(r"^### ", unreleased, flags=re.MULTILINE)
    assert above.strip() == ""
    headings = [group.partition("\n")[0] for group in groups]
    assert headings == [heading for heading in ("Added", "Changed", "Fixed") if heading in headings]


def test_a_result_is_named_by_a_page_or_the_newest_of_its_kind() -> None:
    """Results of one kind have one name after the date."""
    names = sorted(file.name for file in RESULTS.iterdir())
    dated = [re.fullmatch(r"\d{4}-\d\d-\d\d-([\w-]+\.(?:json|md))", name) for name in names]
    assert [name for name, match in zip(names, dated, strict=True) if match is None] == []
    newest = {match[1]: match[0] for match in dated if match}
    pages = "".join(document.read_text() for document in DOCUMENTS)
    assert [name for name in names if name not in pages and name not in newest.values()] == []


def test_each_measurement_that_a_constant_names_stands_there() -> None:
    """A comment or docstring of the source names the file, and its heading after a comma."""
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "csrc").glob("*.[ch]pp")]
    joined = (re.sub(r"\n\s*(?://|#)?\s*", " ", source.read_text()) for source in sources)
    named = {found for text in joined for found in re.findall(r"benchmarks/results/(\S+\.md), ([\w ]+)", text)}
    assert len(named) >= 5
    headings = {
        (file.name, heading)
        for file in RESULTS.glob("*.md")
        for heading in re.findall(r"^## (.*)", file.read_text(), re.MULTILINE)
    }
    assert named - headings == set()


def test_a_page_leads_to_each_account_of_what_was_run() -> None:
    """A page has what a reader decides by; the rest stands in a dated file beside the results."""
    accounts = [file.name for file in RESULTS.glob("*.md")]
    assert accounts != []
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert set(accounts) - set(re.findall(r"\]\(\S+/benchmarks/results/([^)#]+)", pages)) == set()
