"""The proofs hold for a sound engine, and each fails for the one that breaks what it proves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import furlong
from furlong import verify as verify_run
from furlong.api import Engine
from furlong.cli.main import main
from furlong.config.schema import DataConfig, ModelConfig, RunConfig
from furlong.errors import ConfigError
from furlong.kv.pools import CpuPool, DiskPool
from furlong.kv.store import KVStore
from furlong.models.shrink import shrink_config
from furlong.plan.plan import Chunk, Slice
from furlong.plan.rows import ChunkRows, rows_of
from furlong.runtime import executor
from furlong.runtime.cell import Cell
from furlong.testing import take_grads
from furlong.verify import (
    EXACT_BOUND,
    RECURRENT,
    Finding,
    Subject,
    build_subject,
    check_accumulation,
    check_gradients,
    check_isolation,
    sequences,
)

OPTIONS = furlong.ChunkOptions(size=16)
HYBRIDS = {
    "mamba2": "slow",
    "qwen3_next": "nightly",
    "zamba2": "nightly",
    "minimax": "nightly",
    "kimi_linear": "nightly",
}
LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.1, "target_modules": "all-linear"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 8}),
    "mistral": ("MistralConfig", {}),
    "mixtral": ("MixtralConfig", {}),
    "gpt_oss": ("GptOssConfig", {}),
    "gemma2": ("Gemma2Config", {}),
}
MARKS = {"mixtral": "slow"} | dict.fromkeys(("mistral", "gpt_oss", "gemma2"), "nightly")


def subject_of(family: str, lora: dict[str, Any] | None = None) -> Subject:
    config_class, settings = FAMILIES[family]
    config = getattr(transformers, config_class)(**settings)
    return build_subject(shrink_config(config, max_seq_len=4096), OPTIONS, lora)


@pytest.fixture(scope="module")
def llama() -> Subject:
    """Looked at by the engine before a test breaks it: the start-up check would refuse it."""
    subject = subject_of("llama")
    subject.engine.forward_backward(sequences(), OPTIONS)
    take_grads(subject.model)
    return subject


def marked(name: str) -> Any:
    return pytest.param(name, marks=getattr(pytest.mark, MARKS[name])) if name in MARKS else name


@pytest.mark.parametrize("family", [marked(name) for name in FAMILIES])
def test_a_sound_engine_passes(family: str) -> None:
    """Gemma 2's softmax and norms are computed in float32, by transformers itself."""
    subject = subject_of(family)
    assert subject.bound == EXACT_BOUND
    for check in (check_gradients, check_isolation, check_accumulation):
        finding = check(subject)
        assert finding.passed, finding


@pytest.mark.slow
def test_adapters_are_proved_too() -> None:
    subject = subject_of("llama", LORA)
    finding = check_gradients(subject)
    assert finding.passed and "lora" in finding.figure


def test_gradients_that_are_not_relayed_are_found(
    llama: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVStore, "later_grads", lambda *_: None)
    finding = check_gradients(llama)
    assert not finding.passed and "model.layers." in finding.figure


