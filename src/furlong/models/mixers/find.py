"""The search for layers that remember tokens in states, before chunks are computed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, get_args, get_origin

import torch
from torch import Tensor, nn

from furlong.errors import UnsupportedModelError, UserError
from furlong.models.entrance import enter
from furlong.models.held import Skip
from furlong.models.mixers.caches import SliceCache
from furlong.models.mixers.probe import NUM_TOKENS, Probed, cache_argument, watching
from furlong.models.mixers.relay import Inputs, Mixer, first, inputs_of
from furlong.models.support import refuse_mixerless
from furlong.ops.scarcity import is_of_machine


class SearchedModel(Protocol):
    """The whole model, as far as the search needs it; `causal_lm.CausalLM` is one."""

    base: Any
    decoder: Any
    config: Any

    @property
    def attention_modules(self) -> Sequence[nn.Module]: ...
    @property
    def name(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def num_input_ids(self) -> int: ...
    @property
    def held(self) -> range: ...
    @property
    def layers(self) -> Sequence[nn.Module]: ...


def find(model: SearchedModel) -> Probed:
    """The mixers of a model by one forward of a few tokens, and what its layers do.

    Call it where attention is ours. Raises UnsupportedModelError for a model that fails with a
    cache, and for a layer beside attention and states that moves other tokens than its own.
    """
    name = cache_argument(model.decoder)
    if name is None:
        refuse_mixerless(model.base)
        return Probed()
    devices = [model.device] if model.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        watching(model.decoder, model.attention_modules) as watched,
    ):
        watch, cache = watched
        _tell_stand_ins(model, {name: cache})
        watch.forget()
        _run(model, {name: cache}, NUM_TOKENS)
        probed = watch.probed
        if not probed.mixers:
            refuse_mixerless(model.base)
            return Probed()
        met = {layer for _, layer in probed.events}
        # on meta there are no values that could move
        bare = [n for n in model.held if n not in met and model.device.type != "meta"]
        handles = [_watch_tokens(model, layer) for layer in bare]
        outputs: list[Any] = []
        layer = model.layers[model.held.start]
        handles.append(layer.register_forward_hook(lambda *given: outputs.append(given[-1])))
        try:
            _run(model, {name: cache}, NUM_TOKENS)
        finally:
            for handle in handles:
                handle.remove()
    num_returned = len(outputs[0]) if isinstance(outputs[0], tuple) else 0
    return replace(probed, num_returned=num_returned)


@dataclass(frozen=True, slots=True)
class Called:
    """A mixer, and what it is called with."""

    mixer: Mixer
    inputs: Inputs


def calls_of(model: SearchedModel, mixers: Sequence[Mixer], num_tokens: int) -> list[Called]:
    """The calls of some mixers in a forward of that many tokens."""
    found: list[Called] = []
    name = cache_argument(model.decoder)
    assert name is not None

    def note(mixer: Mixer, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(Called(mixer, inputs_of(args, kwargs)))

    with ExitStack() as stack:
        stack.enter_context(watching(model.decoder, model.attention_modules))
        for mixer in mixers:
            hook = mixer.module.register_forward_pre_hook(partial(note, mixer), with_kwargs=True)
            stack.callback(hook.remove)
        _run(model, {name: SliceCache({}, num_tokens)}, num_tokens)
    return found


def _run(model: SearchedModel, cache: dict[str, Any], num_tokens: int) -> None:
    """A forward of a few tokens with a cache; of hidden states, where another stage embeds."""
    ids = torch.arange(num_tokens, device=model.device)[None] % model.num_input_ids
    given = {"input_ids": ids}
    if 0 not in model.held:
        dtype = next(p.dtype for p in model.base.parameters() if p.is_floating_point())
        shape = (1, num_tokens, model.config.hidden_size)
        given = {"inputs_embeds": torch.zeros(shape, device=model.device, dtype=dtype)}
    positions = torch.arange(num_tokens, device=model.device)[None]
    kwargs = {"position_ids": positions, "use_cache": False, "return_dict": True} | cache

    def run() -> Tensor:
        return model.decoder(**given, **kwargs).last_hidden_state  # type: ignore[no-any-return]

    try:
        enter(model.base, run)
    except Exception as error:
        if isinstance(error, UserError) or is_of_machine(error):
            raise
        raise UnsupportedModelError(
            given=f"{model.name} fails with a cache of no tokens: {type(error).__name__}: {error}",
            required="a decoder that takes one of transformers' caches, as generation needs it",
            source="the search for recurrent layers, before the start-up self-check",
            change="train a model of another family, or report this one",
        ) from error


def _tell_stand_ins(model: SearchedModel, cache: dict[str, Any]) -> None:
    """Let what stands for layers of other stages return what layers return.

    What these say of it is not always what they do: a first pass shows what the decoder makes of
    plain hidden states (1, T, D) from its stand-ins.
    """
    stand_ins = [module for module in model.decoder.modules() if isinstance(module, Skip)]
    if not stand_ins:
        return
    first = model.layers[model.held.start]
    says = inspect.signature(type(first).forward).return_annotation
    if get_origin(says) is not tuple:
        return
    are_tuples: list[bool] = []

    def entered(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        are_tuples.append(x.ndim < 3)  # the decoder has taken the first element

    def left(_: Any, __: Any, output: Any) -> None:
        are_tuples.append(isinstance(output, tuple))

    hook = (
        first.register_forward_pre_hook(entered, with_kwargs=True)
        if model.held.start
        else first.register_forward_hook(left)
    )
    try:
        with suppress(UnsupportedModelError):
            _run(model, cache, NUM_TOKENS)
    finally:
        hook.remove()
    if not are_tuples or are_tuples[0]:  # none: the decoder takes plain ones apart, and fails
        for stand_in in stand_ins:
            stand_in.num_returned = len(get_args(says))


def _watch_tokens(model: SearchedModel, layer: int) -> Any:
    """Let a layer be called twice, and raise if another token moves when the first one changes."""

    def again(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x, *rest = args
        changed = torch.cat([x[:, :1] + 1, x[:, 1:]], 1)
        moved = first(module.forward(changed, *rest, **kwargs)) - first(output)
        scale = float(first(output).double().norm())
        bound = 1e-4 if moved.dtype.itemsize > 2 else 3e-2
        if float(moved[:, 1:].double().norm()) > bound * scale:
            raise UnsupportedModelError(
                given=f"{model.name} moves other tokens in layer {layer} when one changes, where "
                "no attention is called and no state is kept",
                required="tokens that meet in attention, or in states of transformers' cache",
                source="the search for recurrent layers, before the start-up self-check",
                change="train a model of another family",
            )

    return model.layers[layer].register_forward_hook(again, with_kwargs=True)
