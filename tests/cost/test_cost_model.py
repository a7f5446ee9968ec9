"""Seconds of actions: what hides behind what, and what the simulator makes of them."""

from dataclasses import replace
from math import inf

import pytest
from papers.chunkflow_plan import plan_chunkflow
from papers.fpdt_plan import plan_fpdt

from furlong.cost.machine import Efficiency, Link, Machine
from furlong.cost.model import CostModel
from furlong.cost.shape import model_shape
from furlong.cost.training import Lora, Training
from furlong.plan.plan import (
    Backward,
    Chunk,
    ChunkPlan,
    Forward,
    Layout,
    Offload,
    Place,
    RebuildKV,
    Recompute,
    Reduce,
    Send,
    Slice,
    Unshard,
)
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import join_replicas, plan_replica
from furlong.simulate.clock import simulate

SHAPE = model_shape("Llama-3-8B")
A100 = Machine.named("A100-80")
HALF = Efficiency(best=0.5, half_tokens=0)
EXACT = replace(
    A100, linear=HALF, attention_forward=HALF, attention_backward=HALF, activation_bytes_per_s=inf
)
LONG = 32 * 1024


BOTH = (Forward(0, 0, "all"), Backward(0, 0))


def one_chunk(*pieces, sp_size=1, actions=BOTH, stages=(32,)):
    lens = tuple(piece.num_tokens for piece in pieces)
    return ChunkPlan(lens, (Chunk(pieces),), stages, (tuple(actions),), sp_size=sp_size)


def forward_s(plan, model):
    return model.costs(plan).compute_s(Forward(0, 0, "all"), 0)


def test_a_mixed_chunk_hides_communication_behind_local_attention():
    """Skrull, Eq. 2: max(all-to-all, local) + distributed."""
    slow = replace(A100, links=replace(A100.links, within_node=Link(1e-3, 5e9)))
    model = CostModel(SHAPE, slow)
    shared = Slice(0, 0, LONG, Place(0, 2))
    alone = forward_s(one_chunk(shared, sp_size=2), model)
    tiny = forward_s(one_chunk(shared, Slice(1, 0, 16), sp_size=2), model)
    assert tiny == pytest.approx(alone, rel=5e-3)
    local = [Slice(i, 0, 16 * 1024, Place(i - 1, 1)) for i in (1, 2)]
    both = forward_s(one_chunk(shared, *local, sp_size=2), model)
    apart = alone + forward_s(
        one_chunk(*(replace(s, seq_id=s.seq_id - 1) for s in local), sp_size=2), model
    )
    assert both < 0.97 * apart


def test_a_group_is_as_slow_as_its_slowest_process():
    model = CostModel(SHAPE, A100)
    uneven = one_chunk(Slice(0, 0, 9000), Slice(1, 0, 100, Place(1, 1)), sp_size=2)
    alone = one_chunk(Slice(0, 0, 9000), Slice(1, 0, 0))
    assert forward_s(uneven, model) == pytest.approx(forward_s(alone, model))


def test_sequence_parallelism_divides_work_and_pays_all_to_alls():
    model = CostModel(SHAPE, EXACT)
    whole = forward_s(one_chunk(Slice(0, 0, LONG)), model)
    eighth = forward_s(one_chunk(Slice(0, 0, LONG, Place(0, 8)), sp_size=8), model)
    # by hand: 4096 tokens of 10,240 bf16 values, 7/8 of them moved: 73,400,320 bytes at 300 GB/s
    # are 244.668 us, four calls of 20 us; 32 layers
    all_to_all = 0.010389367
    assert eighth == pytest.approx(whole / 8 + all_to_all)
    across = forward_s(one_chunk(Slice(0, 0, LONG, Place(0, 16)), sp_size=16), model)
    assert across > eighth / 2 + all_to_all / 2


def test_what_is_free_takes_no_time():
    """benchmarks/parallel.py compares what all-to-alls take with what is computed without them."""
    model, plan = CostModel(SHAPE, A100), one_chunk(Slice(0, 0, LONG, Place(0, 8)), sp_size=8)
    seconds = [
        model.costs(plan, free=free).compute_s(BOTH[0], 0)
        for free in ((), ("streams", "gathers"), ("all-to-all",))
    ]
    assert seconds[0] == seconds[1] > seconds[2] > 0


