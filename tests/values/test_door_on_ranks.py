"""`furlong.chunked` on replicas, a pool and a pipeline: own loops, with the model's own head."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.sharded_cases import adapted_llama, llama, tied_llama
from helpers.ranks import run_all, run_ranks
from helpers.tiny_families import build
from helpers.wide_norms import widen_norms
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import furlong
from furlong.errors import ConfigError, DataError, ElsewhereError, FurlongError
from furlong.models.placeholders import hold, placeholders
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import take_grads, worst_relative_error

BOUND = 1e-12
OPTIONS = furlong.ChunkOptions(size=8)
NUM_STEPS = 3


def batch_of(replica: int, step: int) -> dict[str, Tensor]:
    """Two padded rows that share nine tokens; replicas have unlike lengths."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    num_tokens = 17 + 6 * replica
    ids = torch.randint(3, 96, (2, num_tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 13:] = 0
    ids[1, :9] = ids[0, :9]
    return {"input_ids": ids, "attention_mask": mask}


def log_probs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The log-probabilities of rows' tokens, 0 at padding: (B, T - 1)."""
    logits = model(**batch, use_cache=False).logits[:, :-1].log_softmax(-1)
    found = logits.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return found * batch["attention_mask"][:, 1:]


def dpo(model: Any, reference: Any, batch: dict[str, Tensor]) -> Tensor:
    """The first row is chosen, the second one rejected."""
    with torch.no_grad():
        before = log_probs(reference, batch).sum(-1)
    chosen, rejected = log_probs(model, batch).sum(-1) - before
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))


def grpo(model: Any, reference: Any, batch: dict[str, Tensor]) -> Tensor:
    """A clipped ratio, times advantages of the group, over two calls under one loss."""
    rewards = batch["input_ids"].double().mean(-1)
    advantages = ((rewards - rewards.mean()) / rewards.std())[:, None]
    with torch.no_grad():
        old = log_probs(reference, batch)
    terms = []
    for row in range(2):
        own = {name: x[row : row + 1] for name, x in batch.items()}
        ratio = (log_probs(model, own) - old[row : row + 1]).exp()
        bounded = ratio.clamp(0.8, 1.2)
        terms.append(torch.minimum(ratio * advantages[row], bounded * advantages[row]).sum())
    return -sum(terms) / batch["attention_mask"].sum()  # type: ignore[return-value]


LOSSES = {"dpo": dpo, "grpo": grpo}
MODELS: dict[str, Any] = {"llama": llama, "tied": tied_llama, "adapted": adapted_llama}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def trained(model: Any, reference: Any, loss: Any, replicas: list[int]) -> dict[str, Tensor]:
    """The weights after some steps on the batches of `replicas`, whose losses are summed."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    for step in range(NUM_STEPS):
        for replica in replicas:
            LOSSES[loss](model, reference, batch_of(replica, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: whole(p.detach()).clone() for n, p in model.named_parameters() if p.requires_grad}


def apart(sizes: tuple[int, ...], kind: str, loss: str) -> float:
    """The distance of weights from those of one process, without furlong. `sizes`: dp, sp, pp and,
    if not 1, the number of copies of the weights."""
    torch.manual_seed(0)
    truth = trained(MODELS[kind](), MODELS[kind](), loss, list(range(sizes[0])))
    torch.manual_seed(0)
    ranks = make_ranks(*sizes[:3], "cpu", *sizes[3:])
    model, reference = (furlong.chunked(MODELS[kind](), OPTIONS, ranks=ranks) for _ in range(2))
    found = trained(model, reference, loss, [ranks.replica])
    if sizes[2] > 1:
        found = {n: x for n, x in found.items() if is_own(n, ranks, model)}
    return worst_relative_error(found, {name: truth[name] for name in found})


def is_own(name: str, ranks: Any, model: Any) -> bool:
    """Whether a process's stage of two trains the weight: of three layers the first holds two."""
    tied = model.config.tie_word_embeddings
    first = "embed_tokens" in name or any(f"layers.{i}." in name for i in (0, 1))
    return (first != bool(ranks.stage)) or ("embed_tokens" in name and tied)


