"""Texts that evaluations let the model write: what is written, and that training stays the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_runs import TinyRun, build_hybrid_run, signal_after
from safetensors.torch import load_file
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import AutoModelForCausalLM, AutoTokenizer

from furlong import ChunkOptions, Engine
from furlong.cli.main import main
from furlong.runtime.distributed.fsdp import sharded_modules
from furlong.runtime.distributed.mesh import make_ranks
from furlong.train.processes import group_of_one
from furlong.train.samples import write_samples

LORA = ("--model.lora.rank=2", "--model.lora.dropout=0.3", "--train.epochs=1", "--train.lr=0.1")
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"


def samples(run: Path) -> dict[int, list[list[str]]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["samples"] for line in lines if "samples" in line}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "adapter_model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_samples_are_the_models_own_and_change_no_step(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Also in a run that was stopped, and without data to evaluate; dropout draws."""
    plain, whole, halves = (tmp_path / name for name in ("plain", "whole", "halves"))
    prompts = ["word1 word2", "wörd 文"]
    flags = [*LORA, f"--log.samples={json.dumps(prompts)}", "--log.sample_tokens=5",
             "--train.eval_every_steps=1"]  # fmt: skip
    assert main(tiny_run.arguments(plain, *LORA)) == 0
    assert main(tiny_run.arguments(whole, *flags)) == 0
    with signal_after(2):
        assert main(tiny_run.arguments(halves, *flags)) == 0
    assert main(tiny_run.arguments(halves, *flags, "--resume")) == 0
    assert same(weights(whole), weights(plain)) and same(weights(halves), weights(plain))
    assert samples(halves) == samples(whole) and list(samples(whole)) == [0, 1, 2, 3]
    assert samples(whole)[3] != samples(whole)[0]

    model = AutoModelForCausalLM.from_pretrained(tiny_run.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.folder / "model")
    ids = tokenizer(prompts, padding=False)["input_ids"]
    for given, (_, text) in zip(ids, samples(whole)[0], strict=True):
        found = torch.tensor([given])
        for _ in range(5):
            best = model(found).logits[:, -1].argmax(-1, keepdim=True)
            found = torch.cat([found, best], 1)
        assert text == tokenizer.decode(found[0, len(given) :])


def test_a_prompt_is_read_in_chunks(tiny_run: TinyRun) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_run.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.folder / "model")
    read: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, given, found: read.append(found.shape[1])
    )
    ids = tokenizer("word1 word2 word3 " * 4)["input_ids"]
    written = [
        write_samples(
            model, tokenizer, [("", ids)], 3, chunk_size=size, device=model.device, in_step=False
        )
        for size in (len(ids), 5)
    ]
    assert written[0] == written[1]
    assert read[0] == len(ids) and max(read[3:]) == 5 and sum(read[3:]) == len(ids) + 2


def test_weights_in_cpu_memory_come_for_a_pass_of_their_layer(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the root, which stays whole; nothing is left of an evaluation, or of texts."""
    model = AutoModelForCausalLM.from_pretrained(tiny_run.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.folder / "model")
    waits, wholes = FSDPParamGroup.wait_for_unshard, list[int]()

    def watched(group: Any) -> None:
        waits(group)
        wholes.append(sum(own.is_unsharded for own in groups))

    with group_of_one():
        ranks = make_ranks(1, 1, 1, "cpu")
        engine = Engine(model, ranks=ranks, offload_weights=True)
        states: Any = [module._get_fsdp_state() for module in sharded_modules(model)]
        groups = [own._fsdp_param_group for own in states]
        monkeypatch.setattr(FSDPParamGroup, "wait_for_unshard", watched)
        write_samples(
            model, tokenizer, [("", [*range(9)])], 2, chunk_size=5, device=ranks.device,
            in_step=False, reshard=True,
        )  # fmt: skip
        assert (max(wholes), len(groups)) == (2, 3)
        ids = torch.arange(9)
        sequences = [{"input_ids": ids, "labels": ids}]
        engine.forward_backward(sequences, ChunkOptions(size=4), backward=False)
        assert not any(own.is_unsharded for own in groups)
        assert groups[0].comm_ctx.post_forward_order == []


def test_messages_go_through_the_chat_template(tiny_run: TinyRun, tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "word1"}]
    flags = [f"--log.samples={json.dumps(prompt)}", "--log.sample_tokens=2", "--train.epochs=null",
             "--train.steps=1", f"--data.chat_template={TEMPLATE}"]  # fmt: skip
    assert main(tiny_run.arguments(tmp_path / "run", *flags)) == 0
    assert samples(tmp_path / "run")[1][0][0] == "<user>word1<answer>"


@pytest.mark.parametrize(
    ("prompts", "more", "said"),
    [
        ([[{"role": "user", "content": "x"}]], [], "chat template"),
        (["word " * 300], [], "log.sample_tokens"),
        (["word"], ["--log.sample_tokens=256"], "log.sample_tokens"),
        (["word", ""], [], "log.samples"),
        ([{"prompt": "x"}, "y"], [], "log.samples"),
        ([[{"content": "x"}]], [f"--data.chat_template={TEMPLATE}{{{{ raise_exception('no') }}}}"],
         "refuses"),
        ([], ["--log.sample_tokens=3"], "log.samples"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_are_told_before_the_first_step(
    tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], prompts: Any,
    more: list[str], said: str,
) -> None:  # fmt: skip
    flags = [f"--log.samples={json.dumps(prompts)}", *more]
    assert main(tiny_run.arguments(tmp_path / "run", *flags)) == 2
    told = capsys.readouterr().err
    assert said in told and "log.sample" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("family", ["mamba2", pytest.param("jamba", marks=pytest.mark.slow)])
def test_a_prompt_of_a_recurrent_model_is_read_at_once(tmp_path: Path, family: str) -> None:
    """Its generation hands states on from token to token alone, and has none or another cache."""
    tiny, prompt = build_hybrid_run(family, tmp_path / "tiny"), "word1 word2 word3"
    flags = (f'--log.samples=["{prompt}"]', "--log.sample_tokens=4", "--chunks.size=8",
             "--train.epochs=null", "--train.steps=1")  # fmt: skip
    assert main(tiny.arguments(tmp_path / "run", *flags)) == 0
    model = AutoModelForCausalLM.from_pretrained(tiny.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder / "model")
    found = torch.tensor([tokenizer(prompt)["input_ids"]])
    start = found.shape[1]
    for _ in range(4):
        best = model(found, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        found = torch.cat([found, best], 1)
    ((_, text),) = samples(tmp_path / "run")[0]
    assert tokenizer.decode(found[0, start:]).startswith(text)
