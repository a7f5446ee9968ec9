"""ChunkFlow's Table 5: what a longer context adds, by the bytes of its keys and values."""

import pytest
from papers.chunkflow import chunkflow_plan
from papers.fused import OtherMemory

from furlong.cost.shape import model_shape
from furlong.cost.training import Training

pytestmark = pytest.mark.nightly

K = 1024


@pytest.mark.parametrize(("parts", "gib"), [(("kv",), 3.0625), (("kv", "kv_gradients"), 6.125)])
def test_224k_tokens_more_of_context(parts, gib):
    """28 layers of two times 512 bf16 values, on four devices: 14,336 bytes a token."""
    shape, training = model_shape("Qwen2.5-7B"), Training(kv_gradient_bytes=2)
    memory = OtherMemory(shape, training, 0, tp_size=4)

    def held(context):
        plan = chunkflow_plan((context,), 4 * K, 1, (shape.num_layers,))
        return sum(memory.curve(plan, 0).peak[part] for part in parts)

    assert (held(256 * K) - held(32 * K)) / 2**30 == pytest.approx(gib, rel=1e-6)
    assert gib * 2**30 == len(parts) * 14_336 * 224 * K
