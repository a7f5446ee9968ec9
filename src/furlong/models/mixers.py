"""Recurrent layers (mixers): find them, and pass their states and gradients from chunk to chunk.

Mixers are recognized by a forward of a few tokens that is traced, not by name. A layer calls
`AttentionInterface`, or uses the states of its cache, or both; a layer that does neither must be
token-wise, which the start-up check verifies. A mixer is then called slice by slice, with the
states that enter each slice.

transformers' layers read and write states through the cache that their decoder is given. The
decoder gets an `EmptyCache`, which stores nothing, since keys and values go through
`AttentionInterface`; a mixer gets a `SliceCache` for each slice. Both implement whatever a forward
asks of a cache. For one token with a state a mixer's forward takes its decoding path, which must be
avoided (see `SliceCache`). The cache then hides the state from the mixer, and only the mixer's scan
gets the state: the forward runs with its own code and defaults, but with other functions under the
scans' names; the mixer's module is unchanged.

Two computations keep states elsewhere. RecurrentGemma's block stores them on itself, and its
convolution ignores the tokens before a slice: `rg_lru` computes the same with the slice's cache. A
selective scan (Mamba) takes no initial state, but is linear in it: `with_state` adds the state's
contribution. With decays a_t = exp(A dt_t)

    h_t = a_t h_(t-1) + dt_t B_t u_t,    y_t = (C_t h_t + D u_t) silu(z_t),

so a state h_0 adds C_t (a_1 ... a_t) h_0 silu(z_t) to y_t, whatever computes the rest.

States pass from chunk to chunk as K,V do in SeCO. In the graph of a slice the state that enters is
a leaf, whose gradient is sent to the previous chunk (`receive_states`); the state that leaves is an
output, whose gradient the next chunk has sent (`send_states`). Both run inside the backward of the
cell, so that checkpoints and retained graphs need no special case.

In a sequence-parallel group a slice is in several runs of consecutive tokens, one process after the
other. Between two runs the states go by a message in the place of the store, and their gradients
come back; what enters or leaves a run is the same. All processes of the group enter each message,
in the order of slices and tokens, and in the reverse order in a backward.

    C channels, K tokens of a convolution's state, T tokens of a chunk or slice, D hidden size, W
    width of a block, b batch, d channels and n size of a selective scan's state
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, silu, softplus
from transformers import DynamicCache

from furlong.errors import UnsupportedModelError
from furlong.models.attention import BoundCell, bound, called_within, patched
from furlong.models.placeholders import num_returned
from furlong.ops.attention import AttentionRule
from furlong.ops.latent import Expansion
from furlong.plan.passes import Pass

StateKey = tuple[str, int]
"""(kind of a state: "conv", "recurrent" or "linear"; its number in the layer)."""
States = dict[StateKey, Tensor]
StateForms = dict[StateKey, tuple[torch.Size, torch.dtype]]
"""Shape and dtype of each state of a mixer, in the order in which a message holds them."""


class EmptyCache(DynamicCache):  # type: ignore[misc]
    """A cache that stores nothing and always has zero tokens."""

    layer: int | None = None
    """The last layer that passed keys and values: a shared block serves several layers."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.layer = layer_idx
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return True


