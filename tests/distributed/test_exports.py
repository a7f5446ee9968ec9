"""Exports of divided models: the files of the whole model, without a second one."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.launched import Launched
from helpers.live_bytes import LiveBytes
from helpers.ranks import run_ranks
from helpers.tiny_runs import TinyRun, run_command
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import furlong
from furlong.models.build import build_model, export_model, exported_names
from furlong.runtime.distributed.mesh import make_ranks
from furlong.train import trainer
from furlong.train.checkpoints import whole_weights
from furlong.train.processes import Launch, Processes


def export(rank: int, folder: Path) -> int:
    """The peak of the bytes that an export of a divided model makes, on each process."""
    num_ranks = dist.get_world_size()
    processes = Processes(Launch(rank, num_ranks, rank), dist.group.WORLD)
    ranks = make_ranks(num_ranks, 1, 1, "cpu")
    model = build_model(str(folder / "model"))
    engine = furlong.Engine(model, ranks=ranks, compute_dtype=torch.bfloat16)
    with LiveBytes() as live:
        names = {*exported_names(model).values()}
        weights = whole_weights(engine, processes, names, torch.bfloat16)
        if rank == 0:
            out = folder / "exported"
            export_model(model, None, out, dtype=torch.bfloat16, weights=weights)
    return live.peak


@pytest.mark.slow
def test_a_divided_model_is_exported_to_its_own_files_in_two_bytes_a_weight(tmp_path: Path) -> None:
    """Experts, which are one weight here and many there, tied embeddings, a generation config."""
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=12, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).bfloat16()
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path / "model")
    peak, *others = run_ranks(export, tmp_path, num_ranks=2)
    for name in ("model.safetensors", "generation_config.json", "config.json"):
        source, exported = (tmp_path / of / name for of in ("model", "exported"))
        if name == "config.json":
            old, new = (json.loads(file.read_text()) for file in (source, exported))
            assert old.items() <= new.items()
        else:
            assert exported.read_bytes() == source.read_bytes(), name
    num_bytes = 2 * sum(weight.numel() for weight in model.parameters())
    assert peak < 1.1 * num_bytes
    assert all(other < 0.5 * num_bytes for other in others)


def with_a_full_disk(arguments: list[str]) -> None:
    """`furlong`, whose disk is full when it exports."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer.export_model = full
    run_command(arguments)


@pytest.mark.slow
def test_an_export_that_cannot_be_written_ends_all(tiny_run: TinyRun, tmp_path: Path) -> None:
    arguments = tiny_run.arguments(
        tmp_path / "run", "--train.epochs=null", "--train.steps=1", "--parallel.dp=2"
    )
    ended = Launched(tmp_path / "out", with_a_full_disk, arguments).ended(200)
    assert [process.code for process in ended] == [2, 2], ended
    assert "go on with --resume" in ended[0].said and "given:" not in ended[1].said
