"""The peak of a first step, as `furlong train` prints it measured and predicted, method by method.

A model of 34 M parameters in float32, one sequence of 3,072 tokens and three short ones: constants
of the libraries are small beside graphs. docs/research/simulated-and-real.md has the figures.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from helpers.launched import Launched
from helpers.tiny_runs import run_command

pytestmark = pytest.mark.nightly
CUT, PIPELINE, POOL = "--chunks.size=512", "--parallel.pp=2", "--parallel.sp=2"
ADAPTERS = ("--model.lora.rank=8", "--model.lora.target_modules=all-linear")
VOCAB_SIZE = 8192
METHODS: dict[str, tuple[int, tuple[str, ...]]] = {
    # name: processes, flags
    "auto": (1, ()),
    "chunkflow": (1, (CUT, "--chunks.num_retained=2")),
    "seco": (1, (CUT,)),
    "spaco": (1, (CUT, "--chunks.sample={chunks: 4, rule: fixed, report_loss: true}")),
    "seco, a pool": (2, (CUT, POOL)),
    "fpdt": (1, (CUT,)),
    "fpdt, on disk": (1, (CUT, "--offload=disk", "--memory.disk=4GiB")),
    "chunkflow, a pool": (2, (CUT, POOL)),
    "fpdt, a pool": (2, (CUT, POOL)),
    "chunkflow, a pipeline": (2, (CUT, PIPELINE)),
    "infinipipe": (2, (PIPELINE, "--memory.device=560MiB")),
    "skrull": (2, (POOL, "--memory.device=1200MiB")),
    "auto, adapters": (1, ADAPTERS),
    "seco, adapters": (1, (CUT, *ADAPTERS)),
    "chunkflow, adapters": (1, ("--chunks.size=1024", *ADAPTERS)),
    "seco, a pool, adapters": (2, (CUT, POOL, *ADAPTERS)),
    "places": (2, (POOL, "--memory.device=1200MiB")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    words = ["<end>", "<unknown>", *(f"w{i}" for i in range(VOCAB_SIZE - 2))]
    numbers = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=words[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[0])
    wrapped.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=4096,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "texts").mkdir()
    draw = random.Random(1)
    for num_tokens in (3072, 451, 401, 201):
        text = " ".join(draw.choices(words[2:], k=num_tokens - 1))
        (folder / "texts" / f"{num_tokens}.txt").write_text(text)
    return folder


@pytest.mark.parametrize("name", METHODS)
def test_a_first_step_takes_what_is_predicted(name: str, folder: Path, tmp_path: Path) -> None:
    num_processes, flags = METHODS[name]
    arguments = [
        "train", f"--model.name={folder / 'model'}", "--model.dtype=float32",
        f"--data.train={folder / 'texts'}", "--data.max_seq_len=3072", "--train.steps=1",
        "--train.epochs=null", "--train.sequences_per_step=4", "--train.eval_every_steps=0",
        f"--chunks.method={name.split(',')[0]}", *flags, f"--out={tmp_path / 'run'}",
    ]  # fmt: skip
    launched = Launched(tmp_path / "out", run_command, arguments, num_processes=num_processes)
    ended = launched.ended(600)
    assert [process.code for process in ended] == [0] * num_processes, ended
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    figures = {key: value for line in lines for key, value in json.loads(line).items()}
    took, counted = figures["used_memory_bytes"], figures["predicted_device_bytes"]
    print(f"{name}: {took / 2**20:.0f} MiB, {counted / 2**20:.0f} predicted, {counted / took:.2f}")
    assert counted == pytest.approx(took, rel=0.1)
