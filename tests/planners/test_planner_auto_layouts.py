"""The layout that `auto` decides for: the fastest that fits, with words for the others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from furlong.cost.lengths import sample_lengths
from furlong.cost.machine import Machine
from furlong.cost.memory import PARTS
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training
from furlong.errors import ConfigError
from furlong.plan.lengths import Lengths, StepSize, count_lengths
from furlong.plan.plan import ChunkPlan, Layout, Reduce, Unshard
from furlong.planners import infinipipe, orders
from furlong.planners.candidates import TimeEstimate, bounds_of, chunks, longest_step
from furlong.planners.chunks import group_chunks, shard_all
from furlong.planners.decide import Decision, decide, model_of_run
from furlong.planners.infinipipe import Loads, choose_layers
from furlong.planners.layouts import layouts
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_replica
from furlong.planners.question import SLACK, Candidate, Limits, Question, Space, whole_model
from furlong.planners.search import (
    _MOST_FITTING,
    METHODS,
    Method,
    Trials,
    _walk,
    best_plan,
    search,
)
from furlong.report.report import report_plan
from furlong.simulate.predict import Needs, most_of, needs_of, predict, predict_step, step_s
from furlong.train.batches import BatchPlanner, Wanted

GIB = 2**30
SHAPE = model_shape("Qwen2.5-0.5B")
H100 = CostModel(SHAPE, Machine.named("H100"))
LENS = count_lengths([9000, 3000, 3000, 1000, 700, 500, 300, 20])
SHORT = count_lengths([512] * 32)


def choose(
    lengths: Lengths = LENS,
    num_devices: int = 4,
    budget_bytes: float = 70 * GIB,
    model: CostModel = H100,
    sizes: dict[str, int] | None = None,
    **changes: Any,
) -> Decision:
    values = {"size": StepSize(8), "must_fit": True} | changes
    given = (sizes or {}) | values.pop("dials", {})
    asked = {"method": values.pop("method", "auto"), "given": given}
    question = Question((), model, Limits(int(budget_bytes)), num_devices, **asked)
    return decide(question, lengths, **values)


def test_short_sequences_are_dealt_to_replicas() -> None:
    decision = choose(SHORT, size=StepSize(32), dials={"size": 512, "order": "chunk-first"})
    assert decision.layout == Layout(dp=4) and decision.stages == ()
    assert decision.layout_words.startswith("dp 4 x sp 1 x pp 1 (auto): ")


def test_one_long_sequence_is_shared() -> None:
    decision = choose(count_lengths([60_000]), size=StepSize(1), dials={"keep": "attention"})
    assert decision.layout.dp == 1 and decision.layout.num_devices == 4


@pytest.mark.parametrize("sizes", [{"sp": 1}, {"sp": 1, "dp": 2}])
@pytest.mark.slow
def test_stages_are_made_where_memory_is_short(sizes: dict[str, int]) -> None:
    ample, short = choose(SHORT, sizes={"sp": 1}, size=StepSize(32)), 5 * GIB
    assert ample.layout.pp == 1
    kept = {"reshard": False}
    decision = choose(SHORT, budget_bytes=short, sizes=sizes | kept, size=StepSize(32))
    assert decision.layout.pp > 1 and sum(decision.stages) == SHAPE.num_layers
    assert len(decision.stages) == decision.layout.pp
    if len(sizes) == 1:
        assert "dp 4 x sp 1 x pp 1 does not fit: it lacks " in decision.layout_words
    with pytest.raises(ConfigError) as caught:
        choose(SHORT, budget_bytes=short, sizes={"sp": 1, "pp": 1} | kept, size=StepSize(32))
    ways = [f"set parallel.{name} to auto" for name in ("sp", "pp", "reshard")]
    assert "; or ".join([*ways, "start more processes"]) in caught.value.change


def test_a_pool_is_made_where_a_sequence_does_not_fit_one_device() -> None:
    dials = {"size": 4096, "keep": "all", "order": "chunk-first", "num_retained": 1}
    lengths = count_lengths([40_000, *[500] * 31])
    decision = choose(lengths, budget_bytes=40 * GIB, sizes={"pp": 1}, dials=dials)
    assert decision.layout.sp > 1
    with pytest.raises(ConfigError, match="lacks"):
        choose(lengths, budget_bytes=40 * GIB, sizes={"pp": 1, "sp": 1}, dials=dials)


def test_given_sizes_hold() -> None:
    decision = choose(num_devices=8, sizes={"dp": 2}, dials={"size": 1024})
    assert decision.layout.dp == 2 and decision.layout.num_devices == 8
    assert set(decision.layout_words.split()) >= {"dp", "(auto):"}
    fixed = choose(num_devices=8, sizes={"dp": 2, "sp": 2, "pp": 2})
    assert fixed.layout == Layout(2, 2, 2)
    assert "(auto)" not in fixed.layout_words and "slower" not in fixed.layout_words


def test_layer_first_and_a_pipeline_exclude_each_other() -> None:
    given = {"order": "layer-first"}
    assert choose(dials=given).layout.pp == 1
    with pytest.raises(ConfigError, match=r"chunks\.order = layer-first with dp 1 x sp 1 x pp 4"):
        choose(dials=given, sizes={"dp": 1, "sp": 1})


@pytest.mark.slow
def test_no_replica_is_idle_unless_nothing_else_is_left() -> None:
    assert choose(SHORT, size=StepSize(2)).layout.dp <= 2
    decision = choose(SHORT, size=StepSize(2), sizes={"sp": 1, "pp": 1})
    assert decision.layout == Layout(dp=4)


@pytest.mark.slow
def test_a_slow_link_between_machines_is_crossed_by_stages_or_replicas() -> None:
    shape = model_shape("Qwen3-0.6B")
    lengths, found = count_lengths([30_000] * 4), []
    for devices_per_node in (4, 2):
        links = Machine.named("H100").links
        slow = replace(links.between_nodes, bytes_per_s=1e9, latency_s=1e-3)
        links = replace(links, devices_per_node=devices_per_node, between_nodes=slow)
        model = CostModel(shape, replace(Machine.named("H100"), links=links))
        decision = choose(lengths, model=model, size=StepSize(1))
        found.append(decision.layout)
    assert found[0] == Layout(sp=4) and found[1].sp * found[1].pp == 4 and found[1].pp > 1


def test_nothing_fits_in_any_layout() -> None:
    with pytest.raises(ConfigError) as caught:
        choose(budget_bytes=2 * GIB)
    given = caught.value.given
    assert "in none of 6 layouts a plan fits; nearest is dp 4 x sp 1 x pp 1" in given
    assert "weights, gradients and optimizer of " in given
    assert "start more processes; or give it a larger memory.device" in caught.value.change
    decision = choose(budget_bytes=2 * GIB, must_fit=False)
    assert decision.layout == Layout(dp=4) and decision.options.reshard
    assert "no plan is predicted to fit 2 GiB" in decision.words
    decision = choose(budget_bytes=2 * GIB, must_fit=False, dials={"reshard": False})
    assert decision.layout == Layout(pp=4) and decision.stages[0] < decision.stages[1]  # tied head


@pytest.mark.parametrize(
    ("method", "needs"),
    [
        ("spaco", "chunks.sample"), ("infinipipe", "parallel.pp above 1"),
        ("places", "parallel.sp"),
        ("fpdt", "no pipeline"), ("seco", "no pipeline"),
    ],
)  # fmt: skip
def test_a_method_without_a_plan_says_what_it_needs(method: str, needs: str) -> None:
    pp = 2 if needs == "no pipeline" else 1
    with pytest.raises(ConfigError) as caught:
        choose(num_devices=pp, method=method, sizes={"pp": pp})
    assert needs in caught.value.required and method in caught.value.given


def test_dials_beside_a_methods_own_chunks_are_counted_as_candidates() -> None:
    answer = choose(method="places", sizes={"dp": 1, "sp": 4, "pp": 1}).answer
    assert answer is not None and answer.best.method == "places" and answer.num_pruned >= 0


@pytest.mark.slow
def test_two_decisions_are_equal() -> None:
    lengths = count_lengths([900, 700, 300, 20])
    first, second = (choose(lengths, num_devices=2) for _ in range(2))
    for name in ("options", "layout", "stages", "words", "layout_words"):
        assert getattr(first, name) == getattr(second, name)


LIMITS = Limits(70 * GIB)
GRID = [
    ChunkOptions(size=size, num_retained=number, keep=keep)
    for size, number, keep in product((256, 1024, 4096, 16_384), (0, 1, 4), ("all", "attention"))
]


@pytest.mark.parametrize("layout", [Layout(4), Layout(2, 2), Layout(2, 1, 2), Layout(8)], ids=str)
def test_a_layouts_step_is_that_of_the_plan_that_a_run_makes_of_it(layout: Layout) -> None:
    """Replicas meet in the last Backward of each stage, and some have no sequence."""
    lens = [min(n, 32768) for n in sample_lengths("chatqa2", 6, 0)]
    order = {} if layout.pp > 1 else {"order": "layer-first", "stage_layers": 1}
    options = ChunkOptions(size=4096, keep="kv", **order)
    space = Space(Question([lens], H100, LIMITS), layout)
    plan_of = space.plan_of(options)
    told_s = space.step_s(plan_of)
    planner = BatchPlanner(layout, H100.sequence_seconds, SHAPE.num_layers, space.stages)
    run = planner.plan(Wanted(tuple(lens), options)).plan
    model = whole_model(space.model)
    assert told_s == pytest.approx(predict_step(model, run).step_s)
    update_s = told_s - step_s(model, run)
    own = SHAPE.num_parameters / layout.num_devices / H100.hardware.optimizer_parameters_per_s
    # a stage at either end has the tied head
    assert own * (1 - 1e-6) <= update_s <= own * (1 + 1e-6) * (1 if layout.pp == 1 else 2)
    alone = (step_s(space.model, plan_of(own)) for own in space.dealt[0])
    assert told_s - update_s >= max(alone) * (1 - 1e-9)
    # whole weights are there once, whether an Unshard gathers them or not
    lists = (tuple(a for a in own if not isinstance(a, Unshard)) for own in run.actions)
    bare = predict(model, replace(run, actions=tuple(lists)))
    assert bare.device_bytes == predict(model, run).device_bytes


@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2), Layout(1, 1, 2)], ids=str)
def test_of_a_part_of_a_step_counts_once_what_a_step_has_once(layout: Layout) -> None:
    """Gathers and sums of weights, a pipeline's fill and drain, the optimizer."""
    plan_of = partial(Space.plan_of, options=ChunkOptions(size=1024, keep="all"))
    part, whole = (
        Space(Question([[1024] * n], H100, LIMITS, size=StepSize(32), weight=32 / n), layout)
        for n in (8, 32)
    )
    whole_s = whole.step_s(plan_of(whole))
    assert part.step_s(plan_of(part)) == pytest.approx(whole_s, rel=1e-4)
    alone_s = whole.busiest_s(plan_of(whole))
    assert part.busiest_s(plan_of(part)) == pytest.approx(alone_s, rel=1e-4)


