"""Layers as they are measured on meta, against transformers' own models and real graphs."""

import json
import re
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import torch
from helpers import tiny_families
from helpers.hybrids import HYBRIDS
from helpers.shapes import shape_of_values
from helpers.tiny_families import WINDOW, config_of, own_settings
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from furlong.cost.memory import stage_bytes
from furlong.cost.shape import ModelShape, cached_shape, is_known_model, known_models, model_shape
from furlong.cost.training import Lora, Training
from furlong.errors import ConfigError
from furlong.families import FAMILIES
from furlong.kv.arena import Arena
from furlong.kv.pools import DevicePool
from furlong.kv.store import KVStore
from furlong.models.build import add_adapters, model_of_config
from furlong.models.decoder import HFDecoder
from furlong.models.describe import describe
from furlong.models.shrink import shrink_config
from furlong.ops.backends.select import CallKind, choose_backend
from furlong.plan.passes import Pass
from furlong.plan.plan import Chunk, Slice
from furlong.plan.rows import rows_of
from furlong.runtime.cell import Cell

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
OTHERS = HYBRIDS | {
    "deepseek_v2": BASE | LATENT,
    "deepseek_v3": BASE | LATENT,
    "deepseek_v3 without narrow queries": BASE | LATENT | {"q_lora_rank": None},
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
    "granitemoehybrid without experts": HYBRIDS["granitemoehybrid"] | {"num_local_experts": 0},
    "zamba2 with two blocks": HYBRIDS["zamba2"] | {"num_mem_blocks": 2},
}  # fmt: skip


GROUPED = {
    "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96,
}  # fmt: skip
VARIANTS = {
    "llama tied": {"tie_word_embeddings": True},
    "llama wide heads": {"head_dim": 24},
    "phi3 with windows": {"sliding_window": WINDOW},
    "qwen2 late windows": {
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2,
    },
    "qwen3_moe with a dense layer": {"mlp_only_layers": [1]},
}  # fmt: skip
TINY = tiny_families.FAMILIES | tiny_families.OTHERS
OWN_CODE = {"gpt2", "granitemoe"}
"""Families that no planner has been tried on."""
CONFIGS = {n: {} for n in TINY if n not in OWN_CODE} | VARIANTS | OTHERS


@cache
def config(name):
    """The config of a tiny model; layer types of plain ones are their family's own."""
    family = name.split()[0]
    if name not in OTHERS:
        own = {**GROUPED, **own_settings(family), "layer_types": None, **CONFIGS[name]}
        return config_of(family, **own)
    settings = {k: v for k, v in OTHERS[name].items() if v is not None}
    return AutoConfig.for_model(family, **settings)


@cache
def shape_of(name):
    return describe(config(name))


RECURRENT = re.compile(
    "(DeltaNet|DeltaAttention|LightningAttention|Mamba2?(Layer|Mixer)|BambaMixer|FalconH1Mixer"
    "|ShortConv|RecurrentBlock)$"
)
"""Names of the classes of transformers that have a state."""


QUICK = (
    "llama", "phi3 with windows", "gpt_oss", "qwen3_moe with a dense layer", "deepseek_v3",
    "llama4_text", "gemma4_text sharing", "qwen3_next", "nemotron_h", "minimax",
)  # fmt: skip
"""Of each kind of layer one; the others each night."""


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.nightly) for n in CONFIGS]
)
@pytest.mark.few(3)
def test_counts_windows_kinds_and_saved_bytes_are_those_of_the_model(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(name))
    shape = shape_of(name)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert sum(layer.parameters for layer in shape.layers) == sum(
        p.numel() for n, p in model.named_parameters() if ".layers." in n
    )
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    for own, layer in zip(layers, shape.layers, strict=True):
        classes = [type(m).__name__ for m in own.modules()]
        recurrent = [c for c in classes if RECURRENT.search(c)]
        assert layer.is_recurrent == bool(recurrent), classes
        attention = [c for c in classes if c.endswith("Attention") and c not in recurrent]
        assert layer.attends == bool(attention), classes
    types = getattr(config(name), "layer_types", None)
    if getattr(config(name), "sliding_window", None) == WINDOW:
        slides = ["sliding" in kind for kind in types] if types else [True] * shape.num_layers
        assert shape.windows == tuple(WINDOW if slide else None for slide in slides)
        assert any(slides)
    assert ModelShape.from_values(json.loads(json.dumps(shape.to_values()))) == shape
    require_saved_bytes(name, "bfloat16")


NUM_TOKENS, RANK = 128, 16


