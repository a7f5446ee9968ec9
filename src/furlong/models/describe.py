"""Describe a model's layers for the cost model: run a chunk through them on the meta device.

Nothing is computed and no weight has memory. A chunk of a few tokens takes the same path as in a
run. Counted are matrix products with weights and inside scans, tensors that autograd saves, and the
keys, values and states that are stored for later chunks.

    T tokens, N query heads, K key-value heads, H head dim
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from furlong.cost.shape import NO_ATTENTION, LayerShape, Matrix, ModelShape
from furlong.errors import ConfigError, UserError
from furlong.families import ATTENTION_DROPOUTS, INNER_CHUNKS, family_of, for_all_layers
from furlong.models.asked import rope_entries
from furlong.models.build import model_of_config, with_images
from furlong.models.decoder import HFDecoder
from furlong.models.folder import reason
from furlong.models.mixers import SliceRows
from furlong.models.placeholders import (
    PlaceholderLayer,
    all_linear,
    in_place_of,
    is_tied,
    layer_list,
)
from furlong.models.rope import num_positions
from furlong.models.support import refuse_config
from furlong.ops.attention import AttentionRule
from furlong.plan.passes import Pass

_TOKENS = 128
"""Tokens of the chunk: two inner chunks of delta rules, whose size is a constant."""
_FEW_TOKENS = 32
"""Tokens of the chunk for models that scan token by token."""
_ELEMENTWISE = 9
"""FLOPs of an element-wise scan per token and element of its state (Gu and Dao 2023)."""
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten._grouped_mm}
_LINEAR = (nn.Linear, Conv1D)
_ADAPTERS = (("mixer",), ("mlp",), ("mixer", "mlp"))
"""Sets of kinds of linear layers that have adapters, in the order of `SavedBytes`."""


@lru_cache(maxsize=64)
def _described(config_class: type, text: str, source: str) -> ModelShape:
    config = config_class.from_dict(json.loads(text))  # type: ignore[attr-defined]
    decoder = config.get_text_config()
    for name in ATTENTION_DROPOUTS:
        if getattr(decoder, name, None):
            setattr(decoder, name, 0.0)
    # these make a forward read ids and positions, which have no values on meta, and cost nothing
    decoder.pad_token_id = None
    for entry in rope_entries(decoder):
        entry["rope_type"] = "default"
    try:
        refuse_config(config, f"a model of type {decoder.model_type}", source)
        # independent of the caller's RNG and grad mode, and without changing them
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            return _measured(config, source)
    except ConfigError:
        raise
    except Exception as error:  # a family's own code may do anything on meta
        raise ConfigError(
            given=f"model type {decoder.model_type}, whose layers cannot be measured:"
            f" {error.given if isinstance(error, UserError) else reason(error)}",
            required="a decoder that transformers can build and run on the meta device",
            source=source,
            change="train without predictions: give chunks.size, chunks.keep and the layout",
        ) from error


def describe(config: Any, source: str = "the model's config") -> ModelShape:
    """Return the `ModelShape` of a transformers config.

    Raises ConfigError if it is not a decoder, or one that cannot be trained in chunks.
    """
    built = config if with_images(config) else config.get_text_config()
    values = json.dumps(built.to_dict(), sort_keys=True, default=str)
    return _described(type(built), values, source)  # type: ignore[arg-type]


@dataclass
class _Layer:
    """Work of one layer for one chunk; FLOPs of scans and bytes are sums over all tokens."""

    module: nn.Module | None = None
    matrices: int = 0
    before_kv: int = 0
    experts: nn.Module | None = None
    num_active: int = 1
    scan_flops: int = 0
    convolution_flops: int = 0
    saved: int = 0
    scan_saved: int = 0
    window: int | None = NO_ATTENTION
    heads: tuple[int, int, int, int] = (0, 0, 0, 0)
    """(query heads, key-value heads, width of a key, width of a value)."""
    stored: int = 0
    states: Mapping[Any, Tensor] = field(default_factory=dict)
    met: set[nn.Module] = field(default_factory=set)
    """Modules in which tokens mix, by attention or a recurrent state."""
    products: dict[nn.Module, list[tuple[int, int]]] = field(default_factory=dict)
    """Module -> (input width, output width) of the matrices that it multiplies a token with; a
    token's active experts count as one matrix."""


