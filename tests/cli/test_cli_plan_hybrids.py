"""`furlong plan` on hybrids, by their config.json: plans, words, and what is refused by name."""

import json
import re

import pytest
from helpers.hybrids import HYBRIDS

from furlong.cli.main import main

BASE = {k: v for k, v in HYBRIDS["qwen3_5_text"].items() if not k.startswith(("linear", "layer"))}
LATENT = {
    "model_type": "deepseek_v3", "head_dim": 8, "kv_lora_rank": 32, "q_lora_rank": 32,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "num_key_value_heads": 4,
    "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MAMBA = {
    "model_type": "mamba2", "conv_kernel": 4, "expand": 2, "tie_word_embeddings": False,
    **HYBRIDS["mamba2"],
}  # fmt: skip
CONFIGS = {
    "qwen3_next": {
        **HYBRIDS["qwen3_next"], "model_type": "qwen3_next", "linear_conv_kernel_dim": 4,
    },
    "bamba": {**HYBRIDS["bamba"], "model_type": "bamba", "mamba_d_conv": 4},
    "mamba2": MAMBA,
    "deepseek_v3": BASE | LATENT,
    "llama4_text": {
        **BASE, "model_type": "llama4_text", "num_local_experts": 2, "intermediate_size_mlp": 80,
        "attention_chunk_size": 64, "no_rope_layer_interval": 2, "moe_layers": [1, 3],
        "num_experts_per_tok": 1,
    },
    "zamba2": {
        **HYBRIDS["zamba2"], "model_type": "zamba2", "mamba_d_conv": 4, "mamba_expand": 2,
        "attention_head_dim": 32,
    },
    "gemma4_text": {
        **BASE, "model_type": "gemma4_text", "sliding_window": 20, "global_head_dim": 32,
    },
    "deepseek_v32": BASE | LATENT | {"model_type": "deepseek_v32"},
    "rwkv": BASE | {"model_type": "rwkv"},
}  # fmt: skip
WORDS = {
    "qwen3_next": "4 layers (3 recurrent, 15 KiB of states after each chunk)",
    "bamba": "4 layers (2 recurrent, 10.5 KiB of states after each chunk)",
    "mamba2": "3 layers (3 recurrent, 15.8 KiB of states after each chunk)",
    "deepseek_v3": "4 layers (4 with latent attention)",
    "llama4_text": "4 layers;",
}


QUICK = ["--chunks.method", "chunkflow"]


@pytest.fixture
def plan(tmp_path, capsys):
    """`furlong plan` of a config, with flags -> the exit code and what it says."""

    def run(name, *flags):
        config, lengths = tmp_path / "config.json", tmp_path / "lengths.json"
        config.write_text(json.dumps(CONFIGS[name]))
        lengths.write_text(json.dumps({"version": 1, "lengths": [900, 100, 30]}))
        given = ["--model.name", str(config), "--lengths", str(lengths), "--hardware", "H100"]
        code = main(["plan", *given, *flags])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.few(2)
def test_a_plan_and_true_words(plan, name):
    code, said = plan(name, *QUICK, "--chunks.size", "128", "--chunks.keep", "kv")
    assert code == 0, said
    words = " ".join(said.split())  # lines are wrapped
    assert WORDS[name] in words
    assert bool(re.search(r", states \d", words)) == ("recurrent" in WORDS[name])


@pytest.mark.parametrize(("name", "waits"), [("qwen3_next", True), ("deepseek_v3", False)])
def test_groups_say_that_states_go_from_device_to_device(plan, name, waits):
    code, said = plan(name, *QUICK, "--devices", "2", "--parallel.sp", "2")
    assert code == 0, said
    assert ("recurrent layers run on one device after the other" in " ".join(said.split())) == waits


@pytest.mark.parametrize(
    ("name", "flags", "given", "required"),
    [
        ("zamba2", ["--devices", "2", "--parallel.pp", "2"], "adds the original embeddings again",
         "parallel.pp 1"),
        ("gemma4_text", ["--chunks.order", "layer-first", "--chunks.stage_layers", "2"],
         "feeds token ids and shared keys and values to later layers", "one stage of all layers"),
        ("deepseek_v32", [], "picks the keys of each token with a learned indexer",
         "layers in which"),
        ("rwkv", [], "keeps its state outside of transformers' cache", "layers in which"),
    ],
)  # fmt: skip
@pytest.mark.few(2)
def test_what_cannot_be_is_refused_by_name(plan, name, flags, given, required):
    code, said = plan(name, *flags)
    assert code == 2
    assert given in said.replace("\n", " ")
    assert required in said.replace("\n", " ")


def test_the_search_over_devices_keeps_to_what_can_be(plan):
    code, said = plan("zamba2", *QUICK, "--devices", "4", "--json")
    assert code == 0, said
    # a line on stderr, after ten seconds, comes behind the object
    layout = json.JSONDecoder().raw_decode(said)[0]["layout"]
    assert layout["pp"] == 1, "its layers hand on more than hidden states"
