"""The start-up self-check: does the model compute the same in chunks as in its own forward?

Random sequences are computed twice: whole, by the model itself, and in chunks, by the executor. The
plan has three chunks, one of which drops its graph and recomputes it. The check compares

- final hidden states of a long sequence of a few tokens, which is cut into the three chunks, and
  the gradient of a loss with respect to its input embeddings. Only the last tokens have a loss, so
  the gradient of the first chunks' embeddings comes only through K,V that later chunks read;
- logits of a short sequence in the last of these chunks. The executor computes them a few rows at a
  time.

Then a run in pipeline stages is compared with a run in a single stage, first with a plan that
retains graphs from stage to stage, then with one that finishes each stage before the next
(layer-first).

Some models are also checked as a tiny twin. The twin has the model's class and config, but few
heads, small widths, short lengths and random float64 weights. If no stages are checked, it also has
few recurrent layers of each kind. So the same code runs in a fraction of a second. A twin is
checked

- in addition to a model in 16 bits, because the error allowed there is large: twice the change of
  the model's own results when attention outputs are rounded differently, which may route a token to
  another expert;
- in addition to a model whose windows, attention blocks or temperatures matter only at lengths
  beyond these few tokens;
- instead of a model of which each process holds one stage. Every process makes the same twin, and
  compares it whole, and in stages that have the layers of the model's stages.

Gradients of a whole model may hide an error of recurrent layers: a dropped state may change them by
less than float32 rounding. So one mixer of each kind is also checked by itself. It runs on random
hidden states, whole and in chunks, one of which is a single token. The loss is at the last chunk.
Gradients are compared at rows that reach the loss only through the recurrent state, which excludes
rows within the convolution's reach. On a CPU this is skipped for the recurrent families, and the
releases of transformers, that `furlong.families` lists and this project's tests compare. Other
releases may differ in code, other devices in kernels.

    T tokens, D hidden size, K tokens that a convolution joins
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from furlong.errors import ElsewhereError, UnsupportedModelError, UserError
from furlong.families import (
    CHUNKED,
    NEWEST_RELEASE,
    OLDEST_RELEASE,
    family_of,
    installed_release,
)
from furlong.kv.arena import Arena
from furlong.kv.pools import Pools, Storage
from furlong.models.asked import spread
from furlong.models.attention import CellAttention, bound, forward_as_written, scales_by_position
from furlong.models.build import draw_weights
from furlong.models.decoder import HFDecoder
from furlong.models.mixers import Called, Mixer, SliceCache, TokenMixing, first, relaying
from furlong.models.placeholders import carried, hold, placeholders, uncuttable
from furlong.models.quantized import packed_linears, unpacked
from furlong.models.rope import num_positions, switching_lengths
from furlong.models.shrink import LONGEST_TOKENS, shrink_config
from furlong.models.support import compiled_in_place, shortest_window
from furlong.ops.backends.base import Backend
from furlong.ops.backends.select import ProbedBackend, is_of_machine
from furlong.ops.loss import IGNORE_INDEX
from furlong.plan.passes import Pass
from furlong.plan.plan import Backward, Chunk, ChunkPlan, Forward, Order, Recompute, Slice
from furlong.planners.options import ChunkOptions
from furlong.planners.orders import assemble, walk_groups
from furlong.runtime.batch import Batch, ChunkTargets, ShiftedSequence, batch_of
from furlong.runtime.distributed.comms import Comms
from furlong.runtime.distributed.fsdp import whole
from furlong.runtime.executor import Executor, Layers
from furlong.runtime.head import OutputHead
from furlong.runtime.rng import RNGState, modes_kept, replayed
from furlong.testing import relative_error

Run = dict[str, Tensor]
"""Tensors to compare, by name."""
Agree = Callable[[Mapping[str, float]], dict[str, float]]
"""Maps this process's errors by name to those that all processes of the stage decide by."""
GRADIENTS = "gradients"
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
_NARROW_BOUND = 0.5
"""Upper limit of bounds derived from rounding; a dropped gradient has error 1."""
_NUM_ROUNDINGS = 4
_CUT_BOUND, _NARROW_CUT_BOUND = 1e-5, 1e-3
"""Bounds for stages, which run the same operations in the same order, but for those of a family
outside its layers. In 16 bits a GPU may sum in another order."""
_NUM_TOKENS, _SHORT_TOKENS = 16, 4
_LOSS_TOKENS = 4
"""Number of last tokens of the long sequence that enter the loss."""
_TILE_TOKENS = 3
_FLOAT16_LOSS_SCALE = 2.0**-8
"""Factor of the loss that keeps gradients in the range of float16."""


