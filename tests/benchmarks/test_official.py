"""benchmarks/official.py: configs and tokenizers that are right, and that it can say 'wrong'."""

from __future__ import annotations

import json

import official
import official_tokenizers
import pytest
from data.tiny_tokenizers import byte_tokenizer
from official_models import facts, judge, shrunk
from official_tokenizers import Package
from tokenizers import normalizers
from transformers import AutoConfig

MADE = Package("npm:made", "llama", "<end>")
WITH_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("name", ["Meta-Llama-3.1-8B", "Qwen2.5-window (use_sliding_window true)"])
def test_numbers_are_small_and_all_other_keys_stay(name, tmp_path):
    values = facts()[name]["config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    small = shrunk(tmp_path, values)
    assert small["hidden_size"] < 200 and small["vocab_size"] < 300
    kept = {key for key in values if small[key] == values[key]}
    assert kept >= {key for key, own in values.items() if not isinstance(own, int)}
    assert "max_position_embeddings" in kept
    kinds = []
    for config in (values, small):
        (tmp_path / "config.json").write_text(json.dumps(config))
        kinds.append({*(getattr(AutoConfig.from_pretrained(tmp_path), "layer_types", None) or ())})
    assert kinds[0] == kinds[1]


def test_every_config_says_where_it_is_from():
    sources = {fact["source"] for fact in facts().values()}
    assert len(sources) == 4 and all(isinstance(f["config"], dict) for f in facts().values())


@pytest.mark.slow  # a run of furlong train each
def test_a_config_that_trains_and_tables_that_say_otherwise():
    fact = facts()["SmolLM2-1.7B"]
    assert judge("right", fact).outcome == "as published"
    assert judge("count", {**fact, "parameters": 1.6e9}).outcome == "wrong"
    assert judge("refused", {**fact, "refused": "a reason"}).outcome == "wrong"


@pytest.fixture
def made(tmp_path):
    folder = tmp_path / "made"
    byte_tokenizer(WITH_CALLS).save_pretrained(folder)
    official_tokenizers.complete(folder, MADE)
    return official_tokenizers.Asked(folder, MADE, tmp_path)


def test_a_tokenizer_that_is_read_as_its_files_are(made):
    assert made.read_by("", official_tokenizers.load_tokenizer(str(made.folder))) == []
    assert made.ends() == made.chats() == []


def test_a_tokenizer_that_is_read_otherwise(made):
    made.template = WITH_CALLS.replace("<|im_end|>\n", "<|im_end|>")
    found = made.chats()
    assert len(found) > 20 and found[0].startswith("chat 1 turns: ids")
    made.raw.normalizer = normalizers.Lowercase()
    assert made.read_by("", official_tokenizers.load_tokenizer(str(made.folder)))


def test_a_tokenizer_that_cannot_be_had_is_left_out_or_a_miss(tmp_path, monkeypatch):
    asked = ["--cache", str(tmp_path), "--only", "Llama 2", "--jobs", "1"]
    monkeypatch.setattr(
        official, "each_alone",
        lambda measure, names, *_, tell, **__: [tell(measure(name)) for name in names],
    )  # fmt: skip
    assert official.main([*asked, "--offline"]) == 0
    monkeypatch.setenv("PATH", "")
    assert official.main(asked) == 1