def test_whole_graphs_are_kept_layer_first_where_they_do_not_fit_chunk_first() -> None:
    given = {"size": 4096, "keep": "all"}

    def offered(budget_bytes: float, **more: Any) -> dict[str | None, int]:
        limits = Limits(int(budget_bytes), margin=0.0)
        question = Question([[65_536] * 2], H100, limits, 2, given=given | more)
        found = list(chunks(Space(question, Layout(2))))
        return {c.options.order: sum(c.least or Needs(0)) for c in reversed(found)}

    plenty = 2**50
    least = offered(1) | offered(plenty, order="layer-first")
    assert least["layer-first"] < least["chunk-first"]
    assert set(offered(plenty)) == {"chunk-first"}
    between = (least["layer-first"] + least["chunk-first"]) / 2
    assert set(offered(between)) == {"chunk-first", "layer-first"}
    one_chunk = Space(Question([[4096] * 2], H100, LIMITS, 2, given={"size": 4096}), Layout(2))
    found = {(c.options.keep, c.options.order) for c in chunks(one_chunk)}
    assert ("all", "layer-first") not in found
    # it takes no less time
    space = Space(Question([[65_536] * 2], H100, LIMITS, 2), Layout(2))
    first_s, *others_s = (
        space.step_s(space.plan_of(ChunkOptions(**given, **order)))
        for order in ({}, *({"order": "layer-first", "stage_layers": n} for n in (1, 8)))
    )
    assert min(others_s) >= first_s * (1 - 1e-9)


