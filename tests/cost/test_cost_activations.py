"""Bytes of a graph: the stages of a model, and the frameworks that papers used."""

import pytest
from papers.fused import fused

from furlong.cost.memory import stage_bytes
from furlong.cost.shape import model_shape
from furlong.cost.training import Training


def test_fused_modules_save_what_megatron_counts():
    shape = model_shape("GPT-13B")  # width 4 D, full heads: 32 D bytes and the log-sum-exp
    assert fused(shape).layer_bytes(shape, 0, 2) == 32 * 5120 + 4 * 40
    ours = stage_bytes(shape, (shape.num_layers,), 0, Training())
    assert fused(shape).layer_bytes(shape, 0, 2) < ours.graph_layers[0]


def test_a_checkpointed_layer_keeps_its_input():
    shape = model_shape("Llama-3-8B")
    cell = stage_bytes(shape, (16, 16), 1, Training())
    assert cell.graph(16) == 16 * 2 * 4096 + cell.ends
    assert cell.graph(3) - cell.graph(4) == pytest.approx(cell.graph_layers[0] - 2 * 4096)
    assert stage_bytes(shape, (16, 16), 0, Training()).ends == 0
