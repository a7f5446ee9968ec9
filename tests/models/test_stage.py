"""A stage: fed and read at its layers, and the model is afterwards as it was."""

from __future__ import annotations

import pytest
import torch
from helpers.batches import batch
from helpers.tiny_families import build

import furlong
from furlong.errors import PlanError
from furlong.kv.arena import Arena
from furlong.kv.pools import DevicePool
from furlong.kv.store import KVStore
from furlong.models.attention import KVReady
from furlong.models.decoder import HFDecoder, Stage
from furlong.ops.backends.select import ProbedBackend
from furlong.plan.passes import Pass
from furlong.plan.plan import Chunk, Slice
from furlong.plan.rows import rows_of
from furlong.runtime.cell import Cell
from furlong.testing import reference_loss, take_grads, worst_relative_error

NUM_TOKENS = 9
CPU = torch.device("cpu")


def cell_of(stage: Stage) -> Cell:
    arena = Arena(CPU)
    chunk = Chunk((Slice(0, 0, NUM_TOKENS),))
    rows = rows_of(chunk, 0, sp_size=1, q_heads=1, kv_heads=1)
    pool = DevicePool(arena)
    return Cell(rows, {}, KVStore(arena, {}), ProbedBackend(), pool, stage.layers, stage.events)


def test_the_model_is_afterwards_as_it_was_also_after_an_error():
    base = build("llama")
    model = HFDecoder(base)
    assert not model.probed.mixers  # looked for once, before the hook
    own = list(base.modules())
    attributes = [set(vars(m)) for m in own]
    stages = model.stages((1, 1, 1))
    handle = base.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with model.installed(), pytest.raises(ZeroDivisionError):
        x = torch.zeros(NUM_TOKENS, 32, dtype=torch.float64)
        what = Pass("graph", recompute_layers=1)
        stages[1].run(x, torch.arange(NUM_TOKENS), cell_of(stages[1]), what)
    handle.remove()
    assert list(base.modules()) == own and [set(vars(m)) for m in own] == attributes
    assert all(stage._inject.x is stage._capture.hidden is None for stage in stages)


@pytest.mark.parametrize("recompute_layers", [0, 1, 2])
def test_a_forward_that_a_caller_has_set_on_a_layer_is_used_and_stays(recompute_layers):
    base = build("llama")
    layer = base.model.layers[1]
    plain = layer.forward
    layer.forward = lambda *given, **named: 0.5 * plain(*given, **named)
    own, sequences = layer.forward, batch([29, 4])
    loss = reference_loss(base, sequences)
    truth = take_grads(base)
    options = furlong.ChunkOptions(size=8, recompute_layers=recompute_layers)
    for _ in range(2):
        assert furlong.forward_backward(base, sequences, options).loss == pytest.approx(loss)
        assert worst_relative_error(take_grads(base), truth) <= 1e-12
        assert layer.forward is own


def test_a_pass_to_the_last_kv_leaves_nothing_swapped():
    base = build("llama")
    model = HFDecoder(base)
    stage = model.stages((2, 1))[0]
    own = list(base.modules())
    ids = batch([NUM_TOKENS])[0]["input_ids"]
    with model.installed(), pytest.raises(KVReady), torch.no_grad():
        cell = cell_of(stage)
        stage.run(ids, torch.arange(NUM_TOKENS), cell, Pass("to last kv", writes_kv=True))
    assert cell.met == [*stage.events] and list(base.modules()) == own
    assert stage._capture.hidden is None


@pytest.mark.parametrize("recompute_layers", [0, 1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_recomputed_layers_run_again_in_the_backward(recompute_layers, training):
    """Also in evaluation mode, in which transformers' own checkpoints are silently off."""
    base = build("llama").train(training)
    model = HFDecoder(base)
    stage = model.stages((1, 2))[1]
    x = torch.randn(NUM_TOKENS, 32, dtype=torch.float64, requires_grad=True)
    with model.installed():
        cell = cell_of(stage)
        what = Pass("graph", recompute_layers=recompute_layers)
        out = stage.run(x, torch.arange(NUM_TOKENS), cell, what)
        assert cell.met == [*stage.events]
        assert not any("forward" in vars(layer) for layer in base.model.layers)
        out.sum().backward()
    again = cell.met[2:]
    assert sorted(again) == [*stage.events][:recompute_layers]


def test_heights_that_are_not_the_models_are_no_plan_for_it():
    model = HFDecoder(build("llama"))
    for heights in ((1, 1), (2, 2), (3, 0), (1, 3, -1)):
        with pytest.raises(PlanError, match="are not those of LlamaForCausalLM, which has 3"):
            model.stages(heights)


def test_a_stage_sees_layers_that_were_replaced_when_the_model_is_looked_at_again():
    base = build("llama")
    sequences = batch([NUM_TOKENS])
    options = furlong.ChunkOptions(size=4, order="layer-first")
    engine = furlong.Engine(base)
    before = engine.forward_backward(sequences, options, backward=False).loss
    base.model.layers[1] = build("llama", seed=1).model.layers[1]
    base.model.layers[1].self_attn.layer_idx = 1
    after = engine.forward_backward(sequences, options, backward=False).loss
    whole = furlong.ChunkOptions(size=4)
    assert after != before
    again = engine.forward_backward(sequences, whole, backward=False).loss
    assert after == pytest.approx(again, rel=1e-12)


def test_frozen_layers_are_counted_from_below():
    base = build("llama")
    model = HFDecoder(base)
    assert model.num_frozen_layers == 0
    base.requires_grad_(False)
    assert model.num_frozen_layers == 3
    base.lm_head.weight.requires_grad_(True)
    assert model.num_frozen_layers == 3, "the head is above all layers"
    base.model.layers[1].mlp.up_proj.weight.requires_grad_(True)
    assert model.num_frozen_layers == 1
    base.model.norm.weight.requires_grad_(True)
    assert model.num_frozen_layers == 0, "what lies beside the layers may lie below them"