def test_plans_of_equal_estimates_are_not_one_plan() -> None:
    question, tried = Question([[4096] * 8], H100, LIMITS, 2), set[int]()

    def offered(space: Space) -> Iterator[Candidate]:
        for size in range(512, 4096, 256):
            options = ChunkOptions(size=size)

            def plan_of(lens: Sequence[int], options: ChunkOptions = options) -> ChunkPlan:
                tried.add(options.size)
                return plan_replica(lens, options, num_layers=SHAPE.num_layers)

            yield Candidate("", space, options, 0.0, plan_of, Needs(0), [4096])

    list(_walk(Trials(question, lambda words: None), Space(question, Layout(2)), offered))
    assert len(tried) == _MOST_FITTING


def test_a_search_checks_no_plan_that_nobody_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[ChunkPlan] = []
    monkeypatch.setattr(orders, "check", checked.append)
    question = Question([[9000, 3000, 700, 500]], H100, LIMITS, num_devices=4)
    answer = search(question)
    assert len(answer.tried) > 1 and not checked
    best_plan(*question.steps, answer)
    assert checked and checked[-1].seq_lens == tuple(*question.steps)


@pytest.mark.parametrize("keep", ["all", "attention", "input"])
def test_one_rank_of_each_kind_tells_what_a_pipeline_needs(keep: Any) -> None:
    layout = Layout(pp=8)
    space = Space(Question([[9000, 3000, 3000, 700]], H100, LIMITS, 8), layout)
    trials, memory = Trials(space.question, lambda words: None), space.model.memory()
    for size, offload in product((512, 4096), ({}, {"offload": "cpu"})):
        options = ChunkOptions(size=size, keep=keep, num_retained=2, **offload)
        plan = space.plan_of(options)(*space.question.steps)
        candidate = Candidate("", space, options, 0.0, space.plan_of(options), longest=[9000])
        found = trials.walked(candidate, [plan])
        assert len(vars(plan)["_curves"]) < layout.pp
        curves = [memory.curve(plan, rank) for rank in range(layout.pp)]
        assert found.needs == most_of(map(needs_of, curves))


