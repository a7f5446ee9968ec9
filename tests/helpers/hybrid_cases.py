"""Cases of families with recurrent layers, against float64 twins of their modeling files."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import furlong
from furlong.planners.spaco import EXACT, Factors, sample_backwards
from furlong.testing import reference_loss, take_grads, worst_relative_error
from helpers.batches import batch
from helpers.hybrids import VOCAB_SIZE, build

LENS, SHORT_LENS = [70, 33, 9, 5], [17, 6, 2]
"""The second ones are for chunks of a single token."""


@dataclass(frozen=True)
class Case:
    """One value of each dial; a dial that is not given has its plainest value."""

    family: str
    size: int
    keep: str = "kv"
    num_retained: int = 0
    hybrid: bool = True
    """Whether the tail of a cut sequence shares its chunk with whole ones."""
    stage_layers: int = 0
    """Layers of each stage of the layer-first order; 0: chunk-first."""
    recompute_layers: int = 0
    tier: str = "device"
    kind: str = "gradients"
    """gradients of a loss; lora: of adapters on all linear layers; hidden states: of a loss that
    the caller makes of them; sampled: the mean over every draw of the chunks of one sequence."""

    @property
    def lens(self) -> list[int]:
        return LENS if self.size > 1 else SHORT_LENS

    @property
    def options(self) -> furlong.ChunkOptions:
        return furlong.ChunkOptions(
            size=self.size, num_retained=self.num_retained, keep=self.keep, hybrid=self.hybrid,
            order="layer-first" if self.stage_layers else "chunk-first",
            stage_layers=self.stage_layers or None, recompute_layers=self.recompute_layers,
            tier=self.tier,
        )  # fmt: skip


def measured(case: Case, known: dict[str, Any]) -> tuple[float, float]:
    """The relative error of the loss, and the largest one of any parameter's gradient; `known`
    holds the last model and its truth, which the next case may share."""
    key = f"{case.family} {case.kind} {case.lens}"
    if key not in known:
        known.clear()
        model = build(case.family, twin=True)
        model = with_adapters(model) if case.kind == "lora" else model
        lens = [5 * case.size - 1, case.size] if case.kind == "sampled" else case.lens
        sequences = batch(lens, vocab_size=VOCAB_SIZE, masked=[range(3)])
        loss = of_hidden(case, model, sequences, reference=True)
        known[key] = model, sequences, loss, take_grads(model)
    model, sequences, loss, truth = known[key]
    if case.kind == "sampled":
        given, grads = loss, mean_of_draws(case, model, sequences)
    else:
        given = of_hidden(case, model, sequences, reference=False)
        grads = take_grads(model)
    return abs(given - loss) / abs(loss), worst_relative_error(grads, truth)


def of_hidden(case: Case, model: Any, sequences: Any, *, reference: bool) -> float:
    """The loss of a batch, with its gradients in the model."""
    if case.kind != "hidden states":
        if reference:
            return reference_loss(model, sequences)
        return furlong.forward_backward(model, sequences, case.options).loss
    if reference:
        decoder = model.get_decoder()
        ids = [sequence["input_ids"][None] for sequence in sequences]
        hidden = [decoder(input_ids=i, use_cache=False).last_hidden_state[0] for i in ids]
    else:
        hidden = furlong.Engine(model).hidden_states(sequences, case.options)
    loss = sum((h * torch.linspace(-1, 1, h.numel()).view_as(h)).sum() for h in hidden)
    loss.backward()
    return float(loss)


def with_adapters(model: Any) -> Any:
    """The model with LoRA on all linear layers, none of which is zero."""
    layers = model.get_decoder().layers
    linear = {name.rpartition(".")[2] for name, m in layers.named_modules() if type(m) is nn.Linear}
    linear = {name for name in linear if not name.isdigit()}  # others have that name, too
    if model.config.model_type in ("mamba2", "nemotron_h"):
        linear.discard("out_proj")  # which peft refuses there
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=sorted(linear))).double()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return adapted


def mean_of_draws(case: Case, model: Any, sequences: Any) -> dict[str, Any]:
    """The mean gradient over all draws of the five chunks of the first sequence, each with 1/2."""
    engine = furlong.Engine(model)
    whole = engine.plan([len(s["input_ids"]) for s in sequences], case.options)
    assert len(whole.chunks) == 6
    mean: dict[str, Any] = {}
    for draw in itertools.product((False, True), repeat=5):
        drawn = dict.fromkeys(itertools.compress(range(5), draw), Factors(2, 2))
        engine.run(sample_backwards(whole, drawn | {5: EXACT}, report_loss=False), sequences)
        for name, grad in take_grads(model).items():
            mean[name] = mean.get(name, 0) + grad / 2**5
    return mean
