"""Multisets of lengths: shares, buckets, percentiles, and the file."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.errors import ConfigError
from furlong.plan.lengths import Lengths, count_lengths, read_lengths, write_lengths

lists = st.lists(st.integers(1, 300_000), min_size=1, max_size=60)


@given(lists, st.floats(0.1, 100))
def test_sums_percentiles_and_buckets_are_those_of_the_list(
    seq_lens: list[int], percent: float
) -> None:
    lengths = count_lengths(seq_lens)
    assert lengths.longest == max(seq_lens)
    expected = np.percentile(seq_lens, percent, method="inverted_cdf")
    assert lengths.percentile(percent) == expected, "the shortest that is enough"
    buckets = lengths.buckets()
    assert buckets[0].num_sequences and buckets[-1].num_sequences
    for bucket, following in pairwise(buckets):
        assert bucket.upto == following.above
    for own, inside in [
        (lengths, seq_lens), *((b, [n for n in seq_lens if b.above < n <= b.upto]) for b in buckets)
    ]:  # fmt: skip
        assert (own.num_sequences, own.num_tokens) == (len(inside), sum(inside))
        assert own.num_pairs == sum(n * (n + 1) // 2 for n in inside)
    assert sum(bucket.num_sequences for bucket in buckets) == len(seq_lens)


def test_buckets_end_with_a_power_of_two() -> None:
    buckets = count_lengths([3, 64, 65, 128, 129, 1024]).buckets()
    shown = [(bucket.above, bucket.upto, bucket.num_sequences) for bucket in buckets]
    assert shown == [(0, 64, 2), (64, 128, 2), (128, 256, 1), (256, 512, 0), (512, 1024, 1)]


@settings(max_examples=15)
@given(lists)
def test_a_file_gives_back_what_was_written(seq_lens: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "new" / "lengths.json"
        write_lengths(file, count_lengths(seq_lens))
        assert read_lengths(file) == count_lengths(seq_lens)
        assert [path.name for path in file.parent.iterdir()] == ["lengths.json"]


def test_a_file_may_be_written_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text('{"version": 1, "lengths": [812, [4096, 2], 812, [7, 1]]}')
    assert read_lengths(file) == Lengths(((7, 1), (812, 2), (4096, 2)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        ("{", "Invalid JSON"),
        ("[1, 2]", "[1, 2]"),
        ('{"version": 2, "lengths": [1]}', "version = 2"),
        ('{"version": 1, "lengths": []}', "lengths = []"),
        ('{"version": 1, "lengths": [1.5]}', "= 1.5"),
        ('{"version": 1, "lengths": ["1"]}', "= '1'"),
        ('{"version": 1, "lengths": [true]}', "= True"),
        ('{"version": 1, "lengths": [-5]}', "lengths.0.tokens = -5"),
        ('{"version": 1, "lengths": [3, [5, 0]]}', "lengths.1.pair.1 = 0"),
    ],
)
def test_a_file_of_something_else_is_told(tmp_path: Path, text: str | None, reason: str) -> None:
    file = tmp_path / "lengths.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_lengths(file)
    assert reason in caught.value.given and "lengths.json" in caught.value.given


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a file that can be written"):
        write_lengths(tmp_path / "file" / "lengths.json", count_lengths([1]))


@pytest.mark.parametrize("seq_lens", [[], [3, 0]])
def test_lengths_are_positive(seq_lens: list[int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        count_lengths(seq_lens)