def test_chunks_with_which_replicas_wait_for_each_other_end_no_search() -> None:
    """One replica has one chunk and the other two, which no estimate sees: they meet late."""
    lens = (1103, 6410, 395, 884, 376, 6298, 317, 31_596, 38_542)
    model = CostModel(SHAPE, Machine.named("A100-80"))
    found = []
    for given in ({}, {"size": 8000}):
        question = Question([lens], model, LIMITS, 2, given={"dp": 2, "sp": 1, "pp": 1} | given)
        found.append(search(question).best.step_s)
    assert found[0] <= found[1] * (1 + 0.005)


@pytest.mark.parametrize("layout", layouts(4, SHAPE), ids=str)
@pytest.mark.parametrize("keep", ["all", "kv"])
def test_estimates_are_near_the_simulation(layout: Layout, keep: Any) -> None:
    space = Space(Question([[9000, 3000, 3000, 700]], H100, LIMITS), layout)
    options = ChunkOptions(size=1024, keep=keep)
    groups = shard_all(group_chunks(space.busiest[0], options), layout.sp)
    estimate = TimeEstimate(
        space.model, groups, sp_size=layout.sp, stages=space.stages, num_steps=1
    )
    plan = space.plan_of(options)(space.busiest[0])
    lists = (tuple(a for a in own if not isinstance(a, Reduce)) for own in plan.actions)
    simulated_s = step_s(space.model, replace(plan, actions=tuple(lists)))
    assert estimate.seconds(options) == pytest.approx(
        simulated_s, rel=0.1 if space.stages else 1e-6
    )


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(sp=2, pp=2), Layout(pp=4)], ids=str)
def test_no_plan_needs_less_than_the_bound(layout: Layout) -> None:
    space = Space(Question([[9000, 3000, 3000, 700]], H100, LIMITS), layout)
    for options in GRID:
        plan = space.plan_of(options)(longest_step(space, options.size))
        needed = predict(space.model, plan).device_bytes
        least = max(bound.needs(options).device_bytes for bound in bounds_of(space, options.size))
        assert 0.5 * needed < least <= needed * (1 + 1e-6)


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, sp=2), Layout(sp=4)], ids=str)
@pytest.mark.parametrize("height", [1, 5])
@pytest.mark.parametrize("keep", ["all", "attention", "input"])
def test_no_plan_that_frees_weights_needs_less_than_the_bound(
    layout: Layout, height: int, keep: Any
) -> None:
    """The whole batch of a replica waits in front of every stage."""
    question = Question([[9000, 3000, 3000, 700]], H100, LIMITS, layout.num_devices)
    space = Space(question.resharding(layout), layout)
    options = ChunkOptions(
        size=1024, keep=keep, order="layer-first", stage_layers=height, reshard=True
    )
    plans = (space.plan_of(options)(own) for step in space.dealt for own in step)
    needed = max(predict(space.model, plan).device_bytes for plan in plans)
    least = max(bound.needs(options).device_bytes for bound in bounds_of(space, options.size))
    assert 0.9 * needed < least <= needed * (1 + 1e-6)


