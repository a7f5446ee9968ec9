"""Adapter of a Hugging Face decoder: runs stages of consecutive layers, and the head.

For the length of a pass the decoder's list of layers is replaced by a list of the same length, in
which only the stage's layers are real. `Inject`, which returns the stage's input, takes the place
of the layer before the stage. `Capture`, which keeps the stage's output, takes the place of the
layer after it. `PlaceholderLayer` takes the place of all other layers. Operations of a family
between embedding and first layer (multiplier, positions, dropout) and after the last layer thus
affect no other stage. Config, layer indices and parameter names stay those of the whole model.

    T tokens of a chunk, D hidden size, V vocabulary
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import MoeModelOutputWithPast

from furlong.errors import ElsewhereError, PlanError, UnsupportedModelError, UserError
from furlong.families import family_of, for_all_layers
from furlong.models.asked import answers_of
from furlong.models.attention import (
    BoundCell,
    CellAttention,
    Change,
    KVReady,
    bound,
    cache_argument,
    called_within,
    chunked_attention,
    forward_as_written,
    hooked,
    patched,
)
from furlong.models.fused import Agreed, fused
from furlong.models.mixers import (
    NUM_TOKENS,
    Called,
    EmptyCache,
    Mixer,
    Probe,
    Probed,
    SliceCache,
    TokenMixing,
    inputs_of,
    relaying,
    watching,
)
from furlong.models.placeholders import (
    Capture,
    Inject,
    PlaceholderLayer,
    decoder_of,
    head_holder,
    holders_of,
    in_place_of,
    is_tied,
    layer_list,
    local_layers_of,
    returned,
    uncuttable,
)
from furlong.models.rope import goes_beyond, num_positions
from furlong.models.routers import ROUTER_LOGITS, Router, RouterRule, routers_of, rule_of
from furlong.models.support import (
    COMPILED_CALL,
    OTHER_FAMILY,
    bare_model,
    call_root,
    compiled_in_place,
    is_sharded,
    refuse_unsupported,
)
from furlong.ops.backends.select import is_of_machine
from furlong.plan.passes import Pass

_MOST_RETURNED = 8
"""Values that a layer returns at most."""


@dataclass
class DecoderOutput(MoeModelOutputWithPast):  # type: ignore[misc]
    """Output of a decoder: hidden states, and None for any other field."""

    def __getattr__(self, name: str) -> Any:
        """Return None for any other field that a family's head reads."""
        if name.startswith("_"):
            raise AttributeError(name)
        return None