def several(rank: int, layouts: Any) -> dict[str, float]:
    return {f"{sizes} {kind} {loss}": apart(sizes, kind, loss) for sizes, kind, loss in layouts}


TWO = [
    ((2, 1, 1), "llama", "dpo"), ((2, 1, 1), "tied", "grpo"), ((2, 1, 1, 2), "tied", "dpo"),
    ((1, 2, 1), "llama", "grpo"),
    ((1, 2, 1), "adapted", "dpo"), ((1, 1, 2), "llama", "dpo"), ((1, 1, 2), "tied", "grpo"),
]  # fmt: skip
FOUR = [
    (sizes, kind, loss)
    for sizes in ((2, 2, 1), (2, 1, 2), (1, 2, 2))
    for kind, loss in (("llama", "grpo"), ("tied", "dpo"))
]


@pytest.mark.parametrize(
    "layouts",
    [TWO[:1], *(pytest.param(layouts, marks=pytest.mark.slow) for layouts in (TWO[1:], FOUR))],
    ids=["first", "two", "four"],
)
def test_loops_of_ones_own_end_in_the_weights_of_one_process(layouts: Any) -> None:
    num_ranks = math.prod(layouts[0][0][:3])
    for found in run_ranks(several, layouts, num_ranks=num_ranks, limit_s=180):
        assert {name: of for name, of in found.items() if of > BOUND} == {}


def gradients(model: Any, batch: dict[str, Tensor], loss_of: Any) -> dict[str, Tensor]:
    loss_of(model(**batch, use_cache=False)).backward()
    return {name: whole(x) for name, x in take_grads(model).items()}


def scoring() -> Any:
    """A reward model, whose head is no language model's."""
    config = build("llama").config
    config.num_labels = 1
    torch.manual_seed(0)
    return widen_norms(AutoModelForSequenceClassification.from_config(config).double().train())


def of_scores(output: Any) -> Tensor:
    return (output.logits[0] - output.logits[1]).sigmoid().log().sum()


def of_routers(output: Any) -> Tensor:
    """A sum over tokens and the squares of router logits, so that the sum over replicas is one."""
    routed = sum(own.double().pow(2).sum() for own in output.router_logits)
    return output.logits.logsumexp(-1).pow(2).sum() + routed


def heads(rank: int) -> None:
    """Heads and routers on two replicas and on a pool, also where an engine came first."""
    routed = {"output_router_logits": True}
    for sizes in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        ranks = make_ranks(*sizes, "cpu")
        every = [batch_of(replica, 0) for replica in range(sizes[0])]
        padded = [{**own, "input_ids": own["input_ids"] * own["attention_mask"]} for own in every]
        full = [{"input_ids": own["input_ids"]} | routed for own in every]
        for make, loss_of, batches in (
            (scoring, of_scores, padded),
            (lambda: widen_norms(build("mixtral")), of_routers, full),
        ):
            truth: dict[str, Tensor] = {}
            for batch in batches:
                for name, x in gradients(make(), batch, loss_of).items():
                    truth[name] = truth.get(name, 0) + x
            # of shared tokens gradients are summed before Mixtral's routers round them to float32
            model = furlong.chunked(make(), OPTIONS, ranks=ranks, share_prompts=False)
            found = gradients(model, batches[ranks.replica], loss_of)
            if ranks.pp > 1:
                found = {name: x for name, x in found.items() if is_own(name, ranks, model)}
                truth = {name: x for name, x in truth.items() if is_own(name, ranks, model)}
            assert found.keys() == truth.keys()
            assert worst_relative_error(found, truth) < BOUND