def test_a_card_between_kept_and_freed_weights_has_them_freed() -> None:
    """The larger card keeps all weights, with steps that are as fast."""
    lengths, dials = count_lengths([16_000] * 4), {"size": 16_384, "offload": "none"}
    card = partial(choose, lengths, sizes={"sp": 4, "pp": 1}, size=StepSize(4))
    assert not card(budget_bytes=12 * GIB, dials=dials).options.reshard
    small = card(budget_bytes=7 * GIB, dials=dials)
    assert small.options.reshard and small.options.order == "layer-first"
    assert small.answer and small.answer.best.needs.device_bytes <= 0.9 * 7 * GIB
    with pytest.raises(ConfigError) as caught:
        card(budget_bytes=7 * GIB, dials=dials | {"reshard": False})
    assert "set parallel.reshard to auto" in caught.value.change
    assert card(dials=dials | {"order": "layer-first", "reshard": True}).options.reshard


def test_weights_are_freed_where_kept_ones_leave_no_room_for_a_plan() -> None:
    """Their state alone would fit."""
    lengths, sizes, layout = count_lengths([60_000]), {"sp": 2, "pp": 1}, Layout(sp=2)
    kept = Question([[60_000]], H100, Limits(8 * GIB), 2).resharding(layout, False)
    assert kept.state_bytes(layout) < kept.limits.limit_bytes
    dials = {"size": 2048, "keep": "input", "offload": "none"}
    decision = choose(lengths, 2, 8 * GIB, sizes=sizes, size=StepSize(1), dials=dials)
    assert decision.options.reshard


def test_weights_are_freed_where_kept_ones_make_a_step_far_slower() -> None:
    """Kept ones fit with every input alone kept."""
    given = {"sp": 2, "pp": 1, "offload": "none"}
    free = {"reshard": True, "order": "layer-first"}
    kept, freed, auto = (
        search(Question([[16_384] * 2], H100, Limits(8 * GIB), 2, given=given | more)).best
        for more in ({"reshard": False}, free, {})
    )
    assert 1.25 * freed.step_s < kept.step_s
    assert auto.options.reshard and auto.step_s == freed.step_s


@pytest.mark.parametrize("method", ["infinipipe", "chunkflow"])
def test_passes_of_pipelines_gather_weights_where_kept_ones_leave_no_room(method: str) -> None:
    """InfiniPipe's 30B at 48K on 32 cards: FSDP inside of stages, in pools of eight."""
    model = CostModel(model_shape("GPT-30B"), Machine.named("A800"), H100.training)
    given = {"sp": 8, "pp": 4} | ({"size": 16_384} if method == "chunkflow" else {})
    limits = Limits(64 * GIB)
    answer = search(Question([[49_152]], model, limits, 32, given=given, method=method))
    assert answer.best.options.reshard and answer.best.options.order == "chunk-first"
    _, plan = best_plan([49_152], answer)
    assert plan.regathers and plan.replicated
    training = answer.best.space.model.training
    decision = Decision(answer.best.options, "", layout=answer.best.layout, stages=plan.stages)
    assert model_of_run(model, decision).training == training
    freed = training.weights(model.shape, plan.stages, frozenset((1,)), 8)
    assert freed.share_bytes == pytest.approx(freed.all * 4 / 8, rel=1e-6)
    assert freed.state.total == pytest.approx(freed.all * 16 / 8, rel=1e-6)


def on_small_cards(
    num_devices: int, cpu_bytes: int = 16 * GIB, device_bytes: int = 6 * GIB, **given: Any
) -> Decision:
    """A decision that may put weights on the CPU; 16 bytes of a parameter are 7.4 GiB."""
    model = replace(H100, training=replace(H100.training, offload_weights=None))
    given = {"size": 2048, "keep": "attention", "sp": num_devices, **given}
    question = Question((), model, Limits(device_bytes, cpu_bytes), num_devices, given=given)
    return decide(question, count_lengths([8192]), size=StepSize(1), must_fit=True)


