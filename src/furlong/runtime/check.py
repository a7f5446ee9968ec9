"""The start-up self-check: is this model, cut into chunks, still the model that the user gave?

Random sequences are computed whole by the model itself, and by the executor: a plan of three
chunks, one of which drops its graph and computes it again from what it keeps. Compared are

- of a few tokens, whose tail shares a chunk with another sequence: final hidden states, and the
  gradient by the input embeddings of a loss at the last tokens alone. What reaches the embeddings
  of the first chunks then came through keys and values of later ones, and nothing else;
- the short sequence's logits, by the model's own forward, in chunks a few rows at a time;
- with a sliding window, hidden states of more tokens than the shortest window, without gradients.

What differs is refused by name. In 16 bits the bound is twice what the whole run itself moves when
the outputs of every attention and of the modules in it are rounded once more: many kernels know 16
bits alone, so that the same model in float32 is not always there to be compared.

Stages of some layers each are then compared with one stage of all, by a plan that retains graphs
from stage to stage and by one that goes layer-first.

A tiny twin has the model's class, config and number of layers, but few heads, small widths, short
lengths and random weights: the same code at the same cuts, in a fraction of a second. It is checked
beside a model whose attention blocks or temperature by position (Llama 4) begin to matter beyond
thousands of tokens, and in the place of a model of which a process holds one stage: every process
makes the same twin, whole, and as stages that hold what theirs does and nothing else.

Gradients of a whole model tell too little of recurrent layers: a state that is dropped moves them
by less than float32 rounds. So one mixer of each kind is a stage of its own, which is given random
hidden states, whole and in chunks, one of them of a single token. The loss is at the last chunk,
and gradients are compared by the rows that reach it through the recurrent state alone: those in
front of what its convolution joins.

    T tokens, D hidden size, K tokens that a convolution joins
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

from furlong.errors import UnsupportedModelError, UserError
from furlong.families import CHUNKED
from furlong.kv.arena import Arena
from furlong.kv.pools import Pools, Storage
from furlong.models.attention import CellAttention, bound, own_forward, scales_by_position
from furlong.models.build import draw_weights, model_of_config
from furlong.models.decoder import HFDecoder
from furlong.models.mixers import Called, Event, Mixer, SliceCache, first, relaying
from furlong.models.placeholders import hold, placeholders, uncuttable
from furlong.models.rope import num_positions
from furlong.models.shrink import LONGEST_TOKENS, shrink_config
from furlong.models.support import compiled_in_place, shortest_window
from furlong.ops.backends.base import Backend
from furlong.ops.backends.select import is_of_machine
from furlong.ops.loss import IGNORE_INDEX
from furlong.plan.passes import Pass
from furlong.plan.plan import Backward, Chunk, ChunkPlan, Forward, Order, Recompute, Slice
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import assemble, walk_group
from furlong.runtime.batch import Batch, ChunkInputs, ShiftedSequence, batch_of
from furlong.runtime.cell import Cell
from furlong.runtime.distributed.comms import Comms
from furlong.runtime.executor import Executor, Layers
from furlong.runtime.head import OutputHead
from furlong.runtime.rng import RNGState, modes_kept, replayed
from furlong.testing import relative_error

Run = dict[str, Tensor]
"""Tensors to compare, by name."""
GRADIENTS = "gradients"
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
_CUT_BOUND, _NARROW_CUT_BOUND = 1e-5, 1e-3
"""Bounds of stages: the same operations run in the same order, but for what a family does outside
of its layers; in 16 bits, for the rounding of sums, which a GPU may order otherwise."""
_NUM_TOKENS = 16
_SHORT_TOKENS = 4
_LOSS_TOKENS = 4
"""The last tokens of the long sequence, whose hidden states the loss is made of."""
_BEYOND_WINDOW_TOKENS = 24
_LONGEST_WINDOW_TOKENS = 8192
"""Beyond longer windows nothing is computed whole: its memory would be that of the sequence."""
_TILE_TOKENS = 3
_NUM_ROUNDINGS = 4
_MIN_LOSS_SCALE = 2.0**-20


def self_check(model: HFDecoder, backend: Backend, heights: Sequence[int] | None = None) -> float:
    """The largest relative L2 error of what is compared; raises if one is too large.

    `heights`: layers of each stage, for a check of these stages against one of all layers; a model
    that is here whole has passed the other check before. None: that other check.

    Runs in the mode in which the model is, or in evaluation mode where it draws random numbers,
    with the parameters as they are now, and adds to no `.grad`. Buffers and generators are
    afterwards as before. Raises UnsupportedModelError for a model that differs in chunks, computes
    what is not finite, or whose forward changes a buffer.
    """
    whole = (model.num_layers,)
    heights = tuple(heights or whole)
    model.stages(heights)  # stages of other layers are no fault of the model
    is_whole = model.local_layers == range(model.num_layers)
    subjects = [model] if is_whole else []
    if not is_whole or hides_lengths(model):
        subjects.append(tiny_twin(model))
    errors = []
    if heights == whole or not is_whole:
        errors += [_check(subject, backend) for subject in subjects]
    if heights != whole:
        errors += [_check_cuts(subject, backend, heights, is_whole) for subject in subjects]
    return max(errors)


def _check(model: HFDecoder, backend: Backend) -> float:
    """The largest error of a whole model in chunks."""
    with _settled(model), cut_embeddings(model) as leaves:
        trial, ids = ComparedRuns(model, backend, leaves), _ids(model)
        errors = _compare(trial, partial(trial.whole, ids), partial(trial.chunked, ids))
        errors += _beyond_the_window(trial)
        with _refused(model, _fails_in_chunks):
            return max(errors + mixer_errors(model, backend))


def _check_cuts(
    model: HFDecoder, backend: Backend, heights: Sequence[int], is_whole: bool
) -> float:
    """The largest error of a model's stages of `heights` layers, in chunks, against one stage of
    all; where no process is whole, of models that hold one stage each.

    Raises UnsupportedModelError for a decoder that hands more from layer to layer than its hidden
    states, however little that matters.
    """
    found = []
    try:
        with _settled(model):
            parts = [model] * len(heights) if is_whole else held_by(model, heights)
            ids = _ids(model)
            with cut_embeddings(model, parts[0]) as leaves:
                trial = ComparedRuns(model, backend, leaves)
                truth = trial.chunked(ids)
                bounds = {
                    name: _NARROW_CUT_BOUND if value.dtype.itemsize < 4 else _CUT_BOUND
                    for name, value in truth.items()
                }
                for order in ("chunk-first", "layer-first"):
                    with _refused(model, _fails_in_chunks):
                        given = trial.chunked(ids, parts, heights, order)
                    errors = {name: relative_error(given[name], truth[name]) for name in truth}
                    found += _within(model, errors, bounds, "gives other {} in stages")
        return max(found)
    except UnsupportedModelError as error:  # whole, it has passed already
        raise uncuttable(model.name, error.given.removeprefix(model.name).lstrip()) from error


def _within(
    model: HFDecoder, errors: dict[str, float], bounds: dict[str, float], told: str,
    where: str = "causal attention only",
) -> list[float]:  # fmt: skip
    """The errors; raises UnsupportedModelError if one is above its bound. `told`: what a model
    does, with a place for what is compared; `where`: tokens meet."""
    for name, error in errors.items():
        if not error <= bounds[name]:
            raise refusal(
                model,
                f"{told.format(name)} (relative error {error:.1e})",
                f"a relative error of at most {bounds[name]:.0e}: tokens meet in {where}",
            )
    return list(errors.values())


@contextmanager
def _settled(model: HFDecoder) -> Iterator[None]:
    """Within it a model draws no random numbers. Raises UnsupportedModelError for one that does not
    run by itself, or whose forward changes a buffer."""
    before = RNGState.read(model.device)
    with modes_kept(model.model), torch.no_grad(), replayed(before, model.device):
        with _unchanged_buffers(model), _refused(model, _fails_whole):
            model.whole_logits(_ids(model)[1])
        if not RNGState.read(model.device).equals(before):
            model.model.eval()
        yield


@contextmanager
def _unchanged_buffers(model: HFDecoder) -> Iterator[None]:
    """Put changed buffers back, and raise UnsupportedModelError if there were any."""
    buffers = [
        (f"{path}.{name}".lstrip("."), module, name, buffer, buffer.clone())
        for path, module in model.model.named_modules()
        if not hasattr(module, "rope_type")  # a run's frequencies are chosen in place
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    changed = []
    try:
        yield
    finally:
        for path, module, name, buffer, before in buffers:
            same = (buffer == before) | (before != before)  # NaN equals nothing
            if module._buffers[name] is not buffer or not bool(same.all()):
                changed.append(path)
                module._buffers[name] = buffer.copy_(before)
    if changed:
        raise refusal(
            model,
            f"changes {changed[0]} by a forward",
            "modules that no forward changes: a whole sequence is one forward, its chunks are many",
            change="call eval() on this module, or take another one",
        )


def _ids(model: HFDecoder) -> list[Tensor]:
    """A long sequence (T,), to be cut, and a short one."""
    positions = num_positions(model.config) or _NUM_TOKENS
    return random_ids(model, [min(_NUM_TOKENS, positions), min(_SHORT_TOKENS, positions)])


def random_ids(model: HFDecoder, lens: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    highest = min(model.vocab_size, model.num_input_ids)
    ids = [torch.randint(highest, (n,), generator=generator, device="cpu") for n in lens]
    return [i.to(model.device) for i in ids]


def _beyond_the_window(trial: ComparedRuns) -> list[float]:
    """The error of hidden states of more tokens than the shortest window."""
    model = trial.model
    limit = model.longest_tokens or 2**31
    window = shortest_window(model.base) or limit
    if window >= limit:  # no token is beyond it
        return []
    if window > _LONGEST_WINDOW_TOKENS:
        if not any(trial.windows):
            raise _in_mask_alone(model, window)
        return []
    length = min(max(window, _NUM_TOKENS) + _BEYOND_WINDOW_TOKENS, limit)
    ids = random_ids(model, [length, _SHORT_TOKENS])
    whole = [model.num_layers]
    plan = plan_chunks([len(i) for i in ids], cuts(length), whole, backward=False)
    name = f"hidden states beyond the window of {window} tokens"

    def chunked() -> Run:
        with model.installed():
            return {name: torch.cat(trial.obey(plan, model.stages(whole), ids)[0])}

    def unchunked() -> Run:
        return {name: torch.cat([model.whole_hidden(i) for i in ids])}

    return _compare(trial, unchunked, chunked)


def _compare(
    trial: ComparedRuns, run_whole: Callable[[], Run], run_chunked: Callable[[], Run]
) -> list[float]:
    """The errors of a run in chunks; raises if one is above its bound.

    In 16 bits a top-k choice may fall otherwise by rounding alone. So what is above the bound is
    tried again with other roundings: a real difference stays in all of them.
    """
    model = trial.model
    with _refused(model, _fails_whole):
        whole = run_whole()
    dtype = next(iter(whole.values())).dtype
    _require_finite(model, whole, dtype)
    with _refused(model, _fails_in_chunks):
        errors = differences(run_chunked(), whole)
    bounds = dict.fromkeys(errors, _TOLERANCES.get(dtype, 0.0))
    for attempt in range(_NUM_ROUNDINGS if dtype.itemsize < 4 else 0):
        with rounded_again(model, seed=2 * attempt):
            moved = differences(run_whole(), whole)
        bounds = {name: max(bounds[name], 2 * moved[name]) for name in errors}
        if all(errors[name] <= bounds[name] for name in errors):
            break
        with rounded_again(model, seed=2 * attempt + 1):
            again = differences(run_chunked(), whole)
        errors = {name: min(errors[name], again[name]) for name in errors}
    try:
        return _within(model, errors, bounds, "gives other {} in chunks than whole")
    except UnsupportedModelError as error:
        window = shortest_window(model.base)
        if window is not None and not any(trial.windows):
            raise _in_mask_alone(model, window) from error
        raise


def differences(given: Run, truth: Run) -> dict[str, float]:
    """Relative L2 errors by name; of gradients, the largest of any piece of the long sequence."""
    return {
        name: _gradient_error(given[name], truth[name])
        if name == GRADIENTS
        else relative_error(given[name], truth[name])
        for name in truth
    }


def _gradient_error(given: Tensor, truth: Tensor) -> float:
    """The largest error of a piece: a relay that is dropped loses the first one, however little
    that is of the whole.

    A gradient that is zero but for rounding counts against a millionth of the whole one.
    """
    floor = 1e-6 * float(truth.double().norm())
    pieces = [slice(start, stop) for start, stop in pairwise(cuts(len(truth)))]
    return max(relative_error(given[piece], truth[piece], floor) for piece in pieces)


@contextmanager
def cut_embeddings(*models: HFDecoder) -> Iterator[list[Tensor]]:
    """Within it the models' input embeddings are cut off from what follows: with gradients each
    call's output becomes a leaf, of those that are yielded."""
    leaves: list[Tensor] = []
    embeddings = dict.fromkeys(model.base.get_input_embeddings() for model in models)
    handles = [
        module.register_forward_hook(lambda *called: _cut(leaves, called[-1]))
        for module in embeddings
    ]
    try:
        yield leaves
    finally:
        for handle in handles:
            handle.remove()