def real_bytes_per_token(config, dtype, adapters=()):
    """Bytes of all storages that the graph of one chunk holds on this CPU, parameters apart."""
    dtype = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if adapters:
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules=list(adapters)))
        model = model.to(dtype)  # as the executor computes: adapters in compute dtype
    adapter, store = HFDecoder(model), KVStore(Arena(torch.device("cpu")), {})
    rows = rows_of(Chunk((Slice(0, 0, NUM_TOKENS),)), 0, sp_size=1, q_heads=1, kv_heads=1)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    ids, layers = torch.arange(NUM_TOKENS) % 90, range(adapter.num_layers)
    with adapter.installed(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        backend = choose_backend(CallKind(store.arena.device, dtype, 32))
        cell = Cell(rows, {}, store, backend, DevicePool(store.arena), layers, adapter.events)
        (stage,) = adapter.stages((adapter.num_layers,))
        pack(stage.run(ids, torch.arange(NUM_TOKENS), cell, Pass("graph")))
    return sum(storages.values()) / NUM_TOKENS


def counted(shape, training):
    return stage_bytes(shape, (shape.num_layers,), 0, training).graph()


@pytest.mark.nightly
@pytest.mark.parametrize("name", CONFIGS)
def test_saved_bytes_are_those_of_a_real_graph_in_float32_too(name):
    require_saved_bytes(name, "float32")


def require_saved_bytes(name, dtype):
    real = real_bytes_per_token(config(name), dtype)
    expected = counted(shape_of(name), Training.in_dtype(dtype))
    # state spaces save a little with the first and last token of a chunk
    assert expected == pytest.approx(real, rel=0.025)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("name", "dtype", "adapters"),
    [
        ("llama", "bfloat16", ATTENTION),
        ("gemma2", "bfloat16", ATTENTION + MLP),
        pytest.param("qwen3", "float32", ATTENTION, marks=pytest.mark.slow),
        pytest.param("olmo2", "float32", ATTENTION + MLP, marks=pytest.mark.slow),
    ],
)
def test_frozen_matrices_save_no_input(name, dtype, adapters):
    lora = Lora(RANK, adapters)
    shape = shape_of(name)
    expected = counted(shape, replace(Training.in_dtype(dtype), lora=lora))
    real = real_bytes_per_token(config(name), dtype, adapters)
    assert expected == pytest.approx(real, rel=0.03)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(name))
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules=list(adapters)))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(lora.layer_parameters(shape, n) for n in range(shape.num_layers)) == trained


EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


@pytest.mark.parametrize(
    ("family", "modules", "parameters"),
    [
        ("deepseek_v3", "all-linear", ()), ("qwen2_moe", "all-linear", EXPERTS),
        ("qwen3_5_moe_text", "all-linear", ()), ("phimoe", ("q_proj", "v_proj"), EXPERTS[1:]),
        ("gpt_oss", r".*layers\.[01]\..*\.[qv]_proj", EXPERTS), ("gpt2", "all-linear", ()),
        ("mamba2", "all-linear", ()), ("glm4_moe", ("mlp.gate_proj", "o_proj"), ()),
        ("zamba2", "all-linear", ()), ("granitemoehybrid", "all-linear", ("router.weight",)),
    ],
)  # fmt: skip
@pytest.mark.few(2, 5)
def test_adapters_are_counted_as_peft_makes_them(family, modules, parameters):
    config = shrink_config(AutoConfig.for_model(family), max_seq_len=64)
    lora = {
        "rank": 3, "alpha": 6.0, "dropout": 0.0, "target_modules": modules,
        "target_parameters": parameters,
    }  # fmt: skip
    model = add_adapters(model_of_config(config, family, dtype=torch.bfloat16), lora)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shape, counted = describe(config), Lora(3, modules, parameters)
    assert sum(counted.layer_parameters(shape, n) for n in range(shape.num_layers)) == trained


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"pad_token_id": 0}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    ],
)
def test_families_that_look_at_ids_or_positions_are_measured(family, changes):
    found = describe(config_of(family, num_key_value_heads=None, **changes))
    plain = config_of(family, num_key_value_heads=None, pad_token_id=None)
    assert found.layers == describe(plain).layers


# the table of bytes at a chunk's end, by class defaults or published sizes
KIMI = (["linear_attention"] * 3 + ["full_attention"]) * 6 + ["linear_attention"] * 2 + [FULL]
PUBLISHED = {
    "qwen3_5_text": ({}, 24, 2.06, 50, 128),
    "qwen3_next": ({}, 36, 2.06, 74, 96),
    "kimi_linear": ({"layer_types": KIMI}, 20, 2.09, 42, 32),
}


@pytest.mark.parametrize(
    "name",
    [n if n == "qwen3_5_text" else pytest.param(n, marks=pytest.mark.nightly) for n in PUBLISHED],
)
def test_states_and_what_tokens_store_of_published_models(name):
    settings, num_recurrent, layer_mib, all_mib, kv_mib = PUBLISHED[name]
    shape = describe(AutoConfig.for_model(name, **settings))
    states = [layer.state_bytes(2) for layer in shape.layers if layer.is_recurrent]
    assert len(states) == num_recurrent
    assert states[0] / 2**20 == pytest.approx(layer_mib, abs=0.01)
    total = sum(layer.state_bytes(2) for layer in shape.layers)
    assert total / 2**20 == pytest.approx(all_mib, abs=0.5)
    stored = sum(layer.stored for layer in shape.layers if layer.attends)
    assert 4096 * 2 * stored / 2**20 == pytest.approx(kv_mib, rel=0.15)


