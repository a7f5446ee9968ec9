"""The cost model predicts what it was not fitted on; the tables are those of the benchmark."""

import pytest


def checked(table):
    """The table's rows by case, after everything that it promises has been looked at."""
    assert table.wrong == []
    assert any(row.tolerance is not None and not row.fitted for row in table.rows)
    assert table.title in table.text()
    return {row.case: row for row in table.rows}


def test_infinipipes_appendix_a():
    from paper_times import infinipipe_table_3

    rows = checked(infinipipe_table_3())
    predicted = [row for row in rows.values() if not row.fitted]
    assert len(predicted) == 12 and not any(row.missed for row in predicted)
    assert max(abs(row.off) for row in predicted) < 0.03


def test_chunkflows_memory():
    from paper_memory import chunkflow_table_5

    rows = checked(chunkflow_table_5())
    assert sum(row.fitted for row in rows.values()) == 2
    assert not any(row.missed for row in rows.values())


def test_chunkflows_chunk_sizes_of_one_model():
    from paper_times import TABLE_4, chunkflow_table_4, chunkflow_table_6

    for table in (chunkflow_table_4(TABLE_4[:2], num_batches=1), chunkflow_table_6(num_batches=1)):
        assert not table.missed
        checked(table)


@pytest.mark.slow
def test_chunkflows_chunk_sizes():
    from paper_times import chunkflow_table_4, chunkflow_table_6

    rows = checked(chunkflow_table_4())
    assert len(rows) == 8 and not any(row.missed for row in rows.values())
    ratios = list(checked(chunkflow_table_6()).values())[1:]
    assert all(abs(row.off) < 0.15 for row in ratios)


def test_skrulls_buckets_and_secos_lengths():
    from paper_memory import seco_lengths, skrull_buckets

    for table in (skrull_buckets(), seco_lengths()):
        assert not table.missed
        checked(table)


def test_fpdts_strategies():
    """Two misses, each with its cause in the table; the other six predictions hold."""
    from paper_memory import fpdt_strategies

    table = fpdt_strategies()
    rows = checked(table)
    assert len(rows) == 10 and sum(row.fitted for row in rows.values()) == 2
    assert [row.case.split(",")[0] for row in table.missed] == [
        "TP",
        "UL + AC + OC + ZeRO-3 + FPDT",
    ]


def test_a_miss_needs_a_cause_and_a_cause_a_miss(capsys, monkeypatch):
    import paper_fits
    from paper_tables import Row, Table

    missed = Row(case="a", paper=1, ours=2, tolerance=0.5)
    explained = Row(case="b", paper=1, ours=2, tolerance=0.5, cause="known")
    needless = Row(case="c", paper=1, ours=1, tolerance=0.5, cause="known")
    fitted = Row(case="d", paper=1, ours=2, tolerance=0.5, fitted=True)
    table = Table("t", "u", (missed, explained, needless, fitted))
    assert table.wrong == [missed, needless] and table.missed == [missed, explained]
    monkeypatch.setattr(paper_fits, "tables", lambda: {"only": lambda: table})
    assert paper_fits.main([]) == 1
    printed = capsys.readouterr().out
    assert "MISSED (50%)" in printed and "not as promised: t: a" in printed
    monkeypatch.setattr(
        paper_fits, "tables", lambda: {"only": lambda: Table("t", "u", (explained, fitted))}
    )
    assert paper_fits.main(["on"]) == 0
    assert paper_fits.main(["no such table"]) == 1
