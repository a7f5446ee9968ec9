"""Hybrids from their config.json alone: parameters, kinds of layers, states, latents."""

import inspect
import json
import re
from functools import cache

import pytest
from helpers.hybrids import HYBRIDS

from furlong.cost.shape import ModelShape
from furlong.errors import ConfigError
from furlong.families import FAMILIES

BASE = {k: v for k, v in HYBRIDS["qwen3_5_text"].items() if not k.startswith(("linear", "layer"))}
LATENT = {
    "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "moe_intermediate_size": 32, "topk_group": 1, "q_lora_rank": 32, "first_k_dense_replace": 1,
    "head_dim": None,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4 = {
    **BASE, "sliding_window": 20, "global_head_dim": 32, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 320, "layer_types": [SLIDING, FULL] * 2,
}  # fmt: skip
SHARING = {"num_hidden_layers": 6, "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 2}
CONFIGS = HYBRIDS | {
    "deepseek_v2": BASE | LATENT,
    "deepseek_v3": BASE | LATENT,
    "deepseek_v3 without narrow queries": BASE | LATENT | {"q_lora_rank": None},
    "deepseek_v3 with biases": BASE | LATENT | {"attention_bias": True},
    "llama4_text": {
        **BASE, "num_local_experts": 2, "intermediate_size_mlp": 80, "attention_chunk_size": 20,
        "floor_scale": 16, "no_rope_layer_interval": 2, "moe_layers": [1, 3],
        "num_experts_per_tok": 1,
    },
    "gemma4_text": GEMMA4,
    "gemma4_text sharing": GEMMA4 | SHARING,
    "gemma4_text doubled": GEMMA4 | SHARING | {"use_double_wide_mlp": True},
    "gemma4_text with one projection": {
        **GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
    "gemma4_text with experts": {
        **GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "falcon_h1 with norms and biases": HYBRIDS["falcon_h1"] | {
        "mamba_rms_norm": True, "projectors_bias": True, "attention_bias": True, "mlp_bias": True,
    },
    "granitemoehybrid without experts": HYBRIDS["granitemoehybrid"] | {"num_local_experts": 0},
    "mamba with biases": HYBRIDS["mamba"] | {"use_bias": True, "use_conv_bias": False},
    "mamba2 with biases": HYBRIDS["mamba2"] | {"use_bias": True, "use_conv_bias": False},
    "lfm2 with biases": HYBRIDS["lfm2"] | {"conv_bias": True},
    "lfm3 without gates": HYBRIDS["lfm3"] | {"use_attention_gate": False},
    "zamba2 with two blocks": HYBRIDS["zamba2"] | {"num_mem_blocks": 2},
    "zamba2 without attention's adapters": HYBRIDS["zamba2"] | {
        "use_shared_attention_adapter": False
    },
}  # fmt: skip


RECURRENT = re.compile(
    "(DeltaNet|DeltaAttention|LightningAttention|Mamba2?(Layer|Mixer)|BambaMixer|FalconH1Mixer"
    "|ShortConv|RecurrentBlock)$"
)
"""Names of the classes of transformers that have a state."""


@cache
def transformers_model(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {k: v for k, v in CONFIGS[name].items() if v is not None}
    config = AutoConfig.for_model(name.split()[0], **settings)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def shape_of(name):
    return ModelShape.from_config(transformers_model(name).config.to_dict())


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_are_transformers_own(name):
    model, shape = transformers_model(name), shape_of(name)
    assert shape.exact
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert sum(shape.layer_parameters(i) for i in range(shape.num_layers)) == sum(
        p.numel() for n, p in model.named_parameters() if ".layers." in n
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_file_without_defaults_says_the_same(name):
    shortened = json.loads(json.dumps(transformers_model(name).config.to_diff_dict()))
    assert ModelShape.from_config(shortened) == shape_of(name)


@pytest.mark.parametrize("name", CONFIGS)
def test_kinds_of_layers_are_those_of_the_model(name):
    from torch import nn

    model, shape = transformers_model(name), shape_of(name)
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    assert len(layers) == shape.num_layers
    for layer, mixer in zip(layers, shape.mixers, strict=True):
        classes = [type(m).__name__ for m in layer.modules()]
        recurrent = [c for c in classes if RECURRENT.search(c)]
        attention = [c for c in classes if c.endswith("Attention") and c not in recurrent]
        assert mixer.is_recurrent == bool(recurrent), classes
        assert mixer.attends == bool(attention), classes


# the table of bytes at a chunk's end, by class defaults or published sizes
KIMI = (["linear_attention"] * 3 + ["full_attention"]) * 6 + ["linear_attention"] * 2 + [FULL]
PUBLISHED = {
    "qwen3_5_text": ({}, 24, 2.06, 50, 128),
    "qwen3_next": ({}, 36, 2.06, 74, 96),
    "kimi_linear": ({"layer_types": KIMI}, 20, 2.09, 42, 32),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_states_and_what_tokens_store_of_published_models(name):
    from transformers import AutoConfig

    settings, num_recurrent, layer_mib, all_mib, kv_mib = PUBLISHED[name]
    shape = ModelShape.from_config(AutoConfig.for_model(name, **settings).to_dict())
    states = [mixer.state_bytes(2) for mixer in shape.mixers if mixer.is_recurrent]
    assert len(states) == num_recurrent
    assert states[0] / 2**20 == pytest.approx(layer_mib, abs=0.01)
    layers = range(shape.num_layers)
    assert shape.state_bytes(layers, 2) / 2**20 == pytest.approx(all_mib, abs=0.5)
    stored = sum(mixer.stored for mixer in shape.mixers if mixer.attends)
    assert 4096 * 2 * stored / 2**20 == pytest.approx(kv_mib, rel=0.15)


def test_deepseek_stores_latents():
    from transformers import AutoConfig

    shape = ModelShape.from_config(AutoConfig.for_model("deepseek_v3").to_dict())
    assert 4096 * 2 * 61 * shape.stored_size / 2**30 == pytest.approx(0.27, abs=0.01)
    assert 4096 * 2 * 61 * shape.mixers[0].kv_width / 2**30 == pytest.approx(19, abs=0.1)
    assert shape.has_latents


def test_the_scan_of_a_delta_rule_takes_six_million_operations():
    from transformers import AutoConfig

    shape = ModelShape.from_config(AutoConfig.for_model("qwen3_next").to_dict())
    assert shape.mixers[0].scan_flops / 1e6 == pytest.approx(6, rel=0.05)
    assert 2 * shape.mixers[0].matrices / 1e6 == pytest.approx(67, rel=0.05)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("qwen3_next", {"layer_types": None, "full_attention_interval": 4}),
        ("kimi_linear", {"layer_types": None, "mlp_layer_types": None,
                         "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2, 4],
                                                "head_dim": 16, "num_heads": 4,
                                                "short_conv_kernel_size": 4}}),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "ME*-M"}),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [1, 3]}),
        ("bamba", {"layer_types": None}),
    ],
)  # fmt: skip
def test_layers_of_a_config_as_its_authors_wrote_it(name, keys):
    from transformers import AutoConfig

    settings = {k: v for k, v in {**CONFIGS[name], **keys}.items() if v is not None}
    own = AutoConfig.for_model(name, **settings).to_dict()
    written = {k: v for k, v in {**settings, "model_type": name}.items() if v is not None}
    read = {k: v for k, v in own.items() if k not in ("layer_types", "layers_block_type")}
    shape = ModelShape.from_config(own)
    assert ModelShape.from_config(read | written).mixers == shape.mixers
    assert ModelShape.from_config(read | written).mlps == shape.mlps


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.not_in_chunks])
def test_what_no_chunks_can_train_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError) as error:
        ModelShape.from_config({**BASE, "model_type": name})
    assert FAMILIES[name].not_in_chunks in error.value.given
    assert name in error.value.given


