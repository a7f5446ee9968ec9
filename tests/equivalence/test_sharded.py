"""Weights that FSDP2 has sharded, on one rank: each pass is a call of the root module."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gradients import batch, num_labels, reference_loss, take_grads, worst_relative_error
from helpers.tiny_families import build

import furlong
from furlong.kv.arena import Arena
from furlong.models.causal_lm import CausalLM
from furlong.models.entrance import add_entrance
from furlong.ops.choose import ProbedBackend
from furlong.planners.orders.one_device import plan_on_device
from furlong.runtime.comms import Alone
from furlong.runtime.executor import Executor
from furlong.runtime.inputs import shift_labels
from furlong.runtime.pools import Pools, Storage

LIMIT_S = 300
LENS = [21, 4]
ORDERS = {
    "chunk-first": furlong.ChunkOptions(size=8, keep="input"),
    "height 1": furlong.ChunkOptions(size=8, keep="input", order="layer-first"),
    "height 2": furlong.ChunkOptions(
        size=8, keep="attention", order="layer-first", stage_layers=2, recompute_layers=1
    ),
}
CASES = [
    # (tied head, whether the model knows its entrance, orders from the first pass on)
    (False, True, ("height 1", "chunk-first", "height 2")),
    (True, True, ("height 1", "chunk-first")),
    (True, True, ("chunk-first", "height 1")),
    (False, False, ("height 1",)),
]


def run(model: CausalLM, order: str, pools: Pools) -> float:
    """A step by the executor; returns the summed loss."""
    sequences = batch(LENS)
    plan = plan_on_device(LENS, ORDERS[order], num_layers=model.num_layers)
    with model.installed():
        executor = Executor(
            model, plan, shift_labels(sequences), num_valid_tokens=num_labels(sequences),
            backend=ProbedBackend(), pools=pools, comms=Alone(),
        )  # fmt: skip
        return executor.run()[0]


def groups(model: torch.nn.Module) -> list[Any]:
    states = [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    several = "_fsdp_param_groups"  # one group per module before torch 2.13
    return [g for s in states for g in getattr(s, several, None) or [s._fsdp_param_group]]


def one_case(tied: bool, has_entrance: bool, orders: tuple[str, ...]) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    model = build("llama", tie_word_embeddings=tied)
    loss = reference_loss(model, batch(LENS))
    truth = take_grads(model)
    whole = CausalLM(model)  # which refuses what is sharded already
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if has_entrance:
        register_fsdp_forward_method(model, add_entrance(model))
    pools = Pools(Arena(torch.device("cpu")), Storage())
    found: dict[str, Any] = {"errors": [], "losses": []}
    for order in orders:
        found["losses"].append(run(whole, order, pools) / num_labels(batch(LENS)) / loss - 1)
        grads = {n: p.grad.to_local() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        found["errors"].append(worst_relative_error(grads, truth))
    found["states"] = {(g._training_state.name, g._sharded_state.name) for g in groups(model)}
    found["groups"] = len(groups(model))
    found["roots"] = sum(
        bool(m._get_fsdp_state()._is_root) for m in model.modules() if hasattr(m, "_get_fsdp_state")
    )
    return found


def in_child(answers: Any, folder: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    for case in CASES:
        try:
            answers.send(one_case(*case))
        except Exception as error:
            answers.send({"error": f"{type(error).__name__}: {error}"})
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def answers() -> dict[tuple, dict[str, Any]]:
    """What each case has found, in one process of its own with a limit of time."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        child = context.Process(target=in_child, args=(theirs, folder), daemon=True)
        child.start()
        theirs.close()
        found = {}
        try:
            for case in CASES:
                assert ours.poll(LIMIT_S), "no answer in time"
                found[case] = ours.recv()
            child.join(LIMIT_S)
        finally:
            child.kill()
            child.join()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[:-1], ids=str)
def test_sharded_weights_get_the_same_gradients(case, answers):
    found = answers[case]
    assert "error" not in found, found
    assert max(found["errors"]) <= 1e-12 and max(map(abs, found["losses"])) <= 1e-12
    assert len(found["errors"]) == len(case[2])
    assert found["groups"] == 4, "three layers and the root"
    assert found["states"] == {("IDLE", "SHARDED")}
    assert found["roots"] == 1, "a layer that was not seen at the first call takes itself for one"


@pytest.mark.slow
def test_without_the_entrance_it_does_not_work(answers):
    """What the entrance is for: a stage's swapped layers are not all seen at the first call."""
    found = answers[CASES[-1]]
    assert "error" in found or found["roots"] != 1 or found["states"] != {("IDLE", "SHARDED")}
