"""What `auto` decides: the fastest plan that fits, and of those alike the one that needs least."""

from dataclasses import replace
from itertools import product
from math import inf

import pytest

from furlong.cost.machine import Machine, this_cpu
from furlong.cost.memory import PlanMemory
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Training
from furlong.errors import ConfigError
from furlong.plan.lengths import StepSize, count_lengths
from furlong.plan.plan import Layout, Offload
from furlong.planners.candidates import ByteBound, longest_step
from furlong.planners.decide import Decision, decide, sample_steps
from furlong.planners.options import ChunkOptions, fixed_options, option_values
from furlong.planners.orders import plan_on_device
from furlong.planners.question import MARGIN, SLACK, Limits, Question, Space
from furlong.planners.search import _order_of, search
from furlong.planners.spaco import Sampling, one_draw
from furlong.simulate.predict import predict
from furlong.units import parse_bytes

GIB = 2**30
SHAPE = model_shape("Qwen2.5-0.5B")
CPU = CostModel(SHAPE, this_cpu(), Training.in_dtype("float32"))
H100 = CostModel(SHAPE, Machine.named("H100"))
LENS = count_lengths([40_000, 9_000, 3_000, 3_000, 1_000, 700, 500, 300])


SHORT = count_lengths([5_000, 700, 30])


def choose(model=CPU, lengths=LENS, budget_bytes=1000 * GIB, **changes):
    values = {"size": StepSize(8)} | changes
    offload = {name: values.pop(name, 0) for name in ("cpu_bytes", "disk_bytes")}
    limits = Limits(int(budget_bytes), **offload, margin=values.pop("margin", MARGIN))
    names = {"num_devices", "calls", "given", "method"} & values.keys()
    asked = {name: values.pop(name) for name in names}
    return decide(Question((), model, limits, **asked), lengths, **values)


def needs(options, lens, model=CPU):
    """(bytes on the device, seconds) of the plan of these lengths."""
    predicted = predict(model, plan_on_device(lens, options, num_layers=model.shape.num_layers))
    return predicted.device_bytes, predicted.step_s


def test_the_last_percents_of_speed_are_not_bought_with_memory():
    searched = choose().answer
    fastest_s = min(tried.step_s for tried in searched.tried)
    best = searched.best
    assert best.step_s <= fastest_s * (1 + SLACK)
    alike = [
        tried
        for tried in searched.tried
        if tried.step_s <= fastest_s * (1 + SLACK) and _order_of(tried) == _order_of(best)
    ]
    assert len(alike) == searched.alike
    assert len(alike) > 2, "the search ends behind what is alike"
    assert all(tried.needs >= best.needs for tried in alike)


