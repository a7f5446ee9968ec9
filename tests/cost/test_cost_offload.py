"""Memory and traffic of each kind in each target: by hand, and by the formulas of the store."""

from dataclasses import replace
from functools import cache

import pytest
from helpers.shapes import shape_of_values
from papers.chunkflow_plan import plan_chunkflow
from papers.fpdt_plan import plan_fpdt

from furlong.cost.memory import PARTS, PlanMemory, stage_bytes
from furlong.cost.training import Training
from furlong.plan.plan import ChunkPlan, Offload
from furlong.plan.text import format_action, parse_action, parse_chunk
from furlong.planners.options import ChunkOptions

MIB = 2**20
FLOAT32 = Training.in_dtype("float32")
CHUNK, NUM_CHUNKS = 1024, 16
LENGTH = CHUNK * NUM_CHUNKS


@cache
def own_shape():
    """That of the benchmarks' own model: 8 layers of 384, 6 heads of 64, 2 of keys and values."""
    return shape_of_values({
        "model_type": "qwen2", "hidden_size": 384, "intermediate_size": 1024,
        "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2,
        "vocab_size": 4096,
    })  # fmt: skip


def own_memory():
    return PlanMemory(own_shape(), FLOAT32, 10**15, device_type="cpu")


def layer_first(height, keep="input", *, memory=None, **offload):
    memory = memory or own_memory()
    plan = plan_fpdt(
        [LENGTH], num_layers=8, stage_layers=height, chunk_size=CHUNK, keep=keep,
        offload=Offload(**offload),
    )  # fmt: skip
    return plan, memory.curve(plan, 0), memory.curve(plan, 0).traffic


def read_bytes(traffic, target):
    return traffic.read[:, traffic.of(target)].sum()


def written_bytes(traffic, target):
    return traffic.written[:, traffic.of(target)].sum()


def part(curve, *names):
    return curve.device[:, [PARTS.index(name) for name in names]].sum(axis=1)


def test_inputs_are_written_twice_and_read_by_every_pass():
    _, curve, traffic = layer_first(1, inputs="disk")
    # 7 stages of 16 chunks of 1.5 MiB. Read: F (not the last chunk's at the last stage), K of 6
    # stages but for their last chunk, R, and the gradient by the stage before
    message = 1.5 * MIB
    assert written_bytes(traffic, "disk") == 2 * 7 * 16 * message
    assert read_bytes(traffic, "disk") == (7 * 16 - 1 + 6 * 15 + 7 * 16 + 7 * 16) * message
    assert read_bytes(traffic, "cpu") == written_bytes(traffic, "cpu") == 0
    assert traffic.to_json().keys() == {"inputs"}
    assert curve.disk.max() == 7 * 16 * message
    assert not curve.cpu.any() and curve.disk[-1] == 0
    # on the device remain those that a pass reads and delivers
    _, on_device, nothing = layer_first(1)
    saved = part(on_device, "activations").max() - part(curve, "activations").max()
    assert saved > (7 * 16 - 5) * message
    assert nothing.to_json() == {}


def test_an_input_becomes_its_gradient_in_one_buffer():
    plan, curve, _ = layer_first(1, inputs="disk")
    at = {format_action(action): i for i, action in enumerate(plan.actions[0])}
    message = 1.5 * MIB
    # all inputs are there until the last backward of stage 1 has made them gradients of stage 0
    assert curve.disk[at["B15.7"]] == curve.disk[at["B0.7"]] == 7 * 16 * message
    assert curve.disk[at["R15.6"]] == 7 * 16 * message
    # B15.6 reads the gradient of its output, which dies with it
    assert curve.disk[at["R14.6"]] == 7 * 16 * message - message
    assert curve.disk[at["R0.0"]] == message
    assert curve.disk[at["reduce 7"]] == 7 * 16 * message


def test_a_kept_graph_gives_its_input_back_and_takes_a_buffer_for_the_gradient():
    plan, curve, traffic = layer_first(4, keep="all", inputs="cpu")
    at = {format_action(action): i for i, action in enumerate(plan.actions[0])}
    message = 1.5 * MIB
    forwards, backwards = ("F0.0 all", "F15.0 all", "F0.1 all", "F15.1 all"), (
        "B15.1", "B0.1", "B15.0", "B0.0",
    )  # fmt: skip
    expected = [message, 16 * message, 16 * message, message]
    assert [curve.cpu[at[name]] for name in forwards] == expected
    assert [curve.cpu[at[name]] for name in backwards] == expected
    assert written_bytes(traffic, "cpu") == 2 * 16 * message
    assert read_bytes(traffic, "cpu") == 2 * 16 * message


