"""Parameters of well-known models, and the bytes that a token of a long sequence keeps."""

import pytest
from papers.fpdt_plan import plan_fpdt

from furlong.cost.memory import PARTS, PlanMemory
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.models.describe import describe
from furlong.planners.orders import stage_heights

NARROW, WIDE = Training(kv_gradient_bytes=2), Training()
# parameters of these models on the hub
PARAMETERS = {
    "Qwen2.5-0.5B": 494_032_768, "Qwen2.5-1.5B": 1_543_714_304, "Qwen2.5-7B": 7_615_616_512,
    "Llama-3.2-1B": 1_235_814_400, "Llama-3.1-8B": 8_030_261_248, "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976, "Qwen3-8B": 8_190_735_360,
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_known_models_have_the_parameters_of_those_on_the_hub(name):
    assert model_shape(name).num_parameters == PARAMETERS[name]


def kept_bytes(shape, training, height):
    """Of a token: the inputs of all stages but the first, K,V with their gradients of one stage."""
    stages = stage_heights(shape.num_layers, height)
    number_bytes = training.compute_bytes + training.kv_gradient_bytes
    inputs = (len(stages) - 1) * shape.hidden_size * training.compute_bytes
    return inputs + max(stages) * 2 * shape.kv_size * number_bytes


@pytest.mark.parametrize("height", [1, 2, 3, 6])
@pytest.mark.parametrize("training", [NARROW, WIDE], ids=["16-bit", "float32"])
def test_the_walk_grows_by_as_much(height, training):
    """A longer sequence needs so many more bytes per token, but for what is alive elsewhere."""
    tiny = describe({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 90,
    })  # fmt: skip
    memory = PlanMemory(tiny, training, 10**15)
    peaks = []
    for length in (2**15, 2**16):
        plan = plan_fpdt([length], num_layers=6, stage_layers=height, chunk_size=1024)
        curve = memory.curve(plan, 0).device
        kinds = ["activations", "kv", "kv_gradients", "buffers"]
        peaks.append(curve[:, [PARTS.index(kind) for kind in kinds]].sum(axis=1).max())
    token_ids = 24
    grown = (peaks[1] - peaks[0]) / 2**15 - token_ids
    assert grown == pytest.approx(kept_bytes(tiny, training, height), rel=0.01)