def calls_between(rank: int) -> None:
    """An engine of the same model, evaluation, generation, and errors in calls and losses."""
    ranks = make_ranks(2, 1, 1, "cpu")
    model, truth, batch = llama(), llama(), {"input_ids": batch_of(0, 0)["input_ids"]}
    with torch.no_grad():
        logits = truth(**batch).logits
        tokens = truth.generate(batch["input_ids"][:1], max_new_tokens=4, do_sample=False)
    engine = furlong.Engine(model, ranks=ranks)
    furlong.chunked(model, OPTIONS, ranks=ranks)
    square = lambda output: output.logits.pow(2).mean() / 2  # noqa: E731
    grads = gradients(truth, batch, lambda output: square(output) * 2)
    for _ in range(2):
        found = gradients(model, batch, square)
        assert worst_relative_error(found, grads) < BOUND
        with torch.no_grad():
            assert torch.equal(
                model.generate(batch["input_ids"][:1], max_new_tokens=4, do_sample=False), tokens
            )
            found_logits = model(**batch, use_cache=False).logits
            torch.testing.assert_close(found_logits, logits, rtol=1e-10, atol=1e-10)
        with pytest.raises(ConfigError, match="output_attentions"):
            model(**batch, use_cache=False, output_attentions=True)
        with pytest.raises(DataError if rank else ElsewhereError, match="below 0"):
            model(**batch | {"position_ids": torch.arange(-rank, 17 - rank)[None]}, use_cache=False)
        states = model.model(**batch, use_cache=False).last_hidden_state  # no head behind it
        states.pow(2).sum().backward()
        assert model.lm_head.weight.grad is None
        model.zero_grad()
    furlong.chunked(model, OPTIONS, ranks=ranks, reduction="mean")  # of two equal losses
    found = gradients(model, batch, lambda output: square(output) * 2)
    assert worst_relative_error(found, grads) < BOUND
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if not rank:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, state_dict=state)
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
            weights = truth.state_dict()
            assert all(torch.equal(x, weights[n]) for n, x in loaded.state_dict().items())
    ids = [{"input_ids": own, "labels": own} for own in batch["input_ids"]]
    engine.forward_backward(ids, OPTIONS)
    assert engine.clip_gradients(1.0) > 0


@pytest.mark.slow
def test_heads_routers_and_what_comes_between_calls() -> None:
    run_all(heads, calls_between, num_ranks=2, limit_s=120)


