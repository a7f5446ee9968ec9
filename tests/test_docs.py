"""The pages: links that lead somewhere, and promises about their size."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page):
    """The anchors of a page's headings, as they are made from their words."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-") for words in headings}


def broken_links(page):
    """Relative links of a page to a file or a heading that is not there."""
    broken = []
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "other.md").write_text("# Some words: here\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#some-words-here) [b](other.md#no) [c](gone.md) [d](https://x.y)")
    assert broken_links(page) == ["other.md#no", "gone.md"]


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = [page for page in PAGES if page.parent == ROOT / "docs" and page.name != "index.md"]
    assert [page.name for page in pages if f"({page.name}" not in index] == []


def test_the_readme_is_short_and_the_glossary_has_few_words():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
    rows = [r for r in (ROOT / "docs/glossary.md").read_text().splitlines() if r.startswith("| ")]
    assert len(rows) - 2 <= 25
