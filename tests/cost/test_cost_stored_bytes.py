"""Bytes per token that a sequence keeps, for well-known models: the table, and the dial's best."""

from dataclasses import replace

import pytest
from papers.fpdt_plan import plan_fpdt

from furlong.cost.memory.levels import PARTS
from furlong.cost.memory.plan_memory import PlanMemory
from furlong.cost.memory.stored_bytes import (
    checkpoint_bytes_per_token,
    kv_bytes_per_token,
    kv_gradient_bytes_per_token,
    layer_first_bytes_per_token,
    smallest_stage_layers,
)
from furlong.cost.memory.training import Training
from furlong.cost.shapes.known_models import model_shape
from furlong.cost.shapes.shape import ModelShape
from furlong.planners.orders.layer_first import stage_heights

NARROW, WIDE = Training(kv_gradient_bytes=2), Training()
# KB (1,000 bytes) of K,V; with 16-bit gradients; with float32 ones; hidden checkpoints
TABLE = {
    "Qwen2.5-0.5B": ("12.3", "24.6", "36.9", "43.0"),
    "Qwen2.5-1.5B": ("28.7", "57.3", "86.0", "86.0"),
    "Qwen2.5-7B": ("57.3", "114.7", "172.0", "200.7"),
    "Llama-3.2-1B": ("32.8", "65.5", "98.3", "65.5"),
    "Llama-3.1-8B": ("131", "262", "393", "262"),
    "Qwen3-0.6B": ("114.7", "229", "344", "57.3"),
    "Qwen3-1.7B": ("114.7", "229", "344", "114.7"),
    "Qwen3-8B": ("147", "295", "442", "295"),
}
# parameters of these models on the hub
PARAMETERS = {
    "Qwen2.5-0.5B": 494_032_768, "Qwen2.5-1.5B": 1_543_714_304, "Qwen2.5-7B": 7_615_616_512,
    "Llama-3.2-1B": 1_235_814_400, "Llama-3.1-8B": 8_030_261_248, "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976, "Qwen3-8B": 8_190_735_360,
}  # fmt: skip
# Stage heights that keep the fewest bytes, for 16-bit and for float32 gradients. By hand:
# 0.5B: inputs of 1,792 bytes, K,V with gradients of 1,024 or 1,536 per layer: 4 stages of 6 layers
# keep 3 * 1,792 + 6 * 1,024 = 11,520, 3 stages 11,776, 5 stages 12,288
# 8B, 16-bit: both take 8,192, S - 1 + ceil(32 / S) of them: 11 for 5, 6, 7 and 8 stages, of which
# the lowest have 4 layers; so 28 layers of 1.5B with float32 gradients (3,072): 10 for 5, 6 and 7
# 7B, float32: 3 * 7,168 + 7 * 6,144 = 64,512 for 4 stages, 65,536 for 5
HEIGHTS = {
    "Qwen2.5-0.5B": (6, 6), "Qwen2.5-1.5B": (7, 4), "Qwen2.5-7B": (7, 7),
    "Llama-3.2-1B": (4, 4), "Llama-3.1-8B": (4, 4), "Qwen3-0.6B": (2, 2),
    "Qwen3-1.7B": (4, 3), "Qwen3-8B": (6, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name):
    shape = model_shape(name)
    assert shape.num_parameters == PARAMETERS[name]
    kv = kv_bytes_per_token(shape, WIDE)
    found = (
        kv,
        kv + kv_gradient_bytes_per_token(shape, NARROW),
        kv + kv_gradient_bytes_per_token(shape, WIDE),
        checkpoint_bytes_per_token(shape, WIDE),
    )
    rounded = tuple(
        f"{value / 1000:.{1 if '.' in text else 0}f}"
        for value, text in zip(found, TABLE[name], strict=True)
    )
    assert rounded == TABLE[name]


@pytest.mark.parametrize("name", HEIGHTS)
@pytest.mark.parametrize("training", [NARROW, WIDE], ids=["16-bit", "float32"])
def test_the_height_that_keeps_the_fewest_bytes(name, training):
    shape = model_shape(name)
    best = smallest_stage_layers(shape, training)
    assert best == HEIGHTS[name][training is WIDE]
    least = layer_first_bytes_per_token(shape, training, best)
    each = 2 * shape.kv_size * (2 + training.kv_gradient_bytes)
    for height in range(1, shape.num_layers + 1):
        stages = stage_heights(shape.num_layers, height)
        kept = (len(stages) - 1) * shape.hidden_size * 2 + max(stages) * each
        assert kept == layer_first_bytes_per_token(shape, training, height)
        assert kept > least or (kept == least and height >= best)


@pytest.mark.parametrize("height", [1, 2, 3, 6])
@pytest.mark.parametrize("training", [NARROW, WIDE], ids=["16-bit", "float32"])
def test_the_walk_grows_by_as_much(height, training):
    """A longer sequence needs so many more bytes per token, but for what is alive elsewhere."""
    tiny = ModelShape.from_config({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 90,
    })  # fmt: skip
    memory = PlanMemory(replace(tiny), training, 10**15)
    peaks = []
    for length in (2**15, 2**16):
        plan = plan_fpdt([length], num_layers=6, stage_layers=height, chunk_size=1024)
        curve = memory.curve(plan, 0).device
        kinds = ["activations", "kv", "kv_gradients", "buffers"]
        peaks.append(curve[:, [PARTS.index(kind) for kind in kinds]].sum(axis=1).max())
    token_ids = 24
    grown = (peaks[1] - peaks[0]) / 2**15 - token_ids
    assert grown == pytest.approx(layer_first_bytes_per_token(tiny, training, height), rel=0.01)
