"""`furlong plan` refuses what `furlong train` refuses, by the same code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from furlong.cli.main import main
from furlong.errors import UserError
from furlong.models.build import check_model
from furlong.models.folder import reason
from furlong.models.shrink import shrink_config

TINY = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 96}
PLAIN = TINY | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
MXFP4 = {"quant_method": "mxfp4"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def plan(tmp_path: Path, values: dict[str, Any], *flags: str, length: int = 48) -> int:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    asked = ["plan", "--lengths", str(length), "--model.name", str(file), "--hardware", "H100"]
    return main([*asked, "--chunks.method=chunkflow", *flags])


@pytest.mark.parametrize(
    ("values", "change"),
    [
        ({"model_type": "starcoder2", **PLAIN, "attention_dropout": 0.1},
         "--model.config={attention_dropout: 0}"),
        ({"model_type": "gptj", "n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4,
          "n_inner": 48, "vocab_size": 96, "attn_pdrop": 0.0}, ""),
        ({"model_type": "gpt2", **TINY, "n_positions": 64, "attn_pdrop": 0.1},
         "--model.config={attn_pdrop: 0}"),
    ],
)  # fmt: skip
def test_a_model_that_train_refuses_is_not_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any], change: str
) -> None:
    assert plan(tmp_path, values) == 2
    told = capsys.readouterr().err
    try:
        check_model(str(tmp_path), max_seq_len=48)
    except UserError as error:
        assert error.given in " ".join(told.split())
    else:
        assert "computes attention or states 0 times" in told
    if change:
        assert plan(tmp_path, values, change) == 0


@pytest.mark.parametrize(
    ("flags", "length", "runs"),
    [([], 64, True), ([], 65, False), (["--model.rope={rope_type: yarn, factor: 2}"], 128, True),
     (["--model.rope={rope_type: yarn, factor: 2}"], 129, False)],
)  # fmt: skip
def test_lengths_beyond_the_positions_do_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], length: int, runs: bool
) -> None:
    values = {"model_type": "llama", **PLAIN}
    assert plan(tmp_path, values, *flags, "--json", length=length) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["runs_here"], not found["refused"]) == (runs, runs)
    assert plan(tmp_path, values, *flags, length=length) == 0
    printed = capsys.readouterr().out
    assert ("model.rope" in printed, "runs here  yes" in printed) == (not runs, runs)


def test_known_models_have_their_positions(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model.name", "Llama-3-8B", "--hardware", "H200", "--model.lora.rank=16"]
    for length, runs in ((8192, True), (8193, False)):
        assert main([*asked, "--chunks.size=4096", "--lengths", str(length), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["runs_here"] == runs


@pytest.mark.parametrize(("family", "quantized"), [("gpt_oss", MXFP4), ("deepseek_v3", FP8)])
def test_quantized_weights_are_planned_as_floats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, quantized: dict[str, Any]
) -> None:
    config = shrink_config(AutoConfig.for_model(family), max_seq_len=64)
    for flags in ([], ["--model.lora.rank=4"]):
        found = []
        for more in ({}, {"quantization_config": quantized}):
            assert plan(tmp_path, config.to_dict() | more, *flags, "--json") == 0
            found.append(json.loads(capsys.readouterr().out))
        assert all(one["runs_here"] for one in found)
        assert found[0]["peak_bytes"] == found[1]["peak_bytes"] > 0
    check_model(str(tmp_path), max_seq_len=48)
    values = config.to_dict() | {"quantization_config": {"quant_method": "gptq"}}
    assert plan(tmp_path, values, "--json") == 0
    assert not json.loads(capsys.readouterr().out)["runs_here"]
    with pytest.raises(UserError, match="quantized weights"):
        check_model(str(tmp_path), max_seq_len=48)


def test_the_reason_that_no_other_checkpoint_mends_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = AutoConfig.for_model("deepseek_v32").to_dict() | {"quantization_config": FP8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="learned indexer"):
        check_model(str(tmp_path), max_seq_len=48)
    assert plan(tmp_path, config) == 2
    assert "learned indexer" in capsys.readouterr().err


@pytest.mark.parametrize("more", [{"auto_map": {"AutoConfig": "configuration_x.X"}}, {}])
def test_a_type_that_transformers_does_not_know_names_a_conversion(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    values = {"model_type": "chatglm", **TINY, "quantization_config": FP8, **more}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError) as caught:
        check_model(str(tmp_path), max_seq_len=48)
    assert "chatglm" in caught.value.given and "-hf" in caught.value.change
    assert "auto_map" in caught.value.given or not more


def test_reasons_of_other_libraries_end_with_a_sentence() -> None:
    told = reason(ValueError("It is so. " * 25 + "Please pass the argument and so on " * 9))
    assert told.endswith("It is so.") and len(told) <= 300