def _cut(leaves: list[Tensor], x: Tensor) -> Tensor:
    """x, or a copy of a leaf that is put to the others where gradients are wanted."""
    if not torch.is_grad_enabled():
        return x
    leaves.append(x.detach().requires_grad_())
    return leaves[-1].clone()  # some families scale it in place


@contextmanager
def rounded_again(model: HFDecoder, *, seed: int) -> Iterator[None]:
    """Within it what attentions and the modules in them return is moved by rounding.

    That is by at most half a unit in the last place.
    """
    generator = torch.Generator(device=model.device).manual_seed(seed)

    def move(module: nn.Module, inputs: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return output
        noise = torch.rand(first.shape, generator=generator, device=first.device) * 2 - 1
        moved = first * (1 + noise * torch.finfo(first.dtype).eps / 2)
        moved = moved.to(first.dtype)
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    parts = {part: None for module in model.attention_modules for part in module.modules()}
    handles = [part.register_forward_hook(move) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class ComparedRuns:
    """Runs of a model, whole and in chunks, and what was seen in them beside their outcome."""

    model: HFDecoder
    backend: Backend
    leaves: list[Tensor]
    """See `cut_embeddings`."""
    windows: set[int | None] = field(default_factory=set)
    """Sliding windows that chunked attention was given."""
    loss_scale: float = 1.0
    """Factor of the loss, so that its gradients fit into float16."""

    def whole(self, ids: Sequence[Tensor]) -> Run:
        """Tensors to compare, by the model itself, one sequence at a time."""
        long, short = ids
        with torch.enable_grad():
            self.leaves.clear()
            hidden = self.model.whole_hidden(long)
            _require_leaves(self.model, len(self.leaves), 1)
            grad = self._gradient(hidden, _cotangent(hidden, len(long)))
        logits = self.model.whole_logits(short)
        return {"hidden states": hidden.detach(), "logits": logits, GRADIENTS: grad[0]}

    def chunked(
        self,
        ids: Sequence[Tensor],
        parts: Sequence[HFDecoder] = (),
        heights: Sequence[int] = (),
        order: Order = "chunk-first",
    ) -> Run:
        """The same in chunks and stages of `heights` layers, where a stage runs for all chunks
        before the next: what layers leave for others beside hidden states is then lost.

        `parts`: for each stage a model that holds it; the whole model holds all. Without them it is
        one stage of all layers.
        """
        parts, heights = parts or [self.model], heights or [self.model.num_layers]
        length = len(ids[0])
        stages = [part.stages(heights)[number] for number, part in enumerate(parts)]
        plan = plan_chunks([len(i) for i in ids], cuts(length), heights, order)
        with ExitStack() as installed:
            for part in dict.fromkeys(parts):
                installed.enter_context(part.installed())
            hidden, grad = self.obey(plan, stages, ids, partial(_cotangent, length=length))
        tiles = hidden[1].split(_TILE_TOKENS)  # a head that mixes tokens differs in tiles
        logits = torch.cat([parts[-1].logits(tile) for tile in tiles])
        return {"hidden states": hidden[0], "logits": logits, GRADIENTS: grad[:length]}

    def obey(
        self,
        plan: ChunkPlan,
        stages: Sequence[Layers],
        ids: Sequence[Tensor],
        cotangent: Callable[[Tensor], Tensor] = torch.zeros_like,
    ) -> tuple[list[Tensor], Tensor]:
        """Let the executor obey a plan of one rank: final hidden states (T, D) of each sequence,
        and the gradient (T, D) by the leaves, in the order of chunks; see `TrialHead`."""
        model, leaves = self.model, self.leaves
        leaves.clear()
        begun: dict[int, Tensor] = {}
        labels = [torch.full(i.shape, IGNORE_INDEX, device="cpu") for i in ids]
        batch = batch_of([ShiftedSequence(*own) for own in zip(ids, labels, strict=True)])
        head = TrialHead(model, batch, lambda hidden: self.loss_scale * cotangent(hidden))
        Executor(
            model, plan, batch,
            num_valid_tokens=1, num_labels=1, backend=self.backend,
            pools=Pools(Arena(model.device), Storage()), comms=Comms(), head=head, stages=stages,
            make_cell=partial(Cell, adds_gradients=False, windows=self.windows),
            embedded=lambda chunk: begun.setdefault(chunk, leaves[-1]),
        ).run()  # fmt: skip
        _require_leaves(model, len(leaves), len(begun))
        grads = [begun[chunk].grad for chunk in sorted(begun)]
        found = [grad[0] for grad in grads if grad is not None]
        return head.finish(), torch.cat(found) if found else torch.empty(0)

    def _gradient(self, hidden: Tensor, cotangent: Tensor) -> Tensor:
        """The gradient (1, T, D) by the leaf; scales the loss down until it fits float16."""
        may_overflow = hidden.dtype == torch.float16
        while True:
            (grad,) = torch.autograd.grad(
                hidden, self.leaves[0], cotangent * self.loss_scale, retain_graph=may_overflow
            )
            too_large = not bool(grad.isfinite().all())
            if not (may_overflow and too_large and self.loss_scale > _MIN_LOSS_SCALE):
                return grad
            self.loss_scale /= 64


def plan_chunks(
    lens: Sequence[int],
    cut_at: Sequence[int],
    heights: Sequence[int],
    order: Order = "chunk-first",
    *,
    backward: bool = True,
) -> ChunkPlan:
    """A plan of one sequence that is cut, and of whole ones that share the chunk of its tail.

    Chunk-first every other chunk retains its graph, from the first one on; the others, and all
    that layer-first does not turn around, are computed again from what keep=attention leaves.
    """
    pieces = [Slice(0, start, stop) for start, stop in pairwise(cut_at)]
    others = (Slice(i, 0, lens[i]) for i in range(1, len(lens)))
    chunks = [*(Chunk((piece,)) for piece in pieces[:-1]), Chunk((pieces[-1], *others))]
    numbers, stages = range(len(chunks)), range(len(heights))
    if order == "layer-first" or not backward:
        options = ChunkOptions(order=order, keep="attention")
        walk = walk_group(numbers, heights, options, backward=backward)
    else:
        walk = [Forward(c, s, "attention" if c % 2 else "all") for s in stages for c in numbers]
        for stage, chunk in product(reversed(stages), reversed(numbers)):
            walk += [Recompute(chunk, stage)] if chunk % 2 else []
            walk.append(Backward(chunk, stage))
    return assemble(lens, [chunks], heights, [walk])


class TrialHead(OutputHead):
    """A head that puts hidden states out with their backward, and gives the first sequence a
    gradient."""

    def __init__(
        self, model: HFDecoder, batch: Batch, cotangent: Callable[[Tensor], Tensor]
    ) -> None:
        """`cotangent`: of some hidden states, that of the first sequence (T, D)."""
        super().__init__(model, batch, None, nullcontext, is_rounded=False)
        self._cotangent = cotangent
        self.cotangents = ()

    def gradient(self, hidden: Tensor, inputs: ChunkInputs, *factors: Any) -> Tensor:
        self.evaluate(hidden.detach(), inputs)
        self.cotangents = [self._cotangent(hidden), *[None] * len(inputs.rows.tokens)]
        return super().gradient(hidden, inputs, *factors)


def cuts(length: int) -> list[int]:
    """Where a sequence is cut: no piece is empty, the last one holds the tokens of the loss."""
    tail = max(1, length - max(_LOSS_TOKENS, length // 4))
    return sorted({0, length // 3, tail, length})


def _cotangent(hidden: Tensor, length: int, num_tokens: int | None = None) -> Tensor:
    """The gradient (T, D) of the loss by hidden states (any, D) of a sequence of `length` tokens: a
    random direction at its last tokens, all of them in its last piece, and 0 before."""
    num_tokens = num_tokens or min(_LOSS_TOKENS, length - cuts(length)[-2])
    cotangent = hidden.new_zeros(length, hidden.shape[-1])
    cotangent[-num_tokens:] = random_like(cotangent[-num_tokens:])
    return cotangent


def random_like(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(x.shape, generator=generator, device="cpu").to(x)


def _require_leaves(model: HFDecoder, found: int, required: int) -> None:
    """Raise UnsupportedModelError unless a forward has called the input embeddings so often."""
    if found != required:
        raise refusal(
            model,
            f"calls its input embeddings {found} times in a forward",
            "a decoder that embeds its tokens once",
        )


_SPREAD = 5
"""Attention matters more where weights are larger than transformers draws them."""


def tiny_twin(model: HFDecoder) -> HFDecoder:
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
    return HFDecoder(base, max_seq_len=longest and LONGEST_TOKENS)


def hides_lengths(model: HFDecoder) -> bool:
    """Whether a model does something else beyond thousands of tokens, which a short check does not
    see: attention blocks, queries that grow with their position."""
    types = getattr(model.config, "layer_types", None) or ()
    return CHUNKED in types or any(scales_by_position(module) for module in model.attention_modules)


def held_by(twin: HFDecoder, heights: Sequence[int]) -> list[HFDecoder]:
    """For each stage what a process that holds nothing else has of a twin."""
    parts = []
    for height, stop in zip(heights, accumulate(heights), strict=True):
        base = deepcopy(twin.base)
        hold(base, placeholders(base, range(stop - height, stop)))
        parts.append(HFDecoder(base, max_seq_len=twin.max_seq_len))
    return parts


_LENS = (20, 19, 1, 20)
_ROWS = 4
"""Rows in front of the last chunk whose gradients are compared by themselves: those behind decay
least."""
_MIXER_BOUND, _NARROW_MIXER_BOUND = 1e-3, 1e-2
"""Bounds for weights and tables in float32, and in 16 bits, to which some families round decays. A
state that is dropped is at 1."""
_LEAST_SHARE = 1e-3
"""The least share in the gradient of all earlier rows that the compared ones are taken to have:
less may be the rounding of others."""


def mixer_errors(model: HFDecoder, backend: Backend) -> list[float]:
    """The largest relative error of each kind of mixer; raises UnsupportedModelError for one that
    is no longer itself in slices. A mixer of a 16-bit type is compared in float32."""
    kinds = {type(mixer.module): mixer for mixer in reversed(model.probed.mixers)}
    if not kinds:
        return []
    with own_forward(model.base, model.max_seq_len):
        calls = model.calls_of(list(kinds.values()), sum(_LENS))
        return [_mixer_error(model, call, backend) for call in calls]


def _mixer_error(model: HFDecoder, given: Called, backend: Backend) -> float:
    bound_ = _NARROW_MIXER_BOUND if given.inputs.x.dtype.itemsize < 4 else _MIXER_BOUND
    called = given
    if given.inputs.x.dtype.itemsize < 4:
        wide = deepcopy(given.mixer.module).to(torch.float32)
        called = Called(Mixer(wide, given.mixer.layer), given.inputs.to(torch.float32))
    x = random_like(called.inputs.x)
    with torch.enable_grad():
        (own_y, own_grad), width = _whole(called, x)
        y, grad = _in_chunks(model, called, x, backend)
    cut = sum(_LENS[:-1])
    rows = slice(cut - width - _ROWS + 1, cut - width + 1)
    floor = _LEAST_SHARE * float(own_grad[:cut].double().norm())
    errors = {
        "outputs": relative_error(y, own_y),
        "gradients": relative_error(grad[:cut], own_grad[:cut]),
        "gradients through its state": relative_error(grad[rows], own_grad[rows], floor),
    }
    kind, layer = type(called.mixer.module).__name__, called.mixer.layer
    told = f"has a {kind} (layer {layer}) that gives other {{}} in slices than whole"
    where = "the states that its layers keep in their cache"
    return max(_within(model, errors, dict.fromkeys(errors, bound_), told, where))


def _whole(called: Called, x: Tensor) -> tuple[tuple[Tensor, Tensor], int]:
    """Output (T, D) of all tokens and gradient (T, D) by them, and the width of the convolution."""
    leaf = x.clone().requires_grad_()
    cache = SliceCache({}, x.shape[1])
    args, kwargs = called.inputs.of(leaf, lambda of_tokens: of_tokens, cache)
    y = first(called.mixer.module(*args, **kwargs))[0]
    (grad,) = torch.autograd.grad(y, leaf, _cotangent(y, len(y), _LENS[-1]))
    widths = [state.shape[-1] for (kind, _), state in cache.after.items() if kind == "conv"]
    return (y.detach(), grad[0]), max(widths, default=0)


class _MixerStage:
    """One mixer as a stage, whose input is `x` (1, T, D)."""

    def __init__(self, called: Called, x: Tensor, leaves: list[Tensor]) -> None:
        layer = called.mixer.layer
        self.layers = range(layer, layer + 1)
        self.events: tuple[Event, ...] = (("states", layer),)
        self._called, self._x, self._leaves = called, x, leaves

    def run(self, _: Tensor, positions: Tensor, cell: CellAttention, what: Pass) -> Tensor:
        def own_rows(of_tokens: Tensor) -> Tensor:
            return of_tokens[:, positions]

        module, x = self._called.mixer.module, _cut(self._leaves, own_rows(self._x))
        args, kwargs = self._called.inputs.of(x, own_rows, SliceCache({}, 0))
        with bound([module], cell, what, positions):
            return first(module(*args, **kwargs))[0]


def _in_chunks(
    model: HFDecoder, called: Called, x: Tensor, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Output and gradient (T, D), see `_whole`, in chunks of one sequence."""
    length, trial = sum(_LENS), ComparedRuns(model, backend, [])
    plan = plan_chunks([length], list(accumulate(_LENS, initial=0)), [1])
    ids = torch.zeros(length, dtype=torch.int64, device=model.device)
    with relaying([called.mixer]):
        stage = _MixerStage(called, x, trial.leaves)
        cotangent = partial(_cotangent, length=length, num_tokens=_LENS[-1])
        (y,), grad = trial.obey(plan, [stage], [ids], cotangent)
    return y, grad


def refusal(
    model: HFDecoder,
    what: str,
    required: str,
    change: str = "train a model of another family, or report this one",
) -> UnsupportedModelError:
    if compiled_in_place(model.base):
        what += ", with layers that are compiled in place"
        change = "leave out layer.compile(), or model.compile of a run"
    return UnsupportedModelError(
        given=f"{model.name} {what}", required=required, source="the start-up self-check",
        change=change,
    )  # fmt: skip


@contextmanager
def _refused(
    model: HFDecoder, refused: Callable[[HFDecoder, Exception], UnsupportedModelError]
) -> Iterator[None]:
    """Whatever a family's own code raises within it becomes a refusal."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or is_of_machine(error):
            raise
        raise refused(model, error) from error


def _in_mask_alone(model: HFDecoder, window: int) -> UnsupportedModelError:
    return refusal(
        model,
        f"has its sliding window of {window} tokens in its attention mask alone",
        "a window that is passed to transformers' AttentionInterface: chunks have no mask",
    )


def _fails_whole(model: HFDecoder, error: Exception) -> UnsupportedModelError:
    change = "mend the model or its config: model(input_ids=...) must run by itself"
    kernel = model.config._attn_implementation
    if isinstance(error, ImportError) and kernel not in ("sdpa", "eager"):
        change = (
            'call model.set_attn_implementation("sdpa"): beside this check, chunks run on '
            f"furlong's own attention, and {kernel} is not needed"
        )
    return UnsupportedModelError(
        given=f"{model.name} fails in its own forward, without chunks: {_named(error)}",
        required="a model whose own forward and backward run on token ids alone",
        source="the start-up self-check",
        change=change,
    )


def _fails_in_chunks(model: HFDecoder, error: Exception) -> UnsupportedModelError:
    return refusal(
        model,
        f"fails when it runs in chunks: {_named(error)}",
        "a decoder that runs with position_ids, without an attention mask and without a cache",
    )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _require_finite(model: HFDecoder, whole: Run, dtype: torch.dtype) -> None:
    if all(bool(value.isfinite().all()) for value in whole.values()):
        return
    weights = model.model.named_parameters()
    name = next((n for n, p in weights if not bool(p.detach().isfinite().all())), None)
    wider = "float64" if dtype.itemsize >= 4 else "bfloat16 or float32"
    raise UnsupportedModelError(
        given=f"{model.name} with weights in {name} that are not finite"
        if name
        else f"{model.name} computes values that are not finite, without chunks too, though its "
        "weights are finite",
        required="finite weights, hidden states, logits and gradients",
        source="the start-up self-check",
        change="load the weights again, or an earlier checkpoint"
        if name
        else "look at its weights and its config for values that are far too large, or compute in "
        f"a wider type than {dtype}, such as {wider}",
    )
