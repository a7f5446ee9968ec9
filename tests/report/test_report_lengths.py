"""The table and the picture of a data set's lengths."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from furlong.plan.lengths import count_lengths
from furlong.report.lengths import _label, lengths_table, save_lengths_picture, summary_line

LENGTHS = count_lengths([10, 60, 100, 100, 3000, 20_000])


def cells() -> list[list[str]]:
    console = Console(width=120, record=True, file=None)
    with console.capture() as captured:
        console.print(lengths_table(LENGTHS, "title"))
    rows = [line for line in captured.get().splitlines() if "│" in line]
    return [[cell.strip() for cell in row.strip("│ ").split("│")] for row in rows]


def test_the_table_has_a_row_per_bucket_and_their_sum() -> None:
    rows = cells()
    assert rows[0] == ["1 to 64", "2", "33.3%", "0.3%", "< 0.1%"]
    assert rows[1] == ["65 to 128", "2", "33.3%", "0.9%", "< 0.1%"]
    assert rows[2] == ["129 to 256", "0", "0", "0", "0"]
    assert rows[-2] == ["16,385 to 32,768", "1", "16.7%", "85.9%", "97.8%"]
    assert rows[-1][:2] == ["all", "6"] and rows[-1][3] == "23.3K"


def test_a_bars_label_rounds_half_up() -> None:
    assert [_label(share) for share in (0.125, 0.375, 0.124, 1.0)] == ["13%", "38%", "12%", "100%"]


def test_the_summary_names_the_percentiles() -> None:
    assert summary_line(LENGTHS) == (
        "mean 3,878, median 100, p90 20,000, p99 20,000, longest 20,000 tokens"
    )


@pytest.mark.parametrize("max_seq_len", [None, 1000, 50_000])
def test_the_picture_shows_every_bucket(tmp_path: Path, max_seq_len: int | None) -> None:
    file = tmp_path / "lengths.svg"
    save_lengths_picture(LENGTHS, file, "a title", max_seq_len=max_seq_len)
    text = file.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    for label in ("a title", "≤ 64", "≤ 32K", "attention FLOPs", "98%", "share of the whole"):
        assert f"<!-- {label} -->" in text
    # A limit that cuts nothing off is not drawn.
    assert ("data.max_seq_len 1,000" in text) == (max_seq_len == 1000)
    assert "50,000" not in text


def test_a_title_that_is_too_long_keeps_its_end(tmp_path: Path) -> None:
    file = tmp_path / "lengths.svg"
    save_lengths_picture(LENGTHS, file, f"/home/{'folder/' * 30}books.jsonl")
    text = file.read_text(encoding="utf-8")
    (title,) = (line for line in text.splitlines() if "books.jsonl" in line)
    assert title.strip().startswith("<!-- …") and "/home" not in title


def test_one_length_can_be_drawn(tmp_path: Path) -> None:
    save_lengths_picture(count_lengths([1]), tmp_path / "one.png", "one")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["[/red].txt", "[bold]a", "$x^{$.txt", "[link=x]y[/link]"])
def test_a_files_name_is_neither_markup_nor_a_formula(tmp_path: Path, name: str) -> None:
    console = Console(width=120, record=True, file=None)
    with console.capture() as captured:
        console.print(lengths_table(LENGTHS, name))
    assert name in captured.get()
    file = tmp_path / "a.svg"
    save_lengths_picture(LENGTHS, file, name)
    assert name in file.read_text()