def test_without_a_backward_an_input_dies_with_its_reader():
    plan = plan_fpdt([LENGTH], num_layers=8, stage_layers=4, chunk_size=CHUNK, backward=False,
                     offload=Offload(inputs="cpu"))  # fmt: skip
    curve = own_memory().curve(plan, 0)
    message = 1.5 * MIB
    assert curve.cpu.tolist() == [message * n for n in [*range(1, 17), *range(16, 0, -1)]]
    traffic = own_memory().curve(plan, 0).traffic
    assert written_bytes(traffic, "cpu") == read_bytes(traffic, "cpu") == 16 * message


def test_frozen_stages_have_no_gradients_to_keep():
    texts = "F0.0 input, F0.1 input, F0.2 kv, R0.2, B0.2, R0.1, B0.1, reduce 2, reduce 1, reduce 0"
    plan = ChunkPlan(
        (64,), (parse_chunk("0:0-64"),), (2, 3, 3), (tuple(map(parse_action, texts.split(", "))),),
        offload=Offload(inputs="cpu"), frozen_stages=1,
    )  # fmt: skip
    message = 64 * 384 * 4
    host = own_memory().curve(plan, 0).cpu
    # x1 and x2; x2 becomes a gradient, which B0.1 reads; x1 becomes none
    assert host.tolist() == [message * n for n in (1, 2, 2, 2, 2, 2, 2, 0, 0, 0)]
    assert written_bytes(own_memory().curve(plan, 0).traffic, "cpu") == 3 * message
    # read: x1 by F and R, x2 by R alone (F0.2 computes nothing), its gradient by B0.1
    assert read_bytes(own_memory().curve(plan, 0).traffic, "cpu") == 4 * message


@pytest.mark.parametrize("height", [1, 2, 8])
def test_attention_is_written_once_and_read_once_or_twice(height):
    plan, curve, traffic = layer_first(height, "attention", attention="disk")
    per_layer = CHUNK * (384 * 4 + 6 * 4)
    num_stages = 8 // height
    # the last stage remembers no attention of its last layer, and of its last chunk none
    written = (num_stages - 1) * 16 * height + 15 * (height - 1)
    # a rebuild peeks at all of its layers but the last
    peeked = (num_stages - 1) * 15 * (height - 1)
    assert written_bytes(traffic, "disk") == written * per_layer == curve.disk.max()
    assert read_bytes(traffic, "disk") == (written + peeked) * per_layer
    _, on_device, _ = layer_first(height, "attention")
    assert part(on_device, "activations").max() >= written * per_layer
    # those of the whole cell are there from its recompute to its backward
    at = [format_action(action) for action in plan.actions[0]].index("R8.0")
    cell = stage_bytes(own_shape(), plan.stages, 0, FLOAT32)
    assert part(curve, "activations")[at] >= CHUNK * cell.graph()
    _, _, unseen = layer_first(height, "attention", attention="disk", kv="disk")
    assert unseen.to_json()["attention"] == traffic.to_json()["attention"]


def test_kept_graphs_off_the_device():
    options = ChunkOptions(size=CHUNK, num_retained=2, keep="kv")
    plan = plan_chunkflow([LENGTH], options, stages=(8,))
    lower = replace(plan, offload=Offload(graphs="cpu"))
    graph = CHUNK * stage_bytes(own_shape(), (8,), 0, FLOAT32).graph()
    traffic = own_memory().curve(lower, 0).traffic
    moved = {"offload": "cpu", "read_bytes": round(2 * graph), "written_bytes": round(2 * graph)}
    assert traffic.to_json() == {"graphs": moved}
    assert own_memory().curve(lower, 0).cpu.max() == round(2 * graph)
    # recomputed graphs stay where they are: one at a time
    saved = part(own_memory().curve(plan, 0), "activations").max()
    saved -= part(own_memory().curve(lower, 0), "activations").max()
    assert saved == pytest.approx(graph, rel=0.02)


@pytest.mark.parametrize("target", ["cpu", "disk"])
def test_each_memory_holds_its_own(target):
    _, curve, traffic = layer_first(2, inputs=target, kv=target)
    assert curve.lower_bytes == getattr(curve, target).tolist()
    assert (
        max(curve.lower_bytes) > 0 == getattr(curve, {"cpu": "disk", "disk": "cpu"}[target]).max()
    )
    assert traffic.to_json().keys() == {"inputs", "kv", "kv_gradients"}