def moved(model: Any, batch: dict[str, Tensor]) -> bool:
    """Whether an optimizer that is made now trains the model's weights."""
    before = [whole(p.detach()).clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    log_probs(model, batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    return any(
        not torch.equal(whole(p), x) for p, x in zip(model.parameters(), before, strict=True)
    )


def generations(rank: int) -> None:
    """Weights are divided behind a generation, and one process alone cannot make it."""
    model = furlong.chunked(llama(), OPTIONS, ranks=make_ranks(2, 1, 1, "cpu"))
    batch, settings = batch_of(0, 0), {"max_new_tokens": 2, "do_sample": False}
    with pytest.raises(ConfigError, match="process 0 in a call without chunks; process 1 in a"):
        if rank == 0:
            model.generate(batch["input_ids"], **settings)
        dpo(model, model, batch).backward()
    tokens = model.generate(batch["input_ids"], **settings)
    assert torch.equal(tokens, llama().generate(batch["input_ids"], **settings))
    with torch.no_grad():  # replicas that end at unlike lengths
        own = batch_of(rank, 0)["input_ids"][:, : 9 + rank]
        settings["max_new_tokens"] += rank
        tokens = model.generate(own, **settings, synced_gpus=True)
        assert torch.equal(tokens, llama().generate(own, **settings))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert moved(model, batch)


def pipelines(rank: int) -> None:
    """Behind a step of a pipeline only calls in chunks see the weights of all stages."""
    ranks = make_ranks(1, 1, 2, "cpu")
    model, truth, batch = (
        furlong.chunked(tied_llama(), OPTIONS, ranks=ranks),
        tied_llama(),
        batch_of(0, 0),
    )
    ids = batch["input_ids"]
    with torch.no_grad():
        logits = truth(ids).logits
        torch.testing.assert_close(model.eval()(ids).logits, logits, rtol=1e-10, atol=1e-10)
    engine = furlong.Engine(model, ranks=ranks)
    for own in (model, truth):
        optimizer = torch.optim.AdamW(own.train().parameters(), 1e-2)
        for _ in range(2):
            (50 * log_probs(own, batch).sum()).backward()
            if own is truth:
                norm = torch.nn.utils.clip_grad_norm_(own.parameters(), 0.5)
            else:
                found = engine.clip_gradients(0.5)
            optimizer.step()
            optimizer.zero_grad()
        if own is model:
            kept = optimizer
    assert found == pytest.approx(float(norm), rel=BOUND)
    # as docs/python.md saves it
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    trained = {n: state[n] for n, p in model.named_parameters() if p in kept.state}
    parts = [trained] * 2
    dist.all_gather_object(parts, trained)
    state |= parts[0] | parts[1]
    for name, x in truth.named_parameters():
        torch.testing.assert_close(state[name], x.detach(), rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        logits = truth.eval()(ids).logits
        torch.testing.assert_close(model.eval()(ids).logits, logits, rtol=1e-10, atol=1e-10)
    with pytest.raises(ConfigError, match="in a pipeline that has trained"):
        model.generate(ids, max_new_tokens=2)
    with pytest.raises(ConfigError, match="a Linear outside"), torch.no_grad():
        model.lm_head(torch.zeros(1, 32, dtype=torch.float64))
    with pytest.raises(ConfigError, match="with 2 pipeline stages"):
        furlong.chunked(model, OPTIONS, ranks=ranks, reduction="mean")
    with pytest.raises(ConfigError, match="2 processes train"):
        furlong.unchunked(model)


@pytest.mark.parametrize("calls", [generations, pipelines])
def test_calls_without_gradients_leave_weights_that_train(calls: Any) -> None:
    run_ranks(calls, num_ranks=2)


def refusals(rank: int) -> None:
    model = llama()
    hold(model, placeholders(model, range(2) if rank == 0 else range(2, 3)))
    with pytest.raises(ConfigError if not rank else FurlongError, match="LlamaForCausalLM with la"):
        furlong.chunked(model, OPTIONS, ranks=make_ranks(1, 1, 2, "cpu"))
    ranks = make_ranks(1, 2, 1, "cpu")
    with pytest.raises(ConfigError, match="reduction='avg'"):
        furlong.chunked(llama(), OPTIONS, ranks=ranks, reduction="avg")
    with pytest.raises(ConfigError, match="ranks and a process_group"):
        furlong.chunked(llama(), OPTIONS, ranks=ranks, process_group=ranks.group)
    model = furlong.chunked(llama(), OPTIONS, ranks=ranks)
    with pytest.raises(ConfigError, match="divided among"):
        furlong.chunked(model, furlong.ChunkOptions(size=4), ranks=make_ranks(2, 1, 1, "cpu"))
    labels = {"labels": batch_of(0, 0)["input_ids"], "attention_mask": torch.ones(2, 17)}
    if rank == 0:
        labels["attention_mask"][1, 13:] = 0
    with torch.no_grad(), pytest.raises(ElsewhereError if rank else DataError, match="padding"):
        model(batch_of(0, 0)["input_ids"], **labels)
    with pytest.raises(ConfigError, match="2 processes train"):
        furlong.unchunked(model)
    with pytest.raises(ConfigError, match="another loss on process 1"):
        (dpo(model, model, batch_of(0, 0)) * (1 + rank)).backward()
    with pytest.raises(ConfigError, match="of replica 0"):
        model(**batch_of(rank, 0), use_cache=False)
    assert not take_grads(model)
    with pytest.raises(ConfigError, match="a Linear outside"):
        model.forward(**batch_of(0, 0), use_cache=False)
    states = model.model(**batch_of(0, 0), use_cache=False).last_hidden_state
    with pytest.raises(ConfigError, match="outside the decoder, called by itself"):
        model.lm_head(states[:, -2:])
    assert not take_grads(model)
    dpo(model, model, batch_of(0, 0)).backward()  # as before
    assert model.lm_head.weight.grad is not None
    model.zero_grad()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="put into a model whose weights are divided"):
        adapted(**batch_of(0, 0), use_cache=False)


def test_what_processes_cannot_do_is_refused_on_all() -> None:
    run_ranks(refusals, num_ranks=2)
