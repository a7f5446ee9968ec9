"""The start-up self-check: is this model, cut into chunks, still the model that the user gave?

Three comparisons of random sequences, computed whole by the model itself and computed in chunks:

- a few tokens whose tail shares a chunk with another sequence: final hidden states, and the
  gradient by the input embeddings of a loss at the last tokens alone. What reaches the embeddings
  of the first chunks then came through keys and values of later ones, and nothing else;
- the short sequence's logits, by the model's own forward, in chunks a few rows at a time;
- with a sliding window, hidden states of more tokens than the shortest window, without gradients.

What differs is refused by name. In 16 bits the bound is twice what the whole run itself moves when
the outputs of every attention and of the modules in it are rounded once more.

Attention blocks and a temperature by position (Llama 4) begin to matter beyond thousands of tokens:
a tiny twin (`runtime.checks.twin`), in which they are short, is checked beside the model.

Where a process holds one stage, nobody has the whole model to compare with. Its own weights must be
finite, and a tiny twin (`runtime.checks.twin`) is checked in the model's place: whole, and as
stages that hold what theirs does and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from furlong.errors import UnsupportedModelError, UserError
from furlong.models.causal_lm import CausalLM
from furlong.models.held import uncuttable
from furlong.models.rope import num_positions
from furlong.models.support import shortest_window
from furlong.ops.backend import Backend
from furlong.ops.scarcity import is_of_machine
from furlong.runtime.checks.cuts import cut_errors
from furlong.runtime.checks.differences import differences
from furlong.runtime.checks.mixers import mixer_errors
from furlong.runtime.checks.trial import (
    Run,
    Watch,
    chunked_forwards,
    chunked_run,
    random_ids,
    refusal,
    refuse_not_finite,
    rounded_again,
    watched,
    whole_run,
)
from furlong.runtime.checks.twin import held_by, hides_lengths, tiny_twin
from furlong.runtime.modes import modes_kept
from furlong.runtime.rng import RNGState, replayed

_T = TypeVar("_T")
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
_NUM_TOKENS = 16
_SHORT_TOKENS = 4
_BEYOND_WINDOW_TOKENS = 24
_LONGEST_WINDOW_TOKENS = 8192
"""Beyond longer windows nothing is computed whole: its memory would be that of the sequence."""
_NUM_ROUNDINGS = 4


def self_check(model: CausalLM, backend: Backend, heights: Sequence[int] | None = None) -> float:
    """The largest relative L2 error of what is compared; raises if one is too large.

    `heights`: layers of each stage in which the chunks are computed; None: one stage of all.

    Runs in the mode in which the model is, or in evaluation mode where it draws random numbers,
    with the parameters as they are now, and adds to no `.grad`. Buffers and generators are
    afterwards as before. Raises UnsupportedModelError for a model that differs in chunks, whose
    weights are not finite, or whose forward changes a buffer.
    """
    whole = (model.num_layers,)
    heights = tuple(heights or whole)
    model.stages(heights)  # stages of other layers are no fault of the model
    refuse_not_finite(model)
    if model.held == range(model.num_layers):
        error = _check([model] * len(heights), model, backend, heights)
        if not hides_lengths(model):
            return error
        twin = tiny_twin(model)
        return max(error, _check([twin] * len(heights), twin, backend, heights))
    twin = tiny_twin(model)
    errors = [_check([twin], twin, backend, whole)]
    if heights != whole:
        errors.append(_check(held_by(twin, heights), twin, backend, heights))
    return max(errors)


def _check(
    parts: Sequence[CausalLM], model: CausalLM, backend: Backend, heights: Sequence[int]
) -> float:
    """The largest error of a model that `parts` hold, each its own stage."""
    before = RNGState.read(model.device)
    try:
        with modes_kept(model.model), torch.no_grad(), replayed(before, model.device):
            with _unchanged_buffers(model):
                short = _ids(model)[1]
                known = [_try(lambda: model.whole_logits(short), partial(_fails_whole, model))]
            if not RNGState.read(model.device).equals(before):
                model.model.eval()
                known.clear()
            errors = _errors(parts, model, backend, heights, known)
            own = _try(lambda: mixer_errors(model, backend), partial(_fails_in_chunks, model))
            return max(errors + own)
    except UnsupportedModelError as error:
        if len(heights) == 1:
            raise
        # whole, it has passed already
        raise uncuttable(model.name, error.given.removeprefix(model.name).lstrip()) from error


@contextmanager
def _unchanged_buffers(model: CausalLM) -> Iterator[None]:
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


def _ids(model: CausalLM) -> list[Tensor]:
    """A long sequence (T,), to be cut, and a short one."""
    positions = num_positions(model.config) or _NUM_TOKENS
    return random_ids(model, [min(_NUM_TOKENS, positions), min(_SHORT_TOKENS, positions)])


def _errors(
    parts: Sequence[CausalLM],
    model: CausalLM,
    backend: Backend,
    heights: Sequence[int],
    known: list[Tensor],
) -> list[float]:
    """The errors of all comparisons. `known`: the short sequence's own logits, if they are known;
    the first run takes them out."""
    limit = model.longest_tokens or 2**31
    window = shortest_window(model.base) or limit
    ids = _ids(model)
    with watched(model, parts[0]) as watch:
        errors = _compare(
            model,
            lambda: whole_run(model, ids, watch, known.pop() if known else None),
            lambda: chunked_run(parts, backend, heights, ids, watch),
            watch,
        )
        errors += cut_errors(parts, model, backend, heights, ids, watch)
    if window >= limit:  # no token is beyond it
        return errors
    if window > _LONGEST_WINDOW_TOKENS:
        if not any(watch.windows):
            raise _in_mask_alone(model, window)
        return errors
    length = min(max(window, _NUM_TOKENS) + _BEYOND_WINDOW_TOKENS, limit)
    beyond = random_ids(model, [length, _SHORT_TOKENS])
    name = f"hidden states beyond the window of {window} tokens"
    return errors + _compare(
        model,
        lambda: {name: torch.cat([model.whole_hidden(i) for i in beyond])},
        lambda: {name: torch.cat(chunked_forwards(parts, backend, heights, beyond, watch))},
        watch,
    )


def _compare(
    model: CausalLM, run_whole: Callable[[], Run], run_chunked: Callable[[], Run], watch: Watch
) -> list[float]:
    """The errors of a run in chunks; raises if one is above its bound.

    In 16 bits a top-k choice may fall otherwise by rounding alone. So what is above the bound is
    tried again with other roundings: a real difference stays in all of them.
    """
    whole = _try(run_whole, partial(_fails_whole, model))
    dtype = next(iter(whole.values())).dtype
    _require_finite(model, whole, dtype)
    errors = differences(_try(run_chunked, partial(_fails_in_chunks, model)), whole)
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
    for name, error in errors.items():
        if not error <= bounds[name]:
            window = shortest_window(model.base)
            if window is not None and not any(watch.windows):
                raise _in_mask_alone(model, window)
            raise refusal(
                model,
                f"gives other {name} in chunks than whole (relative error {error:.1e})",
                f"a relative error of at most {bounds[name]:.0e}: tokens meet in causal attention "
                "only",
            )
    return list(errors.values())


def _try(run: Callable[[], _T], refused: Callable[[Exception], UnsupportedModelError]) -> _T:
    """Call `run`; whatever a family's own code raises becomes a refusal."""
    try:
        return run()
    except Exception as error:
        if isinstance(error, UserError) or is_of_machine(error):
            raise
        raise refused(error) from error


def _in_mask_alone(model: CausalLM, window: int) -> UnsupportedModelError:
    return refusal(
        model,
        f"has its sliding window of {window} tokens in its attention mask alone",
        "a window that is passed to transformers' AttentionInterface: chunks have no mask",
    )


def _fails_whole(model: CausalLM, error: Exception) -> UnsupportedModelError:
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


def _fails_in_chunks(model: CausalLM, error: Exception) -> UnsupportedModelError:
    return refusal(
        model,
        f"fails when it runs in chunks: {_named(error)}",
        "a decoder that runs with position_ids, without an attention mask and without a cache",
    )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _require_finite(model: CausalLM, whole: Run, dtype: torch.dtype) -> None:
    wider = "float64" if dtype.itemsize >= 4 else "bfloat16 or float32"
    if not all(bool(value.isfinite().all()) for value in whole.values()):
        raise UnsupportedModelError(
            given=f"{model.name} computes values that are not finite, without chunks too, though "
            "its weights are finite",
            required="finite hidden states, logits and gradients",
            source="the start-up self-check",
            change=f"look at its weights and its config for values that are far too large, or"
            f" compute in a wider type than {dtype}, such as {wider}",
        )
