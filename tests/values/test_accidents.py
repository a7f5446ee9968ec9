"""What may happen between a forward and a backward: right or refused by name, and nothing leaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import peft
import pytest
import torch
from helpers.batches import batch
from helpers.tiny_families import build
from naive_losses import whole_values
from torch import Tensor

import furlong
from furlong.errors import ConfigError, UserError
from furlong.kv.pools import Storage
from furlong.testing import take_grads, worst_relative_error

OPTIONS = furlong.ChunkOptions(size=8, keep="attention")
SEQUENCES = batch([29, 4, 13], masked=[range(18)])


@dataclass
class Subject:
    """A model, its engine, and the gradients of the loss below by the model's own forward."""

    model: Any
    engine: furlong.Engine = field(init=False)
    truth: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.engine = furlong.Engine(self.model)
        loss_of(self.whole()).backward()
        self.truth = take_grads(self.model)

    def whole(self) -> list[Tensor]:
        return whole_values(self.model, SEQUENCES)

    def values(self, **changes: Any) -> list[Tensor]:
        options = furlong.ChunkOptions(**{"size": 8, "keep": "attention", **changes})
        return self.engine.token_values(SEQUENCES, options)

    def error(self, times: float = 1.0) -> float:
        """The gradients' largest relative error from so many times the truth."""
        found = take_grads(self.model)
        return worst_relative_error(found, {n: times * x for n, x in self.truth.items()})

    @property
    def taken_bytes(self) -> int:
        return self.engine._session.state.opened.arena.taken_bytes


def loss_of(values: list[Tensor]) -> Tensor:
    """A loss that couples the sequences."""
    return torch.stack([own.pow(2).sum() for own in values]).softmax(0)[0] * 50 + values[2].sum()


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(build("llama"))


def plain(s: Subject) -> None:
    loss_of(s.values()).backward()
    assert s.error() <= 1e-12


def backward_twice(s: Subject) -> None:
    loss = loss_of(s.values())
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert s.error() <= 1e-12


def backward_of_a_retained_graph(s: Subject) -> None:
    loss = loss_of(s.values())
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="a second backward through the same values"):
        loss.backward()
    assert s.error() <= 1e-12


def autograd_grad(s: Subject) -> None:
    names, parameters = zip(*s.model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss_of(s.values()), parameters)
    assert worst_relative_error(dict(zip(names, grads, strict=True)), s.truth) <= 1e-12
    one = torch.autograd.grad(loss_of(s.values()), parameters[3])
    torch.testing.assert_close(one[0], s.truth[names[3]], rtol=1e-10, atol=1e-13)
    assert all(p.grad is None for p in parameters)


def without_gradients(s: Subject) -> None:
    with torch.no_grad():
        values = s.values()
    assert not any(own.requires_grad for own in values)
    torch.testing.assert_close(loss_of(values), loss_of(s.whole()).detach(), rtol=1e-12, atol=0)
    assert s.taken_bytes == 0  # while they are held


def frozen(s: Subject) -> None:
    s.model.requires_grad_(False)
    try:
        assert not any(own.requires_grad for own in s.values())
    finally:
        s.model.requires_grad_(True)


def one_sequence_used(s: Subject) -> None:
    s.whole()[1].pow(2).sum().backward()
    truth = take_grads(s.model)
    ran: list[Any] = []
    for keep in ("kv", "attention", "input"):
        ran.clear()
        hook = s.model.model.layers[0].register_forward_pre_hook(lambda *x: ran.append(x))
        values = s.values(keep=keep, hybrid=False)
        num_forwards = len(ran)
        values[1].pow(2).sum().backward()
        hook.remove()
        assert worst_relative_error(take_grads(s.model), truth) <= 1e-12
        del values
        assert len(ran) - num_forwards < num_forwards, "chunks of other sequences ran too"
        assert s.taken_bytes == 0


def values_dropped(s: Subject) -> None:
    values = s.values()
    assert s.taken_bytes > 0
    del values


def a_hook_fails_before_us(s: Subject) -> None:
    def fail(grad: Tensor) -> None:
        raise ArithmeticError("a hook")

    values = s.values()
    values[0].register_hook(fail)
    with pytest.raises(ArithmeticError, match="a hook"):
        loss_of(values).backward()


