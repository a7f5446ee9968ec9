"""The executor obeys a plan, refuses what it cannot obey, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import weakref

import peft
import pytest
import torch
from helpers.batches import batch
from helpers.executors import executor_of
from helpers.tiny_families import build
from papers.chunkflow_plan import plan_chunkflow

import furlong
from furlong.errors import ConfigError, DataError, PlanError
from furlong.kv.arena import Arena
from furlong.kv.pools import Pools, Storage
from furlong.models.decoder import HFDecoder
from furlong.models.placeholders import hold, placeholders
from furlong.plan.plan import (
    Backward,
    ChunkPlan,
    Forward,
    Offload,
    RebuildKV,
    Recompute,
    Reduce,
)
from furlong.plan.text import load_plan, save_plan
from furlong.planners.chunks import group_chunks
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_1f1b, plan_on_device
from furlong.runtime.executor import Executor
from furlong.testing import reference_loss, take_grads, worst_relative_error

LENS = [21, 4]
OPTIONS = ChunkOptions(size=8)
LAYER_FIRST = ChunkOptions(size=8, keep="input", order="layer-first", num_retained=0)


def execute(plan: ChunkPlan) -> None:
    furlong.Engine(build("llama")).run(plan, batch(LENS))


def planned(options=LAYER_FIRST, lens=LENS) -> ChunkPlan:
    return plan_on_device(lens, options, num_layers=3)


def test_a_plan_of_several_ranks_is_refused() -> None:
    """Half a gradient would look like a whole one."""
    plan = plan_chunkflow(LENS, OPTIONS, stages=(3,))
    execute(plan)
    two = dataclasses.replace(plan, actions=plan.actions * 2)
    with pytest.raises(PlanError, match="one rank: the plan has 2"):
        execute(two)
    pipeline = plan_1f1b(LENS, group_chunks(LENS, OPTIONS), stages=(2, 1))
    with pytest.raises(PlanError, match="one rank: the plan has 2"):
        execute(pipeline)


def test_sequences_of_other_lengths_are_refused() -> None:
    plan = plan_chunkflow([21, 5], OPTIONS, stages=(3,))
    with pytest.raises(DataError, match="sequences of 21, 4 tokens"):
        execute(plan)


def test_a_plan_without_one_action_is_refused_before_anything_runs() -> None:
    model = build("llama")
    plan = planned()
    actions = [a for a in plan.actions[0] if a != Backward(0, 0)]
    with pytest.raises(PlanError):
        furlong.Engine(model).run(dataclasses.replace(plan, actions=(tuple(actions),)), batch(LENS))
    assert all(p.grad is None for p in model.parameters())


def test_lengths_that_are_none_and_what_is_no_plan_are_refused() -> None:
    engine = furlong.Engine(build("llama"))
    for seq_lens in ([2.5], [0], [True], "12", {"a": 1}):
        with pytest.raises(ConfigError, match="seq_lens"):
            engine.plan(seq_lens, OPTIONS)
    for plan in (None, "F0.0 all", OPTIONS):
        with pytest.raises(ConfigError, match=r"(?s)of type .*ChunkPlan"):
            engine.run(plan, batch(LENS))


@pytest.mark.parametrize("options", [OPTIONS, LAYER_FIRST], ids=lambda o: o.order)
@pytest.mark.parametrize("target", ["none", "cpu", "disk"])
def test_nothing_is_left_at_the_end(options, target, monkeypatch) -> None:
    monkeypatch.setattr("furlong.runtime.cell._MIN_BYTES", 1)
    monkeypatch.setattr("furlong.kv.store.segment_tokens", lambda *_: 3)
    model = HFDecoder(build("llama"))
    pools = Pools(Arena(model.device, poison=True), Storage(poison=True))
    with model.installed():
        plan = planned(dataclasses.replace(options, offload=target))
        executor = executor_of(model, plan, batch(LENS), pools=pools)
        loss_sum, timeline = executor.run()
    assert loss_sum > 0 and len(timeline.records) == len(executor._actions)
    left = executor._cells or executor._hidden or executor._outbox
    assert not left and not executor._inputs
    assert pools.arena.taken_bytes == pools.lower_bytes == 0
    pools.close()


def test_a_plan_from_a_file_is_obeyed_like_the_one_that_was_saved() -> None:
    engine = furlong.Engine(build("llama"))
    options = dataclasses.replace(LAYER_FIRST, offload={"inputs": "disk", "kv": "cpu"})
    plan = engine.plan(LENS, options)
    loss = engine.run(plan, batch(LENS)).loss
    truth = take_grads(engine.model.model)
    loaded = load_plan(save_plan(plan))
    assert loaded == plan and engine.run(loaded, batch(LENS)).loss == loss
    again = take_grads(engine.model.model)
    assert all(torch.equal(again[n], truth[n]) for n in truth)


FAILING = [
    (RebuildKV, "input", "cpu"), (Recompute, "attention", "disk"), (Forward, "input", "none"),
    (Forward, "attention", "cpu"), (Backward, "all", "disk"), (Backward, "attention", "none"),
]  # fmt: skip
MORE = [  # with them each pair of an action, a keep and a target at least once
    (RebuildKV, "attention", "disk"), (RebuildKV, "input", "none"), (Recompute, "input", "cpu"),
    (Recompute, "attention", "none"), (Forward, "all", "disk"), (Backward, "input", "cpu"),
    (Backward, "all", "none"), (Forward, "all", "cpu"), (Backward, "input", "disk"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "keep", "target"),
    [*FAILING, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
@pytest.mark.few(2)
def test_an_error_inside_leaves_nothing_in_any_pool(kind, target, keep, monkeypatch) -> None:
    """In the middle layer of the middle stage, while a lease and a graph are alive."""
    monkeypatch.setattr("furlong.runtime.cell._MIN_BYTES", 1)
    monkeypatch.setattr("furlong.kv.store.segment_tokens", lambda *_: 3)
    model = build("llama")
    engine = furlong.Engine(model)
    options = dataclasses.replace(LAYER_FIRST, offload=target, keep=keep)
    truth = engine.forward_backward(batch(LENS), options).loss
    expected = take_grads(model)
    pools, doing = engine._session.state.pools, []
    plain, layer = Executor._obey, model.model.layers[1]

    def obey(self, action, what):
        doing[:] = [action]
        plain(self, action, what)

    def fail(module, *given):
        if doing and isinstance(doing[0], kind) and doing[0].stage == 1 and doing[0].chunk == 1:
            raise KeyboardInterrupt

    def fail_behind(module, inputs, output):
        if output.requires_grad:
            output.register_hook(fail)

    monkeypatch.setattr(Executor, "_obey", obey)
    inside = layer.self_attn.o_proj
    if kind is RebuildKV:
        inside = layer.self_attn.k_proj  # nothing behind it runs
    register = "forward_hook" if kind is Backward else "forward_pre_hook"
    hook = getattr(inside, f"register_{register}")(fail_behind if kind is Backward else fail)
    with pytest.raises(KeyboardInterrupt):
        engine.forward_backward(batch(LENS), options)
    hook.remove()
    monkeypatch.setattr(Executor, "_obey", plain)
    assert pools.arena.taken_bytes == pools.lower_bytes == 0
    for pool in pools.opened.values():
        assert not pool._handles and pool.held_bytes == 0
    model.zero_grad(set_to_none=True)
    assert engine.forward_backward(batch(LENS), options).loss == truth
    again = take_grads(model)
    assert all(torch.equal(again[n], expected[n]) for n in expected)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_copies_by_threads_of_its_own() -> None:
    engine = furlong.Engine(build("llama"))
    options = dataclasses.replace(LAYER_FIRST, offload="cpu")
    truth = engine.forward_backward(batch(LENS), options).loss

    def again() -> None:
        torch.set_num_threads(1)  # threads of torch's own do not come along either
        assert engine.forward_backward(batch(LENS), options).loss == truth

    child = multiprocessing.get_context("fork").Process(target=again)
    child.start()
    child.join(timeout=60)
    child.kill()
    assert child.exitcode == 0
    assert engine.forward_backward(batch(LENS), options).loss == truth


def test_an_error_frees_graphs_without_the_garbage_collector(monkeypatch) -> None:
    """A graph leads to its cell, which holds it."""
    model, outputs, plain = build("llama"), [], Executor._deliver

    def failing(self, action, hidden):
        outputs.append(weakref.ref(hidden))
        if len(outputs) == 3:
            raise KeyboardInterrupt
        plain(self, action, hidden)

    engine = furlong.Engine(model)
    options = dataclasses.replace(OPTIONS, keep="all")
    engine.forward_backward(batch(LENS), options)
    monkeypatch.setattr(Executor, "_deliver", failing)
    gc.disable()
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.forward_backward(batch(LENS), options)
        assert [ref() for ref in outputs] == [None] * 3
    finally:
        gc.enable()


def test_a_worker_that_fails_ends_the_step_and_the_next_one_is_right(monkeypatch) -> None:
    from furlong.kv.disk import NamelessFile

    model = build("llama")
    options = dataclasses.replace(LAYER_FIRST, offload="disk")
    furlong.forward_backward(model, batch(LENS), options)
    expected = take_grads(model)

    def full(self, pages, start):
        raise ConfigError(given="a full disk", required="room", source="disk", change="make room")

    monkeypatch.setattr(NamelessFile, "write", full)
    with pytest.raises(ConfigError, match="a full disk"):
        furlong.forward_backward(model, batch(LENS), options)
    monkeypatch.undo()
    model.zero_grad(set_to_none=True)
    furlong.forward_backward(model, batch(LENS), options)
    again = take_grads(model)
    assert all(torch.equal(again[n], expected[n]) for n in expected)


@pytest.mark.parametrize("target", ["none", "cpu", "disk"])
def test_a_graph_outlives_a_rebuild_of_its_own_cell(target) -> None:
    model = build("llama")
    sequences = batch([24])
    reference_loss(model, sequences)
    truth = take_grads(model)
    plan = dataclasses.replace(
        planned(ChunkOptions(size=8), [24]),
        actions=(
            (
                Forward(0, 0, "attention"), Forward(1, 0, "attention"), Forward(2, 0, "all"),
                Recompute(0, 0), RebuildKV(0, 0), Recompute(1, 0), RebuildKV(1, 0),
                Backward(2, 0), Backward(1, 0), Backward(0, 0), Reduce(0),
            ),
        ),
        offload=Offload(attention=target),
    )  # fmt: skip
    furlong.Engine(model, storage=Storage(poison=True)).run(plan, sequences)
    assert worst_relative_error(take_grads(model), truth) <= 1e-12


def with_adapters(layers: list[int]):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=layers)
    model = peft.get_peft_model(build("llama"), config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


@pytest.mark.parametrize(
    ("layers", "height", "frozen", "keep"),
    [
        ([2], 1, 2, "input"), ([2], 1, 2, "all"), ([1, 2], 1, 1, "attention"),
        ([1, 2], 1, 1, "kv"), ([0, 2], 1, 0, "all"), ([2], 2, 1, "kv"), ([2], 2, 1, "input"),
    ],
)  # fmt: skip
@pytest.mark.few(2)
def test_nothing_runs_backward_below_the_lowest_trained_layer(
    layers, height, frozen, keep, monkeypatch
) -> None:
    model, sequences = with_adapters(layers), batch(LENS)
    reference_loss(model, sequences)
    truth = take_grads(model)
    plain, wants_gradient = Executor._leaf, {}

    def leaf(self, live, at, what):
        x = plain(self, live, at, what)
        if what.computes == "graph":
            wants_gradient[at[1]] = x.requires_grad
        return x

    options = dataclasses.replace(LAYER_FIRST, keep=keep, stage_layers=height)
    furlong.forward_backward(model, sequences, options)  # with the check, which has its own leaves
    take_grads(model)
    monkeypatch.setattr(Executor, "_leaf", leaf)
    result = furlong.forward_backward(model, sequences, options)
    assert worst_relative_error(take_grads(model), truth) <= 1e-12
    ran = [r.action for r in result.timeline.records]
    again = {a.stage for a in ran if isinstance(a, (Recompute, RebuildKV, Backward))}
    assert again == set(range(frozen, len(result.plan.stages)))
    assert wants_gradient == {stage: stage > frozen for stage in again if stage > 0}


@pytest.mark.parametrize("order", ["chunk-first", "layer-first"])
@pytest.mark.parametrize("keep", ["kv", "attention", "input"])
@pytest.mark.parametrize("trained", ["all", "one layer"])
@pytest.mark.few(4)
def test_what_a_hook_changes_in_place_is_changed_once(trained, keep, order) -> None:
    """Above frozen layers no gradient goes by a stage's input, so autograd watches none of them;
    elsewhere the input is a leaf, of which it allows no view to be changed."""
    model, sequences = build("qwen2"), batch([24])
    model.requires_grad_(trained == "all")
    model.model.layers[1].requires_grad_(True)
    steering = torch.randn(32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def change(module, args, kwargs) -> None:
        if module is model.model.rotary_emb:
            (args[1] if len(args) > 1 else kwargs["position_ids"]).mul_(2)
        else:
            (args[0] if args else kwargs["hidden_states"]).add_(steering)

    for module in (model.model.layers[1], model.model.rotary_emb):
        module.register_forward_pre_hook(change, with_kwargs=True)
    reference_loss(model, sequences)
    truth = take_grads(model)
    furlong.forward_backward(model, sequences, ChunkOptions(size=8, keep=keep, order=order))
    assert worst_relative_error(take_grads(model), truth) < 1e-9


def test_a_plan_that_leaves_out_what_is_trained_by_now_is_refused() -> None:
    """Its gradients would be missing without a word."""
    model = build("llama")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    model.model.norm.requires_grad_(False)
    engine = furlong.Engine(model)
    plan = engine.plan(LENS, LAYER_FIRST)
    assert plan.frozen_stages == 1
    engine.run(plan, batch(LENS))
    model.zero_grad(set_to_none=True)
    for lower in (model.model.layers[0].mlp.up_proj, model.model.embed_tokens, model.model.norm):
        lower.requires_grad_(True)
        with pytest.raises(PlanError, match="no backward in the first 1 layers of Llama"):
            engine.run(plan, batch(LENS))
        lower.requires_grad_(False)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("layers", [range(2), range(2, 3)])
def test_a_plan_that_runs_layers_of_another_process_is_refused(layers) -> None:
    """What stands for them would hand hidden states on as they are."""
    base = build("llama")
    hold(base, placeholders(base, layers))
    with pytest.raises(PlanError, match=f"holds layers {layers.start} to {layers.stop - 1}"):
        executor_of(HFDecoder(base), planned(), batch(LENS))
