"""All proofs on one configuration, each printed as a line with its figure and verdict."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from furlong.config.schema import DataConfig, ModelConfig, RunConfig, Source
from furlong.kv.pools import Storage
from furlong.models.build import model_of_config, read_config
from furlong.models.folder import check_folder
from furlong.models.shrink import LONGEST_TOKENS, shrink_config
from furlong.planners.decide import given_options
from furlong.planners.options import ChunkOptions, fixed_options, options_in_words
from furlong.units import format_seconds
from furlong.verify.checks import (
    CHUNK_SIZE,
    Finding,
    Subject,
    build_subject,
    check_accumulation,
    check_gradients,
    check_isolation,
)
from furlong.verify.resume import check_resume


def verify(config: RunConfig | None = None) -> list[Finding]:
    """Proves on a run's configuration, shrunk, what furlong promises; a small Qwen2 without one.

    Prints as it goes. Raises UserError for a model that cannot be trained.
    """
    run = config or RunConfig(
        model=ModelConfig(name="Qwen2"),
        data=DataConfig(train=(Source(path="none"),), max_seq_len=LONGEST_TOKENS),
    )
    whole = _default_model() if config is None else _model_config(run)
    shrunk = shrink_config(whole, max_seq_len=run.data.max_seq_len)
    lora = None if run.model.lora is None else run.model.lora.model_dump() | {"adapter": None}
    options = _options(run, whole, shrunk)
    # the budgets are those of the whole model
    storage = Storage(disk_dir=run.memory.disk_dir)
    subject = build_subject(shrunk, options, lora, storage=storage)
    print(_describe(subject, run.model.name))
    if run.model.quantize is not None:
        print("these weights are in floats: those in 4 bits are checked at the start of each run")
    checks = [
        *(
            partial(check, subject)
            for check in (check_gradients, check_isolation, check_accumulation)
        ),
        partial(check_resume, run, shrunk),
    ]
    findings = []
    for check in checks:
        started_s = time.perf_counter()
        finding = check()
        verdict, took = "ok  " if finding.passed else "FAIL", time.perf_counter() - started_s
        told = f"{finding.name:<12}  {finding.figure}  ({format_seconds(took)})"
        print(f"{verdict}  {told}", flush=True)
        findings.append(finding)
    return findings


def _options(run: RunConfig, whole: Any, shrunk: Any) -> ChunkOptions:
    """The run's own options, with chunks and stages that cut the small sequences and model; without
    sampling, for an exact step."""
    given = given_options(run) | {"size": CHUNK_SIZE, "sample": None}
    if given.get("stage_layers", whole.num_hidden_layers) < whole.num_hidden_layers:
        most = max(1, shrunk.num_hidden_layers // 2)
        given["stage_layers"] = min(given["stage_layers"], most)
    return fixed_options(run.data.max_seq_len, given)


def _model_config(run: RunConfig) -> Any:
    rope = None if run.model.rope is None else run.model.rope.model_dump(mode="json")
    source, revision = check_folder(run.model.name, run.model.revision), run.model.revision
    config = read_config(source, revision=revision, rope=rope, max_seq_len=run.data.max_seq_len)
    # what cannot be built is told of this model, not of its shrunk copy
    model_of_config(config, source, dtype=torch.float32)
    return config


def _default_model() -> Any:
    """The shape of Qwen2.5-0.5B."""
    from transformers import Qwen2Config

    return Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip


def _describe(subject: Subject, name: str) -> str:
    model = subject.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kinds = dict.fromkeys(getattr(base.config, "layer_types", None) or ["full_attention"])
    adapters = ", adapters" if base is not model else ""
    return (
        f"{name} in small: {type(base).__name__}, {base.config.num_hidden_layers} layers"
        f" ({', '.join(kinds)}), hidden {base.config.hidden_size}{adapters};"
        f" chunks: {options_in_words(subject.options)}; float64 on the CPU"
    )
