"""The page of large models: what stands in it is what is planned."""

import json
from pathlib import Path

import large_models
import pytest


def test_the_page_has_the_cells_that_were_found():
    cells = json.loads(large_models.FOUND.read_text())
    assert {name for name, _ in large_models.asked()} == cells.keys()
    assert large_models.table(cells) in Path(large_models.PAGE).read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_cell_is_planned_again():
    name = "8B full, 32K, 1 x 24 GB"
    found = large_models.cell(dict(large_models.asked())[name])
    assert found == json.loads(large_models.FOUND.read_text())[name], "run research/large_models.py"