class SliceCache(EmptyCache):
    """The states of one mixer for one slice: `before` it and `after` it.

    From a slice of one token the states are hidden: the mixer would take its decoding path, which
    writes in place, has kernels without a gradient and does not clamp. They are used all the same:
    `update_conv_state` prepends the convolution's state, and the scan starts from `initial`.
    """

    def __init__(self, before: Mapping[StateKey, Tensor], num_tokens: int) -> None:
        super().__init__()
        self.before, self._hides = before, num_tokens == 1
        self.after: States = {}
        self.unread = set(before)
        """Entering states that the mixer has not used; one that remains is an error."""
        self._initial: StateKey = ("recurrent", 0)

    def read(self, key: StateKey) -> Tensor | None:
        """Return a state that enters the slice, or None, and mark it as used."""
        self.unread.discard(key)
        return self.before.get(key)

    def initial(self) -> Tensor | None:
        """Return the recurrent state that a scan starts from."""
        return self.read(self._initial)

    def touch(self, layer: int) -> None:
        """Hook for subclasses, called when a state of `layer` is read or written."""

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        self.touch(layer)
        # later convolutions of a layer prepend their state themselves
        return None if self._hides and not state_idx else self.read(("conv", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer: int, state_idx: int = 0,
        conv_kernel_size: int | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """Return the convolution's input (1, C, T) with the state that enters, if any, in front:
        (1, C, K + T). The last columns become the state after the slice."""
        self.touch(layer)
        before, x = self.read(("conv", state_idx)), conv_states
        full = x if before is None else torch.cat([before, x], -1)
        width = x.shape[-1] if conv_kernel_size is None else conv_kernel_size
        missing = max(0, width - full.shape[-1])
        self.after["conv", state_idx] = pad(full, (missing, 0))[..., -width:]
        return full

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        self.touch(layer)
        self._initial = ("recurrent", state_idx)
        return None if self._hides else self.initial()

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.touch(layer_idx)
        self.after["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer: int) -> Tensor | None:
        self.touch(layer)
        return self.read(("linear", 0))

    def set_linear_cache(self, layer: int, linear_cache: Tensor) -> None:
        self.touch(layer)
        self.after["linear", 0] = linear_cache


def rg_lru_blocks(decoder: nn.Module) -> dict[nn.Module, int]:
    """Return RecurrentGemma's recurrent blocks in a decoder, each with the number of its layer."""
    layers = getattr(decoder, "layers", ())
    blocks = ((getattr(layer, "temporal_block", None), i) for i, layer in enumerate(layers))
    return {block: i for block, i in blocks if block is not None and is_rg_lru(block)}


def is_rg_lru(module: nn.Module) -> bool:
    return type(module).__name__ == "RecurrentGemmaRecurrentBlock"


def rg_lru(
    block: Any, current: Current, x: Tensor, position_ids: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Run a RecurrentGemma block on a slice x (1, T, D), starting from the states in `current`,
    which get the states after the slice. Return (output (1, T, D), None).

    The block resets its state where `position_ids` are 0, at the start of a sequence.
    """
    cache, num_tokens = current.cache, x.shape[1]
    assert cache is not None, "a block outside of a slice"
    gate = block.act_fn(block.linear_y(x))
    branch = block.linear_x(x).transpose(1, 2)  # (1, W, T)
    full = cache.update_conv_state(branch, 0, conv_kernel_size=block.conv1d_width)
    branch = block.conv_1d(full)[..., : full.shape[-1]][..., -num_tokens:]
    recurrence = block.rg_lru
    recurrence.recurrent_states = cache.initial()
    try:
        scanned = recurrence(branch.transpose(1, 2), position_ids)
        cache.update_recurrent_state(recurrence.recurrent_states, 0)
    finally:
        recurrence.recurrent_states = None
    return block.linear_out(scanned * gate), None


_TILE_ELEMENTS = 2**22


def with_state(
    y: Tensor, last: Tensor, before: Tensor, given: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Turn the result of a scan from zero into that of the same scan from state `before` (b, d, n).

    Args:
        y: (b, d, T), the scan's output.
        last: (b, d, n), the scan's last state.
        given: the scan's arguments by name.

    Returns:
        y and the last state, as if the scan had started from `before`.
    """
    steps, a, c, z = given["dt"], given["A"], given["C"], given.get("z")
    if given.get("delta_bias") is not None:
        steps = steps + given["delta_bias"].to(steps.dtype)[..., None]
    if given.get("delta_softplus"):
        steps = softplus(steps)
    wide = torch.promote_types(torch.promote_types(y.dtype, torch.float32), before.dtype)
    total, h = steps.to(wide).cumsum(-1), before.to(wide)  # (b, d, T), (b, d, n)
    num_tokens = max(1, _TILE_ELEMENTS // (h.numel() or 1))
    parts = []
    for own, read in zip(
        total.split(num_tokens, -1), c.to(wide).split(num_tokens, -1), strict=True
    ):
        decay = torch.exp(a.to(wide)[None, :, None, :] * own[..., None])  # (b, d, t, n)
        parts.append(torch.einsum("bdtn,bdn,bnt->bdt", decay, h, read))
    more = torch.cat(parts, -1)
    if z is not None:
        more = more * silu(z.to(wide))
    decayed = torch.exp(a.to(wide)[None] * total[..., -1:]) * h
    return (y + more.to(y.dtype)), (last + decayed.to(last.dtype))


_INITIAL = ("initial_state", "initial_states")


@dataclass
class Current:
    """Holds the cache of the slice that a mixer is computing."""

    cache: SliceCache | None = None
    num_scans: int = 0
    """Scans of the slice so far: some mixers scan their heads one by one."""
    forms: dict[torch.dtype, StateForms] = field(default_factory=dict)
    """dtype of the mixer's input -> forms of its states, for messages between processes."""


def mixer_forward(module: nn.Module, current: Current) -> Callable[..., Any]:
    """Return a mixer's forward, in which scans start from the state that enters the slice.

    Raises:
        UnsupportedModelError: the instance has a forward other than its class's.
    """
    if "forward" in module.__dict__:
        raise UnsupportedModelError(
            given=f"{type(module).__name__} with a forward that was put into this instance",
            required="recurrent layers that run by their class's own forward",
            source="the model that was passed",
            change="pass the model without wrappers (accelerate's hooks, compiled layers)",
        )
    if is_rg_lru(module):
        return partial(rg_lru, module, current)
    plain = inspect.unwrap(type(module).forward)
    scans = {
        name: scan
        for name in plain.__code__.co_names
        if (scan := _continued(name, plain.__globals__.get(name), current)) is not None
    }
    opened = FunctionType(
        plain.__code__, {**plain.__globals__, **scans}, plain.__name__, plain.__defaults__,
        plain.__closure__,
    )  # fmt: skip
    opened.__kwdefaults__ = plain.__kwdefaults__
    return MethodType(opened, module)


def _continued(name: str, function: Any, current: Current) -> Callable[..., Any] | None:
    """Return the call that replaces `function` if it is a scan, else None.

    A scan is recognized by its signature; single-step functions of decoding, by their names.
    """
    if not callable(function) or isinstance(function, type) or re.search("recurrent|update", name):
        return None
    try:
        takes = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if "return_last_state" in takes and not takes.keys() & set(_INITIAL):
        return partial(_scan_from_zero, function, current)
    initial = next((i for i in _INITIAL if i in takes), None)
    return None if initial is None else partial(_scan_from, function, initial, current)


def _scan_from(
    scan: Callable[..., Any], initial: str, current: Current, *args: Any, **kwargs: Any
) -> Any:
    """Call a scan with the state that enters the slice, if any, as the argument named `initial`."""
    assert current.cache is not None, "a scan outside of a slice"
    if kwargs.get(initial) is None:
        kwargs[initial] = current.cache.initial()
    return scan(*args, **kwargs)


def _scan_from_zero(
    scan: Callable[..., Any], current: Current, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Call a scan that takes no initial state, and add the entering state's contribution."""
    assert current.cache is not None, "a scan outside of a slice"
    number, before = current.num_scans, current.cache.initial()
    current.num_scans += 1
    y, last = scan(*args, **kwargs)
    if before is None:
        return y, last
    if before.ndim > last.ndim:  # a state of all heads, for scans of one head each
        before = before[:, number]
    given = inspect.signature(scan).bind(*args, **kwargs).arguments
    return with_state(y, last, before, given)


TokenMixing = tuple[Literal["attention", "states"], int]
"""(the way in which tokens mix: attention or a recurrent state, the layer)."""
NUM_TOKENS = 4
"""Tokens of the traced forward."""


@dataclass(frozen=True, slots=True)
class Probed:
    """The mixers of a decoder, and the ways in which its layers mix tokens, in forward order."""

    mixers: tuple[Mixer, ...] = ()
    events: tuple[TokenMixing, ...] = ()
    num_returned: int = 0
    """Length of the tuple that a layer returns; 0: it returns hidden states alone."""


class Probe(SliceCache):
    """Stands for cell and cache in one traced forward: records mixers and ways of mixing tokens."""

    def __init__(self) -> None:
        super().__init__({}, NUM_TOKENS)
        self.modules: list[nn.Module] = []
        """Modules whose forward is running, the innermost one last."""
        self.mixers: dict[nn.Module, int] = {}
        self.events: list[TokenMixing] = []
        self.num_returned: dict[nn.Module, int] = {}
        """Length of the tuple that a module returned; 0: no tuple."""

    def attend(
        self, what: Pass, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule,
        sinks: Tensor | None, source: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        self.events.append(("attention", layer))
        return q

    def take_latents(self, what: Pass, layer: int, latents: Tensor, expand: Expansion) -> Tensor:
        return latents

    def touch(self, layer: int) -> None:
        module = self.modules[-1]
        if module not in self.mixers:
            self.mixers[module] = layer
            self.events.append(("states", layer))


@contextmanager
def watching(
    decoder: nn.Module, attending: Sequence[nn.Module], device: torch.device
) -> Iterator[Probe]:
    """Context manager: record a forward of the decoder, which takes the yielded probe as its cache.

    `attending`: modules that may call `AttentionInterface`; `device`: where the forward computes.
    """
    watch, blocks = Probe(), rg_lru_blocks(decoder)
    positions = torch.arange(NUM_TOKENS, device=device)

    def begin(module: nn.Module, _: object) -> None:
        watch.modules.append(module)
        if module in blocks:  # its forward uses no cache
            watch.touch(blocks[module])

    def end(module: nn.Module, _: object, output: object) -> None:
        watch.modules.pop()
        watch.num_returned[module] = num_returned(output)

    with ExitStack() as stack:
        for module in decoder.modules():
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end).remove)
        stack.enter_context(bound(attending, watch, Pass("values"), positions, watch))
        stack.enter_context(torch.no_grad())
        yield watch


_BUCKET_TOKENS = 64
"""Width of the buckets of lengths that are batched; for shorter slices, powers of two."""


@dataclass(frozen=True, slots=True)
class SliceRows:
    """Consecutive tokens of a slice on one process, and how states enter and leave them.

    Where the process that has stored a slice's states has none of its first tokens, its part has no
    rows and passes the states on.
    """

    index: int
    """Number of the slice in the chunk."""
    rows: slice
    """Rows of the tokens among the process's rows of the chunk."""
    continues: bool
    """Whether states of an earlier chunk, which the process has stored, enter."""
    is_continued: bool
    """Whether a later chunk continues the slice's sequence after these tokens."""
    process: int = 0
    """Process of the sequence-parallel group that has the rows."""
    before: int | None = None
    """Process that sends the entering states, if another one has the tokens before these."""
    behind: int | None = None
    """Process that gets the states at the end, if another one has the next tokens of the slice."""

    @property
    def is_whole(self) -> bool:
        """Whether no state enters or leaves."""
        is_alone = self.before is None and self.behind is None
        return is_alone and not self.continues and not self.is_continued

    @property
    def num_tokens(self) -> int:
        return self.rows.stop - self.rows.start  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Mixer:
    """A module that mixes tokens through a recurrent state, and its layer."""

    module: nn.Module
    layer: int


@contextmanager
def relaying(mixers: Sequence[Mixer]) -> Iterator[None]:
    """Context manager: call each mixer slice by slice, and pass its states from chunk to chunk."""
    with patched((vars(mixer.module), "forward", _sliced(mixer)) for mixer in mixers):
        yield


def _sliced(mixer: Mixer) -> Callable[..., Any]:
    current = Current()
    return partial(_forward, mixer, mixer_forward(mixer.module, current), current)


def _forward(
    mixer: Mixer, own: Callable[..., Any], current: Current, *args: Any, **kwargs: Any
) -> Any:
    """Run a mixer slice by slice and return its output for the chunk."""
    pass_of = BoundCell.to(mixer.module)
    if pass_of is None:
        raise called_within(mixer.module)
    cell: Any = pass_of.cell  # with `runtime.cell.Cell`'s slices and states
    given, states = inputs_of(args, kwargs), States()
    parts_of_chunk = cell.state_slices()
    is_relayed = any(part.behind is not None for part in parts_of_chunk)
    forms = _forms(own, current, given) if is_relayed else {}
    found: list[tuple[int, Tensor]] = []  # (first row, output of these rows)
    output = None
    for parts in in_batches(parts_of_chunk):  # several are whole sequences, without states
        part, take, after = parts[0], partial(_rows_of, parts), States()
        y = take(given.x)
        if part.process == cell.process:
            before = States()
            if part.continues:
                y, before = cell.enter(mixer.layer, part.index, y)
            elif part.before is not None:
                y, before = cell.receive(part, y, states, forms)
            after = before
            if part.num_tokens:
                output, after = _call(mixer, own, current, given, y, take, before)
                y = first(output)
            if part.is_continued:
                y = cell.leave(pass_of.what, mixer.layer, part.index, y, after)
        if part.behind is not None:
            y, states = cell.pass_on(part, y, after, forms)
        if len(parts) == 1:
            found.append((part.rows.start, y))
        else:
            found += [(p.rows.start, y[n : n + 1, : p.num_tokens]) for n, p in enumerate(parts)]
    cell.mixed(pass_of.what, mixer.layer)
    assert output is not None, "a mixer without rows"
    # parts without rows have the input's dtype, and are there for their place in the graph
    ys = [y.to(first(output).dtype) for _, y in sorted(found, key=itemgetter(0))]
    y = ys[0] if len(ys) == 1 else torch.cat(ys, 1)
    return (y, *output[1:]) if isinstance(output, tuple) else y


def _call(
    mixer: Mixer, own: Callable[..., Any], current: Current, given: Inputs, x: Tensor,
    take: Callable[[Tensor], Tensor], before: States,
) -> tuple[Any, States]:  # fmt: skip
    """Call a mixer on some rows x of a chunk. Return (its output, states after the rows)."""
    cache = current.cache = SliceCache(before, x.shape[1])
    current.num_scans = 0
    try:
        own_args, own_kwargs = given.of(x, take, cache)
        output = own(*own_args, **own_kwargs)
    finally:
        current.cache = None
    if cache.unread:  # the slice was computed as if its sequence began with it
        raise _leaves_states(mixer, cache.unread)
    return output, cache.after


def _forms(own: Callable[..., Any], current: Current, given: Inputs) -> StateForms:
    """Return the forms of a mixer's states, which a process must know before states arrive. The
    first call finds them by a forward of one token."""
    x = given.x
    if x.dtype not in current.forms:
        cache = current.cache = SliceCache({}, 1)
        current.num_scans = 0
        devices = [x.device] if x.device.type == "cuda" else []
        try:
            # without a graph: a checkpointed layer must save the same tensors each time
            with torch.random.fork_rng(devices), torch.no_grad():
                args, kwargs = given.of(x[:, :1], lambda rows: rows[:, :1], cache)
                own(*args, **kwargs)
        finally:
            current.cache = None
            torch.clear_autocast_cache()  # else it would hold casts of weights without a graph
        current.forms[x.dtype] = {k: (s.shape, s.dtype) for k, s in sorted(cache.after.items())}
    return current.forms[x.dtype]


def _leaves_states(mixer: Mixer, unread: Collection[StateKey]) -> UnsupportedModelError:
    kinds = ", ".join(sorted({kind for kind, _ in unread}))
    return UnsupportedModelError(
        given=f"{type(mixer.module).__name__} (layer {mixer.layer}) computes a slice without the"
        f" state ({kinds}) that the tokens before it have left",
        required="recurrent layers that take their states from transformers' cache, and scans that"
        f" take one as {' or '.join(_INITIAL)}",
        source="the forward of the model's layers",
        change="train a model of another family, or report this one",
    )


def _rows_of(parts: Sequence[SliceRows], x: Tensor) -> Tensor:
    """Return the rows of x (1, T, ...) that belong to `parts`. The rows of one slice of t tokens
    are (1, t, ...). Those of B slices are (B, longest, ...), with padding on the right, which a
    causal layer never sees."""
    if len(parts) == 1:
        return x[:, parts[0].rows]
    longest, others = max(part.num_tokens for part in parts), (0, 0) * (x.ndim - 2)
    return torch.cat([pad(x[:, p.rows], (*others, 0, longest - p.num_tokens)) for p in parts])


def in_batches(parts: Sequence[SliceRows]) -> list[list[SliceRows]]:
    """Group slices into calls of a mixer. Whole sequences of similar lengths share a call, where
    padding less than doubles the tokens; every other slice has a call of its own."""
    batches: dict[tuple[int, ...], list[SliceRows]] = {}
    for number, part in enumerate(parts):
        n = part.num_tokens
        alike = (n.bit_length(),) if n < _BUCKET_TOKENS else (_BUCKET_TOKENS, n // _BUCKET_TOKENS)
        batches.setdefault(alike if part.is_whole else (0, 0, number), []).append(part)
    return list(batches.values())


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of a mixer for a whole chunk, with its hidden states `x` (1, T, D)."""

    x: Tensor
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def of(
        self, x: Tensor, take: Callable[[Tensor], Tensor], cache: EmptyCache
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and the named arguments for a call of the mixer on some rows of the
        chunk. In them `x` replaces the hidden states, and `cache` the cache.

        `take` selects the rows of every other tensor (1, T, ...).
        """
        cut = partial(self._cut, x, take, cache)
        return [cut(a) for a in self.args], {name: cut(a) for name, a in self.kwargs.items()}

    def to(self, dtype: torch.dtype) -> Inputs:
        """Return these inputs with floating-point tensors cast to `dtype`."""

        def cast(given: Any) -> Any:
            if isinstance(given, tuple):
                return tuple(cast(one) for one in given)
            is_cast = isinstance(given, Tensor) and given.is_floating_point()
            return x if given is self.x else given.to(dtype) if is_cast else given

        x = self.x.to(dtype)
        return Inputs(x, [cast(a) for a in self.args], {k: cast(a) for k, a in self.kwargs.items()})

    def _cut(
        self, x: Tensor, take: Callable[[Tensor], Tensor], cache: EmptyCache, given: Any
    ) -> Any:
        if given is self.x:
            return x
        if isinstance(given, EmptyCache):
            return cache
        if isinstance(given, tuple):
            return tuple(self._cut(x, take, cache, one) for one in given)
        is_of_tokens = isinstance(given, Tensor) and given.ndim > 1
        if is_of_tokens and given.shape[:2] == (1, self.x.shape[1]):
            return take(given)
        return given


def inputs_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs:
    """Wrap the arguments of a mixer's call; the first one must be its hidden states."""
    x = args[0] if args else next(iter(kwargs.values()))
    assert isinstance(x, Tensor) and x.ndim == 3, "a mixer without hidden states"
    return Inputs(x, args, kwargs)


def first(output: Any) -> Tensor:
    """Return the hidden states in a mixer's output."""
    found = output[0] if isinstance(output, tuple) else output
    assert isinstance(found, Tensor)
    return found


@dataclass(frozen=True, slots=True)
class Called:
    """A mixer and the inputs of one of its calls."""

    mixer: Mixer
    inputs: Inputs


def receive_states(
    x: Tensor,
    states: Mapping[StateKey, Tensor],
    send: Callable[[Mapping[StateKey, Tensor | None]], None],
) -> tuple[Tensor, States]:
    """Return x (1, T, D) and the states, as outputs of an autograd function whose backward calls
    `send` with the states' gradients."""
    if not torch.is_grad_enabled() or not states:
        return x, dict(states)
    # one input that requires grad makes autograd compute the states' gradients, even if x has none
    anchor = torch.empty(0, device=x.device, requires_grad=True)

    def back(grads: Sequence[Tensor | None]) -> None:
        send(dict(zip(states, grads, strict=True)))

    out, *entered = _ReceiveStates.apply(anchor, back, x, *states.values())  # type: ignore[no-untyped-call]
    return out, dict(zip(states, entered, strict=True))


def send_states(
    y: Tensor, states: Sequence[Tensor], later_grads: Callable[[], Sequence[Tensor | None]]
) -> Tensor:
    """Return y (1, T, D) as the output of an autograd function. In its backward the slice's final
    recurrent `states` get their gradients, which `later_grads()` returns: the next chunk has sent
    them. Without a graph, return y itself."""
    if not torch.is_grad_enabled() or not y.requires_grad:
        return y
    return _SendStates.apply(later_grads, y, *states)  # type: ignore[no-any-return, no-untyped-call]


def in_graph(y: Tensor) -> Tensor:
    """Return y as the output of an autograd node, also where nothing before it is trained, so that
    all processes of a group take part in the messages of a backward."""
    if not torch.is_grad_enabled():
        return y
    anchor = torch.empty(0, device=y.device, requires_grad=True)
    return _ReceiveStates.apply(anchor, lambda _: None, y)[0]  # type: ignore[no-any-return, no-untyped-call]


class _ReceiveStates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, send: Callable[..., None], x: Tensor, *states: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(anchor)
        ctx.send = send
        return x.view_as(x), *(state.view_as(state) for state in states)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dx: Tensor | None, *dstates: Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # a checkpointed layer first runs again, on all processes alike
        ctx.send(dstates)
        return None, None, dx, *(None for _ in dstates)


class _SendStates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, later_grads: Callable[[], Sequence[Tensor | None]], y: Tensor, *states: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y.new_empty(0))
        ctx.later_grads = later_grads
        return y.view_as(y)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # as above: its messages come before those of the backward
        return None, dy, *ctx.later_grads()
