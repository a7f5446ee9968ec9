"""The document of the papers' numbers: what counts, and that no miss is written away."""

from dataclasses import replace

import paper_numbers
import pytest
from papers.tables import Row, Table, printed, speedup

pytestmark = pytest.mark.nightly

GOOD = Row(case="good", paper="3, 2", ours="3, 2", tolerance=0)
TEXT = Row(case="order", paper="3, 2", ours="2, 3", tolerance=0)
KNOWN = Row(case="known", paper=1.0, ours=2.0, tolerance=0.5, cause="too small")
NEEDLESS = Row(case="needless", paper=1, ours=1, tolerance=0.5, cause="known")
BETTER = Row(case="faster", paper=56, ours=42, tolerance=0, at_most=True, run="yes")
NEAR = Row(case="near", paper=1, ours=1.2, tolerance=0.5)
FITTED = Row(case="fitted", paper=1, ours=2, tolerance=0.5, fitted=True)
SHOWN = Row(case="shown", paper=1, ours=2)
ON_LINE = Row(case="line", paper=1, ours=1, tolerance=0.5, on_line=True)


def documented(monkeypatch, tmp_path, *rows):
    """(exit status, document) of one table of these rows."""
    document = tmp_path / "numbers.md"
    monkeypatch.setattr(paper_numbers, "DOCUMENT", document)
    tables = {"only": (lambda: Table("t", "u", rows), "no: it")}
    monkeypatch.setattr(paper_numbers, "sections", lambda: {"Heading": tables})
    return paper_numbers.main([]), document.read_text()


def test_a_mismatch_is_not_written_away(monkeypatch, tmp_path, capsys):
    status, written = documented(monkeypatch, tmp_path, GOOD, TEXT, KNOWN, BETTER)
    assert status == 1 and "not as promised: t: order" in capsys.readouterr().out
    assert "| known | 1 | 2 | +100.0% | **MISSED (50%)**: too small | no: it |" in written
    assert "| faster | 56 | 42 | -25.0% | better | yes |" in written


def test_a_cause_needs_a_miss(monkeypatch, tmp_path, capsys):
    assert documented(monkeypatch, tmp_path, GOOD, NEEDLESS)[0] == 1
    assert "not as promised: t: needless" in capsys.readouterr().out


def test_the_first_line_counts_promises_alone(monkeypatch, tmp_path):
    """Points on a line of their own table, fitted rows and rows without a bound count apart."""
    rows = GOOD, KNOWN, BETTER, NEAR, FITTED, SHOWN, ON_LINE, ON_LINE
    status, written = documented(monkeypatch, tmp_path, *rows)
    assert status == 0
    words = "4 predictions, 2 within 10 %, 3 within 25 %, 3 in their own bounds"
    assert written.startswith(f"# The papers' numbers: {words}\n")
    assert f"Counted: {words}; 2 points on lines fitted to their own tables; 1 fitted" in written
    assert "; without a bound: 1 of t." in written
    assert "| all | 4 | 2 | 3 | 3 |" in written
    assert "- 1 row fitted; 2 on their line, at most 0.0% off" in written


def test_a_point_off_its_line_is_missed(monkeypatch, tmp_path):
    off = replace(ON_LINE, ours=2, cause="bent")
    status, written = documented(monkeypatch, tmp_path, GOOD, off)
    assert status == 0 and "1 points on lines fitted to their own tables, 1 of them off" in written
    assert "| line | 1 | 2 | +100.0% | **MISSED (50%)**: bent | no: it |" in written
    assert "Counted: 1 predictions, 1 within 10 %" in written


def test_ours_must_round_to_the_print():
    assert not Row(case="c", ours=57.142857, **printed("57.14")).missed
    assert Row(case="c", ours=57.146, **printed("57.14")).missed
    assert Row(case="c", ours=1.0, paper="1", tolerance=0).missed


@pytest.mark.parametrize(("ours", "missed"), [(1.1, False), (0.99, True), (1.6, True)])
def test_a_speedup_is_no_slowdown(ours, missed):
    assert speedup("c", 1.2, ours).missed is missed
