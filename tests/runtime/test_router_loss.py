"""Load balancing of experts: a step with a router loss has the gradients of the plain model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from helpers.float64_twin import twin_class
from helpers.ranks import run_ranks
from helpers.tiny_families import build, build_other, config_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

import furlong
from furlong.errors import ConfigError, UnsupportedModelError
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import take_grads, worst_relative_error

BOUND = 1e-12
COEFFICIENT = 0.5
OPTIONS = furlong.ChunkOptions(size=8, keep="kv")
LENS = (21, 9, 13, 17)


def balanced(family: str, *, lora: bool = False, **changes: object) -> Any:
    """A model with a router loss, without float32 in its code."""
    asked = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    config = config_of(family, **asked, **changes)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = twin_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1).add_(0.1 * torch.randn_like(parameter))
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=2))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter)
    return model.train()


def sequences(lens: tuple[int, ...] = LENS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 96, (n,), generator=generator) for n in lens]
    return [{"input_ids": x, "labels": x.masked_fill(x % 5 == 0, -100)} for x in ids]


def plain(model: Any, batch: list[dict[str, Tensor]]) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, router loss and gradients of one padded batch, by the model's own forward."""
    ids, labels, mask = (
        nn.utils.rnn.pad_sequence(x, batch_first=True, padding_value=value)
        for x, value in (
            ([s["input_ids"] for s in batch], 0), ([s["labels"] for s in batch], -100),
            ([torch.ones_like(s["input_ids"]) for s in batch], 0),
        )
    )  # fmt: skip
    out = model(input_ids=ids, attention_mask=mask)
    # transformers rounds the cross-entropy to float32
    loss = cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss = loss + COEFFICIENT * out.aux_loss
    z_coefficient = getattr(model.config, "router_z_loss_coef", 0.0)
    rows = mask.flatten().bool()
    z_loss = torch.cat([x[rows].logsumexp(-1).square() for x in out.router_logits]).mean()
    loss = loss + z_coefficient * z_loss
    loss.backward()
    return float(loss.detach()), float(out.aux_loss.detach()), take_grads(model)


@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("mixtral", {}, OPTIONS),
        # half of the layers without experts
        ("qwen3_moe", {"decoder_sparse_step": 2}, furlong.ChunkOptions(size=64)),
        ("gpt_oss", {"lora": True}, furlong.ChunkOptions(size=8, recompute_layers=2)),
        ("olmoe", {"num_experts": 8}, furlong.ChunkOptions(size=8, order="layer-first")),
        ("mixtral", {"router_z_loss_coef": 0.3}, OPTIONS),
    ],
)
def test_a_step_is_that_of_the_plain_model(
    family: str, changes: Any, options: furlong.ChunkOptions
) -> None:
    model = balanced(family, **changes)
    loss, aux_loss, truth = plain(model, sequences())
    result = furlong.forward_backward(model, sequences(), options)
    assert worst_relative_error(take_grads(model), truth) <= BOUND
    assert result.loss == pytest.approx(loss, rel=BOUND)
    assert result.metrics["aux_loss"] == pytest.approx(aux_loss, rel=BOUND)
    assert ("z_loss" in result.metrics) == ("router_z_loss_coef" in changes)
    evaluated = furlong.forward_backward(model, sequences(), options, backward=False)
    assert evaluated.loss == pytest.approx(loss, rel=BOUND)


def test_a_chunked_model_returns_router_logits() -> None:
    """Also where rows share a prompt, and where the router loss is all of the loss."""
    model = balanced("mixtral")
    ids = torch.stack([s["input_ids"] for s in sequences((24, 24, 24))])
    ids[1:, :16] = ids[0, :16]
    mask = torch.ones_like(ids)
    mask[2, 20:] = 0
    call = {"input_ids": ids, "attention_mask": mask}

    def loss_of(out: Any, share: float) -> Tensor:
        found: Tensor = share * out.logits[:, :20].logsumexp(-1).mean() + out.aux_loss
        return found

    for share in (0.0, 1.0):
        loss_of(model(**call), share).backward()
        truth, router_logits = take_grads(model), model(**call).router_logits
        out = furlong.chunked(model, OPTIONS)(**call)
        loss_of(out, share).backward()
        assert worst_relative_error(take_grads(model), truth) <= BOUND
        kept = mask.flatten().bool()
        for given, wanted in zip(out.router_logits, router_logits, strict=True):
            torch.testing.assert_close(given[kept], wanted[kept], rtol=BOUND, atol=BOUND)
        furlong.unchunked(model)
    with pytest.raises(ConfigError, match="router"):
        furlong.chunked(build("llama"), OPTIONS)(input_ids=ids, output_router_logits=True)