def test_missing_sizes_and_kinds_are_refused_by_name():
    config = transformers_model("qwen3_next").config.to_dict()
    for key in ("linear_key_head_dim", "layer_types"):
        with pytest.raises(ConfigError, match=key):
            ModelShape.from_config({k: v for k, v in config.items() if k != key})
    with pytest.raises(ConfigError, match="indexed_attention"):
        ModelShape.from_config(config | {"layer_types": ["indexed_attention"] * 4})


SAVED = {
    "qwen3_next": {"linear_num_value_heads": 8, "linear_key_head_dim": 32},
    "kimi_linear": {"linear_num_heads": 8, "linear_head_dim": 32},
    "mamba2": {"hidden_size": 256, "num_heads": 16, "head_dim": 32, "chunk_size": 64},
    "mamba": {"hidden_size": 128, "state_size": 16},
    "minimax": {"hidden_size": 128, "block_size": 32},
    "lfm2": {},
    "recurrent_gemma": {"hidden_size": 128, "lru_width": 128},
}


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_graph_of_a_mixer_is_about_what_is_counted(name, dtype):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {k: v for k, v in {**CONFIGS[name], **SAVED[name]}.items() if v is not None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings))
    model = model.to(getattr(torch, dtype))
    module = next(m for m in model.modules() if RECURRENT.search(type(m).__name__))
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    hidden, element = model.config.hidden_size, 4 if dtype == "float32" else 2

    def saved_bytes(num_tokens):
        storages, alive = {}, []

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
            return tensor

        x = torch.randn(1, num_tokens, hidden, dtype=model.dtype, requires_grad=True)
        needs = inspect.signature(module.forward).parameters
        given = {"attention_mask": None, "position_embeddings": None}
        given["position_ids"] = torch.arange(num_tokens)[None]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(x, **{k: v for k, v in given.items() if k in needs})
        return sum(n for at, n in storages.items() if at not in parameters)

    measured = (saved_bytes(384) - saved_bytes(192)) / 192 - element * hidden  # without its input
    shape = ModelShape.from_config(model.config.to_dict())
    mixer = next(mixer for mixer in shape.mixers if mixer.is_recurrent)
    counted = element * mixer.saved + 4 * mixer.saved_float32
    assert counted == pytest.approx(measured, rel=0.25)
