"""The fixture that the tests of whole runs share."""

from __future__ import annotations

import pytest
from helpers.tiny_runs import TinyRun, build_tiny_run


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return build_tiny_run(tmp_path_factory.mktemp("tiny"))
