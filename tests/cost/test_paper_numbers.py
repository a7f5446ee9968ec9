"""The papers' worked examples are reproduced; the tables are those of the benchmark."""

import paper_numbers
import paper_speedups
import pytest
from paper_tables import Row, Table, printed


def test_every_worked_example_is_met():
    for name, make in paper_numbers.examples().items():
        table = make()
        assert not table.missed and not table.wrong, name
        assert any(row.tolerance is not None for row in table.rows), name
        assert f"| {table.rows[0].case} |" in table.markdown()


def test_a_mismatch_is_not_written_away(monkeypatch, tmp_path, capsys):
    good = Row(case="good", paper="3, 2", ours="3, 2", tolerance=0)
    text = Row(case="order", paper="3, 2", ours="2, 3", tolerance=0)
    known = Row(case="known", paper=1.0, ours=2.0, tolerance=0.5, cause="too small")
    better = Row(case="faster", paper=56, ours=42, tolerance=0, at_most=True)
    document = tmp_path / "numbers.md"
    monkeypatch.setattr(paper_numbers, "DOCUMENT", document)
    tables = {"t": lambda: Table("t", "u", (good, text, known, better))}
    monkeypatch.setattr(paper_numbers, "sections", lambda: {"Heading": tables})
    assert paper_numbers.main([]) == 1
    assert "not as promised: t: order" in capsys.readouterr().out
    written = document.read_text()
    assert "- missed: t: known" in written and "**MISSED (50%)**: too small" in written
    assert "| faster | 56 | 42 | -25.0% | better |" in written
    assert paper_numbers.main(["no such table"]) == 1


def test_ours_must_round_to_the_print():
    assert not Row(case="c", ours=57.142857, **printed("57.14")).missed
    assert Row(case="c", ours=57.146, **printed("57.14")).missed
    assert Row(case="c", ours=1.0, paper="1", tolerance=0).missed


@pytest.mark.slow
def test_simulated_speedups_keep_the_papers_sign():
    for table in (
        paper_speedups.chunkflow_over_megatron(num_batches=5),
        paper_speedups.skrull_over_deepspeed(num_batches=5),
    ):
        assert not table.wrong
        faster = next(row for row in table.rows if row.case == "settings that are faster")
        assert faster.paper == faster.ours