def self_check(
    model: HFDecoder, backend: Backend, heights: Sequence[int] | None = None,
    compute_dtype: torch.dtype | None = None, agree: Agree = dict,
) -> float:  # fmt: skip
    """Compare the model's results in chunks with those of its own forward. Return the largest
    relative L2 error; raise if it is too large.

    Runs in the model's current mode, or in eval mode if the model draws random numbers, with the
    current parameters. The check changes no `.grad`, buffer or generator.

    Args:
        heights: Number of layers of each pipeline stage. With several stages, a run in stages is
            compared with a run in a single stage; check a whole model without `heights` first.
            None: a run in chunks is compared with the model's own forward.
        compute_dtype: The dtype that sharded weights are gathered in; None: the parameters'.
        agree: Function of a dict {name: error of this process}; returns {name: largest error of all
            processes of the stage}.

    Raises:
        UnsupportedModelError: For a model that gives other results in chunks, computes values that
            are not finite, or changes a buffer in its forward.
    """
    check_packed_linears(model)
    whole = (model.num_layers,)
    heights = tuple(heights or whole)
    model.stages(heights)  # refuse wrong heights before the model is blamed
    is_whole = model.local_layers == range(model.num_layers)
    errors = []
    if heights == whole and is_whole:
        twins = _twins(model, compute_dtype)
        errors += [_check(subject, backend, agree) for subject in (model, *twins)]
    elif is_whole:
        errors.append(_check_cuts(model, [model] * len(heights), backend, heights, agree))
    else:
        twin = tiny_twin(model)
        errors.append(_check(twin, backend))
        if heights != whole:
            errors.append(_check_cuts(twin, held_by(twin, heights), backend, heights))
    return max(errors)


def check_twin(model: HFDecoder) -> None:
    """Raise UnsupportedModelError if the self-check of a tiny twin fails on the CPU. The model may
    be on meta. Classes that cannot be built small, or whose twin does not run, pass."""
    try:
        twin = tiny_twin(model, all_layers=False)
    except UnsupportedModelError:
        return
    for dtype in (torch.float64, torch.float32):  # some families run in float32 only
        twin.base.to(dtype)
        try:
            _check(twin, ProbedBackend())
            return
        except UnsupportedModelError as error:
            if error.change != _WHOLE[-1]:
                raise


def check_packed_linears(model: HFDecoder) -> None:
    """Check each 4-bit linear layer: run a forward in eval mode, then a forward and a backward in
    train mode. Raise UnsupportedModelError if the outputs or input gradients of the second forward
    are not those of a linear layer with the dequantized weights."""
    for name, linear in packed_linears(model.base).items():
        dtype = linear.compute_dtype or torch.float32
        generator = torch.Generator().manual_seed(0)
        x, g = (torch.randn(3, size, generator=generator).to(model.device, dtype)
                for size in (linear.in_features, linear.out_features))  # fmt: skip
        weight = unpacked(linear).to(dtype)
        with _refused(model, *_WHOLE), modes_kept(linear), whole(model.base, name):
            with torch.no_grad():
                linear.eval()
                linear(x)
            x.requires_grad_(True)
            with torch.enable_grad():
                y = linear.train()(x)
                (dx,) = torch.autograd.grad(y, x, g, allow_unused=True)
            outputs = torch.nn.functional.linear(x.detach(), weight, linear.bias)
        truth = {"outputs": outputs, "gradients": g @ weight}
        given = {"outputs": y.detach(), "gradients": x.new_zeros(x.shape) if dx is None else dx}
        most = 1e-4 if dtype == torch.float32 else 3e-2
        for what, wanted in truth.items():
            if not (error := relative_error(given[what], wanted)) <= most:
                raise check_failure(
                    model,
                    f"gives {'no' if dx is None else 'other'} {what} at {name}, whose weights are"
                    f" in 4 bits (relative error {error:.1e})",
                    "those of the weights that the codes stand for",
                    "load the model again, and evaluate it inside furlong alone",
                )


