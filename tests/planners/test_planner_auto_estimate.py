"""The closed forms of the search, against walks and simulations of whole plans."""

from dataclasses import replace
from functools import cache

import pytest
from helpers.shapes import shape_of_values
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.cost.machine import Link, Machine, this_cpu
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training
from furlong.plan.plan import Layout
from furlong.planners.candidates import ByteBound, TimeEstimate, least_s
from furlong.planners.chunks import group_chunks
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device
from furlong.planners.question import Limits, Question, Space
from furlong.simulate.predict import needs_of, predict

SMALL = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 512,
}  # fmt: skip
WINDOWED = SMALL | {"model_type": "gemma2", "head_dim": 16, "sliding_window": 600}
CPU = replace(this_cpu(), heap_blocks=0.0, heap_share=0.0)  # of which the bound knows nothing
MODELS = {
    "small": lambda: CostModel(shape_of_values(SMALL), Machine.named("H100")),
    "windowed": lambda: CostModel(shape_of_values(WINDOWED), Machine.named("H100")),
    "cpu": lambda: CostModel(shape_of_values(SMALL), CPU, Training.in_dtype("float32")),
    "cpu, bfloat16": lambda: CostModel(shape_of_values(SMALL), CPU),
    "lora": lambda: CostModel(
        model_shape("Qwen2.5-0.5B"), Machine.named("A100-80"),
        Training(lora=Lora(8, "all-linear")),
    ),
    "one layer": lambda: CostModel(
        shape_of_values(SMALL | {"num_hidden_layers": 1}), Machine.named("H100")
    ),
}  # fmt: skip
target = st.sampled_from(("none", "cpu", "disk"))
offload = st.fixed_dictionaries({"kv": target, "inputs": target, "attention": target})
orders = st.one_of(
    st.just({}), st.integers(1, 7).map(lambda n: {"order": "layer-first", "stage_layers": n})
)
options = st.builds(
    lambda order, **dials: ChunkOptions(**order, **dials),
    order=orders,
    size=st.sampled_from((512, 1024, 2048)),
    keep=st.sampled_from(("input", "kv", "attention", "all")),
    num_retained=st.integers(0, 5),
    offload=offload,
    recompute_layers=st.sampled_from((0, 0, 2)),
)


@cache
def cost_model(name):
    return MODELS[name]()


@settings(max_examples=120)
@given(st.sampled_from(sorted(MODELS)), options, st.integers(1, 12_000), st.booleans())
def test_no_walk_needs_less_than_the_bound(name, options, longest, filled):
    model = cost_model(name)
    others = -longest % options.size if filled else 0
    plan = plan_on_device(
        [longest, others] if others else [longest], options, num_layers=model.shape.num_layers
    )
    walked = needs_of(model.memory().curve(plan, 0))
    bound = ByteBound(model, longest, options.size, others).needs(options)
    for least, most in zip(bound, walked, strict=True):
        assert least <= most * (1 + 1e-9) + 64
    is_plain = options.offloading == ChunkOptions().offloading and not options.recompute_layers
    if is_plain and options.keep != "all" and name != "windowed":
        assert bound.device_bytes >= 0.9 * walked.device_bytes


@settings(max_examples=80)
@given(
    st.sampled_from(sorted(MODELS)),
    options,
    st.lists(st.integers(1, 6_000), min_size=1, max_size=5),
)
def test_the_passes_of_a_few_chunks_tell_the_seconds_of_all(name, options, seq_lens):
    """Of a stage of each kind, unless copies take longer."""
    model = cost_model(name)
    plan = plan_on_device(seq_lens, options, num_layers=model.shape.num_layers)
    seconds = predict(model, plan).step_s
    estimate = TimeEstimate(model, group_chunks(seq_lens, options)).seconds(options)
    assert estimate <= 1.05 * seconds
    if options.offloading == ChunkOptions().offloading:
        assert estimate == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("longest", [60_000, 65_536])
