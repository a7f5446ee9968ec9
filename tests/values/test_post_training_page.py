"""`docs/post-training.md`, run from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helpers.byte_tokenizer import byte_tokenizer
from helpers.tiny_families import build

PAGE = Path(__file__).parents[2] / "docs" / "post-training.md"


def snippets() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize(
    "wanted", ["without TRL", pytest.param("with TRL", marks=pytest.mark.slow)]
)
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.chdir(tmp_path)
    build("llama", vocab_size=260).float().save_pretrained("model")
    byte_tokenizer().save_pretrained("model")
    found = snippets()
    assert len(found) == 8 and "trl" in found[-1]
    names: dict[str, Any] = {}
    for snippet in found if wanted == "with TRL" else found[:-1]:
        exec(compile(snippet, str(PAGE), "exec"), names)
    assert names["result"].num_valid_tokens == 20
    assert names["loss"].item() == pytest.approx(0.6931, abs=1e-3)
    if wanted == "with TRL":
        assert names["trainer"].state.global_step == 2