def error_in_mid_backward(s: Subject) -> None:
    plain_grad = s.model.lm_head.weight.grad = torch.ones_like(s.model.lm_head.weight)
    values = s.values()
    calls: list[None] = []

    def fail(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 3:
            raise ArithmeticError("in a recompute")

    hook = s.model.model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(ArithmeticError, match="in a recompute"):
            loss_of(values).backward()
    finally:
        hook.remove()
    assert s.model.lm_head.weight.grad is plain_grad and bool((plain_grad == 1).all())
    assert all(p.grad is None for n, p in s.model.named_parameters() if n != "lm_head.weight")
    s.model.zero_grad()
    assert s.taken_bytes == 0


def error_in_the_forward(s: Subject) -> None:
    def fail(logits: Tensor, labels: Tensor, extras: Any) -> Tensor:
        raise ArithmeticError("in fn")

    with pytest.raises(ArithmeticError, match="in fn"):
        s.engine.token_values(SEQUENCES, OPTIONS, fail)


def weight_changed_in_place(s: Subject) -> None:
    loss = loss_of(s.values())
    with torch.no_grad():
        s.model.lm_head.weight.mul_(1)
    with pytest.raises(ConfigError, match="weights"):
        loss.backward()


def data_swapped(s: Subject, name: str = "model.layers.1.mlp.up_proj.weight") -> None:
    loss = loss_of(s.values())
    weight = s.model.get_parameter(name)
    before = weight.data
    weight.data = before * 1.1
    try:
        with pytest.raises(ConfigError, match=r"moved by .* between forward and backward"):
            loss.backward()
    finally:
        weight.data = before
    assert all(p.grad is None for p in s.model.parameters())


def parameter_replaced(s: Subject) -> None:
    loss = loss_of(s.values())
    before = s.model.lm_head.weight
    s.model.lm_head.weight = torch.nn.Parameter(before.detach().clone())
    try:
        with pytest.raises(ConfigError, match="parameters are others than in the forward"):
            loss.backward()
    finally:
        s.model.lm_head.weight = before


def several_calls(s: Subject) -> None:
    first, second = loss_of(s.values(size=5)), loss_of(s.values(keep="input"))
    second.backward()
    first.backward()
    (loss_of(s.values()) + loss_of(s.values(keep="kv"))).backward()
    assert s.error(4) <= 1e-12


def other_calls_between(s: Subject) -> None:
    """Also one that fails: it gives back its own alone."""
    loss = loss_of(s.values(offload={"attention": "cpu"}))
    s.engine.forward_backward(SEQUENCES, OPTIONS, backward=False)
    error_in_the_forward(s)
    s.engine.forward_backward(SEQUENCES, OPTIONS)
    s.model.zero_grad()
    loss.backward()
    assert s.error() <= 1e-12


def a_scaler(s: Subject) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(s.values())).backward()
    assert s.error(8) <= 1e-12


def hooks_on_parameters(s: Subject) -> None:
    """Each sees the whole gradient, once."""
    weight, seen = s.model.lm_head.weight, []
    hooks = [
        weight.register_hook(lambda grad: seen.append(grad.clone())),
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())),
    ]
    try:
        loss_of(s.values()).backward()
    finally:
        for hook in hooks:
            hook.remove()
    assert len(seen) == 2
    for grad in seen:
        torch.testing.assert_close(grad, s.truth["lm_head.weight"], rtol=1e-10, atol=1e-13)
    assert s.error() <= 1e-12


def evaluation_mode_between(s: Subject) -> None:
    loss = loss_of(s.values())
    s.model.eval()
    loss.backward()
    assert not s.model.training and s.error() <= 1e-12
    s.model.train()


def a_call_inside_another(s: Subject) -> None:
    def nested(logits: Tensor, labels: Tensor, extras: Any) -> Tensor:
        return s.values()[0]

    with pytest.raises(ConfigError, match="one call at a time"):
        s.engine.token_values(SEQUENCES, OPTIONS, nested)


