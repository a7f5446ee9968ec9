"""Bytes of a graph: what is counted is what transformers' modules save."""

from dataclasses import replace

import pytest
from helpers import tiny_families
from helpers.tiny_families import config_of, own_settings
from papers.fused import fused

from furlong.cost.memory import eager, stage_bytes
from furlong.cost.shape import ModelShape, model_shape
from furlong.cost.training import Lora, Training
from furlong.families import FAMILIES

TINY = tiny_families.FAMILIES | tiny_families.OTHERS

WIDE = {
    "hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8, "layer_types": None,
    "sliding_window": None,
}  # fmt: skip
OWN = {"cohere": {"use_qk_norm": None}, "qwen3_moe": {"moe_intermediate_size": 160}}
"""Settings of a family that are not those of every tiny model of it."""
COUNTED = [name for name in FAMILIES if name in TINY]
NUM_TOKENS = 128


def saved_bytes_per_token(name, dtype, adapters=()):
    """Bytes of all storages that the graph of one chunk holds, parameters apart."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from furlong.kv.arena import Arena
    from furlong.kv.pools.device import DevicePool
    from furlong.kv.store import KVStore
    from furlong.models.causal_lm import CausalLM
    from furlong.ops.choose import Kind, choose_backend
    from furlong.plan.passes import Pass
    from furlong.plan.plan import Chunk, Slice
    from furlong.plan.rows import rows_of
    from furlong.runtime.cells.cell import Cell

    heads = {"head_dim": 32} if "head_dim" in own_settings(name) else {}
    config = config_of(name, **WIDE, **heads, **OWN.get(name, {}))
    cpu, torch_dtype = torch.device("cpu"), getattr(torch, dtype)
    model = AutoModelForCausalLM.from_config(config).to(torch_dtype)
    if adapters:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=list(adapters)))
        model = model.to(torch_dtype)  # as the executor computes: adapters in compute dtype
    store = KVStore(Arena(cpu), {})
    backend = choose_backend(Kind(cpu, torch_dtype, 32))
    chunk = Chunk((Slice(0, 0, NUM_TOKENS),))
    rows = rows_of(chunk, 0, sp_size=1, q_heads=1, kv_heads=1)
    cell = Cell(rows, {}, store, backend, DevicePool(store.arena), range(3))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    adapter = CausalLM(model)
    ids = torch.randint(0, 96, (NUM_TOKENS,))
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with adapter.installed(), hooks:
        (stage,) = adapter.stages((3,))
        stage.run(ids, torch.arange(NUM_TOKENS), cell, Pass("graph"))
    return sum(storages.values()) / NUM_TOKENS, ModelShape.from_config(config.to_dict())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", COUNTED)
def test_counted_graph_is_what_the_modules_save(name, dtype):
    measured, shape = saved_bytes_per_token(name, dtype)
    counted = stage_bytes(shape, (3,), 0, Training.in_dtype(dtype)).graph()
    assert measured == pytest.approx(counted, rel=0.08)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "olmo2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mlp", [False, True])
def test_frozen_matrices_save_no_input(name, dtype, mlp):
    adapters = ATTENTION + MLP if mlp else ATTENTION
    measured, shape = saved_bytes_per_token(name, dtype, adapters)
    training = replace(Training.in_dtype(dtype), lora=Lora(2, mlp=mlp))
    assert measured == pytest.approx(stage_bytes(shape, (3,), 0, training).graph(), rel=0.08)


def test_fused_modules_save_what_megatron_counts():
    shape = model_shape("GPT-13B")  # width 4 D, full heads: 32 D bytes and the log-sum-exp
    assert fused(shape).layer_bytes(shape, 0, 2) == 32 * 5120 + 4 * 40
    assert fused(shape).layer_bytes(shape, 0, 2) < eager(shape, 2).layer_bytes(shape, 0, 2)


def test_a_checkpointed_layer_keeps_its_input():
    shape = model_shape("Llama-3-8B")
    cell = stage_bytes(shape, (16, 16), 1, Training())
    assert cell.graph(16) == 16 * 2 * 4096 + cell.ends
    assert cell.graph(3) - cell.graph(4) == pytest.approx(cell.graph_layers[0] - 2 * 4096)
    assert stage_bytes(shape, (16, 16), 0, Training()).ends == 0