def test_messages_of_neighbours_and_of_other_nodes():
    model = CostModel(SHAPE, A100)
    plan = plan_chunkflow((512,) * 3, ChunkOptions(size=512), stages=(2,) * 16)
    costs = model.costs(plan)
    near = costs.transfer_s(Send("activation", 0, 0, 1), 0)
    far = costs.transfer_s(Send("activation", 0, 7, 8), 7)
    # 4,194,304 bytes at 300 GB/s and 25 GB/s, by hand
    assert near == pytest.approx(20e-6 + 13.981013e-6)
    assert far == pytest.approx(30e-6 + 167.77216e-6)


def test_collectives_on_parameters():
    chunks = tuple(Chunk((Slice(i, 0, 64),)) for i in range(2))
    lists = tuple((Unshard(0), Forward(i, 0, "all"), Backward(i, 0), Reduce(0)) for i in range(2))
    plan = ChunkPlan((64, 64), chunks, (32,), lists)
    assert SHAPE.num_parameters == 8_030_261_248
    # by hand, two devices at 300 GB/s: half of 16.06 GB of bf16 weights is gathered in 26.767537
    # ms. 32.12 GB of float32 gradients: all of them all-reduced, or half of them scattered in
    # 53.535075 ms; 20 us for every call
    for zero, reduce_s in ((0, 0.10709015), (1, 0.05355508), (2, 0.05355508), (3, 0.05355508)):
        costs = CostModel(SHAPE, A100, Training(zero_stage=zero)).costs(plan)
        assert costs.compute_s(Unshard(0), 0) == pytest.approx(0.026787537)
        assert costs.reduce_s(0) == pytest.approx(reduce_s)
    single = CostModel(SHAPE, A100).costs(one_chunk(Slice(0, 0, 64)))
    assert single.compute_s(Reduce(0), 0) == 0


def test_groups_that_hold_all_weights_gather_within_and_add_up_between():
    training = Training(zero_stage=1, gathers=True)
    model = CostModel(SHAPE, A100, replace(training, replicate=2))
    stage = model.stage_seconds((32,), 0, layout=Layout(dp=4), ranks=(0, 1, 2, 3))
    # as of two devices in `test_collectives_on_parameters`; then an all-reduce of the half
    assert stage.unshard_s == pytest.approx(0.026787537)
    assert stage.reduce_s == pytest.approx(0.05355508 + 0.05355508)
    of_one = model.training.weights(SHAPE, (32,), frozenset((0,)), 2)
    assert of_one.state.weights == SHAPE.num_parameters * (2 + 4)
    of_two = training.weights(SHAPE, (32,), frozenset((0,)), 2)
    assert model.training.weights(SHAPE, (32,), frozenset((0,)), 4).state == of_two.state


def test_a_reduction_hides_behind_the_last_backward_and_a_gather_behind_the_first_forward():
    late = 2 * SHAPE.embedding_parameters / SHAPE.num_parameters  # complete at the end only
    late += (1 - late) / 32  # as are those of the first of 32 layers

    def exposed_s(seq_len, *first, spec=EXACT, **training):
        chunks = tuple(Chunk((Slice(i, 0, seq_len),)) for i in range(2))
        lists = tuple((*first, Forward(i, 0, "all"), Backward(i, 0), Reduce(0)) for i in range(2))
        plan = ChunkPlan((seq_len,) * 2, chunks, (32,), lists)
        quick = replace(spec, layer_launch_s=0.0, pass_launch_s=0.0, slice_launch_s=0.0)
        costs = CostModel(SHAPE, quick, Training(**training)).costs(plan)
        return costs, costs.compute_s(Reduce(0), 0)

    for zero in (0, 1, 2):
        costs, long_s = exposed_s(LONG, zero_stage=zero)
        assert long_s == pytest.approx(late * costs.reduce_s(0))
        costs, short_s = exposed_s(1, zero_stage=zero)
        gathered_s = costs.unshard_s(0) if zero else 0
        assert short_s == pytest.approx(costs.reduce_s(0) + gathered_s, rel=1e-2)
        assert exposed_s(1, Unshard(0), zero_stage=zero)[1] == pytest.approx(
            costs.reduce_s(0), rel=1e-2
        )
    costs, long_s = exposed_s(LONG, zero_stage=1, lora=Lora(8))
    assert long_s == pytest.approx(costs.reduce_s(0) / 32)
    on_cpu = replace(EXACT, name="a measured CPU", device_type="cpu")
    for changes in ({"spec": on_cpu}, {"overlaps": False}):
        costs, long_s = exposed_s(LONG, zero_stage=0, **changes)
        assert long_s == pytest.approx(costs.reduce_s(0))
    memory = CostModel(SHAPE, on_cpu).memory()
    assert memory.device_type == "cpu" and memory.device_budget_bytes == A100.budget_bytes


