"""One causal language model of transformers, built small: furlong's gradients beside its own.

The truth is the model's own unchunked forward and backward, in train mode and float64, over one
sequence at a time. Two controls keep a row from being right by chance: the truth is computed twice,
and sequences that are cut without anything handed on from chunk to chunk must give other gradients.
A family whose truth moves, or whose gradients do not, is "unprovable". Whether transformers rounds
to float32 is not taken from a list: `own_rounding` measures it. A family that rounds so much that
nothing can be told of it is measured again with a modeling file that says float64.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from helpers.float64_twin import twin_class
from small_models import FIRST_PLAIN_TOKEN, VOCAB_SIZE, small_config
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import furlong
from furlong.errors import UserError
from furlong.testing import TokenSequences, reference_loss, take_grads
from furlong.verify import EXACT_BOUND, spread_weights

LENS = (61, 20, 9)
CHUNK_SIZE = 13
KEEPS = ("kv", "attention", "all")
CUT_KEEPS = ("input", "attention")
"""What is kept layer-first, one layer after the other."""
ROUNDED = 2e-6
WIDENED = 1e-9
"""The bound where transformers' float32 is float64: deep scans lose a few digits of 16."""
_ROUNDS = "rounds"
"""Not an outcome: the model has to be measured with its float32 widened."""
_ATTENTION_AGREES = 1e-4
_CONTROL_MOVES = 1e-3
_NUM_MORE = 7
# outcome: what the document says of it, in the document's order
OUTCOMES = {
    "wrong": "other gradients than the model's own, or another loss",
    "crash": "furlong fails with something else than a refusal",
    "exact": f"the model's own gradients to at most {EXACT_BOUND:g}",
    "rounded": f"at most {ROUNDED:g}, where transformers itself rounds to float32: its own "
    "gradients move too when its sequences go through it at once",
    "widened": f"at most {WIDENED:g} where the float32 in transformers' modeling file is made "
    "float64; as it is, its own gradients move by more than can be told from an error",
    "refused": "refused by furlong, with its own reason",
    "unprovable": "taken by furlong, but its own gradients are no truth to compare with",
    "not run": "transformers' own model does not run alone, small, or in float64",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One model type and what became of it."""

    model_type: str
    class_name: str
    outcome: str
    detail: str
    """The worst relative error, or the reason."""
    cut: str = "-"
    """What becomes of it when its layers run one after the other; "-" where it does not run."""


_Truths = tuple[float, dict[str, Tensor]]
"""The model's own loss and gradients."""


class _NotRunError(Exception):
    """transformers' own model could not be asked."""


def measure(model_type: str) -> Row:
    """Build a small model of that type and compare furlong's gradients with its own."""
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    outcome, detail, *cut = _outcome(model_type)
    if outcome == _ROUNDS:
        with _default_float64():
            outcome, detail, *cut = _outcome(model_type, wide=True)
    return Row(model_type, class_name, outcome, _one_line(detail), *cut)


@contextmanager
def _default_float64() -> Iterator[None]:
    """Tables that a model makes as it is built are float64, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _outcome(model_type: str, *, wide: bool = False) -> tuple[str, ...]:
    """Outcome and detail, and for a model that is right the outcome of its cut."""
    sequences = _sequences()
    try:
        model, loss, truth = _model_with_truth(model_type, sequences, wide)
    except _NotRunError as error:
        return _refused_in_float32(model_type, sequences) or ("not run", str(error))
    truths = loss, truth
    whole = [furlong.ChunkOptions(size=CHUNK_SIZE, keep=keep) for keep in KEEPS]
    try:
        worst, where = _worst(model, sequences, truths, whole)
    except UserError as error:
        return "refused", error.given
    except Exception as error:  # a crash is a finding, whatever it is
        return "crash", f"{type(error).__name__}: {error}"
    again_loss, again = _true_gradients(model, sequences)
    noise = max(worst_error(again, truth)[0], _relative(again_loss, loss))
    if noise > EXACT_BOUND:
        return "unprovable", f"its own gradients differ by {noise:.1e} from run to run"
    control, _ = worst_error(_true_gradients(model, cut(sequences))[1], truth)
    if not control > _CONTROL_MOVES:
        return "unprovable", f"cut without a relay its gradients move by {control:.1e} only"
    own = own_rounding(model, sequences, truth)
    may_round = not wide and own > EXACT_BOUND
    outcome = _judged(worst, may_round, wide)
    if outcome == "wrong":
        told = f"{worst:.1e} ({where}), its own {own:.1e}"
        return _ROUNDS if may_round else outcome, told
    cut_outcome, told = _cut_outcome(model, sequences, truths, may_round, wide)
    if cut_outcome == "wrong" and may_round:
        return _ROUNDS, told
    if cut_outcome in ("wrong", "crash"):
        return cut_outcome, f"layer by layer: {told}"
    return outcome, f"{worst:.1e}; {told} layer by layer", cut_outcome


def _cut_outcome(
    model: nn.Module, sequences: TokenSequences, truths: _Truths, may_round: bool, wide: bool
) -> tuple[str, str]:
    """Outcome and detail of the same model whose layers run one after the other."""
    options = [
        furlong.ChunkOptions(size=CHUNK_SIZE, keep=keep, order="layer-first", stage_layers=1)
        for keep in CUT_KEEPS
    ]
    try:
        worst, where = _worst(model, sequences, truths, options)
    except UserError as error:
        return "refused", f"refused ({error.given})"
    except Exception as error:  # a crash is a finding, whatever it is
        return "crash", f"{type(error).__name__}: {error}"
    outcome = _judged(worst, may_round, wide)
    return outcome, f"{worst:.1e}" + (f" ({where})" if outcome == "wrong" else "")


def _judged(worst: float, may_round: bool, wide: bool) -> str:
    if wide:
        return "widened" if worst <= WIDENED else "wrong"
    if worst <= EXACT_BOUND:
        return "exact"
    return "rounded" if worst <= ROUNDED and may_round else "wrong"


def _worst(
    model: nn.Module,
    sequences: TokenSequences,
    truths: _Truths,
    tried: Sequence[furlong.ChunkOptions],
) -> tuple[float, str]:
    """The worst error of all that is tried, and its place."""
    loss, truth = truths
    worst, where = 0.0, ""
    for options in tried:
        result = furlong.forward_backward(model, sequences, options, max_seq_len=max(LENS))
        error, name = worst_error(_take_grads(model), truth)
        for found, place in ((error, name), (_relative(result.loss, loss), "the loss")):
            if not found <= worst:
                worst, where = found, f"{place}, keep={options.keep}"
    return worst, where


def cut(sequences: TokenSequences) -> TokenSequences:
    """The same tokens, each chunk a sequence of its own: what a broken engine would compute."""
    pieces = []
    for sequence in sequences:
        targets = sequence["labels"]
        for start in range(0, len(targets), CHUNK_SIZE):
            stop = start + CHUNK_SIZE + 1  # the next chunk's first token is this one's last label
            pieces.append({k: v[start:stop] for k, v in sequence.items()})
    return [piece for piece in pieces if len(piece["labels"]) > 1]


def _sequences() -> TokenSequences:
    generator = torch.Generator().manual_seed(0)
    batch = []
    for num_tokens in LENS:
        ids = torch.randint(FIRST_PLAIN_TOKEN, VOCAB_SIZE, (num_tokens,), generator=generator)
        batch.append({"input_ids": ids, "labels": ids.clone()})
    return batch


def _model_with_truth(
    model_type: str, sequences: TokenSequences, wide: bool
) -> tuple[nn.Module, float, dict[str, Tensor]]:
    """A model, its loss and its gradients: with SDPA where that says the same as eager attention.

    Where it does not, it lacks something that the family needs (a softcap, sinks).
    """
    found: dict[str, tuple[nn.Module, float, dict[str, Tensor]]] = {}
    failures = []
    for attention in ("eager", "sdpa"):
        doing = "cannot be built small"
        try:
            model = build(model_type, torch.float64, attention, wide=wide)
            doing = "its own forward fails"
            found[attention] = (model, *_true_gradients(model, sequences))
        except Exception as error:  # whatever a family's own code raises
            failures.append(f"{doing}: {error}")
    if not found:
        raise _NotRunError(failures[0])
    if len(found) == 2:
        agree = worst_error(found["sdpa"][2], found["eager"][2])[0] <= _ATTENTION_AGREES
        return found["sdpa" if agree else "eager"]
    return next(iter(found.values()))


def _refused_in_float32(model_type: str, sequences: TokenSequences) -> tuple[str, str] | None:
    """A family that knows no float64 can still be one that furlong refuses."""
    try:
        model = build(model_type, torch.float32, "eager")
        _true_gradients(model, sequences)
    except Exception:  # whatever a family's own code raises
        return None
    try:
        furlong.forward_backward(model, sequences, max_seq_len=max(LENS))
    except UserError as error:
        return "refused", error.given
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"
    return "unprovable", "its own forward does not run in float64"


def build(model_type: str, dtype: torch.dtype, attention: str, *, wide: bool = False) -> Any:
    """A small model of that type in train mode, whose attention matters; `wide`: its modeling file
    says float64 for float32."""
    config: Any = small_config(CONFIG_MAPPING[model_type])
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    for name in getattr(config, "sub_configs", {}):  # a composite's class may want the part only
        part = getattr(config, name, None)
        if type(config) is not model_class.config_class is type(part):
            config = part
            break
    model_class = twin_class(model_class) if wide else model_class
    torch.manual_seed(0)
    model = model_class._from_config(config, dtype=dtype, attn_implementation=attention)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others know no float64
    spread_weights(model, seed=0)
    return model.train()


def _true_gradients(model: nn.Module, sequences: TokenSequences) -> tuple[float, dict[str, Tensor]]:
    return reference_loss(model, sequences), _take_grads(model)


def _take_grads(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of all parameters, zero where none arrived, which are then cleared."""
    zeros = {name: torch.zeros_like(p).double() for name, p in model.named_parameters()}
    return zeros | take_grads(model)


def worst_error(given: dict[str, Tensor], truth: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative L2 error of a parameter's gradient, and its name.

    A true gradient below the rounding of all together has no direction (a key's bias without RoPE
    shifts every score alike): it counts against the norm of all. Others count against their own
    norm, or a billionth of that of all.
    """
    total = float(torch.stack([g.norm() for g in truth.values()]).norm())
    worst, where = 0.0, ""
    for name, gradient in truth.items():
        own = float(gradient.norm())
        scale = max(own, 1e-9 * total) if own > EXACT_BOUND * total else total
        error = float((given[name] - gradient).norm())
        error = error / scale if error else 0.0
        if not error <= worst:  # so that NaN is the worst of all
            worst, where = math.inf if math.isnan(error) else error, name
    return worst, where


def _relative(given: float, truth: float) -> float:
    error = abs(given - truth) / abs(truth)
    return math.inf if math.isnan(error) else error


def own_rounding(model: nn.Module, sequences: TokenSequences, truth: dict[str, Tensor]) -> float:
    """How far the model's own gradients move when all sequences go through it at once.

    They are padded on the right, which a causal model does not see: every token keeps its loss and
    its gradient. Sums over tokens take another order and rows lie elsewhere in vector registers, so
    that what moves is transformers' rounding to float32 (or else nothing, to 1e-15). Logits in
    float32 (mllama's) have gradients that are rounded at the scale of the loss: it is another one.
    """
    width = max(len(s["labels"]) for s in sequences) + _NUM_MORE
    ids = torch.full((len(sequences), width), FIRST_PLAIN_TOKEN)
    labels = torch.full_like(ids, -100)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence["labels"])] = sequence["input_ids"]
        labels[row, : len(sequence["labels"])] = sequence["labels"]
    logits = model(input_ids=ids, use_cache=False).logits
    targets = labels[:, 1:].flatten()
    loss = cross_entropy(logits[:, :-1].flatten(0, 1).double(), targets, ignore_index=-100)
    scale = 1 if logits.dtype == torch.float64 else 3
    (scale * loss).backward()
    moved = {name: gradient / scale for name, gradient in _take_grads(model).items()}
    return worst_error(moved, truth)[0]


def _one_line(text: str) -> str:
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= 200 else f"{line[:197]}..."
