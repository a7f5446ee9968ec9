"""Calls of the engine that return tensors with a graph: values of tokens, and hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from furlong.errors import ConfigError
from furlong.models.causal_lm import CausalLM
from furlong.ops.loss import tile_tokens
from furlong.ops.token_values import TiledValues
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import plan_on_device, plan_two_phases, require_two_phases
from furlong.runtime.checks.surroundings import Autocast
from furlong.runtime.followed_model import FollowedModel
from furlong.runtime.inputs import ShiftedSequence, check_ranges, no_data, require_options
from furlong.runtime.tokens.inputs import TokenInputs, token_inputs
from furlong.runtime.tokens.joined import Joined, join_prompts
from furlong.runtime.tokens.keep import decided
from furlong.runtime.tokens.outputs import HiddenStates, Outputs, TokenValues
from furlong.runtime.tokens.two_phases import Gradients, TwoPhases, differentiable
from furlong.values import TokenFunction, require_function


def token_values(
    followed: FollowedModel,
    sequences: object,
    options: ChunkOptions,
    fn: TokenFunction,
    gradients: Gradients,
    *,
    share_prompts: bool = True,
    watch: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """See `Engine.token_values`."""
    require_one_device(followed, "token_values")
    require_function(fn, "fn")
    batch = token_inputs(sequences)
    make = partial(_values_of, followed, batch, fn)
    return outputs(
        followed, batch.sequences, options, make, gradients, share_prompts=share_prompts,
        watch=watch,
    )  # fmt: skip


def hidden_states(
    followed: FollowedModel,
    sequences: Sequence[ShiftedSequence],
    options: ChunkOptions,
    gradients: Gradients = "returned",
    *,
    notes: bool = True,
    share_prompts: bool = True,
) -> list[Tensor]:
    """See `Engine.hidden_states`. `notes`: warn of what of the model does not run."""
    require_one_device(followed, "hidden_states")
    if not sequences:
        raise no_data("no sequences", "at least one sequence", "leave the call out")
    lens = [len(sequence.input_ids) for sequence in sequences]

    def make(_: Autocast, joined: Joined) -> Outputs:
        return HiddenStates(lens, joined)

    return outputs(
        followed, sequences, options, make, gradients, notes=notes, share_prompts=share_prompts
    )


def outputs(
    followed: FollowedModel,
    sequences: Sequence[ShiftedSequence],
    options: ChunkOptions,
    make: Callable[[Autocast, Joined], Outputs],
    gradients: Gradients,
    *,
    notes: bool = True,
    share_prompts: bool = True,
    watch: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    """The outputs of each sequence: what `make` makes of its final hidden states."""
    require_options(options)
    require_two_phases(options)
    if gradients not in get_args(Gradients):
        raise ConfigError(
            given=f"gradients {gradients!r:.60}", required="returned or added",
            source="the arguments of the engine",
            change="added adds to .grad without a second copy; returned is what autograd expects",
        )  # fmt: skip
    autocast = Autocast.captured(followed.given)
    with followed.alone(takes_autocast=True):
        followed.follow(notes=notes)
        model = followed.model
        check_ranges(
            sequences, num_input_ids=model.num_input_ids, vocab_size=model.vocab_size,
            longest_tokens=model.longest_tokens,
        )  # fmt: skip
        shares = share_prompts and may_share(model)
        joined = join_prompts(sequences, options.size) if shares else Joined(sequences)
        lens = [len(sequence.input_ids) for sequence in joined.sequences]
        trains = any(parameter.requires_grad for parameter in model.model.parameters())
        differs = torch.is_grad_enabled() and trains
        if differs:
            options = decided(followed, options, lens, autocast)
        elif options.keep == "auto":
            options = replace(options, keep="kv")  # no matter: nothing comes after the forwards
        plan = (
            plan_two_phases(lens, options, num_layers=model.num_layers, forks=joined.forks)
            if differs
            else plan_on_device(
                lens, options, num_layers=model.num_layers, forks=joined.forks, backward=False
            )
        )
        made = make(autocast, joined)
        run = TwoPhases(followed, plan, joined, made, gradients, autocast, watch)
        return differentiable(run) if differs else run.first()


def may_share(model: CausalLM) -> bool:
    """Whether several answers may go on from one prompt: a state leaves it for one alone."""
    return model.events is None


def require_one_device(followed: FollowedModel, name: str) -> None:
    """Raise ConfigError for an engine of several processes."""
    if followed.ranks is not None:
        raise ConfigError(
            given=f"{name} of an engine with ranks of {followed.ranks.num_processes} processes",
            required="an engine of one process on one device",
            source="the ranks or process_group of furlong.Engine",
            change="make an engine without ranks, or use forward_backward with its own loss",
        )


def _values_of(
    followed: FollowedModel,
    batch: TokenInputs,
    fn: TokenFunction,
    autocast: Autocast,
    joined: Joined,
) -> TokenValues:
    model = followed.model
    most = tile_tokens(model.vocab_size, model.device)
    tiled = TiledValues(model.logits, fn, most, autocast)
    return TokenValues(replace(batch, joined=joined), tiled, model.device)
