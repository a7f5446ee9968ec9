"""The releases of transformers that furlong knows."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import furlong
from furlong.errors import UnsupportedModelError
from furlong.families import NEWEST_RELEASE, OLDEST_RELEASE

REFUSED = UnsupportedModelError(given="a", required="b", source="c", change="d")


def test_the_requirement_is_what_has_been_tested() -> None:
    file = Path(furlong.__file__).parents[2] / "pyproject.toml"
    major, minor = NEWEST_RELEASE
    oldest = ".".join(map(str, OLDEST_RELEASE))
    required = f"transformers>={oldest},<{major}.{minor + 1}"
    assert required in tomllib.loads(file.read_text("utf-8"))["project"]["dependencies"]


@pytest.mark.parametrize("newer", [0, 1])
def test_a_refusal_on_a_newer_transformers_says_so_first(
    newer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    major, minor = NEWEST_RELEASE
    installed = f"{major}.{minor + newer}.3"
    monkeypatch.setattr("importlib.metadata.version", lambda _: installed)
    first, *others = str(REFUSED).splitlines()
    assert len(others) == 3 + newer
    if newer:
        assert f"up to {major}.{minor}" in first and installed in first
