"""The contenders of step.py, one per process: `contenders.py TRIAL_AS_JSON` measures one of them.

Every contender computes the same: the gradients of the summed loss divided by the batch's labelled
tokens, on the same weights and sequences, in float32.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Measurement, measure
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import furlong

Batch = list[dict[str, Tensor]]
Step = Callable[[], float]

_MAX_POSITIONS = 2**18

# "tiny" has as many key-value heads as query heads: most K,V bytes for the time it takes.
SHAPES: dict[str, dict[str, int]] = {
    "small": {
        "num_hidden_layers": 8, "hidden_size": 384, "num_attention_heads": 6,
        "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 4096,
    },
    "tiny": {
        "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 1024,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trial:
    """What one process measures; travels as JSON on its command line."""

    contender: str
    shape: str
    num_tokens: int = 0
    """Tokens of one sequence of random ids, where there is no `batch_path`."""
    batch_path: str | None = None
    """JSON lists of token ids, one per sequence."""
    warmup_tokens: int | None = None
    chunks: dict[str, Any] | None = None
    """furlong's ChunkOptions."""

    def command(self) -> list[str]:
        return [__file__, json.dumps(asdict(self))]

    def batch(self) -> Batch:
        if self.batch_path is None:
            generator = torch.Generator().manual_seed(0)
            vocab_size = SHAPES[self.shape]["vocab_size"]
            return [_labelled(torch.randint(vocab_size, (self.num_tokens,), generator=generator))]
        ids = json.loads(Path(self.batch_path).read_text())
        return [_labelled(torch.tensor(sequence)) for sequence in ids]


def build(shape: str) -> PreTrainedModel:
    """A Qwen2 model with random weights, float32, in train mode."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **SHAPES[shape], max_position_embeddings=_MAX_POSITIONS, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen2ForCausalLM(config).float().train()


def run(trial: Trial) -> Measurement:
    model = build(trial.shape)
    batch = trial.batch()
    make = _CONTENDERS[trial.contender]
    step = make(model, batch, trial.chunks)
    warm_up = step
    if trial.warmup_tokens is not None:
        warm_up = make(model, _first_tokens(batch, trial.warmup_tokens), trial.chunks)
    return measure(model, step, warm_up, sum(len(s["input_ids"]) for s in batch))


def furlong_step(model: PreTrainedModel, batch: Batch, chunks: dict[str, Any] | None) -> Step:
    options = furlong.ChunkOptions(**(chunks or {}))
    return lambda: furlong.forward_backward(model, batch, options).loss


def _hf_step(model: PreTrainedModel, batch: Batch, _: object) -> Step:
    """transformers' own forward and loss, one sequence after the other."""
    divisor = _num_labels(batch)

    def step() -> float:
        total = 0.0
        for sequence in batch:
            loss = model(
                input_ids=sequence["input_ids"][None], labels=sequence["labels"][None],
                num_items_in_batch=divisor, use_cache=False,
            ).loss  # fmt: skip
            loss.backward()
            total += float(loss.detach())
        return total

    return step


def _hf_checkpointing_step(model: PreTrainedModel, batch: Batch, _: object) -> Step:
    _checkpoint(model)
    return _hf_step(model, batch, _)


def _trl_step(model: PreTrainedModel, batch: Batch, _: object) -> Step:
    """What SFTTrainer computes with `packing=True`, from its own parts: best-fit packing to the
    longest sequence, the padding-free collator (position ids isolate the sequences), gradient
    checkpointing, and the head fused with the loss, which makes no full logits."""
    from datasets import Dataset
    from trl import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    from trl.trainer.utils import add_fused_lm_head

    if not hasattr(model, "_head_is_fused"):
        _checkpoint(model)
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        model._head_is_fused = True
    longest = max(len(s["input_ids"]) for s in batch)
    columns = {name: [s[name].tolist() for s in batch] for name in ("input_ids", "labels")}
    packed = pack_dataset(Dataset.from_dict(columns), seq_length=longest, strategy="bfd")
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    rows = [collator([row]) for row in packed]
    divisor = _num_labels(batch)
    assert divisor == sum(int((row["labels"][:, 1:] != -100).sum()) for row in rows)

    def step() -> float:
        total = 0.0
        for row in rows:
            outputs = model(**row, use_cache=False, fused_lm_head=True)
            loss = -outputs.log_probs.sum() / divisor
            loss.backward()
            total += float(loss.detach())
        return total

    return step


_CONTENDERS: dict[str, Callable[[PreTrainedModel, Batch, Any], Step]] = {
    "furlong": furlong_step,
    "hf-full": _hf_step,
    "hf-checkpointing": _hf_checkpointing_step,
    "trl-packing": _trl_step,
}


def _checkpoint(model: PreTrainedModel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name changes in transformers 6
        model.gradient_checkpointing_enable()


def _labelled(input_ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def _num_labels(batch: Batch) -> int:
    return sum(len(s["labels"]) - 1 for s in batch)


def _first_tokens(batch: Batch, num_tokens: int) -> Batch:
    """The batch's first tokens, in whole sequences but for the last."""
    first: Batch = []
    for sequence in batch:
        taken = min(len(sequence["input_ids"]), num_tokens)
        if taken < 2:
            break
        first.append({name: ids[:taken] for name, ids in sequence.items()})
        num_tokens -= taken
    return first


if __name__ == "__main__":
    print(json.dumps(asdict(run(Trial(**json.loads(sys.argv[1]))))))
