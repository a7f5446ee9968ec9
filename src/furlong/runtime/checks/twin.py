"""A tiny twin of a model: what the self-check can look at whole and to its end.

It has the model's class, config and number of layers, but few heads, small widths, short lengths
and random weights. So it runs the same code of the family with the same kinds of layers at the same
cuts, in a fraction of a second. It stands for a model of which a process holds one stage: every
process makes the same twin, and asks no other one. And it shows what a model does beyond lengths
that no check reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import accumulate
from typing import Any

import torch

from furlong.families import CHUNKED
from furlong.models.causal_lm import CausalLM
from furlong.models.folders.build import model_of_config
from furlong.models.folders.random_weights import draw_weights
from furlong.models.held import hold, stand_ins
from furlong.models.layer_cache import scales_by_position
from furlong.models.small.shrink import LONGEST_TOKENS, shrink_config

_SPREAD = 5
"""Attention matters more where weights are larger than transformers draws them."""


def tiny_twin(model: CausalLM) -> CausalLM:
    """The whole twin of a model, in float64 on the CPU, in the model's mode."""
    longest = model.max_seq_len
    config = shrink_config(model.config, max_seq_len=longest or 0, all_layers=True)
    base: Any = model_of_config(config, model.name, dtype=torch.float64)
    if getattr(config, "attn_logit_softcapping", None):
        base.set_attn_implementation("eager")  # SDPA has no softcap
    if hasattr(base, "set_experts_implementation"):
        base.set_experts_implementation("eager")  # the others know no float64
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        draw_weights(base, 0, torch.device("cpu"))
        for parameter in base.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(_SPREAD)
    base.train(model.base.training)
    return CausalLM(base, max_seq_len=longest and LONGEST_TOKENS)


def hides_lengths(model: CausalLM) -> bool:
    """Whether a model does something else beyond thousands of tokens, which a short check does not
    see: attention blocks, queries that grow with their position."""
    types = getattr(model.config, "layer_types", None) or ()
    return CHUNKED in types or any(scales_by_position(module) for module in model.attention_modules)


def held_by(twin: CausalLM, heights: Sequence[int]) -> list[CausalLM]:
    """For each stage what a process that holds nothing else has of a twin."""
    parts = []
    for height, stop in zip(heights, accumulate(heights), strict=True):
        base = deepcopy(twin.base)
        hold(base, stand_ins(base, range(stop - height, stop)))
        parts.append(CausalLM(base, max_seq_len=twin.max_seq_len))
    return parts
