"""The start-up self-check: is this model, cut into chunks, still the model that the user gave?

It compares final logits of a random sequence, longer than the shortest sliding window, computed
whole by the model's own forward and computed in chunks. What fails is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from furlong.errors import UnsupportedModelError, UserError
from furlong.kv.arena import Arena
from furlong.kv.store import KVStore
from furlong.models.causal_lm import CausalLM
from furlong.models.support import shortest_window
from furlong.ops.backend import Backend
from furlong.plan.values import Chunk, ChunkPlan, Slice
from furlong.runtime.cell import Cell
from furlong.runtime.executor import chunk_pieces, piece_lens
from furlong.runtime.inputs import ShiftedSequence, chunk_inputs

_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3}
_MIN_TOKENS = 48
_SHORT_TOKENS = 5


def self_check(model: CausalLM, backend: Backend) -> float:
    """The relative L2 error of chunked logits against the model's own; raises if it is too large.

    Runs in evaluation mode without gradients, with the parameters as they are now.
    """
    sequences = _random_sequences(model)
    modes = [(module, module.training) for module in model.model.modules()]
    model.model.eval()
    try:
        with torch.no_grad():
            expected = [model.whole_logits(s.input_ids.to(model.device)) for s in sequences]
            given, num_attended = _try_chunked_logits(model, backend, sequences)
    finally:
        for module, training in modes:
            module.training = training
    if num_attended != {model.num_layers}:
        raise _refusal(
            model,
            f"reaches transformers' AttentionInterface {sorted(num_attended)} times in a forward "
            f"of {model.num_layers} layers",
            "every layer's attention to go through it once",
        )
    error = float(
        (given - torch.cat(expected).double()).norm() / torch.cat(expected).double().norm()
    )
    tolerance = _TOLERANCES.get(expected[0].dtype, 6e-2)
    if not error <= tolerance:
        raise _refusal(
            model,
            f"gives other logits in chunks than whole (relative error {error:.1e})",
            f"a relative error of at most {tolerance:.0e}: tokens meet in causal attention only",
        )
    return error


def _random_sequences(model: CausalLM) -> list[ShiftedSequence]:
    window = shortest_window(model.model)
    longest = max(_MIN_TOKENS, (window or 0) + _MIN_TOKENS // 2)
    limit = getattr(model.config, "max_position_embeddings", None) or longest
    generator = torch.Generator().manual_seed(0)
    return [
        ShiftedSequence(
            torch.randint(model.vocab_size, (num_tokens,), generator=generator),
            torch.full((num_tokens,), -100),
        )
        for num_tokens in (min(longest, limit), _SHORT_TOKENS)
    ]


def _try_chunked_logits(
    model: CausalLM, backend: Backend, sequences: Sequence[ShiftedSequence]
) -> tuple[Tensor, set[int]]:
    try:
        with model.installed():
            return _chunked_logits(model, backend, sequences)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a family's own code meets without mask or cache
        raise _refusal(
            model,
            f"fails when it runs in chunks: {type(error).__name__}: {error}",
            "a decoder that runs with position_ids, without an attention mask and without a cache",
        ) from error


def _chunked_logits(
    model: CausalLM, backend: Backend, sequences: Sequence[ShiftedSequence]
) -> tuple[Tensor, set[int]]:
    """Logits of both sequences one under the other, and how often each forward reached our
    attention.

    The long one is cut in three; its tail shares a chunk with the short one.
    """
    length, short = (len(s.input_ids) for s in sequences)
    cuts = [0, length // 3, length - length // 4, length]
    pieces = [Slice(0, start, stop) for start, stop in pairwise(cuts)]
    chunks = (Chunk((pieces[0],)), Chunk((pieces[1],)), Chunk((pieces[2], Slice(1, 0, short))))
    plan = ChunkPlan((length, short), chunks, (model.num_layers,), ((),))
    store = KVStore(Arena(model.device), piece_lens(plan))
    logits, num_attended = [], set()
    for index, chunk in enumerate(chunks):
        inputs = chunk_inputs(chunk, sequences, model.device)
        cell = Cell(
            inputs.slices, chunk_pieces(plan, index, inputs.slices), store, backend,
            model.num_layers, writes_kv=True,
        )  # fmt: skip
        logits.append(model.logits(model.hidden(inputs.input_ids, inputs.position_ids, cell)))
        num_attended.add(cell.num_attended)
    return torch.cat(logits).double(), num_attended


def _refusal(model: CausalLM, what: str, required: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        given=f"{model.name} {what}", required=required, source="the start-up self-check",
        change="train a model of another family, or report this one",
    )  # fmt: skip
