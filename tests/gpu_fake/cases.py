"""Steps on the fake GPU: `python cases.py CASE...` prints what each was seen to do, as JSON.

One process for several cases: the harness comes before torch, and starting costs more than a step.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import fake_gpu  # noqa: F401 - before torch
import torch
import torch.distributed as dist
from fake_gpu import Card, FakeGPU, build
from torch.distributed import HashStore, init_process_group
from torch.distributed.device_mesh import init_device_mesh

import furlong
from furlong.config.schema import TrainConfig
from furlong.models import fused
from furlong.models.describe import describe
from furlong.runtime.distributed.mesh import make_ranks
from furlong.runtime.executor import Executor
from furlong.train.optim import build_optimizer, make_state
from furlong.values import log_prob

_SMALL = {
    "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 2**17,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
_LATENT = {
    "q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_TYPES = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "gemma3_text": {"head_dim": 256, "sliding_window": 512, **_TYPES},
    "mistral": {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
                "sliding_window": 4096},
    "gpt_oss": {"head_dim": 64, "num_local_experts": 4, "sliding_window": 128, **_TYPES,
                **_EXPERTS},
    "deepseek_v3": _LATENT,
    "qwen3_next": {
        "head_dim": 64, "num_experts": 4, "moe_intermediate_size": 64, "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 64, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip
LENS = {"mistral": [12_288, 700], "qwen3_next": [300]}
"""Tokens of each sequence where they are not these: chunks of any length, a tail of one token, 64
mod 128 keys, packed slices."""
_LENS = [705, 513, 130, 1, 5]
SIZES = {"mistral": 4096, "qwen3_next": 128}
ORDERS: dict[str, dict[str, Any]] = {
    "chunk-first": {"keep": "attention", "num_retained": 1},
    "layer-first": {"keep": "input", "order": "layer-first", "recompute_layers": 1},
}


def batch(lens: list[int]) -> list[dict[str, torch.Tensor]]:
    ids = [torch.randint(0, 500, (n,)) for n in lens]
    return [{"input_ids": x, "labels": x} for x in ids]


def seen(gpu: FakeGPU, **more: Any) -> dict[str, Any]:
    problems = [f"{kind} {n} x {text} [{at}]" for (kind, text), (n, at) in gpu.problems.items()]
    return {
        "problems": problems, "host_syncs": gpu.counts["host syncs"], "syncs": dict(gpu.syncs),
        "calls": dict(gpu.rules.shapes), "no_room": gpu.counts["prefetch refused: no room"], **more,
    }  # fmt: skip


def step(kind: str, target: str, order: str, card: Card | None = None) -> dict[str, Any]:
    """The second step of a model, and what the first one saw beside it: checks and probes."""
    options = furlong.ChunkOptions(size=SIZES.get(kind, 256), offload=target, **ORDERS[order])
    with FakeGPU(card) as gpu:
        model = build(kind, **_SMALL | MODELS[kind])
        given = batch(LENS.get(kind, _LENS))
        pinned = []
        with mock.patch.object(Executor, "run", lambda own, *_, run=Executor.run: (
            pinned.append(gpu.counts["pinned slab"]), run(own, *_)
        )[1]):  # fmt: skip
            furlong.forward_backward(model, given, options)
        pinned.append(gpu.counts["pinned slab"])
        first = seen(gpu)["problems"]
        gpu.clear()
        engine = furlong.Engine(model)
        engine.forward_backward(given, options)
        staging = staging_of(engine, model.config, [len(x["labels"]) for x in given], options)
        return seen(gpu, first=first, pinned=pinned, staging=staging if target == "cpu" else None)


def staging_of(
    engine: furlong.Engine, config: Any, lens: list[int], options: furlong.ChunkOptions
) -> dict[str, float]:
    """Bytes of the CPU pool's buffers on the device: those that are there, the most that they may
    become, and those that the cost model counts of them in the first action, which reads none."""
    from furlong.cost import memory
    from furlong.cost.training import Training
    from furlong.planners.orders import plan_on_device

    plan = plan_on_device(lens, options, num_layers=config.num_hidden_layers)
    rules = describe(config), Training.in_dtype("bfloat16"), 10**15
    counted = memory.PlanMemory(*rules).curve(plan, 0).device_bytes[0]
    with mock.patch.multiple(memory, _STAGING_BYTES=0, _NUM_LARGEST=0):
        # a copy: curves are noted beside the plan
        without = memory.PlanMemory(*rules).curve(replace(plan), 0).device_bytes[0]
    staging = engine._session.state.opened.of("cpu")._staging  # type: ignore[attr-defined]
    return {
        "held": staging.total_bytes, "most": staging._limit_bytes, "counted": counted - without
    }  # fmt: skip


def values() -> dict[str, Any]:
    """Log-probabilities of two answers to one prompt, and their gradients, as DPO asks for them."""
    options = furlong.ChunkOptions(size=256, offload="cpu", keep="kv", num_retained=0)
    with FakeGPU() as gpu:
        engine = furlong.Engine(build("qwen2", **_SMALL))
        prompt = torch.randint(0, 500, (700,))
        pair = [torch.cat((prompt, torch.randint(0, 500, (n,)))) for n in (190, 333)]
        given = [{"input_ids": x, "labels": x} for x in pair]
        for number in range(2):
            if number:
                gpu.clear()
            found = engine.token_values(given, options, log_prob(), share_prompts=True)
            (found[0].sum() - found[1].sum()).backward()
        return seen(gpu)


def offloaded(left_out: str = "") -> dict[str, Any]:
    """The second step with weights in CPU memory, which FSDP2 brings to the device, alone."""
    from furlong.runtime.distributed.comms import Comms

    class Hasty(Comms):
        """Comms that leave a wait out."""

        def before(self, index: int) -> None:
            if left_out == "ready":
                self._ready.clear()
            super().before(index)

        def reshard(self, stage: int) -> None:
            before = self._freed
            super().reshard(stage)
            if left_out == "freed":
                self._freed = before or torch.cuda.Event()

    init_process_group("cpu:gloo,cuda:fake", store=HashStore(), rank=0, world_size=1)
    options = furlong.ChunkOptions(size=256, keep="input", order="layer-first", reshard=True)
    ranks = make_ranks(1, 1, 1, "cpu")
    with FakeGPU() as gpu, mock.patch.object(
        dist, "all_gather_object", lambda found, own, **_: found.__setitem__(0, own)
    ), mock.patch("furlong.runtime.session.Comms", Hasty):  # fmt: skip
        mesh = init_device_mesh("cuda", (1, 1, 1), mesh_dim_names=("pp", "dp", "sp0"))
        ranks = replace(ranks, mesh=mesh, shard_mesh=mesh["dp", "sp0"]._flatten("shard"))
        model = build("qwen2", **_SMALL | {"num_hidden_layers": 3})  # the first one comes twice
        given = {"ranks": ranks, "offload_weights": True, "compute_dtype": torch.bfloat16}
        engine = furlong.Engine(model, **given)
        for dtype in ("float32", "bfloat16"):
            optimizer = build_optimizer(model, TrainConfig(state_dtype=dtype))
            make_state(optimizer)
            for _ in range(2):
                gpu.clear()
                model.zero_grad()
                engine.forward_backward(batch(_LENS), options)
            found = seen(gpu)
            engine.clip_gradients(1.0)
            optimizer.step()
            assert optimizer.defaults["fused"], "several kernels take three times as long"
            states = [x for own in optimizer.state.values() for x in own.values()]
            held = {x.device.type for p in model.parameters() for x in (p, p.grad, *states)}
        found["problems"] = seen(gpu)["problems"]  # those of the update, too
        dist.destroy_process_group()
        return found | {"held": sorted(held), "num_parameters": len([*model.parameters()])}


def mutant(what: str) -> dict[str, Any]:
    """A step whose pools lack one wait, with copies that are never seen to be done."""
    from furlong.kv import pools

    submit = pools.StreamLane.submit
    patches = {
        "none": nullcontext(),
        "a lease that waits for no read": mock.patch.object(
            pools.StagedPool, "_wait", lambda *_: None
        ),
        "lanes that wait for nothing": mock.patch.object(
            pools.StreamLane, "submit", lambda own, work, after: submit(own, work, ())
        ),
        "buffers that are free at once": mock.patch.object(
            pools.Staging, "give", lambda own, buffer, free, give=pools.Staging.give: give(
                own, buffer, pools.Event())
        ),
    }  # fmt: skip
    options = furlong.ChunkOptions(size=256, offload="cpu", keep="attention", num_retained=0)
    with FakeGPU(copies="slow") as gpu, patches[what]:
        furlong.forward_backward(build("qwen2", **_SMALL), batch([1100]), options)
        return seen(gpu)


_QWEN3_8B = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 1000, "max_position_embeddings": 2**17,
}  # fmt: skip


def elementwise(*, is_lora: bool, is_fused: bool = True) -> dict[str, Any]:
    """Kernels and bytes outside of products and attention of each layer and chunk of 8,192 tokens
    in a step of two chunks, which keep their attention: forward, recompute and backward."""
    if not is_fused:
        fused.DEVICES = ()

    def of_layers(number: int) -> tuple[Counter[str], Counter[str]]:
        with FakeGPU() as gpu:
            dtype = torch.bfloat16 if is_lora else torch.float32
            model: Any = build("qwen3", dtype=dtype, num_hidden_layers=number, **_QWEN3_8B)
            if is_lora:
                import peft

                lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
                model = peft.get_peft_model(model, lora)
            options = furlong.ChunkOptions(size=8192, keep="attention", num_retained=0)
            engine = furlong.Engine(model, compute_dtype=torch.bfloat16)
            for parameter in model.parameters():  # as in any step but the first
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            gpu.clear()
            engine.forward_backward(batch([16_384]), options)
            return Counter(gpu.kernels), Counter(gpu.kernel_bytes)

    few, many = of_layers(1), of_layers(2)
    kernels, moved = ({name: (n - less[name]) / 2 for name, n in more.items() if n > less[name]}
                      for more, less in zip(many, few, strict=True))  # fmt: skip
    return {"kernels": kernels, "bytes": moved}


def benchmark(part: str) -> dict[str, Any]:
    """A part of benchmarks/gpu.py: models of two layers, all else as on a GPU."""
    import gpu_part

    settings = gpu_part.Settings(num_layers=2, peak_flops_per_s=1e15)
    with FakeGPU() as gpu:
        found = {name: values["shares"] for name, values in gpu_part.PARTS[part](settings)}
        return seen(gpu, results=found)


AMPERE = Card("NVIDIA A100-SXM4-80GB", (8, 0))
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        f"{kind}, {target}, {order}": partial(step, kind, target, order)
        for kind in MODELS
        for target in ("none", "cpu", "disk")
        for order in ORDERS
    },
    "gemma3_text on an A100": partial(step, "gemma3_text", "none", "chunk-first", AMPERE),
    "old cuDNN": partial(step, "qwen2", "none", "chunk-first", Card(cudnn=91_000)),
    "values of a tree": values,
    "offloaded weights": offloaded,
    "elementwise, all weights": partial(elementwise, is_lora=False),
    "elementwise, LoRA": partial(elementwise, is_lora=True),
    "elementwise, all weights, as written": partial(elementwise, is_lora=False, is_fused=False),
    "elementwise, LoRA, as written": partial(elementwise, is_lora=True, is_fused=False),
    **{
        f"mutant: {what}": partial(mutant, what)
        for what in (
            "none", "a lease that waits for no read", "lanes that wait for nothing",
            "buffers that are free at once",
        )
    },
    **{
        f"mutant: weights that wait for nothing {what}": partial(offloaded, left_out)
        for what, left_out in (("before", "freed"), ("behind", "ready"))
    },
    **{f"benchmark: {part}": partial(benchmark, part) for part in ("auto", "host")},
}  # fmt: skip


if __name__ == "__main__":
    for name in sys.argv[1:]:
        try:
            found: dict[str, Any] = CASES[name]()
        except Exception as error:  # told to the test, with the outcomes of the other cases
            found = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()[-3000:]}"}
        print(json.dumps({"case": name, **found}), flush=True)
    # autograd's thread for a GPU that is not there aborts the process at times as it is torn down
    os._exit(0)
