"""The table and the picture of a data set's lengths."""

import re
from xml.etree import ElementTree

import pytest

from furlong.plan.lengths import count_lengths
from furlong.report.lengths import format_lengths, save_lengths_picture, summary_line

LENGTHS = count_lengths([10, 60, 100, 100, 3000, 20_000])


def test_the_table_has_a_row_per_bucket_and_their_sum():
    title, _, *rows = [re.split("  +", row.strip()) for row in
                       format_lengths(LENGTHS, "[bold]").splitlines()]  # fmt: skip
    assert title == ["[bold]"]
    assert rows[0] == ["1 to 64", "2", "33.3%", "0.3%", "< 0.1%"]
    assert rows[1] == ["65 to 128", "2", "33.3%", "0.9%", "< 0.1%"]
    assert rows[2] == ["129 to 256", "0", "0", "0", "0"]
    assert rows[-2] == ["16,385 to 32,768", "1", "16.7%", "85.9%", "97.8%"]
    assert rows[-1] == ["all", "6", "23.3K"]
    assert summary_line(LENGTHS) == (
        "mean 3,878, median 100, p90 20,000, p99 20,000, longest 20,000 tokens"
    )


@pytest.mark.parametrize(
    ("lengths", "title", "limit", "said", "unsaid"),
    [
        (LENGTHS, "$x^{$.txt", 1000,  # no formula is made of a file's name
         ["$x^{$.txt", "≤ 64", "≤ 32K", "attention FLOPs", "98%", "data.max_seq_len 1,000"], ""),
        (LENGTHS, f"/home/{'folder/' * 30}books.jsonl", 50_000, [], "50,000"),
        (count_lengths([10] + [100] * 7), "a bar's label rounds half up", None, ["13%"], "12%"),
        (count_lengths([1]), "one", None, ["≤ 64", "100%"], "limit"),
    ],
)  # fmt: skip
@pytest.mark.few(2)
def test_the_picture_shows_every_bucket(lengths, title, limit, said, unsaid, tmp_path):
    file = tmp_path / "lengths.svg"
    save_lengths_picture(lengths, file, title, max_seq_len=limit)
    ElementTree.fromstring(file.read_text())
    words = re.findall("<!-- (.*?) -->", file.read_text())
    assert set(said) <= set(words) and not (unsaid and unsaid in " ".join(words))
    assert "share of the whole" in words
    (shown,) = (word for word in words if word.endswith(title[-12:]))
    assert shown == title or (shown.startswith("…") and "/home" not in shown)
