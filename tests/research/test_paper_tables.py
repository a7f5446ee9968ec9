"""The tables of the papers' numbers; those that take long are marked slow."""

import pytest
from papers import chunkflow, chunkflow_speedups, chunkflow_times, fpdt, infinipipe, seco, skrull

pytestmark = pytest.mark.nightly


def checked(table):
    """The table's rows by case, after everything that it promises has been looked at."""
    assert table.wrong == []
    assert table.title in table.text()
    assert f"| {table.rows[0].case} |" in table.markdown()
    return {row.case: row for row in table.rows}


@pytest.mark.parametrize(
    "make",
    [
        chunkflow.bubbles, infinipipe.table_3, skrull.text, skrull.table_3, skrull.buckets,
        seco.times, seco.lengths,
    ],
)  # fmt: skip
def test_tables_without_a_miss(make):
    table = make()
    assert checked(table) and not table.missed


@pytest.mark.parametrize(
    ("make", "missed"),
    [
        (chunkflow.figure_1, ["micro-steps that need 45 GB or more"]),
        (chunkflow.table_5, ["from 32K to 256K, chunk 2K", "from 32K to 256K, chunk 4K"]),
        (
            infinipipe.table_2,
            ["balance time and length: time", "balance time and length: length"],
        ),
        (fpdt.memory, ["TP, 32K", "UL + AC + OC + ZeRO-3 + FPDT, 4096K"]),
        (fpdt.claims, ["best chunk"]),
    ],
)
def test_tables_with_known_misses(make, missed):
    table = make()
    checked(table)
    assert [row.case for row in table.missed] == missed


def test_points_on_lines_fitted_to_their_own_tables_are_no_predictions():
    tables = infinipipe.table_3(), skrull.table_3()
    assert not any(table.promised for table in tables)
    on_lines = [[row for row in table.rows if row.on_line] for table in tables]
    assert list(map(len, on_lines)) == [24, 20]
    seconds = [row for row in on_lines[0] if "all-to-all" not in row.case]
    assert len(seconds) == 12 and max(abs(row.off) for row in seconds) < 0.03
    assert sum(row.on_line for row in chunkflow.table_5().rows) == 1


def test_infinipipes_appendix_a_is_possible_as_a_forward():
    """12.6e9 parameters, 40 layers of 5,120: 66 % of eight A800 at 32K, by hand."""
    flops = 2 * 12.6e9 * 32 * 1024 + 40 * 4 * 5120 * (32 * 1024) ** 2
    by_hand = flops / (8 * 312e12 * 1.128 * (1 - 0.074))
    assert infinipipe.forward_share(8, 0, 312e12) == pytest.approx(by_hand, rel=0.02)
    shares = [infinipipe.forward_share(n, at, 312e12) for n in (8, 16, 32) for at in range(5)]
    assert min(shares) > 0.4 and max(shares) < 0.67


@pytest.mark.slow
def test_fpdts_mfu_is_predicted_from_one_row():
    """Slow links between two nodes, which nothing hides, make the short rows slow."""
    table = fpdt.mfu()
    checked(table)
    assert [row.case for row in table.rows if row.fitted] == ["TP, 32K"]
    assert len(table.promised) == 9 and not table.missed
    first, last = fpdt.STRATEGIES[0], fpdt.STRATEGIES[-1]
    assert fpdt.step_s(first, 10e9) > 3 * fpdt.step_s(first, None)
    assert fpdt.step_s(last, 10e9) < 1.1 * fpdt.step_s(last, None)


def test_skrulls_speedup_hangs_on_the_baselines_micro_batch():
    table = skrull.speedups(num_batches=1)
    rows = checked(table)
    means = [rows[f"{name}: mean"].ours for name in skrull.BASELINES]
    assert means == sorted(means, reverse=True) and means[0] > 3.76 > means[2] and means[-1] < 1
    assert not table.promised


def test_micro_batches_as_they_come():
    lens = [5, 6, 1, 1, 9, 2]
    ids = range(len(lens))
    assert skrull.micro_batches(ids, lens, 2, 10) == [[0], [1, 2], [3, 4], [5]]
    assert skrull.micro_batches(ids, lens, 2, 12) == [[0, 1], [2, 3], [4, 5]]
    assert skrull.micro_batches(ids, lens, 1, 10) == [[i] for i in ids]
    packed = skrull.micro_batches(ids, lens, None, 12)
    assert len(packed) == 2 and all(sum(lens[i] for i in own) <= 12 for own in packed)


def test_more_devices_lose_performance():
    lost = chunkflow_speedups.drop(4, 4, True, 1)
    assert chunkflow_speedups.drop(4, 1, False, 1) == pytest.approx(0)
    assert 0 < chunkflow_speedups.drop(4, 4, False, 1) < lost < 100


@pytest.mark.slow
def test_chunkflows_chunk_sizes_of_one_model():
    table = chunkflow_times.table_4(chunkflow_times.TABLE_4[:2], num_batches=1)
    assert checked(table) and not table.missed
    absolute = chunkflow_times.table_6(num_batches=1)
    checked(absolute)
    assert [row.paper for row in absolute.missed] == [29.81, 23.774, 28.942]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        chunkflow_times.table_4, chunkflow_speedups.over_megatron, chunkflow_speedups.more_devices,
    ],
)  # fmt: skip
def test_chunkflows_chunk_sizes_and_speedups(make):
    table = make()
    assert checked(table) and not table.missed
