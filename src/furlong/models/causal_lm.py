"""The adapter of a Hugging Face decoder: its stages and its head.

T tokens, D hidden size, V vocabulary
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from furlong.errors import PlanError, UnsupportedModelError
from furlong.families import for_all_layers
from furlong.models.attention import called_within, hooked
from furlong.models.entrance import enter
from furlong.models.head_stub import HeadStub
from furlong.models.held import Skip, decoder_of, held_layers, layer_list
from furlong.models.mixers.caches import DoorCache
from furlong.models.mixers.find import find
from furlong.models.mixers.probe import Event, Probed, cache_argument
from furlong.models.mixers.relay import relaying
from furlong.models.rope import num_positions
from furlong.models.stage import Stage, stages
from furlong.models.support import refuse_unsupported
from furlong.models.switches import chunked_attention, own_forward
from furlong.models.wrappers import bare_model, compiled_in_place


class CausalLM:
    """A decoder with a language-model head, used in pieces.

    Raises UnsupportedModelError for what is known to be inexact. Without `needs_head` the head may
    be another one, which is then the caller's own affair: hidden states stand for logits.
    """

    def __init__(
        self, model: nn.Module, *, max_seq_len: int | None = None, needs_head: bool = True
    ) -> None:
        base: Any = bare_model(model)
        refuse_unsupported(base, max_seq_len, needs_head=needs_head)
        self.model = model
        self.base = base
        self.config = base.config.get_text_config()
        self.max_seq_len = max_seq_len
        self.num_layers = int(self.config.num_hidden_layers)
        self._has_head = base.get_output_embeddings() is not None
        head = base.get_output_embeddings() if self._has_head else base.get_input_embeddings()
        self.vocab_size = int(head.weight.shape[0])
        self.decoder: Any = decoder_of(base)
        self._decoder_name = _child_name(base, self.decoder)
        self._relays = False
        self._decodes_in: int | None = None  # the thread that is about to call the decoder
        self.attention_modules = [m for m in self.decoder.modules() if hasattr(m, "layer_idx")]

    @property
    def name(self) -> str:
        return type(self.base).__name__

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and key-value heads of every layer."""
        num_heads = for_all_layers(self.config, "num_attention_heads")
        num_kv_heads = for_all_layers(self.config, "num_key_value_heads", num_heads) or num_heads
        if not isinstance(num_heads, int) or not isinstance(num_kv_heads, int):
            raise UnsupportedModelError(
                given=f"{self.name}, whose config has not one number of heads for all layers",
                required="equal heads, which the processes of a pool divide among them",
                source="num_attention_heads and num_key_value_heads of the model's config",
                change="use parallel: {sp: 1}",
            )
        return num_heads, num_kv_heads

    def require_own_tokens(self) -> None:
        """Raise UnsupportedModelError for layers whose tokens meet in states, which the processes
        of a pool cannot divide among them."""
        if self.probed.mixers:
            kind = type(self.probed.mixers[0].module).__name__
            raise UnsupportedModelError(
                given=f"{self.name}, whose {kind} keeps a state, on pools of several processes",
                required="layers in which tokens meet in attention alone, for sequence parallelism",
                source="the model's layers, and parallel.sp",
                change="use parallel: {sp: 1}, with dp or pp in its place",
            )

    @property
    def num_input_ids(self) -> int:
        """Token ids that have an embedding: 0 to this number less one."""
        return int(self.base.get_input_embeddings().weight.shape[0])

    @property
    def longest_tokens(self) -> int | None:
        """Tokens of the longest sequence it can take, None if there is no bound."""
        bounds = (self.max_seq_len, num_positions(self.config))
        return min((n for n in bounds if n is not None), default=None)

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder's layers, where it holds them in one list."""
        return list(layer_list(self.decoder, self.num_layers, self.name)[1])

    @property
    def held(self) -> range:
        """The layers that this process holds: all, or those of one stage."""
        if not any(isinstance(module, Skip) for module in self.decoder.modules()):
            return range(self.num_layers)  # a decoder without a list of its layers is whole
        return held_layers(self.layers)

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """The weight that input embeddings and head share, whether or not the head is here."""
        if not self.config.tie_word_embeddings:
            return None
        weight = self.base.get_input_embeddings().weight
        return weight if isinstance(weight, nn.Parameter) else None

    @property
    def num_frozen_layers(self) -> int:
        """First layers of the decoder without a trained parameter in them or below.

        Parameters beside the layers count as below: whether they are is the family's own affair. A
        process that does not hold the first layers has none below but tied embeddings, and cannot
        count frozen layers of other stages: the least of all processes is the model's number.
        """
        own = {id(p) for layer in self.layers for p in layer.parameters()}
        others = [p for p in self.decoder.parameters() if id(p) not in own]
        if self.held.start:
            others = [p for p in others if p is self.tied_weight]
        if any(p.requires_grad for p in others):
            return 0
        trained = (any(p.requires_grad for p in layer.parameters()) for layer in self.layers)
        return next((index for index, any_ in enumerate(trained) if any_), self.num_layers)

    def require_frozen(self, num_layers: int) -> None:
        """Raise PlanError if a parameter is trained in the first `num_layers` layers, or below.

        A plan without their backwards would leave its gradient out.
        """
        if num_layers and self.num_frozen_layers < num_layers:
            raise PlanError(
                f"the plan has no backward in the first {num_layers} layers of {self.name}, where "
                "parameters are trained by now, or below: plan again"
            )

    def require_held(self, layers: Iterable[int]) -> None:
        """Raise PlanError for layers that another process holds."""
        missing = sorted(set(layers) - set(self.held))
        if missing:
            raise PlanError(
                f"the plan runs layer {missing[0]} of {self.name} on this rank, which holds layers "
                f"{self.held.start} to {self.held.stop - 1}"
            )

    def stages(self, heights: Sequence[int]) -> tuple[Stage, ...]:
        """Stages of `heights[i]` layers each; see `models.stage`."""
        return stages(self, heights)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (T, V) of final hidden states (T, D), scaled and capped as the family does."""
        if not self._has_head:
            return hidden

        def head() -> Tensor:
            with self._decoder_out():
                return self._whole(inputs_embeds=hidden[None])

        return enter(self.base, head)[0]

    def whole_hidden(self, input_ids: Tensor) -> Tensor:
        """Final hidden states (T, D) of a sequence (T,) by the decoder itself, outside `installed`.

        Attention is the model's own.
        """
        with own_forward(self.base, self.max_seq_len):
            return enter(self.base, lambda: self.decode(input_ids=input_ids[None]))[0]

    def whole_logits(self, input_ids: Tensor) -> Tensor:
        """Logits (T, V) of a sequence (T,) by the model's own forward, outside `installed`."""
        if not self._has_head:
            return self.whole_hidden(input_ids)
        with own_forward(self.base, self.max_seq_len):
            return enter(self.base, lambda: self._whole(input_ids=input_ids[None]))[0]

    def stays_float32(self, compute_dtype: torch.dtype) -> list[nn.Parameter]:
        """Parameters that transformers keeps in float32 when it loads a model in `compute_dtype`.

        The names are the family's `_keep_in_fp32_modules` (float16 alone) and
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
    def installed(self) -> Iterator[None]:
        """Within it attention is ours; on exit, also after an error, the model is as it was."""
        probed = self.probed
        with (
            chunked_attention(self.base, self.max_seq_len, self.compiled),
            relaying(probed.mixers, probed.shared),
        ):
            self._relays = bool(probed.mixers)
            try:
                with hooked(self.decoder, self._refuse_others):
                    yield
            finally:
                self._relays = False

    def _refuse_others(self, decoder: nn.Module, _: object) -> None:
        """Raise ConfigError for a call of the decoder that is not `decode`'s."""
        if self._decodes_in != threading.get_ident():
            raise called_within(decoder)
        self._decodes_in = None

    @cached_property
    def probed(self) -> Probed:
        """Its layers that remember tokens in states. Raises UnsupportedModelError for a layer in
        which tokens meet in another way."""
        with chunked_attention(self.base, self.max_seq_len):
            return find(self)

    @property
    def events(self) -> tuple[Event, ...] | None:
        """Events of its layers, in order; None: attention in each of them."""
        return self.probed.events if self.probed.mixers else None

    @property
    def compiled(self) -> list[nn.Module]:
        """Modules compiled in place that run so in chunks: layers, what is in them, and the head.
        None where a layer has a mixer, whose calls are cut into slices."""
        found = compiled_in_place(self.base)
        if not found or self.probed.mixers:
            return []
        others = {self.base, self.decoder, *self.base.get_input_embeddings().modules()}
        return [module for module in found if module not in others]

    @property
    def num_returned(self) -> int:
        """Elements of the tuple that a layer returns; 0: hidden states alone."""
        return self.probed.num_returned

    @property
    def cell_modules(self) -> list[nn.Module]:
        """The modules that a cell is bound to: those of attention, and mixers."""
        mixers = [mixer.module for mixer in self.probed.mixers]
        return list(dict.fromkeys([*self.attention_modules, *mixers]))

    def decode(self, **inputs: Tensor) -> Tensor:
        """Final hidden states (1, T, D) by the decoder, of inputs with that batch axis."""
        cache = {}
        if self._relays:
            cache = {cache_argument(self.decoder) or "": DoorCache()}
        self._decodes_in = threading.get_ident()
        output = self.decoder(**inputs, **cache, use_cache=False, return_dict=True)
        return output.last_hidden_state  # type: ignore[no-any-return]

    def _whole(self, **inputs: Tensor) -> Tensor:
        """Logits (1, T, V) by the class's own forward: hooks and wrappers of this instance expect
        whole batches."""
        output = type(self.base).forward(self.base, **inputs, use_cache=False, return_dict=True)
        return output.logits  # type: ignore[no-any-return]

    @contextmanager
    def _decoder_out(self) -> Iterator[None]:
        """Within it the model is its head: what it is given as embeddings passes its decoder."""
        children = self.base._modules
        children[self._decoder_name] = HeadStub(self.decoder)
        try:
            yield
        finally:
            children[self._decoder_name] = self.decoder


def _child_name(base: nn.Module, decoder: nn.Module) -> str:
    for name, child in base.named_children():
        if child is decoder:
            return name
    raise UnsupportedModelError(
        given=f"{type(base).__name__} holds its decoder inside another module",
        required="a model that is a decoder and a head",
        source="the model's modules",
        change="train the text model alone",
    )