@pytest.mark.parametrize("height", [None, 6])
@pytest.mark.parametrize(("size", "keep"), [(2048, "kv"), (4096, "attention")])
@pytest.mark.parametrize("num_retained", [0, 1, 3])
def test_the_bound_holds_with_many_segments_off_the_device(
    longest, height, size, keep, num_retained
):
    model = cost_model("lora")
    order = {} if height is None else {"order": "layer-first", "stage_layers": height}
    dials = ChunkOptions(size=size, keep=keep, num_retained=num_retained, offload="cpu", **order)
    walked = needs_of(model.memory().curve(plan_on_device([longest], dials, num_layers=24), 0))
    bound = ByteBound(model, longest, size).needs(dials)
    assert 0.95 * walked.device_bytes <= bound.device_bytes <= walked.device_bytes
    assert 0.9 * walked.cpu_bytes <= bound.cpu_bytes <= walked.cpu_bytes


@pytest.mark.parametrize("name", ["small", "lora", "cpu", "cpu, bfloat16"])
@pytest.mark.parametrize("keep", ["input", "kv", "attention"])
@pytest.mark.parametrize("num_retained", [0, 1, 3])
def test_chunk_first_on_the_device_the_bound_is_what_the_walk_finds(name, keep, num_retained):
    model = cost_model(name)
    layers = model.shape.num_layers
    for longest in (2048, 16_384, 16_384 - 300):
        dials = ChunkOptions(size=2048, keep=keep, num_retained=num_retained)
        walked = needs_of(
            model.memory().curve(plan_on_device([longest], dials, num_layers=layers), 0)
        )
        bound = ByteBound(model, longest, dials.size).needs(dials)
        assert bound.device_bytes == pytest.approx(walked.device_bytes, abs=4)
        by_layers = replace(dials, order="layer-first", stage_layers=1)
        plan = plan_on_device([longest], by_layers, num_layers=layers)
        walked = needs_of(model.memory().curve(plan, 0))
        bound = ByteBound(model, longest, dials.size).needs(by_layers)
        # layer-first it overlooks a chunk's message or two
        message = dials.size * model.shape.hidden_size * model.training.compute_bytes
        assert 0 <= walked.device_bytes - bound.device_bytes <= 2 * message


@pytest.mark.parametrize(("kind", "least"), [("kv", 0.5), ("inputs", 0.65), ("attention", 0.25)])
@pytest.mark.parametrize("stage_layers", [1, 6])
@pytest.mark.parametrize("keep", ["input", "kv", "attention"])
@pytest.mark.few(6)
def test_a_slow_link_is_in_the_estimate(kind, least, stage_layers, keep):
    """The seconds of its copies, where the kind is written at all: never more than they take."""
    model = cost_model("lora")
    links = replace(model.hardware.links, disk=Link(0.0, 1e7))
    model = replace(model, hardware=replace(model.hardware, links=links))
    dials = ChunkOptions(
        size=2048, keep=keep, order="layer-first", stage_layers=stage_layers, offload={kind: "disk"}
    )
    plan = plan_on_device([30_000], dials, num_layers=model.shape.num_layers)
    seconds = predict(model, plan).step_s
    estimate = TimeEstimate(model, group_chunks([30_000], dials))
    on_device_s = estimate.seconds(replace(dials, offload="none"))
    is_written = kind != "attention" or keep == "attention"
    assert (seconds > 20 * on_device_s) == is_written
    assert least * seconds <= estimate.seconds(dials) <= seconds * (1 + 1e-9)


def test_the_bound_of_a_later_sequence_has_the_gradients_of_all_layers():
    model, dials = MODELS["small"](), ChunkOptions(size=512, keep="kv", num_retained=0)
    alone, later = (
        ByteBound(model, 512, 512, has_gradients=there).needs(dials).device_bytes
        for there in (False, True)
    )
    first, second = (
        predict(model, plan_on_device([512] * count, dials, num_layers=6)).device_bytes
        for count in (1, 2)
    )
    assert alone <= first < later <= second


def test_no_step_is_faster_than_the_bound_of_its_layout():
    """On a card where packed slices go to a slower kernel than the chunks of a long sequence."""
    model = CostModel(model_shape("Qwen3-8B"), Machine.named("H100"))
    question = Question([[400_000, 300, 300]], model, Limits(2**50))
    space = Space(question, Layout())
    plan_of = space.plan_of(ChunkOptions(size=65_536, keep="all"))
    assert least_s(space) < space.step_s(plan_of)