def test_deepseek_stores_latents():
    """Of five layers, the first three of which have no experts; the sums are those of all 61."""
    shape = describe(AutoConfig.for_model("deepseek_v3", num_hidden_layers=5))
    assert 4096 * 2 * 61 * shape.stored_size / 2**30 == pytest.approx(0.27, abs=0.01)
    assert 4096 * 2 * 61 * shape.layers[0].kv_width / 2**30 == pytest.approx(19, abs=0.1)
    assert shape.has_latents
    expert = 3 * shape.hidden_size * 2048
    assert shape.layers[-1].expert_parameters == 256 * expert
    assert shape.num_parameters - shape.num_active_parameters == 2 * 248 * expert


@pytest.mark.parametrize("name", [n for n, f in FAMILIES.items() if f.not_in_chunks])
def test_what_no_chunks_can_train_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match=name):
        describe(AutoConfig.for_model(name))


def test_text_config_and_unknown_models():
    inner = {**GROUPED, "model_type": "llama"}
    beside_images = shape_of_values({"model_type": "llava", "text_config": inner})
    assert beside_images.layers_name == "model.language_model.layers"
    assert replace(beside_images, layers_name="model.layers") == shape_of_values(inner)
    with pytest.raises(ConfigError, match=r"did you mean Qwen2\.5-7B\?"):
        model_shape("qwen2.5-7")


def test_published_counts():
    billions = {
        "Qwen2.5-0.5B": 0.494032768, "Qwen2.5-1.5B": 1.543714304, "Qwen2.5-7B": 7.615616512,
        "Qwen2.5-14B": 14.770, "Qwen2.5-32B": 32.764, "Qwen2.5-72B": 72.706, "Llama-2-7B": 6.738,
        "Llama-2-13B": 13.016, "Llama-3-8B": 8.030, "Llama-3.2-1B": 1.2358144,
        "Llama-3.1-8B": 8.030261248, "Qwen3-0.6B": 0.59604992, "Qwen3-1.7B": 1.720574976,
        "Qwen3-8B": 8.190735360,
    }  # fmt: skip
    for name, count in billions.items():
        assert model_shape(name).num_parameters / 1e9 == pytest.approx(count, abs=6e-4), name


FEW = ("Qwen2.5-0.5B", "Qwen3-8B", "Llama-3.2-1B", "GPT-13B")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FEW, marks=pytest.mark.slow),
        pytest.param(tuple(known_models()), marks=pytest.mark.nightly),
    ],
    ids=["few", "all"],
)
def test_rows_of_known_models_are_what_is_measured(names, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import known_models as made

    assert list(made.CONFIGS) == list(known_models())
    for name in names:
        assert json.loads(json.dumps(made.row(name))) == known_models()[name], name


def test_stages_sum_to_the_model_and_copy_a_tied_head():
    for name in ("llama", "llama tied"):
        shape = shape_of(name)
        for stages in ((7,), (1, 6), (2, 4, 1)):
            ranks = [frozenset((stage,)) for stage in range(len(stages))]
            total = sum(Training().weights(shape, stages, held).all for held in ranks)
            copied = shape.tied_head and len(stages) > 1
            assert total == shape.num_parameters + copied * shape.embedding_parameters


@pytest.mark.parametrize(
    ("old", "new", "is_taken"),
    [
        ("", "\n", True),
        ('"hidden_size"', '"hidden"', False),
        ("{", "", False),
    ],
)
def test_a_cached_shape_that_was_damaged_is_measured_again(
    old, new, is_taken, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape, measured = shape_of("llama tied"), []

    def measure():
        measured.append(1)
        return shape

    assert cached_shape({}, measure) == cached_shape({}, measure) == shape
    (file,) = (tmp_path / "furlong").iterdir()
    text = file.read_text()
    assert len(measured) == 1 and old in text
    file.write_text(text.replace(old, new, 1))
    assert cached_shape({}, measure) == shape
    assert len(measured) == (1 if is_taken else 2)
    monkeypatch.setattr(metadata, "version", lambda name: f"another {name}")
    assert cached_shape({}, measure) == shape
    assert len(measured) == (2 if is_taken else 3)


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        ("llama-3-8b", True), ("meta-llama/Llama-3-8B", True), ("Qwen/Qwen2.5-7B", True),
        ("GPT-13B", True), ("someone/Llama-3-8B", False), ("Qwen/Llama-3-8B", False),
        ("openai/GPT-13B", False), ("meta-llama/Llama-4-8B", False),
    ],
)  # fmt: skip
def test_only_its_publisher_has_a_known_model(name, is_known):
    assert is_known_model(name) == is_known
