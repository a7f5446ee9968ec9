"""The decoder's forward in chunks: `chunked(model, options)`, for trainers that call the model.

A trainer calls the model, and the model calls its decoder, whose forward cuts the batch into chunks
and returns final hidden states with a graph. Head and loss stay the model's or the trainer's, so a
trainer runs unchanged. Calls without gradients that make a cache, such as generation, use the
original forward, and so do copies of the model.

    B rows of a batch, T columns, D hidden size
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from furlong.errors import ConfigError, UnsupportedModelError, in_short
from furlong.kv.pools import Storage
from furlong.models.attention import CACHE_ARGUMENTS, patched
from furlong.models.decoder import DecoderOutput, HFDecoder
from furlong.models.placeholders import decoder_of
from furlong.models.routers import ROUTER_LOGITS
from furlong.models.support import bare_model, unwrapped
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import require_two_phases
from furlong.runtime.batch import ShiftedSequence, require_type
from furlong.runtime.distributed.consensus import run_on_all
from furlong.runtime.distributed.fsdp import end_forward, passed_over, reshard
from furlong.runtime.distributed.mesh import Ranks
from furlong.runtime.hf_batches import IMPLIED, labels_of_padding, padding_read, read_padded
from furlong.runtime.session import Session
from furlong.runtime.two_phase import token_values

_FORWARD = "furlong_forward"
_HOOKS = "furlong_hooks"
_READ = {
    "input_ids", "attention_mask", "position_ids", "use_cache", ROUTER_LOGITS, *CACHE_ARGUMENTS,
}  # fmt: skip
# not read by decoders: logits_to_keep is for heads, margin for TRL's RewardTrainer loss
_HARMLESS = {
    "cache_position", "num_items_in_batch", "return_dict", "is_causal", "logits_to_keep", "margin",
}  # fmt: skip
_IMAGES = "chunks are made of token ids, so that embeddings of images would get no gradient"
_REFUSED = {
    "inputs_embeds": (
        "chunks are made of token ids, so that embeddings would get no gradient",
        "pass input_ids; prompt tuning and images train without furlong",
    ),
    "token_type_ids": (
        "some families add an embedding of them, of zeros too",
        "leave the key out: tokenizer(..., return_token_type_ids=False), or "
        'dataset.remove_columns("token_type_ids")',
    ),
    "pixel_values": (_IMAGES, "train on text alone"),
    "output_hidden_states": (
        "those of every layer would be as long as the sequence", "read last_hidden_state",
    ),
    "output_attentions": ("attention weights of a whole sequence never exist", "leave it out"),
}  # fmt: skip

_M = TypeVar("_M", bound=nn.Module)
Reduction = Literal["sum", "mean"]


def chunked(
    model: _M,
    options: ChunkOptions | None = None,
    *,
    max_seq_len: int | None = None,
    storage: Storage | None = None,
    share_prompts: bool = True,
    ranks: Ranks | None = None,
    process_group: ProcessGroup | None = None,
    reduction: Reduction = "sum",
) -> _M:
    """Make a model's forward run in chunks when gradients are needed; return the model.

    Call `chunked` before a trainer is created, also for a reference model, and before or after
    adapters are added. Another call changes the options, and `unchunked` restores the original
    forward.

    Any head works, such as a reward model's, and logits are computed for all tokens at once.
    Autocast, hooks, `DistributedDataParallel` and `torch.autograd.grad` work as before, with one
    exception: in a hook, a layer's outputs are those of a chunk, without a gradient. Evaluations
    run in chunks if they make no cache: with labels, or with `use_cache` (default: the config's)
    False.

    With `ranks` or a `process_group` all processes call the model together, those of a replica with
    the same batch, and make the same loss of its outputs. Gradients are those of the sum of all
    replicas' losses, also for the model's own head, whose whole weights are gathered in each call
    of the model: nothing may average or add up gradients again. FSDP2 divides the weights. Trainers
    that expect gradients as of `DistributedDataParallel` take `reduction="mean"`; accelerate then
    leaves the model as it is.

    Args:
        options: Default: `keep="auto"`, which keeps as much as memory holds. Graphs are not kept
            (`num_retained` is 0).
        max_seq_len, storage, ranks, process_group: See `furlong.Engine`. In a pipeline each process
            has the whole model, of which it trains its stage.
        reduction: With several replicas, whether gradients are those of the "sum" or of the "mean"
            of their losses.
        share_prompts: Rows of a call with equal first tokens, at least a chunk of them, share their
            computation.

    Raises:
        UnsupportedModelError: For a model that cannot be trained exactly. Calls of the model raise
            ConfigError or DataError for arguments that chunks do not support.
    """
    options = options or ChunkOptions(keep="auto")
    require_type(options, ChunkOptions)
    require_two_phases(options)
    decoder: Any = _decoder(model)
    if "forward" in decoder.__dict__ and _FORWARD not in decoder.__dict__:
        raise ConfigError(
            given=f"{type(decoder).__name__} with a forward that was set on it",
            required="a decoder whose forward is its class's own",
            source="the model passed to furlong.chunked",
            change="call furlong.chunked first, then what wraps the decoder",
        )
    if reduction not in get_args(Reduction):
        raise ConfigError(
            given=f"reduction={in_short(repr(reduction), 60)}",
            required="sum or mean",
            source="the arguments of furlong.chunked",
            change="mean gives the gradients of DistributedDataParallel",
        )
    session = Session(
        model, max_seq_len=max_seq_len, compute_dtype=None, storage=storage, is_entered=True,
        ranks=ranks, process_group=process_group,
    )  # fmt: skip
    if reduction == "mean" and session.ranks is not None and session.ranks.pp > 1:
        raise ConfigError(
            given=f'reduction="mean" with {session.ranks.pp} pipeline stages',
            required="a loop of your own: trainers of others clip and save each stage by itself",
            source="the arguments of furlong.chunked",
            change="divide the loss by ranks.dp, and clip with "
            "furlong.Engine(model, ranks=ranks).clip_gradients(max_norm)",
        )
    former: ChunkedForward | None = decoder.__dict__.get(_FORWARD)
    _install(decoder, ChunkedForward(session, options, share_prompts, reduction))
    autocast = session.ranks is None
    try:
        with session.call("the making of a chunked model", takes_autocast=autocast):
            run_on_all(session.ranks, lambda: _require_whole(session))
        if session.ranks is not None:  # accelerate would put DDP around it
            vars(model)["_is_accelerate_prepared"] = reduction == "mean"
    except BaseException:
        _remove(decoder)
        if former is not None:
            _install(decoder, former)
        raise
    return model


def unchunked(model: _M) -> _M:
    """Restore the decoder's original forward; return the model. Raises ConfigError for a model that
    several processes train."""
    inside: list[Any] = [module for module in model.modules() if _FORWARD in module.__dict__]
    for decoder in inside or [_decoder(model)]:  # also in models that `chunked` would refuse now
        in_chunks: ChunkedForward | None = decoder.__dict__.get(_FORWARD)
        if in_chunks is not None and in_chunks.session.ranks is not None:
            raise ConfigError(
                given=f"a model that {in_chunks.session.ranks.num_processes} processes train",
                required="a model that this process has whole: the original forward would train "
                "nothing of divided weights, or one stage alone",
                source="a call of furlong.unchunked",
                change="save the weights and load the model again",
            )
        _remove(decoder)
    return model


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The decoder's forward: in chunks, or the original in a copy of the model."""
    in_chunks = self.__dict__.get(_FORWARD)
    if in_chunks is None:  # a copy of the model, or one that was loaded
        return type(self).forward(self, *args, **kwargs)
    return in_chunks(self, *args, **kwargs)


def _decoder(model: nn.Module) -> nn.Module:
    bare: Any = bare_model(model)
    if not hasattr(bare, "get_decoder"):
        raise UnsupportedModelError(
            given=f"{type(bare).__name__}, which has no get_decoder()",
            required="a causal decoder of transformers, also with adapters of peft",
            source="the model that was passed",
            change="pass the language model inside it",
        )
    return decoder_of(bare)


def _install(decoder: Any, in_chunks: ChunkedForward) -> None:
    """Put a forward in chunks into the decoder, and its hooks into the model."""
    _remove(decoder)
    model: nn.Module = in_chunks.session.given
    bare = bare_model(model)
    hooks = [bare.register_forward_pre_hook(_with_labels, with_kwargs=True)]
    if in_chunks.session.ranks is not None:
        hooks += [
            model.register_forward_pre_hook(in_chunks.head.enter),
            model.register_forward_hook(in_chunks.head.leave, always_call=True),
        ]
        inside, refuse = {*decoder.modules()}, partial(_refuse_by_itself, decoder)
        for module in bare.modules():
            if module not in inside and any(x is not None for x in module._parameters.values()):
                hooks.append(module.register_forward_pre_hook(refuse))
    decoder.__dict__[_FORWARD], decoder.__dict__[_HOOKS] = in_chunks, hooks
    decoder.__dict__["forward"] = MethodType(forward, decoder)


def _remove(decoder: Any) -> None:
    if decoder.__dict__.pop(_FORWARD, None) is not None:
        decoder.__dict__.pop("forward", None)
        for hook in decoder.__dict__.pop(_HOOKS):
            hook.remove()


def _require_whole(session: Session) -> None:
    """Raise ConfigError if another stage of a pipeline has modules of this process's model."""
    own, num_layers = session.model.local_layers, session.model.num_layers
    if len(own) < num_layers:
        raise ConfigError(
            given=f"{session.model.name} with layers {own.start} to {own.stop - 1} of {num_layers}",
            required="the whole model on each process, since each runs its forward and its head",
            source="the model passed to furlong.chunked, and the ranks",
            change="build the whole model on each process, or call Engine.token_values of its part",
        )


class WholeHead:
    """Puts whole weights into the modules outside the decoder while the model's forward runs, in
    the places of weights that are divided, or that another stage trains."""

    def __init__(self) -> None:
        self._stack: ExitStack | None = None
        self.reads_padding = False
        """Whether the call of the model has labels that padding would predict."""

    @property
    def is_entered(self) -> bool:
        """Whether the model's forward runs."""
        return self._stack is not None

    def enter(self, model: nn.Module, *_: Any) -> None:
        """Forward pre-hook of the model."""
        self.leave(model)
        self._stack = ExitStack()

    def leave(self, model: nn.Module, *_: Any) -> None:
        """Forward hook of the model."""
        end_forward(unwrapped(model))  # an error may have left it begun
        if self._stack is not None:
            self._stack.close()
        self._stack = None

    def after(self, call: Callable[[], None]) -> None:
        """Make a call when the model's forward ends; at once, outside of it."""
        if self._stack is None:
            call()
        else:
            self._stack.callback(call)

    def remove(self) -> None:
        """Take the weights of an earlier call of the decoder out."""
        if self._stack is not None:
            self._stack.close()

    def put(self, model: HFDecoder, weights: Iterable[Tensor]) -> None:
        """Put weights in, in the order of `HFDecoder.outside`. A decoder that is not called by its
        model has no head after it."""
        if self._stack is None:
            return
        inside = {*model.decoder.modules()}
        self._stack.enter_context(passed_over(m for m in model.base.modules() if m not in inside))
        places = zip(model.outside, weights, strict=True)
        self._stack.enter_context(patched((own, name, x) for (own, name, _), x in places))


@dataclass(frozen=True, slots=True)
class ChunkedForward:
    session: Session
    options: ChunkOptions
    share_prompts: bool
    reduction: Reduction
    head: WholeHead = field(default_factory=WholeHead)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # copied and saved models have None here

    def __call__(self, decoder: Any, *args: Any, **kwargs: Any) -> Any:
        given = _named(decoder, args, kwargs)
        if self.session.state.is_inside:  # furlong's own
            return type(decoder).forward(decoder, *args, **kwargs)
        trains = self.wants_gradients(given)
        if not trains and self.is_plain(decoder, given):
            return self._whole(
                decoder, given, lambda: type(decoder).forward(decoder, *args, **kwargs)
            )
        self.head.remove()
        end_forward(unwrapped(self.session.given))  # the model's own, which encloses this call
        cells: list[int] = []
        reads_padding, self.head.reads_padding = self.head.reads_padding, False

        def read() -> list[ShiftedSequence]:
            if reads_padding:
                raise padding_read("a loss")
            if trains:
                _refuse_caches(decoder, given)
            _refuse_unknown(decoder, given)
            sequences, cells[:] = read_padded(
                given["input_ids"], given.get("attention_mask"), given.get("position_ids"),
                has_cache=_makes_cache(decoder, given), model_type=decoder.config.model_type,
            )  # fmt: skip
            return sequences

        with ExitStack() as modes:
            if torch.is_inference_mode_enabled():  # pooled buffers outlive this mode
                modes.enter_context(torch.inference_mode(False))
                modes.enter_context(torch.no_grad())
            asked = given.get(ROUTER_LOGITS)
            routers = getattr(decoder.config, ROUTER_LOGITS, False) if asked is None else asked
            states = token_values(
                self.session, read, self.options, None, share_prompts=self.share_prompts,
                routers=bool(routers),
            )  # fmt: skip
        if (ranks := self.session.ranks) is not None:
            model = self.session.model
            if self.reduction == "mean":
                for own in (x for x in states if x.requires_grad):
                    own.register_hook(partial(_divided, ranks.dp))  # type: ignore[no-untyped-call]
            num_outputs = len(states) - len(model.outside)
            self.head.put(model, states[num_outputs:])
            states = states[:num_outputs]
        own, *of_routers = (
            _joined(given["input_ids"], cells, states[start : start + len(cells)])
            for start in range(0, len(states), len(cells))
        )
        logits = tuple(x.flatten(0, 1) for x in of_routers) if routers else None
        output = DecoderOutput(last_hidden_state=own, router_logits=logits)
        return output.to_tuple() if given.get("return_dict") is False else output

    def wants_gradients(self, given: Mapping[str, Any]) -> bool:
        """Return whether autograd would record the call. It does if gradients are enabled and a
        parameter or a tensor in the arguments (embeddings, or cached K,V of prompt tuning) requires
        gradients, or if a hook makes hidden states require gradients."""
        if not torch.is_grad_enabled():
            return False
        parameters = self.session.given.parameters()
        if any(x.requires_grad for x in chain(parameters, _tensors(given.values()))):
            return True
        if self.session.ranks is not None:
            return False  # hooks of several processes may differ
        with self.session.call("a call of a chunked model", takes_autocast=True):
            return self.session.records()

    @property
    def is_outdated(self) -> bool:
        """Whether this process's model holds layers that another stage has trained."""
        ranks = self.session.ranks
        return ranks is not None and ranks.pp > 1 and self.session.state.trained_layers is not None

    def is_plain(self, decoder: Any, given: Mapping[str, Any]) -> bool:
        """Whether to call the original forward, for a call without gradients: if it uses or makes a
        KV cache."""
        if _caches(given) or given.get("input_ids") is None:
            return True
        # in train mode, and with outdated layers, a cache counts only if `use_cache` asks for it
        is_asked = not (decoder.training or self.is_outdated) or given.get("use_cache") is not None
        return is_asked and _makes_cache(decoder, given)

    def _whole(self, decoder: Any, given: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        """Call the original forward, which gathers divided weights; they are divided again after
        the model's forward, since an optimizer would take gathered ones for parameters."""
        ranks = self.session.ranks
        if ranks is None or not (ranks.divides or self.is_outdated):
            return call()

        def require_trained() -> None:
            if self.is_outdated:
                raise _refusal(
                    decoder, "a KV cache in a pipeline that has trained",
                    "pass use_cache=False, or save the model and load it for generation",
                    "each process has trained the layers of its stage alone",
                )  # fmt: skip

        try:
            run_on_all(ranks, require_trained, "a call without chunks")
            return call()
        finally:
            self.head.after(partial(reshard, unwrapped(self.session.given)))


def _divided(number: int, gradient: Tensor) -> Tensor:
    return gradient / number


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in a call's arguments, also in layers of a cache."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
        for layer in getattr(value, "layers", ()):
            yield from _tensors(vars(layer).values())


def _caches(given: Mapping[str, Any]) -> list[Any]:
    """Return a call's cache arguments, however transformers names them."""
    return [given[name] for name in CACHE_ARGUMENTS if given.get(name) is not None]


def _makes_cache(decoder: Any, given: Mapping[str, Any]) -> bool:
    """Whether transformers would make a cache for this call. With a cache, transformers does not
    detect packed sequences."""
    if getattr(decoder, "gradient_checkpointing", False) and decoder.training:
        return False
    use_cache = given.get("use_cache")
    return bool(getattr(decoder.config, "use_cache", False) if use_cache is None else use_cache)


def _named(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    if not args:
        return kwargs
    bound = inspect.signature(type(decoder).forward).bind_partial(decoder, *args).arguments
    return {**dict(list(bound.items())[1:]), **kwargs}


def _refuse_unknown(decoder: Any, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments that chunks do not support."""
    config = decoder.config
    asked = {name: True for name in _REFUSED if getattr(config, name, None) is True}
    given = asked | {name: x for name, x in given.items() if x is not None}
    if given.get("is_causal") is False:
        raise _refusal(decoder, "is_causal=False", "train with causal attention")
    embeddings = decoder.get_input_embeddings()
    if decoder.training and getattr(embeddings, "neftune_noise_alpha", None) is not None:
        raise _refusal(
            decoder, "neftune_noise_alpha", "set neftune_noise_alpha=None in the trainer",
            "its noise falls with the tokens of a call, which are those of a chunk here",
        )  # fmt: skip
    known = _READ | _HARMLESS | (IMPLIED if "position_ids" in given else set())
    for name in sorted(given.keys() - known):
        if given[name] is not False:
            why, change = _REFUSED.get(name, (None, "leave it out"))
            raise _refusal(decoder, name, change, why)
    if torch.compiler.is_compiling():
        raise _refusal(decoder, "torch.compile of the model", "compile the loss, or nothing")
    if given.get("input_ids") is None:
        raise _refusal(decoder, "no input_ids", "pass input_ids of shape (B, T)")


def _joined(input_ids: Tensor, starts: list[int], states: list[Tensor]) -> Tensor:
    """Return a tensor (B, T, D) with the hidden states (t, D) of each sequence at its place in the
    batch, and 0 at padding. `starts`: where each sequence begins in `input_ids` when its rows are
    concatenated."""
    if len(states) == 1 and input_ids.shape == (1, len(states[0])):
        return states[0][None]
    # if only a head trains, gradients at padding must reach this node all the same
    leaf = states[0].new_empty(0, requires_grad=torch.is_grad_enabled())
    cells: Tensor = _Joined.apply(input_ids.numel(), starts, leaf, *states)  # type: ignore[no-untyped-call]
    return cells.view(*input_ids.shape, -1)


class _Joined(torch.autograd.Function):
    """Autograd function that writes the hidden states of sequences into (B * T, D), with 0 at
    padding.

    The gradients of all hidden states pass through its backward, which can therefore refuse every
    gradient at padding.
    """

    @staticmethod
    def forward(ctx: Any, num_cells: int, starts: list[int], _: Tensor, *states: Tensor) -> Tensor:
        stops = [start + len(own) for start, own in zip(starts, states, strict=True)]
        ctx.starts, ctx.stops = starts, stops
        cells = states[0].new_zeros((num_cells, states[0].shape[1]))
        for start, stop, own in zip(starts, stops, states, strict=True):
            cells[start:stop] = own
        return cells

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each sequence's hidden states. Raise DataError if a gradient at
        padding is not 0. NaN and inf at padding are ignored: an overflowed loss causes them."""
        gaps = zip([0, *ctx.stops], [*ctx.starts, len(grad)], strict=True)
        padding = torch.cat([grad[start:stop] for start, stop in gaps])
        if bool(padding.nan_to_num(0, 0, 0).any()):
            raise padding_read("a loss")
        own = (grad[start:stop] for start, stop in zip(ctx.starts, ctx.stops, strict=True))
        return None, None, None, *own


def _with_labels(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook for evaluations: calls with labels and without gradients.

    Sets use_cache=False unless the call sets it, so that the evaluation runs in chunks. Notes
    labels at padding, which the decoder's call refuses, on all processes: without a backward
    nothing else would detect them.
    """
    decoder: Any = decoder_of(model)
    in_chunks: ChunkedForward | None = decoder.__dict__.get(_FORWARD)
    if in_chunks is not None:
        in_chunks.head.reads_padding = False
    given = _named(model, args, kwargs)
    labels, mask = given.get("labels"), given.get("attention_mask")
    if (
        in_chunks is None or labels is None or in_chunks.session.state.is_inside
        or in_chunks.wants_gradients(given)
    ):  # fmt: skip
        return None
    if given.get("use_cache") is None and not _caches(given):
        given = {**given, "use_cache": False}
    if in_chunks.is_plain(decoder, given):
        return None
    in_chunks.head.reads_padding = (
        model.get_output_embeddings() is not None  # else labels are not next tokens
        and isinstance(labels, Tensor) and isinstance(mask, Tensor)
        and labels.ndim == 2 and labels.shape == mask.shape
        and bool(labels_of_padding(labels, mask))
    )  # fmt: skip
    return (), given


def _refuse_by_itself(decoder: Any, module: nn.Module, _: Any) -> None:
    """Forward pre-hook of modules outside the decoder, on several processes: refuse a call outside
    of the model's, in which neither whole weights would be put in nor gradients be added up."""
    in_chunks: ChunkedForward | None = decoder.__dict__.get(_FORWARD)
    if in_chunks is None or in_chunks.head.is_entered or in_chunks.session.state.is_inside:
        return
    if torch.is_grad_enabled() or in_chunks.is_outdated:
        raise ConfigError(
            given=f"a {type(module).__name__} outside the decoder, called by itself on several "
            "processes",
            required="calls of the whole model, which gather such weights and add up gradients",
            source="a call of a part, or of the forward, of a model that furlong.chunked has "
            "changed",
            change="call the model itself, model(...), or a head of your own, whose gradients you "
            "add up",
        )


def _refuse_caches(decoder: Any, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a cache in a call with gradients."""
    caches = _caches(given)
    if any(x.requires_grad for x in _tensors(caches)):
        raise _refusal(
            decoder, "keys and values that require a gradient, as those of prefix tuning do",
            "train adapters of another type, such as LoRA",
            "chunks begin with token ids, so that these would get no gradient",
        )  # fmt: skip
    if given.get("use_cache") or caches:
        raise _refusal(decoder, "a cache together with gradients", "pass use_cache=False")


def _refusal(decoder: Any, what: str, change: str, why: str | None = None) -> ConfigError:
    in_chunks: ChunkedForward | None = decoder.__dict__.get(_FORWARD)
    is_whole = in_chunks is None or in_chunks.session.ranks is None
    return ConfigError(
        given=f"{type(decoder).__name__} called with {what}" + (f": {why}" if why else ""),
        required="input_ids, attention_mask and position_ids of shape (B, T), without a cache",
        source="a call of a model that furlong.chunked has changed",
        change=change + ", or furlong.unchunked(model)" * is_whole,
    )