def test_zero_3_without_unshards_gathers_with_every_pass():
    short = one_chunk(Slice(0, 0, 64, Place(0, 16)), sp_size=16)
    resident = forward_s(short, CostModel(SHAPE, A100, Training(zero_stage=2)))
    sharded = CostModel(SHAPE, A100, Training(zero_stage=3))
    assert forward_s(short, sharded) == pytest.approx(sharded.costs(short).unshard_s(0))
    assert forward_s(short, sharded) > 2 * resident
    long = one_chunk(Slice(0, 0, 16 * LONG, Place(0, 16)), sp_size=16)
    hidden = forward_s(long, CostModel(SHAPE, A100, Training(zero_stage=2)))
    assert forward_s(long, sharded) == hidden  # hidden behind the computation
    costs = sharded.costs(short)
    assert costs.compute_s(Backward(0, 0), 0) >= costs.unshard_s(0) + costs.reduce_s(0)
    assert costs.compute_s(Reduce(0), 0) == 0  # every backward has reduced its gradients


def test_evaluation_pays_the_head_forward_only():
    evaluate = plan_chunkflow((4096,), ChunkOptions(size=4096), stages=(32,), backward=False)
    train = plan_chunkflow((4096,), ChunkOptions(size=4096), stages=(32,))
    model = CostModel(SHAPE, EXACT)
    head = 2 * SHAPE.embedding_parameters * 4096 / (0.5 * 312e12)
    alone = model.costs(evaluate).compute_s(evaluate.actions[0][0], 0)
    assert alone == pytest.approx(model.costs(train).compute_s(train.actions[0][0], 0) + head)


@pytest.mark.parametrize("lora", [None, Lora(rank=64, modules="all-linear")])
def test_checkpointed_layers_are_paid_in_the_backward(lora):
    """InfiniPipe, Eq. 11: l layers of the stage's 32 take l / 32 of its forward, adapters too."""
    model = CostModel(SHAPE, A100, Training(lora=lora))
    seconds = []
    for layers in (0, 8, 32):
        plan = one_chunk(Slice(0, 0, 4096), actions=(Forward(0, 0, "all", layers), Backward(0, 0)))
        seconds.append(model.costs(plan).compute_s(Backward(0, 0), 0))
    forward = forward_s(one_chunk(Slice(0, 0, 4096)), model)
    assert seconds[1] - seconds[0] == pytest.approx(forward / 4)
    assert seconds[2] - seconds[0] == pytest.approx(forward)


@pytest.mark.parametrize(("target", "slow"), [("cpu", False), ("disk", True)])
def test_streamed_kv_waits_only_where_the_link_is_slow(target, slow):
    model = CostModel(SHAPE, A100)
    plan = plan_chunkflow((64 * 1024,), ChunkOptions(size=8192, keep="kv"), stages=(32,))
    streamed = replace(plan, offload=Offload(kv=target))
    on_device, costs = model.costs(plan), model.costs(streamed)
    for action in plan.actions[0][:-1]:
        plain, waiting = on_device.compute_s(action, 0), costs.compute_s(action, 0)
        assert waiting >= plain * (1 - 1e-9)
        assert slow or costs.copy_s(action, 0) <= waiting
        assert on_device.copy_s(action, 0) == 0
    kv = simulate(plan, on_device).duration_s
    ratio = simulate(streamed, costs, copies=costs).duration_s / kv
    assert (ratio > 1.5) if slow else (ratio < 1.05)