def _twins(model: HFDecoder, compute_dtype: torch.dtype | None = None) -> list[HFDecoder]:
    """Return [a tiny twin] for a model in 16 bits, and for one that behaves differently at longer
    lengths (`hides_lengths`): checking the model itself is not enough. Return [] for other models.

    If no twin can be built, raise UnsupportedModelError for a model of the second kind, and return
    [] for one of the first."""
    try:
        weights = model.base.parameters()
        dtypes = {(p.is_floating_point() and compute_dtype) or p.dtype for p in weights}
        is_narrow = any(dtype.itemsize < 4 for dtype in dtypes)
        is_told = not hides_lengths(model) and not is_narrow
        # recurrent scans run in float32, and errors grow with the layers
        is_recurrent = family_of(model.config.model_type).recurrent != "none"
        return [] if is_told else [tiny_twin(model, all_layers=not is_recurrent)]
    except UnsupportedModelError:
        if hides_lengths(model):
            raise
        return []


def _check(model: HFDecoder, backend: Backend, agree: Agree = dict) -> float:
    """Return the largest relative error of a model in chunks, compared with its own forward. Raises
    UnsupportedModelError if an error is too large."""
    with _settled(model), cut_embeddings(model) as leaves:
        trial = _Trial(model, backend, leaves, agree)
        with _refused(model, *_WHOLE):
            truth = trial.whole()
        if not all(bool(value.isfinite().all()) for value in truth.values()):
            whole = ((n, p) for n, p in model.base.named_parameters() if not isinstance(p, DTensor))
            odd = next((name for name, p in whole if not bool(p.isfinite().all())), "")
            raise check_failure(
                model,
                "computes values that are not finite, without chunks too"
                + (f": its {odd} holds NaN or infinity" if odd else ""),
                "finite weights, hidden states, logits and gradients",
                f"replace {odd}, or the model's files" if odd else "compute in a wider type",
            )
        with _refused(model, *_IN_CHUNKS):
            errors, most = _compare(trial, truth)
            found = _within(model, errors, most, "gives other {} in chunks than whole")
            if not _has_known_mixers(model):
                found += mixer_errors(model, backend, agree)
            return max(found)


def _compare(trial: _Trial, truth: Run) -> tuple[dict[str, float], float]:
    """Run the model in chunks, and compare with `truth`, its own forward. Return ({name: relative
    error of each tensor}, largest error that is allowed).

    Rounding can change a router's choice in 16 bits, and gradients in float32 if weights are large.
    So if an error is too large, whole runs with other roundings determine how much rounding
    changes, and the allowed error rises. The run in chunks is repeated, too, and the least error of
    each tensor is returned: a real difference remains in all runs.
    """
    model, errors = trial.model, trial.differences(trial.chunked(), truth)
    dtype = truth[GRADIENTS].dtype
    if dtype == torch.float64 and model.probed.mixers:  # scans run in float32
        dtype = torch.float32
    most = _TOLERANCES.get(dtype, 0.0)
    is_told = most and any(not e <= most for name, e in errors.items() if name != GRADIENTS)
    if is_told or compiled_in_place(model.base):  # hooks would compile layers anew
        return errors, most or _NARROW_BOUND
    for attempt in range(_NUM_ROUNDINGS):
        if max(errors.values()) <= most:
            break
        with _rounded_again(model, seed=2 * attempt):
            moved = trial.differences(trial.whole(), truth)
        most = max(most, min(2 * max(moved.values()), _NARROW_BOUND))
        if max(errors.values()) <= most:
            break
        with _rounded_again(model, seed=2 * attempt + 1):
            again = trial.differences(trial.chunked(), truth)
        errors = {name: min(errors[name], again[name]) for name in errors}
    return errors, most