class HeadStub(nn.Module):
    """Stands for the decoder while the head runs: returns its input embeddings as hidden states.

    Other attributes that a head reads (Falcon-H1's multiplier) are the decoder's.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.__dict__["_decoder"] = decoder  # not registered as a child module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattr__(name)
        return getattr(self._decoder, name)

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> DecoderOutput:
        return DecoderOutput(last_hidden_state=inputs_embeds)


class Stage:
    """Layers [layers.start, layers.stop) of a decoder. The first stage also embeds token ids, the
    last one also runs what follows the layers."""

    def __init__(self, model: HFDecoder, layers: range) -> None:
        self.layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == model.num_layers
        self._model = model
        self._is_whole = self.is_first and self.is_last
        if not self._is_whole:
            self._list_name, _ = layer_list(model.base)
            self._inject, self._capture = Inject(), Capture()
            self._list = nn.ModuleList(self._slots(model.layers))

    @property
    def events(self) -> tuple[TokenMixing, ...]:
        """The ways in which tokens mix in the stage: pairs ("attention" or "states", layer), in the
        order of a forward."""
        own = self._model.events
        if own is None:
            return tuple(("attention", layer) for layer in self.layers)
        return tuple(event for event in own if event[1] in self.layers)

    def run(self, x: Tensor, position_ids: Tensor, cell: CellAttention, what: Pass) -> Tensor:
        """Run the stage on a chunk, inside `installed`.

        Args:
            x: token ids (T,) for the first stage, hidden states (T, D) for others; a leaf if their
                gradient is wanted.
            position_ids: (T,) int64.

        Returns:
            Hidden states (T, D) after the stage's last layer; final ones after the last stage.

        Raises KVReady where the pass ends at the stage's last K,V.
        """
        run = partial(self._run, x, position_ids, cell, what)
        if what.computes == "to last kv" and is_sharded(self._model.base):
            # FSDP2's post-forward hooks must run: the model's call ends before KVReady is raised
            with self._ending_calls():
                call_root(self._model.base, run)
            raise KVReady
        return call_root(self._model.base, run)[0]  # after a wrapper's hooks, which take no views

    def _run(self, x: Tensor, position_ids: Tensor, cell: CellAttention, what: Pass) -> Tensor:
        """Return hidden states (1, T, D), as `run` describes."""
        modules = self._model.cell_modules
        cache = EmptyCache() if self._model.probed.mixers else None
        decode = partial(self._model.decode, cache)
        positions = position_ids[None].clone()  # a hook that changes them must not affect ours
        with ExitStack() as stack:
            stack.enter_context(bound(modules, cell, what, position_ids, cache))
            if what.recompute_layers and what.computes == "graph":
                stack.enter_context(self._checkpointed(cell, what, position_ids, cache))
            if self._is_whole:
                return decode(input_ids=x[None], position_ids=positions)
            stack.enter_context(self._swapped(x))
            if self.is_first:
                decode(input_ids=x[None], position_ids=positions)
            else:
                # zeros, not x: a family may scale its embeddings in place
                final = decode(inputs_embeds=x.new_zeros((1, *x.shape)), position_ids=positions)
                if self.is_last:
                    return final
            assert self._capture.hidden is not None, "the decoder left before the stage's output"
            return self._capture.hidden

    def _slots(self, own: Sequence[nn.Module]) -> Iterator[nn.Module]:
        for index, layer in enumerate(own):
            if index in self.layers:
                yield layer
            elif index == self.layers.start - 1:
                yield in_place_of(layer, self._inject)
            elif index == self.layers.stop:
                yield in_place_of(layer, self._capture)
            else:
                yield in_place_of(layer, PlaceholderLayer())

    def _swapped(self, x: Tensor) -> AbstractContextManager[None]:
        """Context manager: replace the decoder's layers by the stage's, with input x (T, D)."""
        for placeholder in self._list:
            if isinstance(placeholder, PlaceholderLayer):
                placeholder.num_returned = self._model.probed.num_returned
        return patched(
            [
                (self._model.decoder._modules, self._list_name, self._list),
                (vars(self._inject), "x", None if self.is_first else x),
                (vars(self._capture), "hidden", None),  # restored on exit, else it keeps a graph
            ]
        )

    def _ending_calls(self) -> AbstractContextManager[None]:
        """Context manager: let a pass that ends at the stage's last K,V end without an exception.
        The layer that raises KVReady returns its input instead, so that a wrapper's post-forward
        hooks run."""

        def until_kv(forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            with suppress(KVReady):
                forward(hidden, *args, **kwargs)
            return returned(hidden, self._model.probed.num_returned)

        last = self.events[-1][1] if self.events else self.layers[-1]
        return _wrapped(self._model.layers[last : last + 1], lambda own: partial(until_kv, own))

    def _checkpointed(
        self, cell: CellAttention, what: Pass, position_ids: Tensor, cache: EmptyCache | None
    ) -> AbstractContextManager[None]:
        """Context manager: checkpoint the stage's first `recompute_layers` layers.

        The backward runs their forward again, bound to the same cell. This second forward stores no
        K,V.
        """
        again = replace(what, writes_kv=False, remembers=0, recompute_layers=0)
        first = self.layers.start

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), bound(self._model.cell_modules, cell, again, position_ids, cache)

        return _wrapped(
            self._model.layers[first : first + what.recompute_layers],
            lambda own: partial(checkpoint, own, use_reentrant=False, context_fn=contexts),
        )


def _wrapped(
    layers: Sequence[nn.Module], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> AbstractContextManager[None]:
    """Context manager: wrap the forward of each layer, or its compiled call, with `wrap`."""
    names = [COMPILED_CALL if vars(x).get(COMPILED_CALL) else "forward" for x in layers]
    pairs = zip(layers, names, strict=True)
    return patched((vars(layer), name, wrap(getattr(layer, name))) for layer, name in pairs)


class HFDecoder:
    """A causal decoder with its head, run in stages.

    Args:
        max_seq_len: tokens of the run's longest sequence.
        needs_head: whether the model must have a causal language-model head. If not, any head is
            accepted, and without a language-model head `logits` returns hidden states.
        device: where the model computes; None: where its weights are.
        is_entered: whether passes run inside a call of the decoder, which computes the head itself.

    Raises:
        UnsupportedModelError: the model is known to be inexact in chunks.
    """

    def __init__(
        self, model: nn.Module, *, max_seq_len: int | None = None, needs_head: bool = True,
        device: torch.device | None = None, is_entered: bool = False,
    ) -> None:  # fmt: skip
        base: Any = bare_model(model)
        refuse_unsupported(base, max_seq_len, needs_head=needs_head)
        self.model = model
        self.base = base
        self.device = device or next(model.parameters()).device
        self.config = base.config.get_text_config()
        self.max_seq_len = max_seq_len
        bounds = (n for n in (max_seq_len, num_positions(self.config, max_seq_len or 0)) if n)
        self.longest_tokens = min(bounds, default=None)  # most tokens of a sequence; None: no limit
        self.longest_evaluated = self.longest_tokens  # the same, of a call without gradients
        if max_seq_len != self.longest_tokens and goes_beyond(self.config):
            self.longest_evaluated = max_seq_len or self.longest_tokens
        self.num_layers = int(self.config.num_hidden_layers)
        self._has_head = not is_entered and base.get_output_embeddings() is not None
        head = base.get_output_embeddings() if self._has_head else base.get_input_embeddings()
        self.vocab_size = int(head.weight.shape[0])
        self.decoder: Any = decoder_of(base)
        _require_alone(base, self.decoder)
        self._head_holder, self._decoder_name = head_holder(base)
        self.agreed: Agreed = {}
        self._is_entered = is_entered
        self._decodes_in: int | None = None  # the thread that is about to call the decoder
        self.attention_modules = [m for m in self.decoder.modules() if hasattr(m, "layer_idx")]

    @property
    def name(self) -> str:
        return type(self.base).__name__

    @cached_property
    def heads(self) -> tuple[int, int]:
        """Numbers of query and key-value heads. UnsupportedModelError if layers differ in them."""
        num_heads = for_all_layers(self.config, "num_attention_heads")
        num_kv_heads = for_all_layers(self.config, "num_key_value_heads", num_heads) or num_heads
        if not isinstance(num_heads, int) or not isinstance(num_kv_heads, int):
            raise UnsupportedModelError(
                given=f"{self.name}, whose config has not one number of heads for all layers",
                required="equal heads, which the processes of an sp group divide among them",
                source="num_attention_heads and num_key_value_heads of the model's config",
                change="use parallel: {sp: 1}",
            )
        return num_heads, num_kv_heads

    def heads_for(self, sp_size: int) -> tuple[int, int]:
        """Return `heads`, which the processes of a sequence-parallel group of `sp_size` divide. A
        model without attention gets `sp_size` heads, for which no group is split: each process has
        consecutive tokens."""
        has_attention = self.events is None or any(kind == "attention" for kind, _ in self.events)
        return self.heads if has_attention else (sp_size, sp_size)

    @property
    def num_input_ids(self) -> int:
        """Number of token ids that have an embedding."""
        return int(self.base.get_input_embeddings().weight.shape[0])

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder's layers, which it must hold in one list."""
        return list(layer_list(self.base)[1])

    @cached_property
    def local_layers(self) -> range:
        """The layers that this process holds: all, or those of one stage."""
        return local_layers_of(self.base)

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """The weight that embedding and head share, also where this process lacks the head."""
        if not is_tied(self.base):
            return None
        weight = self.base.get_input_embeddings().weight
        return weight if isinstance(weight, nn.Parameter) else None

    def empty_backward(self) -> None:
        """Run a backward that changes no gradient. It runs the hooks of a wrapper: FSDP2 then
        reduces the gradients that earlier backwards have accumulated."""
        with torch.enable_grad():
            leaf = torch.zeros((), device=self.device, requires_grad=True)
            output = call_root(self.base, lambda: leaf * 1)
        output.backward()  # type: ignore[no-untyped-call]

    @property
    def ends(self) -> tuple[nn.Module | None, nn.Module | None]:
        """The embedding and the head. Each is None if this process lacks it or if it has no
        parameters; both are None if they are tied."""
        embedding, head = self.base.get_input_embeddings(), self.base.get_output_embeddings()
        each = [
            set(module.parameters()) if module is not None else set()
            for module in (embedding, head)
        ]
        if each[0] & each[1]:
            return None, None
        return embedding if each[0] else None, head if each[1] else None

    @property
    def outside(self) -> list[tuple[dict[str, Any], str, nn.Parameter]]:
        """The parameters of modules outside the decoder, such as a head: (parameters of the module
        by name, name in them, parameter)."""
        inside = {*self.decoder.modules()}
        owners = (m._parameters for m in self.base.modules() if m not in inside)
        return [(own, name, p) for own in owners for name, p in own.items() if p is not None]

    @property
    def num_frozen_layers(self) -> int:
        """Number of leading layers without a trained parameter in them or before them.

        A parameter outside the layers counts as one before them, since only the family's code knows
        where it is used. A process of a later stage does not see earlier layers, which count as
        frozen, and counts no parameter outside the layers but a tied weight. The number for the
        whole model is the minimum over processes.
        """
        own = {id(p) for layer in self.layers for p in layer.parameters()}
        others = [p for p in self.decoder.parameters() if id(p) not in own]
        if self.local_layers.start:
            others = [p for p in others if p is self.tied_weight]
        if any(p.requires_grad for p in others):
            return 0
        trained = (any(p.requires_grad for p in layer.parameters()) for layer in self.layers)
        return next((index for index, any_ in enumerate(trained) if any_), self.num_layers)

    def require_frozen(self, num_layers: int) -> None:
        """Raise PlanError if a parameter is trained in or before the first `num_layers` layers.

        A plan without backwards of these layers would leave out the parameter's gradient.
        """
        if num_layers and self.num_frozen_layers < num_layers:
            raise PlanError(
                f"the plan has no backward in the first {num_layers} layers of {self.name}, where "
                "parameters are trained by now, or below: plan again"
            )

    def require_held(self, layers: Iterable[int]) -> None:
        """Raise PlanError for layers that another process holds."""
        missing = sorted(set(layers) - set(self.local_layers))
        if missing:
            raise PlanError(
                f"the plan runs layer {missing[0]} of {self.name} on this rank, which holds layers "
                f"{self.local_layers.start} to {self.local_layers.stop - 1}"
            )

    def stages(self, heights: Sequence[int]) -> tuple[Stage, ...]:
        """Divide the model into stages of `heights[i]` layers each.

        Raises PlanError for heights that do not add up to the model's layers, UnsupportedModelError
        for several stages of a decoder without one list of its layers.
        """
        if sum(heights) != self.num_layers or min(heights) < 1:
            raise PlanError(
                f"the plan's stages of {', '.join(map(str, heights))} layers are not those of "
                f"{self.name}, which has {self.num_layers}"
            )
        if len(heights) > 1 and (why := family_of(self.config.model_type).whole):
            raise uncuttable(self.name, why)
        stops = accumulate(heights)
        return tuple(
            Stage(self, range(stop - n, stop)) for n, stop in zip(heights, stops, strict=True)
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (T, V) of final hidden states (T, D), with a family's scale and softcap."""
        if not self._has_head:
            return hidden

        def head() -> Tensor:
            holder, name = self._head_holder, self._decoder_name
            stub = HeadStub(holder.get_submodule(name))  # returns `inputs_embeds` in its place
            with patched([(holder._modules, name, stub)]):
                return _whole(holder, inputs_embeds=hidden[None])

        return call_root(self.base, head)[0]

    def whole_hidden(self, input_ids: Tensor) -> Tensor:
        """Return final hidden states (T, D) of a whole sequence (T,), by the model's own attention.

        Call it outside `installed`.
        """
        return self._outside(lambda: self.decode(input_ids=input_ids[None]))

    def whole_logits(self, input_ids: Tensor) -> Tensor:
        """Return logits (T, V) of a whole sequence (T,), by the model's own attention; final hidden
        states if the model has no language-model head.

        Call it outside `installed`.
        """
        if not self._has_head:
            return self.whole_hidden(input_ids)
        return self._outside(lambda: _whole(self.base, input_ids=input_ids[None]))

    def _outside(self, run: Callable[[], Tensor]) -> Tensor:
        """Call `run` with the model's own attention; return its output without the batch axis."""
        with forward_as_written([*self.base.modules()], self.max_seq_len):
            return call_root(self.base, run)[0]

    def stays_float32(self, compute_dtype: torch.dtype) -> list[nn.Parameter]:
        """Return parameters that stay float32 if transformers loads the model in `compute_dtype`.

        Their names are in the family's `_keep_in_fp32_modules` (float16 alone) and
        `_keep_in_fp32_modules_strict` (all 16-bit types).
        """
        kept = set(getattr(self.base, "_keep_in_fp32_modules_strict", None) or ())
        if compute_dtype == torch.float16:
            kept |= set(getattr(self.base, "_keep_in_fp32_modules", None) or ())
        if compute_dtype.itemsize > 2 or not kept:
            return []
        pattern = re.compile("|".join(re.escape(n).replace(r"\*", r"[^.]+") for n in sorted(kept)))
        return [p for name, p in self.base.named_parameters() if pattern.search(name)]

    @contextmanager
    def installed(self, modules: Sequence[nn.Module] = ()) -> Iterator[None]:
        """Context manager: run attention and mixers (recurrent layers) through furlong; restore the
        model on exit, also after an error. `modules`: all of the base model's, if known."""
        mixers, modules = self.probed.mixers, modules or [*self.base.modules()]
        with (
            chunked_attention(modules, self.attention_modules, self.max_seq_len, self.compiled),
            relaying(mixers) if mixers else nullcontext(),
            patched(self.fused),
            hooked(self.decoder, self._refuse_others),
            ExitStack() as stack,
        ):
            for router in self.routers:
                hook = router.module.register_forward_hook(partial(_routed, router))
                stack.callback(hook.remove)
            yield

    def _refuse_others(self, decoder: nn.Module, _: object) -> None:
        """Raise ConfigError for a call of the decoder that does not come from `decode`."""
        if self._decodes_in != threading.get_ident():
            raise called_within(decoder)
        self._decodes_in = None

    @cached_property
    def probed(self) -> Probed:
        """The decoder's mixers (recurrent layers) and the ways in which its layers mix tokens,
        recorded in one forward of few tokens.

        Placeholders must return as many values as the layers do. With another number the forward
        fails, or returns another one from the first local layer; it is then repeated.

        Raises:
            UnsupportedModelError: the decoder fails with an empty cache.
        """
        if not cache_argument(self.decoder):
            return Probed()
        placeholders = [m for m in self.decoder.modules() if isinstance(m, PlaceholderLayer)]
        # without placeholders the decoder need not hold its layers in one list
        first = self.layers[self.local_layers.start] if placeholders else self.decoder
        failures = list[UnsupportedModelError]()
        for number in range(_MOST_RETURNED + 1 if placeholders else 1):
            for placeholder in placeholders:
                placeholder.num_returned = number
            try:
                watch = self._watched()
            except UnsupportedModelError as error:
                failures.append(error)
                continue
            if not placeholders or watch.num_returned[first] == number:
                break
        else:
            too_many = UnsupportedModelError(
                given=f"{self.name}, whose layers return more than {_MOST_RETURNED} values",
                required="layers that return few values, which placeholders can stand for",
                source="the model that was passed, and its pipeline stages",
                change="train without pipeline stages",
            )
            raise next(iter(failures), too_many)
        if not placeholders and not watch.mixers:
            return Probed()
        first = self.layers[self.local_layers.start]
        mixers = tuple(Mixer(module, layer) for module, layer in watch.mixers.items())
        return Probed(mixers, tuple(dict.fromkeys(watch.events)), watch.num_returned[first])

    def _watched(self) -> Probe:
        """Run the decoder on a few tokens; return what was recorded."""
        devices = [self.device] if self.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices),
            chunked_attention([*self.base.modules()], self.attention_modules, self.max_seq_len),
            watching(self.decoder, self.attention_modules, self.device) as watch,
        ):
            self._pass_tokens(watch, NUM_TOKENS)
        return watch

    def calls_of(self, mixers: Sequence[Mixer], num_tokens: int) -> list[Called]:
        """Return one `Called` (a mixer and its inputs) for each call of `mixers` in a forward of
        `num_tokens` tokens."""
        found: list[Called] = []

        def note(mixer: Mixer, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(Called(mixer, inputs_of(args, kwargs)))

        modules = self.attention_modules
        with watching(self.decoder, modules, self.device), ExitStack() as stack:
            for mixer in mixers:
                own = partial(note, mixer)
                hook = mixer.module.register_forward_pre_hook(own, with_kwargs=True)
                stack.callback(hook.remove)
            self._pass_tokens(SliceCache({}, num_tokens), num_tokens)
        return found

    def _pass_tokens(self, cache: EmptyCache, num_tokens: int) -> None:
        """Run the decoder on `num_tokens` tokens with a cache. The input is token ids or, if
        another stage holds the embedding, hidden states of zeros."""
        positions = torch.arange(num_tokens, device=self.device)[None]
        given = {"input_ids": positions % self.num_input_ids}
        if 0 not in self.local_layers:
            dtype = next(p.dtype for p in self.base.parameters() if p.is_floating_point())
            shape = (1, num_tokens, self.config.hidden_size)
            given = {"inputs_embeds": torch.zeros(shape, device=self.device, dtype=dtype)}
        try:
            call_root(self.base, lambda: self.decode(cache, position_ids=positions, **given))
        except Exception as error:
            if isinstance(error, UserError | ElsewhereError) or is_of_machine(error):
                raise
            raise UnsupportedModelError(
                given=f"{self.name} fails with a cache of no tokens: {type(error).__name__}: "
                f"{error}",
                required="a decoder that takes one of transformers' caches, as generation needs it",
                source="the search for recurrent layers, before the start-up self-check",
                change="train a model of another family, or report this one",
            ) from error

    @cached_property
    def routers(self) -> list[Router]:
        """The decoder's modules that return router logits; none if layers are compiled, which run
        no hooks that are added later."""
        is_recorded = "router_logits" in (getattr(self.decoder, "_can_record_outputs", None) or ())
        return routers_of(self.decoder) if is_recorded and not self.compiled else []

    @property
    def router_rule(self) -> RouterRule | None:
        """The losses of routers that are added to the cross-entropy, or None."""
        if not getattr(self.config, ROUTER_LOGITS, False):
            return None
        rule = rule_of(self.base)
        if rule is None or not (rule.coefficient or rule.z_coefficient):
            return None
        return rule if answers_of(self.base).adds_router_loss else None

    @property
    def events(self) -> tuple[TokenMixing, ...] | None:
        """How the decoder's layers mix tokens, in order; None: by attention in each layer."""
        return self.probed.events if self.probed.mixers else None

    @cached_property
    def compiled(self) -> list[nn.Module]:
        """Modules compiled in place that stay compiled in chunks: layers, their submodules, and the
        head. Empty if the model has mixers, whose calls are cut into slices."""
        found = compiled_in_place(self.base)
        if not found or self.probed.mixers:
            return []
        others = {self.base, self.decoder, *self.base.get_input_embeddings().modules()}
        return [module for module in found if module not in others]

    @cached_property
    def fused(self) -> list[Change]:
        """Changes that fuse element-wise kernels; none if layers are compiled, which fuses too."""
        return [] if self.compiled else fused(self.base, self.device, self.agreed)

    @property
    def cell_modules(self) -> list[nn.Module]:
        """The modules to which a cell is bound: attention modules, mixers and routers."""
        mixers = [mixer.module for mixer in self.probed.mixers]
        routers = [router.module for router in self.routers]
        return list(dict.fromkeys([*self.attention_modules, *mixers, *routers]))

    def decode(self, cache: EmptyCache | None = None, **inputs: Tensor) -> Tensor:
        """Return the decoder's final hidden states (1, T, D) for inputs with a batch axis."""
        caches = {} if cache is None else {cache_argument(self.decoder) or "": cache}
        if self._is_entered:
            decode = self.decoder.forward  # a call would run the decoder's hooks for each chunk
        else:
            decode, self._decodes_in = self.decoder, threading.get_ident()
        output = decode(**inputs, **caches, use_cache=False, return_dict=True)
        return output.last_hidden_state  # type: ignore[no-any-return]


def _whole(model: Any, **inputs: Tensor) -> Tensor:
    """Return logits (1, T, V) by the `forward` of the model's class. A `forward` that was set on
    the instance and hooks of the model are bypassed."""
    output = type(model).forward(model, **inputs, use_cache=False, return_dict=True)
    return output.logits  # type: ignore[no-any-return]


def _routed(router: Router, module: nn.Module, _: Any, output: Any) -> None:
    """Forward hook of a router: hand its logits to the cell that is bound to it."""
    pass_of, logits = BoundCell.to(module), router.logits(output)
    if pass_of is not None and logits is not None:
        pass_of.cell.route(pass_of.what, router.name, logits)


def _require_alone(base: Any, decoder: nn.Module) -> None:
    """Raise UnsupportedModelError for a decoder that is not inside, or inside a model with weights
    beside decoder and head."""
    holders, head = holders_of(base, decoder), base.get_output_embeddings()
    is_text = base.config.get_text_config() is base.config
    own = {id(p) for m in (decoder, head) if m is not None for p in m.parameters()}
    is_alone = bool(holders) and not is_text and all(id(p) in own for p in base.parameters())
    if len(holders) != 1 and not is_alone:
        raise UnsupportedModelError(
            given=f"{type(base).__name__} holds its decoder inside another module",
            required="a model that is a decoder and a head",
            source="the model's modules",
            change=OTHER_FAMILY
            if is_text
            else "name the checkpoint in model.name of a run file, which trains its text decoder",
        )