ACCIDENTS: list[Callable[[Subject], None]] = [
    plain, backward_twice, backward_of_a_retained_graph, autograd_grad, without_gradients, frozen,
    one_sequence_used, values_dropped, a_hook_fails_before_us, error_in_mid_backward,
    error_in_the_forward, weight_changed_in_place, data_swapped, parameter_replaced, several_calls,
    other_calls_between, a_scaler, hooks_on_parameters, evaluation_mode_between,
    a_call_inside_another,
]  # fmt: skip


@pytest.mark.parametrize("accident", ACCIDENTS, ids=lambda accident: accident.__name__)
@pytest.mark.few(8)
def test_accidents_leave_nothing_behind(subject: Subject, accident: Any) -> None:
    own = dict(subject.model.named_parameters())
    accident(subject)
    assert subject.taken_bytes == 0
    assert subject.engine._session.state.thread is None
    assert all(p is own[n] for n, p in subject.model.named_parameters())
    subject.model.zero_grad()
    assert subject.model.config._attn_implementation == "sdpa"


@pytest.fixture(scope="module")
def adapted() -> Subject:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear")
    model = peft.get_peft_model(build("llama"), config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.eval()
    subject = Subject(model)
    model.train()
    return subject


def test_adapters_and_their_absence(adapted: Subject) -> None:
    adapted.model.eval()
    loss_of(adapted.values()).backward()
    assert adapted.error() <= 1e-12
    with torch.no_grad(), adapted.model.disable_adapter():
        values, whole = adapted.values(), adapted.whole()
    torch.testing.assert_close(values, whole, rtol=1e-12, atol=1e-12)
    adapted.model.train()


@pytest.mark.filterwarnings("ignore:.*dropout")
def test_dropout_is_drawn_once_for_both_phases(adapted: Subject) -> None:
    """Any keep meets the same masks again, whatever the caller draws in between."""
    adapted.model.train()
    grads = []
    for keep in ("kv", "attention", "input"):
        torch.manual_seed(5)
        loss = loss_of(adapted.values(keep=keep))
        torch.manual_seed(77)
        expected = torch.rand(3)
        torch.manual_seed(77)
        loss.backward()
        assert torch.equal(torch.rand(3), expected)
        grads.append(take_grads(adapted.model))
    assert worst_relative_error(grads[0], grads[1]) <= 1e-12
    assert worst_relative_error(grads[2], grads[1]) <= 1e-12


def test_autocast_is_met_again_by_a_backward_outside_of_it() -> None:
    """The error of bfloat16 against float32 is at most 1.1 times that of the model itself."""
    subject = Subject(build("llama", torch.float32))
    errors = []
    for find in (subject.whole, subject.values):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            values = find()
        loss_of([own.float() for own in values]).backward()
        found = take_grads(subject.model)
        parts = [(found[n] - x).norm() ** 2 for n, x in subject.truth.items()]
        errors.append(float(torch.stack(parts).sum().sqrt()))
    assert 0 < errors[1] <= 1.1 * errors[0]
    assert subject.taken_bytes == 0


def test_an_adapter_added_in_between_is_refused() -> None:
    subject = Subject(build("llama"))
    loss = loss_of(subject.values())
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), subject.model)
    with pytest.raises(UserError, match="parameters are others"):
        loss.backward()
    assert subject.taken_bytes == 0


@pytest.mark.parametrize("target", ["cpu", pytest.param("disk", marks=pytest.mark.slow)])
def test_a_budget_is_that_of_all_calls_that_live(target: Any) -> None:
    engine = furlong.Engine(build("llama"))
    options = furlong.ChunkOptions(size=8, keep="attention", offload=target, num_retained=0)
    needed = engine.forward_backward(SEQUENCES, options)
    budget = int(2.5 * getattr(needed, f"{target}_bytes"))
    engine = furlong.Engine(
        engine.model.model, storage=Storage(cpu_bytes=budget, disk_bytes=budget)
    )
    values = [engine.token_values(SEQUENCES, options)]
    for call in (engine.token_values, engine.forward_backward):
        with pytest.raises(ConfigError, match=rf"memory\.{target}"):
            call(SEQUENCES, options)
    loss_of(values.pop()).backward()
    values.append(engine.token_values(SEQUENCES, options))
    values.clear()
    assert engine.forward_backward(SEQUENCES, options).loss > 0