@contextmanager
def _rounded_again(model: HFDecoder, *, seed: int) -> Iterator[None]:
    """Context manager: perturb outputs of attention modules and their submodules by at most half a
    unit in the last place."""
    generator = torch.Generator(device=model.device).manual_seed(seed)

    def move(module: Any, _: Any, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return output
        noise = torch.rand(x.shape, generator=generator, device=x.device) - 0.5
        moved = (x * (1 + noise * torch.finfo(x.dtype).eps)).to(x.dtype)
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    with ExitStack() as stack:
        for part in {part: None for own in model.attention_modules for part in own.modules()}:
            stack.callback(part.register_forward_hook(move).remove)
        yield


def _has_known_mixers(model: HFDecoder) -> bool:
    """Whether this project's tests cover the model's recurrent mixers: `furlong.families` lists
    their family as recurrent, the release of transformers is a tested one, and the model is on a
    CPU."""
    kinds = {type(mixer.module).__module__ for mixer in model.probed.mixers}
    is_theirs = all(module.startswith("transformers.") for module in kinds)
    is_known = is_theirs and family_of(model.config.model_type).recurrent != "none"
    is_tested = OLDEST_RELEASE <= installed_release() <= NEWEST_RELEASE
    return is_known and is_tested and model.device.type == "cpu"


def _check_cuts(
    model: HFDecoder, parts: Sequence[HFDecoder], backend: Backend, heights: Sequence[int],
    agree: Agree = dict,
) -> float:  # fmt: skip
    """Compare a run in stages of `heights` layers with a run in a single stage, both in chunks.
    Return the largest relative error. `parts[n]` is the model that holds the layers of stage n.

    Raises UnsupportedModelError if an error is too large, as for a decoder that passes more than
    hidden states between layers.
    """
    found = []
    try:
        with _settled(model), cut_embeddings(model, parts[0]) as leaves:
            trial = _Trial(model, backend, leaves)
            truth = trial.chunked()
            is_narrow = truth[GRADIENTS].dtype.itemsize < 4  # or that of gathered weights
            most = _NARROW_CUT_BOUND if is_narrow else _CUT_BOUND
            for order in ("chunk-first", "layer-first"):
                with _refused(model, *_IN_CHUNKS):
                    given = trial.chunked(parts, heights, order)
                errors = agree({name: relative_error(given[name], truth[name]) for name in truth})
                found += _within(model, errors, most, "gives other {} in stages")
        return max(found)
    except UnsupportedModelError as error:  # it has passed as a single stage
        raise uncuttable(model.name, error.given.removeprefix(model.name).lstrip()) from error


def _within(
    model: HFDecoder, errors: dict[str, float], most: float, told: str,
    where: str = "causal attention only",
) -> list[float]:  # fmt: skip
    """Raise UnsupportedModelError if one of `errors`, {name of a tensor: relative error}, is above
    `most`. Otherwise return the errors as a list.

    `told` is the fault for the message, such as "gives other {} in stages", where {} becomes the
    tensor's name; `where` names the layers in which tokens may interact."""
    for name, error in errors.items():
        if not error <= most:
            raise check_failure(
                model,
                f"{told.format(name)} (relative error {error:.1e})",
                f"a relative error of at most {most:.0e}: tokens meet in {where}",
            )
    return list(errors.values())


@contextmanager
def _settled(model: HFDecoder) -> Iterator[None]:
    """Context manager: run with the model in eval mode if its forward draws random numbers, else in
    its current mode. On exit modes and generators are restored.

    On entry a forward of a short sequence tests the model. Raises UnsupportedModelError if it fails
    or changes a buffer."""
    before = RNGState.read(model.device)
    buffers = [
        (path, module, name, buffer, buffer.clone())
        for path, module in model.model.named_modules()
        if not hasattr(module, "rope_type")  # a run's frequencies are chosen in place
        for name, buffer in module.named_buffers(recurse=False)
    ]
    changed: list[str] = []
    with modes_kept(model.model), torch.no_grad(), replayed(before, model.device):
        try:
            with _refused(model, *_WHOLE):
                model.whole_logits(_ids(model)[1])
        finally:
            for path, module, name, buffer, value in buffers:
                is_same = (buffer == value) | (value != value)  # NaN equals nothing
                if module._buffers.get(name) is not buffer or not bool(is_same.all()):
                    module._buffers[name] = buffer.copy_(value)
                    changed.append(f"{path}.{name}".lstrip("."))
        if changed:
            raise check_failure(
                model,
                f"changes {changed[0]} by a forward",
                "modules that no forward changes: a sequence is one forward, its chunks are many",
                "call eval() on this module, or take another one",
            )
        if not RNGState.read(model.device).equals(before):
            model.model.eval()
        yield


def _ids(model: HFDecoder) -> list[Tensor]:
    """Return the ids (T,) of a long sequence, to be cut, and of a short one."""
    positions = num_positions(model.config) or _NUM_TOKENS
    return random_ids(model, [min(_NUM_TOKENS, positions), min(_SHORT_TOKENS, positions)])


def random_ids(model: HFDecoder, lens: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    highest = min(model.vocab_size, model.num_input_ids)
    ids = [torch.randint(highest, (n,), generator=generator, device="cpu") for n in lens]
    return [i.to(model.device) for i in ids]


def differences(given: Run, truth: Run) -> dict[str, float]:
    """Return the relative L2 error of each tensor of `given`, by name.

    For gradients, the error of each of the long sequence's pieces (one per chunk) is computed, and
    the largest is returned. If gradients are not relayed from chunk to chunk, those of the first
    piece are wrong, but they may be a small part of the whole.

    An error is divided by the norm of the piece in `truth`, or by a millionth of the whole
    gradient's norm if that is larger.
    """
    errors = {name: relative_error(given[name], truth[name]) for name in truth}
    grad, own = given[GRADIENTS], truth[GRADIENTS]
    floor = 1e-6 * float(own.double().norm())
    pieces = [slice(*piece) for piece in pairwise(cuts(len(own)))]
    return errors | {GRADIENTS: max(relative_error(grad[at], own[at], floor) for at in pieces)}


@contextmanager
def cut_embeddings(*models: HFDecoder) -> Iterator[list[Tensor]]:
    """Context manager: detach the outputs of the models' input embeddings. With gradients enabled,
    each output becomes a leaf, which is appended to the yielded list."""
    leaves: list[Tensor] = []
    with ExitStack() as stack:
        for module in dict.fromkeys(model.base.get_input_embeddings() for model in models):
            hook = module.register_forward_hook(lambda *called: _cut(leaves, called[-1]))
            stack.callback(hook.remove)
        yield leaves


def _cut(leaves: list[Tensor], x: Tensor) -> Tensor:
    """Return x or, with gradients enabled, a clone of a new leaf that has the values of x; append
    the leaf to `leaves`."""
    if not torch.is_grad_enabled():
        return x
    leaves.append(x.detach().requires_grad_())
    return leaves[-1].clone()  # some families scale it in place


@dataclass(frozen=True)
class _Trial:
    """Runs two random sequences through a model, whole or in chunks, to compare the results. Use it
    inside `cut_embeddings`, which yields `leaves`."""

    model: HFDecoder
    backend: Backend
    leaves: list[Tensor]
    agree: Agree = dict

    def differences(self, given: Run, truth: Run) -> dict[str, float]:
        """Return the relative errors of `given`, by name, as the function `differences` does; with
        `agree`, the largest of all processes."""
        return self.agree(differences(given, truth))

    def whole(self) -> Run:
        """Return the tensors to compare from the model's own forward, sequence by sequence."""
        long, short = _ids(self.model)
        self.leaves.clear()
        with torch.enable_grad():
            hidden = self.model.whole_hidden(long)
            self._require_leaves(1)
            (grad,) = torch.autograd.grad(hidden, self.leaves[0], _cotangent(hidden, len(long)))
        logits = self.model.whole_logits(short)
        return {"hidden states": hidden.detach(), "logits": logits, GRADIENTS: grad[0]}

    def chunked(
        self, parts: Sequence[HFDecoder] = (), heights: Sequence[int] = (),
        order: Order = "chunk-first",
    ) -> Run:  # fmt: skip
        """Run both sequences in chunks, and in stages of `heights` layers if given. Return the
        tensors to compare: "hidden states", "logits" and "gradients".

        Each stage runs all chunks before the next stage does, and receives hidden states only. So
        the results differ for a model whose layers pass further tensors to later layers.

        `parts[n]` is the model that holds the layers of stage n; if empty, all layers are a single
        stage.
        """
        parts, heights = parts or [self.model], heights or [self.model.num_layers]
        ids = _ids(self.model)
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
        self, plan: ChunkPlan, stages: Sequence[Layers], ids: Sequence[Tensor],
        cotangent: Callable[[Tensor], Tensor],
    ) -> tuple[list[Tensor], Tensor]:  # fmt: skip
        """Run a plan of one rank on the sequences `ids`, with the layers `stages`. Return (final
        hidden states (T, D) of each sequence, gradient (T, D) of the input embeddings of all
        chunks, joined in order of chunks). `cotangent`: see `TrialHead`."""
        model, begun = self.model, dict[int, Tensor]()
        self.leaves.clear()
        labels = [torch.full(i.shape, IGNORE_INDEX, device="cpu") for i in ids]
        batch = batch_of([ShiftedSequence(*own) for own in zip(ids, labels, strict=True)])
        head = TrialHead(model, batch, cotangent)
        Executor(
            model, plan, batch,
            num_valid_tokens=1, num_labels=1, backend=self.backend,
            pools=Pools(Arena(model.device), Storage()), comms=Comms(), head=head, stages=stages,
            embedded=lambda chunk: begun.setdefault(chunk, self.leaves[-1]),
        ).run()  # fmt: skip
        self._require_leaves(len(begun))
        grads = [begun[chunk].grad for chunk in sorted(begun)]
        return head.finish(), torch.cat([grad[0] for grad in grads if grad is not None])

    def _require_leaves(self, required: int) -> None:
        if len(self.leaves) != required:
            raise check_failure(
                self.model,
                f"calls its input embeddings {len(self.leaves)} times in a forward",
                "a decoder that embeds its tokens once",
            )


def plan_chunks(
    lens: Sequence[int], cut_at: Sequence[int], heights: Sequence[int], order: Order = "chunk-first"
) -> ChunkPlan:
    """Return a plan of one cut sequence, whose last piece shares its chunk with whole sequences.

    Chunk-first, even chunks retain their graph, and odd ones are recomputed with keep="attention".
    Layer-first, all chunks are recomputed, except where a backward directly follows its forward.
    """
    pieces = [Slice(0, start, stop) for start, stop in pairwise(cut_at)]
    others = (Slice(i, 0, lens[i]) for i in range(1, len(lens)))
    chunks = [*(Chunk((piece,)) for piece in pieces[:-1]), Chunk((pieces[-1], *others))]
    numbers, stages = range(len(chunks)), range(len(heights))
    if order == "layer-first":
        walk = walk_groups([numbers], heights, ChunkOptions(order=order, keep="attention"))
    else:
        walk = [Forward(c, s, "attention" if c % 2 else "all") for s in stages for c in numbers]
        for stage, chunk in product(reversed(stages), reversed(numbers)):
            walk += [Recompute(chunk, stage)] if chunk % 2 else []
            walk.append(Backward(chunk, stage))
    return assemble(lens, [chunks], heights, [walk])


class TrialHead(OutputHead):
    """A head without a loss: it keeps final hidden states, and starts backwards from a gradient
    that `cotangent` returns for the first sequence. Other sequences have no gradient."""

    def __init__(
        self, model: HFDecoder, batch: Batch, cotangent: Callable[[Tensor], Tensor]
    ) -> None:
        """`cotangent`: maps hidden states to the first sequence's output gradient (T, D)."""
        super().__init__(model, batch, None, nullcontext, is_rounded=False)
        self._cotangent = cotangent

    def gradient(self, hidden: Tensor, targets: ChunkTargets, *factors: Any) -> Tensor:
        self.evaluate(hidden.detach(), targets)
        self.cotangents = [self._cotangent(hidden), *[None] * len(targets.rows.tokens)]
        return super().gradient(hidden, targets, *factors)


def cuts(length: int) -> list[int]:
    """Return the token indices [0, ..., `length`] at which a sequence is cut into pieces. All
    tokens that have a loss are in the last piece."""
    tail = max(1, length - max(_LOSS_TOKENS, length // 4))
    return sorted({0, length // 3, tail, length})


def _cotangent(hidden: Tensor, length: int, num_tokens: int | None = None) -> Tensor:
    """Return the gradient (T, D) of a loss with respect to the final hidden states of a sequence of
    `length` tokens. It is random at the last `num_tokens` tokens, by default those of the last
    piece that have a loss, and 0 elsewhere. Hidden size, dtype and device are those of `hidden`."""
    num_tokens = num_tokens or min(_LOSS_TOKENS, length - cuts(length)[-2])
    cotangent = hidden.new_zeros(length, hidden.shape[-1])
    cotangent[-num_tokens:] = random_like(cotangent[-num_tokens:])
    return cotangent * _FLOAT16_LOSS_SCALE if hidden.dtype == torch.float16 else cotangent


def random_like(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(x.shape, generator=generator, device="cpu").to(x)


def tiny_twin(model: HFDecoder, *, all_layers: bool = True) -> HFDecoder:
    """Return a tiny twin of the whole model, in float64 on the CPU, in its train or eval mode."""
    longest = model.max_seq_len
    make: Any = type(model.base)._from_config  # a subclass of a family's has its own code
    with _refused(model, *_AS_TWIN), torch.device("meta"):
        config = shrink_config(model.base.config, max_seq_len=longest or 0, all_layers=all_layers)
        base = make(
            config, dtype=torch.float64, attn_implementation=None, experts_implementation=None
        )
        if config.get_text_config() is not config:
            hold(base, carried(base))
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        base.set_attn_implementation("eager")  # SDPA has no softcap
    if hasattr(base, "set_experts_implementation"):
        base.set_experts_implementation("eager")  # the others know no float64
    with torch.random.fork_rng(devices=[]):
        draw_weights(base, 0, torch.device("cpu"))
    base = spread(base).train(model.base.training)
    return HFDecoder(base, max_seq_len=longest and LONGEST_TOKENS, needs_head=False)


def hides_lengths(model: HFDecoder) -> bool:
    """Whether a model behaves differently at lengths that a short check does not reach, because
    of windows, attention blocks, queries scaled by position, or RoPE with two sets of factors
    (PhiMoE also scales attention by the last position of each call)."""
    limit = model.longest_tokens or 2**31
    return (
        CHUNKED in (getattr(model.config, "layer_types", None) or ())
        or any(scales_by_position(module) for module in model.attention_modules)
        or bool(switching_lengths(model.config))
        or (shortest_window(model.base) or limit) < limit
    )


def held_by(twin: HFDecoder, heights: Sequence[int]) -> list[HFDecoder]:
    """Return for each stage a copy of the twin with the layers of that stage only."""
    parts = []
    for height, stop in zip(heights, accumulate(heights), strict=True):
        base = deepcopy(twin.base)
        hold(base, placeholders(base, range(stop - height, stop)))
        parts.append(HFDecoder(base, max_seq_len=twin.max_seq_len, needs_head=False))
    return parts


_LENS = (20, 19, 1, 20)
_ROWS = 4
"""Rows before the last chunk whose gradients are compared apart: the nearest ones decay least."""
_MIXER_BOUND, _NARROW_MIXER_BOUND = 1e-3, 1e-2
"""Bounds in float32 and, for models in 16 bits, to which some families round decays. A dropped
state has error 1."""
_LEAST_SHARE = 1e-3
"""Lower bound of the compared rows' norm, relative to all earlier rows: less may be rounding."""


def mixer_errors(model: HFDecoder, backend: Backend, agree: Agree = dict) -> list[float]:
    """Compare each kind of recurrent mixer in slices with the same mixer on a whole sequence.
    Return the largest relative error of each kind. A mixer in 16 bits runs in float32. Raises
    UnsupportedModelError if an error is too large."""
    kinds = {type(mixer.module): mixer for mixer in reversed(model.probed.mixers)}
    if not kinds:
        return []
    with forward_as_written([*model.base.modules()], model.max_seq_len):
        calls = model.calls_of(list(kinds.values()), sum(_LENS))
        names = {module: name for name, module in model.base.named_modules()}
        found = []
        for call in calls:
            with whole(model.base, names[call.mixer.module]):
                found.append(_mixer_error(model, call, backend, agree))
        return found


def _mixer_error(model: HFDecoder, called: Called, backend: Backend, agree: Agree) -> float:
    most = _MIXER_BOUND
    if called.inputs.x.dtype.itemsize < 4:
        most, wide = _NARROW_MIXER_BOUND, deepcopy(called.mixer.module).to(torch.float32)
        called = Called(Mixer(wide, called.mixer.layer), called.inputs.to(torch.float32))
    x = random_like(called.inputs.x)
    with torch.enable_grad():
        (own_y, own_grad), width = _whole_mixer(called, x)
        y, grad = _mixer_in_chunks(model, called, x, backend)
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
    return max(_within(model, agree(errors), most, told, where))


def _whole_mixer(called: Called, x: Tensor) -> tuple[tuple[Tensor, Tensor], int]:
    """Run a mixer on the whole of x (1, T, D), forward and backward. Return ((output, input
    gradient), width), the first two (T, D); `width` is that of the mixer's convolution, or 0 if it
    has none."""
    leaf = x.clone().requires_grad_()
    cache = SliceCache({}, x.shape[1])
    args, kwargs = called.inputs.of(leaf, lambda of_tokens: of_tokens, cache)
    y = first(called.mixer.module(*args, **kwargs))[0]
    (grad,) = torch.autograd.grad(y, leaf, _cotangent(y, len(y), _LENS[-1]))
    widths = [state.shape[-1] for (kind, _), state in cache.after.items() if kind == "conv"]
    return (y.detach(), grad[0]), max(widths, default=0)


class _MixerStage:
    """A stage of one recurrent mixer, whose input is `x` (1, T, D)."""

    def __init__(self, called: Called, x: Tensor, leaves: list[Tensor]) -> None:
        layer = called.mixer.layer
        self.layers = range(layer, layer + 1)
        self.events: tuple[TokenMixing, ...] = (("states", layer),)
        self._called, self._x, self._leaves = called, x, leaves

    def run(self, _: Tensor, positions: Tensor, cell: CellAttention, what: Pass) -> Tensor:
        def own_rows(of_tokens: Tensor) -> Tensor:
            return of_tokens[:, positions]

        module, x = self._called.mixer.module, _cut(self._leaves, own_rows(self._x))
        args, kwargs = self._called.inputs.of(x, own_rows, SliceCache({}, 0))
        with bound([module], cell, what, positions):
            return first(module(*args, **kwargs))[0]


def _mixer_in_chunks(
    model: HFDecoder, called: Called, x: Tensor, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Return a mixer's output and input gradient (T, D) for one sequence in chunks."""
    length, leaves = sum(_LENS), list[Tensor]()
    plan = plan_chunks([length], list(accumulate(_LENS, initial=0)), [1])
    ids = torch.zeros(length, dtype=torch.int64, device=model.device)
    with relaying([called.mixer]):
        stage = _MixerStage(called, x, leaves)
        cotangent = partial(_cotangent, length=length, num_tokens=_LENS[-1])
        (y,), grad = _Trial(model, backend, leaves).obey(plan, [stage], [ids], cotangent)
    return y, grad


def check_failure(
    model: HFDecoder, what: str, required: str,
    change: str = "train a model of another family, or report this one",
) -> UnsupportedModelError:  # fmt: skip
    if compiled_in_place(model.base):
        what += ", with layers that are compiled in place"
        change = "leave out layer.compile(), or model.compile of a run"
    return UnsupportedModelError(
        given=f"{model.name} {what}", required=required, source="the start-up self-check",
        change=change,
    )  # fmt: skip


_WHOLE = (
    "fails in its own forward, without chunks",
    "a model whose own forward and backward run on token ids alone",
    "mend the model or its config: model(input_ids=...) must run by itself",
)
_IN_CHUNKS = (
    "fails when it runs in chunks",
    "a decoder that runs with position_ids, without an attention mask and without a cache",
)
_AS_TWIN = (
    "cannot be built small, with random weights",
    "a class that is made of its config alone, for a tiny twin with windows or in stages",
    "let its __init__ take the config alone",
)


@contextmanager
def _refused(model: HFDecoder, what: str, *others: str) -> Iterator[None]:
    """Context manager: an error of the model's code is raised as an UnsupportedModelError. `what`
    is the fault in words. `others` are one or two further texts of the error: what is required, and
    the advice if it is not the default one."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError | ElsewhereError) or is_of_machine(error):
            raise
        kernel = model.config._attn_implementation
        if isinstance(error, ImportError) and kernel not in ("sdpa", "eager"):
            change = f'call model.set_attn_implementation("sdpa"): chunks do not need {kernel}'
            others = (others[0], change)
        raise check_failure(model, f"{what}: {type(error).__name__}: {error}", *others) from error