class _AnyDtype(TorchDispatchMode):
    """Makes grouped matrix products run on meta in any dtype; torch only supports bfloat16."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket is _aten._grouped_mm:
            return args[0].new_empty((len(args[0]), args[1].shape[-1]))
        return func(*args, **(kwargs or {}))


class _Chunk(_AnyDtype):
    """Counts the work of each layer while one chunk runs; bound to modules as the chunk's cell."""

    process = 0

    def __init__(self, model: HFDecoder, num_tokens: int) -> None:
        super().__init__()
        layers, base = model.layers, model.base
        self.layers = [_Layer(module) for module in layers]
        self.end = _Layer()
        self.config, self.decoder = model.config, model.decoder
        self.before: list[nn.Module] = []
        """Modules that run before the first layer."""
        self._num_tokens = num_tokens
        self._has_router_loss = model.router_rule is not None
        self._places = dict(zip(layers, self.layers, strict=True))
        self._weights = {_storage(p): (p, m) for m in base.modules() for p in m.parameters(False)}
        self._parents = {child: module for module in base.modules() for child in module.children()}
        self.linears = {base.get_submodule(name) for name in all_linear(base)}
        with _AnyDtype():
            self._mixers = {mixer.module for mixer in model.probed.mixers}
        self._layer: _Layer | None = None
        self._running: list[nn.Module] = []
        self._seen: set[int] = set()
        self._alive: list[Tensor] = []

    @contextmanager
    def watching(self, decoder: nn.Module) -> Iterator[None]:
        """Context manager: count the operations of the decoder and the tensors that it saves."""
        with ExitStack() as stack:
            for module in decoder.modules():
                stack.callback(module.register_forward_pre_hook(self._begin).remove)
                stack.callback(module.register_forward_hook(self._end).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, lambda x: x))
            stack.enter_context(self)
            yield

    def _begin(self, module: nn.Module, *_: Any) -> None:
        self._running.append(module)
        self._layer = self._places.get(module, self._layer)
        if self._layer is None:
            self.before.append(module)

    def _end(self, module: nn.Module, *_: Any) -> None:
        self._running.pop()
        if module in self._places:
            self._layer = self.end

    def _save(self, x: Tensor) -> Tensor:
        key = _storage(x)
        counts = self._layer is not None or x.is_floating_point()  # token ids are counted as inputs
        if counts and key not in self._weights and key not in self._seen:
            self._seen.add(key)
            layer, num_bytes = self._layer or self.end, x.untyped_storage().nbytes()
            layer.saved += num_bytes
            if self._mixers.intersection(self._running):
                layer.scan_saved += num_bytes
        self._alive.append(x)  # keeps the address of its storage from being reused
        return x

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if (layer := self._layer) is None:
            return out
        match func.overloadpacket:
            case packet if packet in _PRODUCTS:
                operands = [x for x in args if isinstance(x, Tensor) and x.ndim > 1][:3]
                self._multiply(layer, *operands[-2:], by_experts=packet is _aten._grouped_mm)
            case _aten.convolution:
                layer.convolution_flops += 2 * out.numel() * prod(args[1].shape[1:])
            case _aten.sum if len(args) > 1 and self._mixers.intersection(
                self._running
            ):  # an element-wise product with a sum
                layer.scan_flops += 2 * args[0].numel()
        return out

    def _multiply(self, layer: _Layer, a: Tensor, b: Tensor, *, by_experts: bool) -> None:
        """Count a matrix product of a (..., T, I) and b (..., I, O)."""
        if not (found := self._weights.get(_storage(b)) or self._weights.get(_storage(a))):
            if self._mixers.intersection(self._running):
                layer.scan_flops += 2 * a.numel() * b.shape[-1]
            else:  # a weight in another dtype: routers multiply in float32
                layer.matrices += b.numel()
            return
        weight, holder = found
        visits = a.numel() // a.shape[-1] // self._num_tokens
        count = weight.numel()
        if by_experts:
            layer.experts, layer.num_active = holder, visits
            count = count // len(weight) * visits
        layer.matrices += count
        if isinstance(holder, _LINEAR):
            holder = self._parents[holder]
        layer.products.setdefault(holder, []).append((visits * b.shape[-2], b.shape[-1]))

    def linear_layers(self, layer: _Layer) -> dict[str, tuple[Any, str]]:
        """Return name -> (module, kind) for the linear layers of a layer. The kind is "mixer"
        inside a module that mixes tokens, else "mlp"."""
        assert layer.module is not None
        inside, found = dict(layer.module.named_modules()), {}
        for name, module in inside.items():
            if module in self.linears:
                ends = [i for i, letter in enumerate(name) if letter == "."] or [0]
                met = any(inside[name[:end]] in layer.met for end in ends)
                found[name] = module, "mixer" if met else "mlp"
        return found

    def matrices(self, layer: _Layer, new: frozenset[str]) -> Iterator[Matrix]:
        """Yield the matrices of a layer that adapters may change, in its modules named in `new`."""
        assert layer.module is not None
        linears = self.linear_layers(layer)
        for name, (module, kind) in linears.items():
            if name in new:
                yield name, sum(module.weight.shape), kind, module.weight.numel()
        for name, weight in layer.module.named_parameters():
            is_bare = name.rpartition(".")[0] in new.difference(linears)
            if is_bare and weight.ndim in (2, 3):
                count = weight.shape[0] if weight.ndim == 3 else 1
                yield name, count * sum(weight.shape[-2:]), "bare", weight.numel()

    def attend(
        self, what: Pass, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule,
        sinks: Tensor | None, source: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        found = self._met()
        found.heads = len(q), len(k), q.shape[-1], rule.value_width or q.shape[-1]
        found.window = rule.window or rule.block
        found.stored = found.stored or len(k) * sum(found.heads[2:])
        return _Attention.apply(q, k, v)  # type: ignore[no-any-return, no-untyped-call]

    def take_latents(self, what: Pass, layer: int, latents: Tensor, expand: Any) -> Tensor:
        assert self._layer is not None
        self._layer.stored = latents.shape[-1]
        return latents

    def state_slices(self) -> list[SliceRows]:
        rows = slice(0, self._num_tokens)
        return [SliceRows(0, rows, continues=False, is_continued=True)]

    def leave(self, what: Pass, layer: int, index: int, y: Tensor, states: Any) -> Tensor:
        self._met().states = states
        return y

    def mixed(self, what: Pass, layer: int) -> None:
        self._met()

    def route(self, what: Pass, router: str, logits: Tensor) -> None:
        if self._layer is not None and self._has_router_loss and logits.requires_grad:
            self._layer.saved += logits.nbytes  # their gradient, until the backward

    def _met(self) -> _Layer:
        layer = self._layer
        assert layer is not None, "tokens that meet outside of the layers"
        layer.before_kv = layer.matrices
        layer.met.update(self._running)
        return layer


class _Attention(torch.autograd.Function):
    """Autograd function that saves the same tensors as furlong's attention: q (N, T, H), k and v
    (K, T, H), output and log-sum-exp. It computes nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, out, lse)
        return out


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _measured(config: Any, source: str) -> ModelShape:
    whole = _built(config, source)
    kinds = _kinds(whole)
    # a second layer of each kind: the first also saves what is made once for all
    kept = [n for n, kind in enumerate(kinds) if kinds[:n].count(kind) < 2]
    try:
        chunks = _chunks(_built(config, source, kept))
    except Exception:  # a layer that needs results of one that was left out
        chunks = _chunks(_built(config, source))
        kept = list(range(len(kinds)))
    shapes = {kinds[n]: _layer_shape(chunks, n, kinds[n], whole.config) for n in kept}
    return _model_shape(whole, tuple(shapes[kind] for kind in kinds), chunks)


def _built(config: Any, source: str, kept: Sequence[int] | None = None) -> HFDecoder:
    """Build the model on meta, with placeholders for layers other than `kept`; None: keep all."""
    base = model_of_config(config, source, dtype=torch.bfloat16).eval()
    if kept is not None and len(kept) < config.get_text_config().num_hidden_layers:
        layers = layer_list(base)[1]
        for n in set(range(len(layers))).difference(kept):
            layers[n] = in_place_of(layers[n], PlaceholderLayer())
    return HFDecoder(base, max_seq_len=num_positions(config))


def _kinds(model: HFDecoder) -> list[tuple[int, frozenset[str], Any]]:
    """Return (number of parameters, names of modules, key) for each layer. Layers with equal keys
    are equal. Parameters and modules that an earlier layer has too are left out of a layer's number
    and names."""
    lists = [x for x in vars(model.config).values() if isinstance(x, list)]
    lists = [x for x in lists if len(x) == model.num_layers]
    seen: set[int] = set()
    found = []
    for n, layer in enumerate(model.layers):
        new = {id(p): p.numel() for p in layer.parameters() if id(p) not in seen}
        names = frozenset(name for name, m in layer.named_modules() if id(m) not in seen)
        seen |= new.keys() | {id(m) for m in layer.modules()}
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        found.append((sum(new.values()), names, (shapes, *(str(values[n]) for values in lists))))
    return found


def _chunks(model: HFDecoder) -> list[_Chunk]:
    """Return counts of a chunk, first in bfloat16, then in float32. For each dtype the first count
    is with all parameters trained; the others are with adapters, one for each entry of
    `_ADAPTERS`."""
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        model.base.to(dtype)
        plain = _passed(model, ())
        found += [plain, *(_passed(model, _adapted(plain, *parts)) for parts in _ADAPTERS)]
    return found


def _num_tokens(config: Any) -> int:
    if family_of(config.model_type).recurrent == "token by token":
        return _FEW_TOKENS
    sizes = (getattr(config, name, None) for name in INNER_CHUNKS)
    return max(_TOKENS, *(2 * size for size in sizes if isinstance(size, int)), 0)


def _passed(model: HFDecoder, adapted: Sequence[nn.Module]) -> _Chunk:
    """Run a chunk and return its counts. Only the linear layers `adapted` are trained; if there are
    none, all parameters are."""
    num_tokens = _num_tokens(model.config)
    if adapted:
        model.base.requires_grad_(False)
        # under adapters of earlier layers, hidden states that enter a layer require a gradient
        model.base.get_input_embeddings().requires_grad_(True)
        for linear in adapted:
            linear.weight.requires_grad_(True)
    chunk = _Chunk(model, num_tokens)
    ids, positions = (torch.arange(num_tokens, device="meta") for _ in range(2))
    try:
        with model.installed(), chunk.watching(model.decoder):
            (stage,) = model.stages((model.num_layers,))
            stage.run(ids, positions, chunk, Pass("graph"))
    finally:
        model.base.requires_grad_(True)
    return chunk


def _adapted(chunk: _Chunk, *kinds: str) -> list[nn.Module]:
    """Return the linear layers of `kinds` ("mixer" or "mlp")."""
    found = [chunk.linear_layers(layer).values() for layer in chunk.layers]
    return [module for module, kind in chain(*found) if kind in kinds]


def _layer_shape(
    chunks: Sequence[_Chunk], n: int, kind: tuple[int, frozenset[str], Any], config: Any
) -> LayerShape:
    """Return the `LayerShape` of layer `n`. `chunks`: the counts that `_chunks` returns; `kind`:
    the layer's entry in the result of `_kinds`."""
    layers, parameters = [chunk.layers[n] for chunk in chunks], kind[0]
    layer, num_tokens, hidden = layers[0], _num_tokens(config), config.hidden_size
    heads, kv_heads, dim, value = layer.heads
    states = [(x.dtype == torch.float32, x.numel()) for x in layer.states.values()]
    wide = sum(count for is_wide, count in states if is_wide)
    scan_flops = max(layer.scan_flops / num_tokens, _ELEMENTWISE * wide)
    experts = list(layer.experts.parameters()) if layer.experts else []
    saved = [one.saved / num_tokens for one in layers]
    # last matrices of token-wise modules; that of an MLP maps back to the hidden size
    apart = [products[-1] for m, products in layer.products.items() if m not in layer.met]
    return LayerShape(
        parameters=parameters,
        matrices=layer.matrices,
        before_kv=layer.before_kv,
        expert_parameters=sum(p.numel() for p in experts),
        num_experts=len(experts[0]) if experts else 1,
        num_active=layer.num_active,
        width=sum(inner for inner, outer in apart if outer == hidden),
        window=layer.window,
        key_flops=2 * heads * (dim + value),
        query_size=heads * dim,
        output_size=heads * value,
        kv_width=kv_heads * (dim + value),
        stored=layer.stored,
        state_float32=wide,
        state_columns=sum(count for is_wide, count in states if not is_wide),
        scan_flops=round(scan_flops + layer.convolution_flops / num_tokens),
        adaptable=tuple(chunks[0].matrices(layer, kind[1])),
        saved=(tuple(saved[:4]), tuple(saved[4:])),  # type: ignore[arg-type]
        scan_saved=(layers[0].scan_saved / num_tokens, layers[4].scan_saved / num_tokens),
    )


def _model_shape(
    whole: HFDecoder, layers: tuple[LayerShape, ...], chunks: Sequence[_Chunk]
) -> ModelShape:
    config, base, decoder = whole.config, whole.base, whole.decoder
    first = next(name for name, module in base.named_modules() if module is whole.layers[0])
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    attending = next((n.heads for n in chunks[0].layers if n.heads[0]), (1, 1, 0, 0))
    own = {id(p) for layer in whole.layers for p in layer.parameters()}
    own |= {id(p) for m in (embedding, head) if m is not None for p in m.parameters()}
    beside = {n: p.numel() for n, p in decoder.named_parameters() if id(p) not in own}
    names = {m: name for name, m in chunks[0].decoder.named_modules()}
    before = tuple(f"{names[m]}." for m in chunks[0].before if names[m])
    entrance = sum(count for name, count in beside.items() if name.startswith(before))
    bias = getattr(head, "bias", None)
    num_tokens, hidden = _num_tokens(config), config.hidden_size
    ends = [c.end.saved / num_tokens + hidden * (2 if i < 4 else 4) for i, c in enumerate(chunks)]
    return ModelShape(
        family=config.model_type,
        hidden_size=hidden,
        num_heads=for_all_layers(config, "num_attention_heads") or attending[0],
        num_kv_heads=for_all_layers(config, "num_key_value_heads") or attending[1],
        head_dim=attending[2],
        vocab_size=embedding.weight.shape[0],
        tied_head=is_tied(base),
        layers=layers,
        entrance_parameters=entrance,
        final_parameters=sum(beside.values()) - entrance + (0 if bias is None else len(bias)),
        final_saved=(tuple(ends[:4]), tuple(ends[4:])),  # type: ignore[arg-type]
        layers_name=first.rpartition(".")[0],
        num_positions=num_positions(config),
    )
