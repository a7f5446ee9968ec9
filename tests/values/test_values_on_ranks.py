"""Values of tokens, and hidden states, on replicas, a pool and a pipeline."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.sharded_cases import adapted_llama, llama, tied_llama
from helpers.ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

import furlong
from furlong.errors import ConfigError, DataError, ElsewhereError, LinkError
from furlong.runtime.distributed.mesh import make_ranks
from furlong.testing import take_grads, worst_relative_error

BOUND = 1e-12
LENS = (21, 9, 3)  # of a pool with chunks of 8, the last one leaves a process without a token
OPTIONS = furlong.ChunkOptions(size=8)
BOTH = furlong.values.stack(furlong.values.log_prob(), furlong.values.entropy())
TWO = [(2, 1, 1), (1, 2, 1), (1, 1, 2)]


def sequences_of(seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, 96, (n,), generator=generator) for n in LENS]
    return [
        {
            "input_ids": x, "labels": x.masked_fill(x % 5 == 0, -100),
            "old": torch.randn(len(x), generator=generator, dtype=torch.float64),
        }
        for x in ids
    ]  # fmt: skip


def loss_of(values: list[Tensor]) -> Tensor:
    """No sum over tokens or sequences; the last sequence has no gradient."""
    first, second, _ = (own.sum(0) for own in values)
    return (first * second).sum() / 100 + values[0].pow(2).mean()


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def errors(sizes: tuple[int, int, int], build: Any, gradients: Any, fn: Any) -> list[float]:
    """The errors of values and gradients against one process."""
    every = [sequences_of(replica) for replica in range(sizes[0])]
    model = build()

    def values_of(engine: furlong.Engine, sequences: Any, **more: Any) -> list[Tensor]:
        if fn is None:
            plain = [{"input_ids": s["input_ids"]} for s in sequences]
            return engine.hidden_states(plain, OPTIONS, **more)
        return engine.token_values(sequences, OPTIONS, fn, **more)

    alone = furlong.Engine(model)
    truth = [values_of(alone, sequences) for sequences in every]
    sum(map(loss_of, truth)).backward()  # type: ignore[union-attr]
    grads = take_grads(model)
    engine = furlong.Engine(model, ranks=make_ranks(*sizes, "cpu"))
    own = engine.ranks.replica  # type: ignore[union-attr]
    values = values_of(engine, every[own], gradients=gradients)
    apart = max(
        float((a - b).detach().abs().max()) for a, b in zip(values, truth[own], strict=True)
    )
    loss_of(values).backward()
    found = {name: whole(x) for name, x in take_grads(model).items()}
    if sizes[2] > 1:  # FSDP2 gives zeros to what another stage trains
        found = {name: x for name, x in found.items() if bool(x.any())}
    names: list[Any] = [None] * math.prod(sizes)
    dist.all_gather_object(names, set(found))
    assert set().union(*names) == grads.keys()
    with torch.no_grad():
        again = values_of(engine, every[own])
    assert not again[0].requires_grad and torch.equal(again[0], values[0])
    return [apart, worst_relative_error(found, {name: grads[name] for name in found})]


def two_processes(rank: int) -> dict[str, list[float]]:
    found = {}
    for sizes in TWO:
        if sizes != (1, 2, 1):
            found[f"{sizes} values"] = errors(sizes, llama, "returned", BOTH)
        if sizes != (2, 1, 1):
            found[f"{sizes} states"] = errors(sizes, tied_llama, "added", None)
    found["adapters"] = errors((1, 1, 2), adapted_llama, "returned", of_old)
    return found


def of_old(logits: Tensor, labels: Tensor, extras: Any) -> Tensor:
    return (furlong.values.log_prob()(logits, labels, extras) - extras["old"]).exp()


def four_processes(rank: int) -> dict[str, list[float]]:
    sizes = [(2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)]
    return {str(own): errors(own, tied_llama, "returned", BOTH) for own in sizes}


@pytest.mark.parametrize(
    "cases",
    [two_processes, pytest.param(four_processes, marks=pytest.mark.slow)],
)
def test_values_and_their_gradients_are_those_of_one_process(cases: Any) -> None:
    for found in run_ranks(cases, num_ranks=2 if cases is two_processes else 4):
        assert {name: of for name, of in found.items() if max(of) > BOUND} == {}


def without_labels(rank: int) -> None:
    """A replica whose answers are all empty goes on; where none has a label all are told."""
    model = llama()
    engine = furlong.Engine(model, ranks=make_ranks(2, 1, 1, "cpu"))
    every = [sequences_of(0), [{**s, "labels": s["labels"] * 0 - 100} for s in sequences_of(1)]]
    loss_of(furlong.Engine(truth := llama()).token_values(every[0], OPTIONS, BOTH)).backward()
    values = engine.token_values(every[rank], OPTIONS, BOTH)
    (sum(own.sum() for own in values) if rank else loss_of(values)).backward()
    found = {name: whole(x) for name, x in take_grads(model).items()}
    assert worst_relative_error(found, take_grads(truth)) < BOUND
    with pytest.raises(DataError, match="no token with a label"):
        engine.token_values(every[1], OPTIONS, BOTH)


def refusals(rank: int) -> None:
    without_labels(rank)
    model = llama()
    engine = furlong.Engine(model, ranks=make_ranks(1, 2, 1, "cpu"))
    sequences = sequences_of(0)

    def values() -> list[Tensor]:
        return engine.token_values(sequences, OPTIONS, BOTH)

    with pytest.raises(ConfigError, match="another loss on process 1"):
        (loss_of(values()) * (1 + rank)).backward()
    with pytest.raises(ConfigError, match="another loss on process 1"):
        (loss_of(values()) * (1 if rank else math.nan)).backward()
    with torch.set_grad_enabled(rank == 0), pytest.raises(ConfigError, match="no_grad on process"):
        values()
    bad: Any = [{"input_ids": "text"}] if rank else sequences
    with pytest.raises(DataError if rank else ElsewhereError, match="input_ids of type str"):
        engine.token_values(bad, OPTIONS)
    with pytest.raises(ConfigError, match=r"chunks\.keep = 'all'"):
        engine.token_values(sequences, furlong.ChunkOptions(keep="all"))
    assert not take_grads(model)
    loss = loss_of(values())
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="a second backward"):
        loss.backward()
    model = llama()
    mlp = model.model.layers[0].mlp
    mlp.act_fn = torch.nn.Sequential(mlp.act_fn, torch.nn.Dropout(0.5))
    engine = furlong.Engine(model.train(), ranks=make_ranks(1, 2, 1, "cpu"))
    with pytest.raises(ConfigError, match="draws random numbers"):
        values()


def test_what_several_processes_cannot_do_is_refused_on_all() -> None:
    run_ranks(refusals, num_ranks=2)


class Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> None:
        return None


def edges(rank: int) -> None:
    """An engine may be closed between forward and backward, and a loss may have no gradient."""
    model = llama()
    engine = furlong.Engine(model, ranks=make_ranks(1, 1, 2, "cpu"))

    def values() -> list[Tensor]:
        return engine.token_values(sequences_of(0), OPTIONS, BOTH)

    loss_of(values()).backward()
    truth = take_grads(model)
    loss = loss_of(values())
    engine.close()
    loss.backward()
    assert worst_relative_error(take_grads(model), truth) == 0
    Constant.apply(values()[0]).backward()
    assert not any(grad.any() for grad in take_grads(model).values())


def goes_on(rank: int) -> None:
    """A process catches an error of its own loss and goes on, to another call than the others."""
    model = llama()
    engine = furlong.Engine(model, ranks=make_ranks(1, 2, 1, "cpu"))
    sequences = sequences_of(0)
    plain = [{"input_ids": s["input_ids"]} for s in sequences]
    plan = engine.plan(list(LENS), OPTIONS)
    calls: list[tuple[str, Any]] = [
        ("a call of token_values", lambda: engine.token_values(sequences, OPTIONS, BOTH)),
        ("a call of hidden_states", lambda: engine.hidden_states(plain, OPTIONS)),
        ("a call of run", lambda: engine.run(plan, plain)),
        ("a call of forward_backward", lambda: engine.forward_backward(plain, OPTIONS)),
        ("a call of clip_gradients", lambda: engine.clip_gradients(1.0)),
    ]
    for number, (place, call) in enumerate(calls, 1):
        loss = loss_of(engine.token_values(sequences, OPTIONS, BOTH))
        with pytest.raises(ConfigError, match=f"of call {number} of token_v.*process 1 in {place}"):
            call() if rank else loss.backward()
    assert not take_grads(model)
    first, second = (loss_of(engine.token_values(sequences, OPTIONS, BOTH)) for _ in range(2))
    with pytest.raises(ConfigError, match=r"call 6 of token_values; process 1 in the .* call 7"):
        (second if rank else first).backward(retain_graph=True)
    first.backward()
    grads = take_grads(model)
    second.backward()
    assert worst_relative_error(take_grads(model), grads) < BOUND  # nothing was left behind
    loss = loss_of(engine.token_values(sequences, OPTIONS, BOTH))
    if rank:  # stays without a backward
        dist.destroy_process_group()
        return
    with pytest.raises(LinkError, match=r"backward of call 8 .*\nrequired: .*\nfrom: .*\nchange: "):
        loss.backward()


def test_a_process_that_is_elsewhere_in_its_code_is_an_error_of_all() -> None:
    run_ranks(goes_on, num_ranks=2)


def changes(rank: int) -> None:
    """Weights that one process alone has changed between forward and backward."""
    for sizes, settings in [((1, 1, 2), None), ((2, 1, 1), {"foreach": True}),
                            ((1, 2, 1), {"fused": True})]:  # fmt: skip
        model = llama()
        engine = furlong.Engine(model, ranks=make_ranks(*sizes, "cpu"))
        sequences = sequences_of(0)
        loss = loss_of(engine.token_values(sequences, OPTIONS, BOTH))
        if settings is None:
            with torch.no_grad():
                model.lm_head.weight.mul_(1 + rank)
        elif rank:
            weight = model.model.layers[0].mlp.down_proj.weight
            weight.grad = torch.ones_like(weight)
            torch.optim.AdamW([weight], **settings).step()
            weight.grad = None
        with pytest.raises(ConfigError if rank else ElsewhereError, match="weights are others"):
            loss.backward()
        assert not take_grads(model)


def heads(rank: int) -> None:
    """The head has no gradient by hidden states; a call of the model itself may come between."""
    ids = sequences_of(0)[0]["input_ids"]
    for sizes in ((2, 1, 1), (1, 2, 1)):
        for gradients in ("returned", "added"):
            model = llama()
            engine = furlong.Engine(model, ranks=make_ranks(*sizes, "cpu"))
            states = engine.hidden_states([{"input_ids": ids}], OPTIONS, gradients=gradients)
            with torch.no_grad():
                model(ids[None])
            states[0].square().mean().backward()
            assert model.lm_head.weight.grad is None
            assert all(p.grad is not None for p in model.model.parameters())


def between_the_phases(rank: int) -> None:
    edges(rank)
    changes(rank)
    heads(rank)


def test_what_happens_between_forward_and_backward_is_right_or_an_error_of_all() -> None:
    run_ranks(between_the_phases, num_ranks=2)
