"""After forward_backward, also after an error inside, the model behaves as before."""

import pytest
import torch
from helpers.batches import batch
from helpers.tiny_families import build

import furlong
from furlong.plan.plan import Backward, Forward, RebuildKV, Recompute
from furlong.runtime.executor import Executor

OPTIONS = furlong.ChunkOptions(size=8)


def behaviour(model):
    """What a user sees of a model: logits, generated tokens, modes."""
    ids = batch([7])[0]["input_ids"][None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    tokens = model.generate(ids, max_new_tokens=5, do_sample=False)
    flags = [(m.training, getattr(m, "gradient_checkpointing", None)) for m in model.modules()]
    grads = [p.requires_grad for p in model.parameters()]
    dtypes = [p.dtype for p in model.parameters()]
    return logits, tokens, (flags, grads, dtypes, model.config._attn_implementation)


def assert_same_behaviour(before, after):
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert before[2] == after[2]


@pytest.mark.parametrize("family", ["llama", "gemma2", "stablelm", "gpt_oss"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.few(3)
def test_after_success(family, training):
    model = build(family, torch.float32).train(training)
    model.model.embed_tokens.requires_grad_(False)
    before = behaviour(model)
    modules = [dict(m.__dict__).keys() for m in model.modules()]
    furlong.forward_backward(model, batch([21, 4]), OPTIONS, compute_dtype=torch.bfloat16)
    model.zero_grad()
    assert_same_behaviour(before, behaviour(model))
    added = {
        k for m, old in zip(model.modules(), modules, strict=True) for k in m.__dict__.keys() - old
    }
    assert not added


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("_compute", Forward),
        ("_compute", Recompute),
        ("_compute", RebuildKV),
        ("_backward", Backward),
    ],
)
@pytest.mark.few(2)
def test_after_an_error_inside(where, kind, monkeypatch):
    model = build("gemma2", torch.float32)
    before = behaviour(model)
    furlong.forward_backward(model, batch([4]), OPTIONS, backward=False)
    plain, options = getattr(Executor, where), furlong.ChunkOptions(size=8, keep="input")

    def fail_on_the_second(self, action, what):
        if isinstance(action, kind) and action.chunk == 1:
            raise KeyboardInterrupt
        plain(self, action, what)

    monkeypatch.setattr(Executor, where, fail_on_the_second)
    with pytest.raises(KeyboardInterrupt):
        furlong.forward_backward(model, batch([29]), options, compute_dtype=torch.bfloat16)
    monkeypatch.undo()
    model.zero_grad()
    assert_same_behaviour(before, behaviour(model))
    truth = furlong.forward_backward(model, batch([29]), OPTIONS).loss
    assert truth > 0


def test_the_timeline_names_every_action():
    timeline = furlong.forward_backward(build("llama"), batch([29, 3]), OPTIONS).timeline
    texts = [record.text for record in timeline.records]
    assert texts[0] == "F0.0 attention" and texts[-1] == "reduce 0"
    assert all(
        a.stop_s <= b.start_s for a, b in zip(timeline.records, timeline.records[1:], strict=False)
    )
    assert timeline.peak_device_bytes > 0 and timeline.duration_s > 0
    assert set(timeline.seconds_by_kind()) == {"F", "R", "B", "reduce"}


def test_a_second_step_takes_no_new_memory_for_keys_and_values():
    from furlong.api import Engine

    engine = Engine(build("llama", torch.float64))
    pooled = []
    for _ in range(3):
        engine.forward_backward(batch([61, 40]), OPTIONS)
        pooled.append(engine._session.state.pools.arena.pooled_bytes)
    assert pooled[1] == pooled[2] and engine._session.state.pools.arena.taken_bytes == 0