def whole(x: Any) -> Tensor:
    found: Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return found


def on_ranks(rank: int, sizes: tuple[int, int, int], build_model: Callable[[], Any]) -> float:
    """The largest error of a step on dp, sp, pp, with gradients added up over two calls."""
    model, batch = build_model(), sequences()
    loss, _, truth = plain(model, batch)
    engine = furlong.Engine(model, ranks=make_ranks(*sizes, "cpu"))
    ranks = engine.ranks
    assert ranks is not None
    options = furlong.ChunkOptions(size=8, keep="kv", num_retained=1)
    result = engine.forward_backward(batch[ranks.replica :: ranks.dp], options)
    found = {name: whole(x) for name, x in take_grads(model).items()}
    if sizes[2] > 1:  # FSDP2 gives zeros to what another stage trains
        found = {name: x for name, x in found.items() if bool(x.any())}
    names: list[Any] = [None] * math.prod(sizes)
    dist.all_gather_object(names, set(found))
    assert set().union(*names) == truth.keys()
    return max(
        abs(result.loss - loss),
        worst_relative_error(found, {name: truth[name] for name in found}),
    )


def four_processes(rank: int) -> dict[str, float]:
    routed = {"router_z_loss_coef": 0.3}
    return {
        "dp 2 x sp 2": on_ranks(rank, (2, 2, 1), lambda: balanced("mixtral")),
        "sp 2 x pp 2": on_ranks(rank, (1, 2, 2), lambda: balanced("qwen3_moe", **routed)),
        "dp 2 x pp 2": on_ranks(rank, (2, 1, 2), lambda: balanced("gpt_oss", lora=True)),
    }


@pytest.mark.slow
def test_four_processes_are_one() -> None:
    for found in run_ranks(four_processes, num_ranks=4):
        assert {name: error for name, error in found.items() if not error <= BOUND} == {}


def test_batches_of_several_calls_count_by_their_labels() -> None:
    """Each call balances its own tokens, as a forward of transformers does."""
    model, batch = balanced("mixtral"), sequences()
    parts = [batch[:1], batch[1:]]
    counts = [sum(int((s["labels"][1:] != -100).sum()) for s in part) for part in parts]
    truth: dict[str, Tensor] = {}
    for part, count in zip(parts, counts, strict=True):
        for name, x in plain(model, part)[2].items():
            truth[name] = truth.get(name, 0) + x * count / sum(counts)
    for part in parts:
        furlong.forward_backward(model, part, OPTIONS, sum(counts))
    assert worst_relative_error(take_grads(model), truth) <= BOUND


def test_what_cannot_be_balanced_is_refused() -> None:
    model = build("mixtral", output_router_logits=True)
    engine = furlong.Engine(model)
    drawn = furlong.ChunkOptions(size=8, keep="kv", sample=furlong.Sampling(rate=0.5, rule="fixed"))
    jitter = build("mixtral", output_router_logits=True, router_jitter_noise=0.3)
    plan = engine.plan(LENS, OPTIONS)
    refused: dict[str, Callable[[], object]] = {
        "sampled chunks": lambda: engine.forward_backward(sequences(), drawn),
        "draws random numbers": lambda: furlong.forward_backward(jitter, sequences(), OPTIONS),
        "a plan with backwards alone": lambda: engine.run(plan, sequences()),
        "router loss": lambda: engine.token_values(sequences(), OPTIONS),
    }
    for told, call in refused.items():
        with pytest.raises(ConfigError, match=told):
            call()
    evaluated = engine.run(engine.plan(LENS, OPTIONS, backward=False), sequences())
    trained = engine.run(plan, sequences(), loads=evaluated.loads)
    assert trained.loss == pytest.approx(evaluated.loss, rel=1e-12)
    with pytest.raises(UnsupportedModelError, match="router loss"):
        furlong.Engine(build_other("doge", is_moe=True, output_router_logits=True))
