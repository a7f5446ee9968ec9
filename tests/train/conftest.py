"""The fixture that the tests of whole runs share."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.tiny_runs import TinyRun, build_tiny_run


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """In chunks that cut two of its eight texts: half as many take half as long."""
    return replace(build_tiny_run(tmp_path_factory.mktemp("tiny")), chunk_size=64)