@pytest.mark.parametrize(
    ("num_devices", "lens", "gib"),
    [
        (1, (800,), 60),
        pytest.param(1, (9_000, 3_000, 700, 20), 10, marks=pytest.mark.nightly),
        (2, (9_000, 700, 300, 20), 8),
        # where memory is plenty
        pytest.param(1, (9_000, 3_000, 700, 20), 30, marks=pytest.mark.nightly),
        pytest.param(2, (9_000, 700, 300, 20), 70, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.few(1)
def test_the_search_loses_nothing_to_brute_force(num_devices, lens, gib):
    """A plain loop over layouts and options, timed and walked as whole replicas run them."""
    model = CPU if num_devices == 1 else H100
    question = Question([lens], model, Limits(gib * GIB), num_devices)
    fastest_s = inf
    for layout in question.layouts():
        space = Space(question, layout)
        for size, number, keep, height in product(
            (256, 1024, 4096, 16_384), (0, 1, 4), ("all", "attention", "kv", "input"), (0, 1, 3, 24)
        ):
            order = {"order": "layer-first", "stage_layers": height} if height else {}
            if height and (layout.pp > 1 or (num_devices > 1 and height > 1)):
                continue
            if keep == "all" and number:  # whole graphs are retained, whatever the number
                continue
            options = ChunkOptions(size=size, num_retained=number, keep=keep, **order)
            plan_of = space.plan_of(options)
            longest = predict(space.model, plan_of(longest_step(space, size)))
            if longest.device_bytes <= question.limits.limit_bytes:
                is_one = num_devices == 1
                seconds = space.busiest_s(plan_of) if is_one else inf
                fastest_s = min(fastest_s, seconds if is_one else space.step_s(plan_of))
    assert search(question).best.step_s <= fastest_s * (1 + SLACK) < inf


@pytest.mark.slow
def test_memory_off_the_device_is_used_only_where_it_is_allowed_and_within_its_budgets():
    tight = {"model": H100, "budget_bytes": int(10.5 * GIB), "size": StepSize(1)}
    alone = choose(**tight)
    assert (
        alone.options.order == "layer-first" and option_values(alone.options).get("offload") is None
    )
    for host, disk in ((100 * GIB, 0), (GIB, 0), (GIB // 2, 4 * GIB), (0, 2 * GIB)):
        decision = choose(cpu_bytes=host, disk_bytes=disk, **tight)
        needs = decision.answer.best.needs
        assert needs.device_bytes <= (1 - MARGIN) * 10.5 * GIB
        assert needs.cpu_bytes <= host and needs.disk_bytes <= disk
        assert decision.answer.best.step_s <= alone.answer.best.step_s
        used = set(option_values(decision.options).get("offload", {}).values())
        assert used <= {name for name, n in (("cpu", host), ("disk", disk)) if n}


def test_given_dials_hold():
    dials = {
        "size": 3000, "num_retained": 2, "keep": "kv", "order": "layer-first", "stage_layers": 5,
        "offload": Offload(kv="disk"),
    }  # fmt: skip
    lengths = count_lengths([900, 30])
    for name, value in dials.items():
        options = choose(given={name: value}, lengths=lengths, disk_bytes=10**15).options
        assert getattr(options, name) == value
        assert options.order == "layer-first" or name != "stage_layers"
    given = choose(given=dials, lengths=lengths, disk_bytes=10**15).options
    assert given == ChunkOptions(**dials)
    chunk_first = choose(given={"order": "chunk-first"}, budget_bytes=20 * GIB).options
    assert (chunk_first.order, chunk_first.stage_layers) == ("chunk-first", None)


def test_the_longest_sequence_of_the_data_must_fit_though_no_step_has_it():
    short = count_lengths([2_000] * 64)
    alone = choose(lengths=short, budget_bytes=20 * GIB)
    together = choose(lengths=short, budget_bytes=20 * GIB, longest=100_000)
    assert needs(alone.options, [100_000])[0] > 20 * GIB
    assert needs(together.options, [100_000])[0] <= (1 - MARGIN) * 20 * GIB


def test_several_small_steps_are_not_packed_into_one():
    for per_step, replicas in ((1, [1] * 10), (4, [4, 4, 2])):
        question = Question(StepSize(per_step).cut([500] * 10), CPU, Limits(2**40))
        space = Space(question, Layout())
        assert [len(step[0]) for step in space.dealt] == replicas
        assert longest_step(space, 4096) == ([500] if per_step == 1 else [500, 1500])


def test_a_step_of_the_longest_sequence_has_it_a_second_time():
    for per_step, step in ((1, [9000]), (2, [9000, 3288]), (4, [9000, 3288, 9000])):
        question = Question(StepSize(per_step).cut([9000] * 4), CPU, Limits(2**40))
        assert longest_step(Space(question, Layout()), 4096) == step


def test_several_layouts_are_tried_best_first():
    lens = [24_000, 12_000, 9000, 5000, 3000, *[700] * 32]
    given = {"keep": "kv", "num_retained": 0, "size": 4096, "pp": 1}
    question = Question([lens], H100, Limits(24 * GIB), 8, given=given, method="chunkflow")
    answer = search(question)
    assert len(answer.slower) == 2 and len(answer.tried) + len(answer.refused) == 1


@pytest.mark.slow
def test_where_nothing_fits_the_smallest_is_taken_unless_the_budget_is_given():
    decision = choose(budget_bytes=1 * GIB)
    assert decision.answer is None
    assert decision.options == ChunkOptions(size=1024, num_retained=0, keep="kv")
    assert "no plan is predicted to fit 1 GiB" in decision.words
    with pytest.raises(ConfigError) as caught:
        choose(budget_bytes=1 * GIB, must_fit=True)
    assert "lacks" in caught.value.required


@pytest.mark.slow
@pytest.mark.parametrize("lower", [{}, {"disk_bytes": 10**12, "given": {"order": "chunk-first"}}])
def test_the_message_names_the_smallest_budget_that_would_do(lower):
    with pytest.raises(ConfigError) as caught:
        choose(budget_bytes=1 * GIB, lengths=SHORT, must_fit=True, **lower)
    words = caught.value.change.rpartition("the smallest that would do is memory.device: ")[2]
    enough = parse_bytes(words)
    assert choose(budget_bytes=enough, lengths=SHORT, must_fit=True, **lower).answer is not None
    with pytest.raises(ConfigError):
        choose(budget_bytes=int(0.994 * enough), lengths=SHORT, must_fit=True, **lower)


def test_too_many_chunks_are_not_searched():
    decision = choose(given={"size": 3})
    assert decision.options == replace(fixed_options(40_000), size=3)
    assert "by the fixed rule" in decision.words


@pytest.mark.parametrize(
    ("seq_len", "per_step", "most"),
    [(100, 10**12, 1024), (40_000, 10**12, 3), (200_000, 10**12, 1), (6_000, 4, 20)],
)
def test_a_huge_batch_is_predicted_from_some_of_its_sequences(monkeypatch, seq_len, per_step, most):
    drawn = []

    def see(question, tell, **_):
        drawn.append(sum(map(len, question.steps)))
        raise ConfigError(given="", required="", source="", change="")

    monkeypatch.setattr("furlong.planners.decide.search", see)
    with pytest.raises(ConfigError):
        choose(lengths=count_lengths([seq_len] * 2000), size=StepSize(per_step))
    assert drawn == [most]


def test_steps_in_tokens_are_drawn_as_a_run_closes_them():
    lengths = count_lengths([8_000] * 2 + [500] * 200)
    drawn, size = sample_steps(lengths, StepSize(tokens=4_000), seed=0, num_devices=4)
    steps = size.cut(drawn)
    question = Question(steps, CPU, Limits(2**40), longest=8_000, size=size)
    assert [sum(step) for step in steps].count(4_000) >= 3
    assert all(sum(step) <= 4_000 or step == [8_000] for step in map(list, steps))
    assert size.sequences in (7, 8) and question.weight == 1 / len(steps)
    space = Space(question, Layout())
    assert [len(own) for (own,) in space.dealt] == [len(step) for step in steps]
    assert longest_step(space, 3_000) == [8_000]
    # of a step that has too many tokens some sequences are enough
    some, size = sample_steps(count_lengths([500] * 9), StepSize(tokens=2**20), seed=0)
    assert sum(some) <= 2**17 and size == StepSize(2**20 // 500)


def test_of_one_large_step_short_and_long_sequences_are_drawn(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "furlong.planners.decide.search",
        lambda question, *_, **__: drawn.extend(*question.steps) or 1 / 0,
    )
    with pytest.raises(ZeroDivisionError):
        choose(lengths=count_lengths([8_000] * 20 + [500] * 200), size=StepSize(220))
    assert 0.05 < drawn.count(8_000) / len(drawn) < 0.15
    assert sum(drawn) <= 2**17


def test_a_margin_leaves_room():
    tight, wide = (choose(budget_bytes=12 * GIB, margin=m).answer.best for m in (0.0, 0.2))
    assert 0.8 * 12 * GIB < tight.needs.device_bytes <= 12 * GIB
    assert wide.needs.device_bytes <= 0.8 * 12 * GIB
    assert tight.step_s < wide.step_s


def test_a_decision_predicts_the_step_of_any_plan():
    decision = choose(budget_bytes=20 * GIB)
    plan = plan_on_device([9_000, 50], decision.options, num_layers=SHAPE.num_layers)
    predicted = decision.predict(plan)
    assert (predicted.device_bytes, predicted.step_s) == needs(decision.options, [9_000, 50])
    assert Decision(decision.options, "").predict(plan) is None


LOWER, MORE = {"cpu_bytes": 64 * GIB}, pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "longest", "budget_bytes", "lower"),
    [
        ("Qwen2.5-7B", 131_072, 145 * GIB, {}),
        pytest.param("Qwen2.5-7B", 131_072, 145 * GIB, LOWER, marks=MORE),
        pytest.param("Qwen2.5-0.5B", 131_072, 11 * GIB, {}, marks=MORE),
        ("Qwen2.5-0.5B", 131_072, 11 * GIB, LOWER),
        pytest.param("Llama-3-8B", 1_000_000, 200 * GIB, {}, marks=MORE),
        ("Llama-3-8B", 1_000_000, 200 * GIB, LOWER),
        ("Qwen2.5-0.5B", 16_384, 11 * GIB, {}),
        pytest.param("Qwen2.5-0.5B", 16_384, 11 * GIB, LOWER, marks=MORE),
    ],
)
@pytest.mark.few(1)
def test_the_work_of_a_search_is_bounded(monkeypatch, model, longest, budget_bytes, lower):
    """By counts: actions walked or simulated, of some 30 microseconds each, and candidates with
    closed forms, of some 100 each: about a second together."""
    walked, estimated = [], []

    class Costs(CostModel):
        def costs(self, plan, **free):
            walked.append(sum(map(len, plan.actions)))
            return super().costs(plan, **free)

    def see(self, plan, rank, original=PlanMemory.curve):
        walked.append(len(plan.actions[rank]))
        return original(self, plan, rank)

    def bound(self, options, original=ByteBound.needs):
        estimated.append(options)
        return original(self, options)

    monkeypatch.setattr(PlanMemory, "curve", see)
    monkeypatch.setattr(ByteBound, "needs", bound)
    priced = Costs(model_shape(model), Machine.named("H100"))
    lengths = count_lengths([longest])
    decision = choose(priced, lengths, budget_bytes=budget_bytes, size=StepSize(1), **lower)
    assert decision.options.size >= 64
    # where nothing fits a finer search follows, and the walk of what lacks least
    assert sum(walked) < (60_000 if decision.answer else 120_000), (sum(walked), len(estimated))
    assert len(estimated) < 2_500


def test_the_message_proposes_what_leads_to_a_plan_that_fits():
    """No smaller chunks than the smallest, and every budget that is too small."""
    dials = {"size": 64, "order": "layer-first", "keep": "kv", "offload": {"inputs": "disk"}}
    tight = {"lengths": SHORT, "must_fit": True, "given": dials}
    with pytest.raises(ConfigError) as caught:
        choose(budget_bytes=1 * GIB, disk_bytes=2**20, **tight)
    change = caught.value.change
    assert "smaller chunks" not in change
    device, disk = change.rpartition("memory.device: ")[2].split(", with memory.disk: ")
    enough = [parse_bytes(words) for words in (device, disk)]
    assert choose(budget_bytes=enough[0], disk_bytes=enough[1], **tight).answer is not None


def test_the_seconds_of_a_sample_are_those_of_a_draw_and_its_memory_is_that_of_all():
    """Any draw may be of all chunks; the same draw is asked of every candidate."""
    dials = {"size": 1024}
    exact = choose(given=dials).answer
    sampled = choose(given=dials | {"sample": Sampling(chunks=5, rule="fixed")}).answer
    exactly = {tried.options: tried for tried in exact.tried}
    pairs = [
        (tried, exactly[replace(tried.options, sample=None)])
        for tried in sampled.tried
        if replace(tried.options, sample=None) in exactly
    ]
    assert len(pairs) > 1 and all(tried.options.sampling is not None for tried, _ in pairs)
    for tried, whole in pairs:
        assert tried.needs == whole.needs
        assert tried.step_s < 0.8 * whole.step_s
    best = sampled.best
    assert best.step_s <= (1 + SLACK) * min(tried.step_s for tried in sampled.tried)
    again = choose(given=dials | {"sample": Sampling(chunks=5, rule="fixed", seed=9)}).answer
    assert (again.best.options.keep, again.best.step_s) == (best.options.keep, best.step_s)


@pytest.mark.parametrize("order", [{"order": "chunk-first"}, {"stage_layers": 12}])
def test_the_seconds_of_a_sample_are_those_of_its_plan(order):
    dials = {"size": 1024, "sample": Sampling(rate=0.3)} | order
    question = Question([[9_000, 3_000, 500]], CPU, Limits(2**40), given=dials)
    best = search(question).best
    exact = best.plan_of(*question.steps)
    drawn = one_draw(exact, best.options.sampling)
    assert drawn.sampled and drawn != one_draw(exact, None) == exact
    assert best.step_s == pytest.approx(predict(CPU, drawn).step_s, rel=1e-12)


def test_a_search_with_a_sample_tries_what_exact_estimates_would_leave_out():
    """They are of whole backwards, far above the seconds of a draw."""
    dials = {"size": 4096, "sample": Sampling(chunks=2, rule="fixed")}
    searched = choose(given=dials).answer
    assert {one.options.keep for one in searched.tried} == {"input", "kv", "attention", "all"}