@pytest.mark.slow
def test_a_loss_that_is_a_mean_of_means_is_found(
    llama: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Engine.forward_backward

    def own_count(self: Engine, sequences: Any, options: Any, *_: Any, **given: Any) -> Any:
        return plain(self, sequences, options, None, **given)

    monkeypatch.setattr(Engine, "forward_backward", own_count)
    assert check_gradients(llama).passed  # one call alone cannot tell
    assert not check_accumulation(llama).passed


@pytest.mark.slow
def test_sequences_that_see_each_other_are_found(
    llama: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_slice(rows: ChunkRows, *rest: Any, **given: Any) -> Cell:
        chunk = Chunk((Slice(0, 0, rows.num_tokens),))
        whole = rows_of(chunk, 0, sp_size=1, q_heads=1, kv_heads=1)
        return Cell(whole, *rest, **given)

    monkeypatch.setattr(executor, "Cell", one_slice)
    finding = check_isolation(llama)
    assert not finding.passed and "moves by" in finding.figure


@pytest.mark.slow
def test_a_token_that_nobody_sees_is_found(llama: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolation alone would also hold for an engine that ignores its input."""
    plain = executor.chunk_inputs

    def blind(*arguments: Any) -> Any:
        found = plain(*arguments)
        found.input_ids.fill_(5)
        return found

    monkeypatch.setattr(executor, "chunk_inputs", blind)
    assert not check_isolation(llama).passed


@pytest.mark.slow
def test_few_layers_with_a_short_window_see_the_other_token() -> None:
    """Two layers with windows of 12 see 22 tokens back; the first sequence's prompt has 35."""
    config = transformers.MistralConfig(num_hidden_layers=2)
    subject = build_subject(shrink_config(config, max_seq_len=4096), OPTIONS, None)
    finding = check_isolation(subject)
    assert finding.passed, finding


def test_a_nan_is_no_small_error(llama: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Engine.forward_backward

    def poisoned(self: Engine, *given: Any, **named: Any) -> Any:
        result = plain(self, *given, **named)
        for parameter in self.model.model.parameters():
            parameter.grad = torch.full_like(parameter, torch.nan)
            break
        return result

    monkeypatch.setattr(Engine, "forward_backward", poisoned)
    assert not check_gradients(llama).passed


def test_a_config_that_cannot_be_built_is_told_of_the_users_own_folder(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    values = {"model_type": "llama", "hidden_act": "nope", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    run = RunConfig(
        model=ModelConfig(name=str(tmp_path)), data=DataConfig(train=("none",), max_seq_len=64)
    )
    with pytest.raises(ConfigError, match="hidden_act = 'nope'") as raised:
        verify_run.verify(run)
    assert str(tmp_path) in raised.value.given


@pytest.mark.parametrize(
    ("chunks", "offload", "told"),
    [
        (
            {"order": "layer-first"},
            {"kv": "disk", "attention": "cpu"},
            "order layer-first, stage_layers 1, offload {kv: disk, attention: cpu}",
        ),
        pytest.param(
            {"stage_layers": 13},
            "cpu",
            "order layer-first, stage_layers 1, offload cpu",
            marks=pytest.mark.nightly,
        ),
    ],
)
@pytest.mark.slow
def test_the_runs_own_dials_are_proved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    chunks: Any,
    offload: Any,
    told: str,
) -> None:
    """Offload and order of the run file reach the engine that is put to the proof."""
    opened: list[str] = []
    for kind in (CpuPool, DiskPool):
        put = kind.put
        monkeypatch.setattr(
            kind, "put", lambda pool, x, put=put: opened.append(type(pool).__name__) or put(pool, x)
        )
    monkeypatch.setattr(verify_run, "check_isolation", lambda *_: Finding("isolation", "", True))
    transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=26, vocab_size=100
    ).save_pretrained(tmp_path)
    run = RunConfig(
        model=ModelConfig(name=str(tmp_path)),
        data=DataConfig(train=("none",), max_seq_len=64),
        chunks=chunks,
        offload=offload,
        memory={"disk": "1GiB", "disk_dir": str(tmp_path)},
    )
    findings = verify_run.verify(run)
    assert all(finding.passed for finding in findings), findings
    assert told in capsys.readouterr().out
    assert set(opened) == ({"CpuPool", "DiskPool"} if "order" in chunks else {"CpuPool"})


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(n, marks=getattr(pytest.mark, mark)) for n, mark in HYBRIDS.items()],
)
def test_recurrent_layers_are_proved_without_their_float32(model_type: str) -> None:
    subject = recurrent(model_type)
    assert subject.bound == RECURRENT
    for check in (check_gradients, check_isolation, check_accumulation):
        finding = check(subject)
        assert finding.passed and finding.name, finding


def recurrent(model_type: str, options: furlong.ChunkOptions = OPTIONS) -> Subject:
    config = transformers.AutoConfig.for_model(model_type)
    return build_subject(shrink_config(config, max_seq_len=4096), options, None)


def test_tables_that_a_family_makes_once_are_not_float32_either() -> None:
    model = recurrent("minimax").model
    slopes = [buffer for name, buffer in model.named_buffers() if name.endswith("slope_rate")]
    assert slopes and all(bool((x.float().double() != x).any()) for x in slopes)


def test_decays_are_spread_as_vectors_whatever_their_shape() -> None:
    """Five times as large, Kimi's (1, 1, heads, 1) would forget all before the next token."""
    model = recurrent("kimi_linear").model
    decays = [p for name, p in model.named_parameters() if name.endswith("A_log")]
    assert decays and all(p.ndim == 4 and float(p.max()) < math.log(16) + 1 for p in decays)


@pytest.mark.slow
def test_layers_that_a_backward_recomputes_are_without_float32_there_too() -> None:
    subject = recurrent("bamba", replace(OPTIONS, recompute_layers=1))
    finding = check_accumulation(subject)
    assert finding.passed, finding


@pytest.mark.slow
def test_the_verb_prints_every_proof_and_fails_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def instead(subject: Subject) -> Finding:
        asked.append(subject)
        return Finding("accumulation", "not run here", len(asked) == 2)

    monkeypatch.setattr(verify_run, "check_accumulation", instead)
    transformers.Qwen3Config(num_hidden_layers=4, max_position_embeddings=256).save_pretrained(
        tmp_path
    )
    arguments = ["verify", f"--model.name={tmp_path}", "--data.train=none"]
    arguments += ["--data.max_seq_len=1024", "--model.rope.rope_type=yarn"]
    arguments += ["--model.rope.factor=4", "--chunks.keep=kv"]
    assert main(arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "Qwen3ForCausalLM, 3 layers" in lines[0] and "keep kv" in lines[0]
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["ok", "gradients"], ["ok", "isolation"], ["FAIL", "accumulation"],
    ]  # fmt: skip
    assert lines[4] == "failed: accumulation"
    assert asked[0].model.config.rope_parameters["rope_type"] == "yarn"
    assert asked[0].options.keep == "kv"
    for name in ("gradients", "isolation"):
        found = Finding(name, "not run again", True)
        monkeypatch.setattr(verify_run, f"check_{name}", lambda _, found=found: found)
    assert main(arguments) == 0


def test_a_model_that_cannot_be_trained_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers.LlamaConfig(attention_dropout=0.1).save_pretrained(tmp_path)
    flags = [f"--model.name={tmp_path}", "--data.train=none", "--data.max_seq_len=64"]
    assert main(["verify", *flags]) == 2
    assert "attention dropout 0.1" in capsys.readouterr().err
    transformers.T5Config().save_pretrained(tmp_path)
    assert main(["verify", *flags]) == 2
    assert "model type t5" in capsys.readouterr().err