def test_copies_take_each_link_in_each_direction_at_a_time():
    """By hand, from the bytes: the slowest link and direction hides the rest."""
    links = replace(A100.links, host=Link(1e-3, 1e9), disk=Link(2e-3, 1e8))
    model = CostModel(SHAPE, replace(A100, links=links))
    plan = plan_fpdt([16_384], num_layers=32, stage_layers=16, chunk_size=8192, keep="attention")
    message, attention = 8192 * 4096 * 2, 8192 * (4096 * 2 + 32 * 4)
    rebuild, recompute = RebuildKV(0, 0), Recompute(1, 0)
    by_offload = {
        # an input is read; and 15 or 16 layers' attention, in two tensors each
        Offload(inputs="cpu"): {Forward(0, 0, "attention"): 1e-3 + message / 1e9},
        Offload(attention="cpu"): {
            Forward(0, 0, "attention"): 0.032 + 16 * attention / 1e9,
            rebuild: 0.030 + 15 * attention / 1e9,
            recompute: 0.032 + 16 * attention / 1e9,
        },
        Offload(inputs="cpu", attention="disk"): {
            Forward(0, 0, "attention"): 0.064 + 16 * attention / 1e8,
            # its output's gradient is read; it is of the first stage, so that none is written
            Backward(1, 0): 1e-3 + message / 1e9,
        },
    }
    for offload, expected in by_offload.items():
        costs = model.costs(replace(plan, offload=offload))
        for action, seconds in expected.items():
            assert costs.copy_s(action, 0) == pytest.approx(seconds), (offload, action)
        # nothing waits inside a layer but attention for K,V
        assert costs.compute_s(recompute, 0) == model.costs(plan).compute_s(recompute, 0)
    costs = model.costs(replace(plan, offload=Offload(inputs="cpu")))
    assert costs.copy_s(rebuild, 0) == 0 == costs.copy_s(Reduce(0), 0)


def test_a_rebuild_of_one_layer_costs_a_projection():
    plan = plan_fpdt([65_536], num_layers=32, chunk_size=8192)
    costs = CostModel(SHAPE, EXACT).costs(plan)
    seconds = 2 * SHAPE.layers[0].before_kv * 8192 / (0.5 * 312e12)
    assert costs.compute_s(RebuildKV(3, 0), 0) == pytest.approx(seconds)
    # of taller stages all layers but the last attend, unless their attention is remembered
    taller = {
        keep: plan_fpdt([65_536], num_layers=32, stage_layers=8, chunk_size=8192, keep=keep)
        for keep in ("input", "attention")
    }
    input_s, attention_s = (
        CostModel(SHAPE, EXACT).costs(plan).compute_s(RebuildKV(3, 0), 0)
        for plan in taller.values()
    )
    layer = CostModel(SHAPE, EXACT).costs(plan)
    forward, recompute = layer.compute_s(Forward(3, 0, "input"), 0), 7 * seconds
    assert input_s == pytest.approx(7 * forward + seconds)
    assert recompute < attention_s < input_s


@pytest.mark.parametrize(("listed", "others", "message_s"), [(2, 1, 1), (1, 2, 1), (1, 1, 0)])
def test_replicas_of_a_stage_are_neighbours(listed, others, message_s):
    """Two pipelines on two nodes of two devices: messages cross, gradients stay. One stays on its
    node. Only a link between nodes takes time."""
    one = plan_replica((1024,), ChunkOptions(size=1024), num_layers=32, stages=(16, 16))
    plan = join_replicas([one] * listed, [[i] for i in range(listed)], [1024] * listed)
    links = replace(
        A100.links, devices_per_node=2, within_node=Link(0.0, 1e30), between_nodes=Link(1.0, 1e30)
    )
    training = Training(zero_stage=1, replicas=others)
    costs = CostModel(SHAPE, replace(A100, links=links), training).costs(plan)
    assert costs.transfer_s(Send("activation", 0, 0, 1), 0) == pytest.approx(message_s)
    assert costs.reduce_s(0) == pytest.approx(0.0)