def test_weights_lie_in_cpu_memory_where_neither_kept_nor_freed_ones_fit() -> None:
    decision = on_small_cards(1)
    assert decision.offload_weights and decision.options.reshard and decision.model
    assert decision.answer and decision.answer.on_device
    report = report_plan(decision.answer.best.plan_of([8192]), decision.model)
    printed = report.to_json()["weights"]
    (held,) = report.memory
    assert printed["host_bytes"] == 16 * SHAPE.num_parameters == held.cpu[0]
    assert printed["whole_bytes"] == held.device[:, PARTS.index("weights")].max()
    bus = H100.hardware.links.host.bytes_per_s
    assert report.breakdown["collectives"] * report.step_s >= printed["brought_bytes"] / bus
    several = on_small_cards(4, device_bytes=9 * GIB // 2)
    assert several.options.reshard and not several.offload_weights
    assert not on_small_cards(1, device_bytes=40 * GIB).offload_weights
    for refused in ({"reshard": False}, {"order": "chunk-first"}, {"cpu_bytes": 0}):
        with pytest.raises(ConfigError) as caught:
            on_small_cards(1, **refused)
        assert "GiB less a margin" in caught.value.required


def test_weights_that_exceed_cpu_memory_are_named_with_what_would_do() -> None:
    with pytest.raises(ConfigError) as caught:
        on_small_cards(1, cpu_bytes=4 * GIB)
    assert re.search(r"memory.cpu: weights, gradients and optimizer 7\.36 GiB", caught.value.given)
    enough = re.search(r"memory\.cpu: ([\d.]+)GiB", caught.value.change)
    assert enough and on_small_cards(1, cpu_bytes=int(float(enough[1]) * GIB)).offload_weights


def test_cpu_memory_is_named_though_kept_tensors_on_the_device_would_lack_less_of_it() -> None:
    """8B at 128K tokens on 24 GB: weights in 60 GiB of RAM lack 62 GiB, whatever lies beside them,
    and the device holds the batch only where inputs lie there, too."""
    training = replace(H100.training, offload_weights=None)
    model = CostModel(model_shape("Qwen3-8B"), Machine.named("RTX4090"), training)
    question = Question([[131_072]], model, Limits(22 * GIB, 60 * GIB), given={"keep": "input"})
    answer = search(question)
    assert answer.on_device and not answer.tried
    (nearest, *_) = answer.refused
    assert [*answer.question.limits.exceeded(nearest.needs)] == ["cpu"]


@pytest.mark.parametrize(("name", "optimizer_bytes"), [("Qwen2.5-14B", 8), ("Qwen2.5-32B", 4)])
def test_a_node_holds_large_models_with_all_weights_trained(
    name: str, optimizer_bytes: int
) -> None:
    """32 G parameters with moments of 2 bytes each: those of AdamW in float32 need 16 bytes of a
    parameter, 61 GiB of each of eight cards, beside which no margin is left."""
    training = replace(H100.training, optimizer_bytes=optimizer_bytes)
    model = CostModel(model_shape(name), H100.hardware, training)
    budget_bytes = H100.hardware.budget("auto", 8)[0]
    lengths, sizes = count_lengths([131_072]), {"pp": 1, "sp": 8}
    decision = choose(lengths, 8, budget_bytes, model, sizes, size=StepSize(1), dials={
        "offload": "none", "keep": "input", "size": 65_536,
    })  # fmt: skip
    assert decision.options.reshard
    question = Question([[131_072]], model, Limits(0), 8)
    kept, freed = (
        question.resharding(Layout(sp=8), own).state_bytes(Layout(sp=8)) / 1e9
        for own in (False, True)
    )
    asked = replace(
        question, limits=Limits(budget_bytes), given={"pp": 1, "sp": 8, "reshard": True}
    )
    wide = replace(asked, model=replace(model, training=H100.training))
    assert wide.fits_with_narrow_moments(Layout(sp=8)) == (optimizer_bytes == 4)
    assert not asked.fits_with_narrow_moments(Layout(sp=8))
    moments = ", `train.state_dtype: bfloat16`" * (optimizer_bytes == 4)
    page = (Path(__file__).parents[2] / "docs/many-devices.md").read_text(encoding="utf-8")
    assert f"| {name}{moments} | {kept:.1f} | {freed:.1f} |" in page


@pytest.mark.parametrize(("budget_bytes", "times"), [(25 * GIB, 0), (70 * GIB, 1)])
def test_own_chunks_that_cannot_fit_are_not_planned(budget_bytes: int, times: int) -> None:
    """Their finest slices with every layer recomputed are bounded first."""
    question = Question([[2**21] * 3], H100, Limits(budget_bytes), num_devices=4, given={"pp": 4})
    assert len(list(infinipipe.candidates(Space(question, Layout(pp=4))))) == times


def test_equal_sequences_end_the_search_as_soon_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pipeline recomputes is chosen once for all that are alike."""
    costs = []

    def see(loads: Loads) -> Any:
        costs.append(loads.saved_bytes.size)
        return choose_layers(loads)

    monkeypatch.setattr(infinipipe, "choose_layers", see)
    limits, layout = Limits(16 * GIB), Layout(pp=2)
    for count in (40, 80):
        question = Question([[9000] * count], H100, limits, num_devices=2, stages=(12, 12))
        (asked,) = infinipipe.candidates(Space(question, layout))
        asked.plan_of([9000] * count)
    assert len(costs) > 1 and max(costs) < 20_000
    # another step to beat changes nothing of what was chosen
    before = len(costs)
    (asked,) = infinipipe.candidates(Space(question, layout, beat_s=1e6))
    asked.plan_of([9000] * 80)
    assert len(costs) == before


def test_a_plan_that_holds_no_whole_step_keeps_no_other_from_being_tried() -> None:
    """Only part of a step is timed; the fastest plan holds that, and the search goes on."""
    question = Question(
        [[8192, 500, 500, 500]], H100, Limits(12 * GIB), num_devices=2, size=StepSize(32), weight=8,
        given={"pp": 2}, whole=[8192, 6000, 3000, 500] * 8, method="chunkflow",
    )  # fmt: skip
    answer = search(question)
    (partial,) = answer.refused
    assert partial.step_s < answer.best.step_s < 1.1 * partial.step_s


def test_a_search_that_is_interrupted_answers_with_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    question, tries = Question([[9000, 3000] * 2], H100, LIMITS, num_devices=4), []

    def stop(words: str) -> None:
        tries.append(words)
        if "best" in words:
            raise KeyboardInterrupt

    answer = search(question, stop, may_cut_short=True)
    assert answer.is_cut_short and answer.best.step_s > 0
    assert any("dp " in words and "sp " in words for words in tries)  # what is under way
    with pytest.raises(KeyboardInterrupt):
        search(question, stop)


def test_own_chunks_are_asked_where_chunk_options_fit_badly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two stages lose little with many equal sequences, eight with a single one a lot."""
    asked: list[Layout] = []

    def see(space: Space) -> Any:
        asked.append(space.layout)
        return iter(())

    monkeypatch.setitem(METHODS, "infinipipe", Method(see, has_own_chunks=True))
    for lens, pp, times in (([3000] * 32, 2, 0), ([30_000], 4, 1)):
        search(Question([lens], H100, LIMITS, pp, given={"dp": 1, "sp": 1, "pp": pp}))
        assert len(asked) == times


@pytest.mark.parametrize("reshard", [True, False])
def test_a_step_of_a_pipeline_runs_what_was_chosen_where_reshard_is_given(reshard: bool) -> None:
    lens = [20_000] * 3
    given = {"dp": 1, "sp": 2, "pp": 4, "reshard": reshard}
    answer = search(Question([lens], H100, LIMITS, 8, given=given))
    name, plan = best_plan(lens, answer)
    assert name == answer.best.method == "infinipipe"
    assert plan.regathers == reshard


@pytest.mark.slow
def test_places_are_asked_where_no_chunk_options_have_their_keys_on_the_device():
    """8 of 64 sequences of GitHub, the longest ones: a pool whose fastest options offload K,V."""
    lens = tuple(sorted(sample_lengths("github", 64, 1))[-8:])
    model = CostModel(
        model_shape("GPT-13B"),
        Machine.named("A800"),
        Training(zero_stage=1, gathers=True, lora=Lora(16)),
    )
    limits = Limits(model.hardware.budget_bytes, int(model.hardware.host_bytes))
    named, auto = (
        search(Question([lens], model, limits, 8, method=method)).best
        for method in ("places", "auto")
    )
    assert auto.step_s <= named.step_s * (1 + SLACK)
    assert auto.method == "places" and auto.options.offloading.kv == "none"
