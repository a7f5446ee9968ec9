"""The contenders of step.py and long.py: `contenders.py TRIAL_AS_JSON` measures one of them.

Every contender computes the same: the gradients of the summed loss divided by the batch's labelled
tokens, on the same weights and sequences, in one dtype.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from measuring import Measurement, measure
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import furlong

Batch = list[dict[str, Tensor]]
Step = Callable[[], float]
Prepare = Callable[[Batch], Step]

_MAX_POSITIONS = 2**18
_START_TOKENS = 256

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
    "flat": {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 1,
        "num_key_value_heads": 1, "intermediate_size": 128, "vocab_size": 512,
    },
    "qwen3_5": {
        "num_hidden_layers": 8, "hidden_size": 384, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1024, "vocab_size": 4096,
        "linear_num_value_heads": 6, "linear_num_key_heads": 3, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}  # fmt: skip
"""By name, the sizes of a Qwen2 model, or of a Qwen3.5 (every fourth layer has attention)."""
_MODEL_TYPES = {"qwen3_5": "qwen3_5_text"}

STEADY_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""Keeps glibc from raising the size below which freed memory stays with the process: then the
resident set is what a step holds, and two lengths can be compared to a few MiB. It costs time."""


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
    """Tokens of the step before the measured one; None: as many as that has."""
    dials: Mapping[str, Any] = field(default_factory=dict)
    """furlong's ChunkOptions, or the arguments of another contender."""
    storage: Mapping[str, Any] = field(default_factory=dict)
    """furlong's Storage."""
    device: str = "cpu"
    dtype: str = "float32"
    python: str = sys.executable
    """The interpreter whose packages the contender needs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables set for the process besides the caller's own."""

    def command(self) -> list[str]:
        own = Path(__file__).resolve()
        variables = {"PYTHONPATH": str(own.parents[1] / "src"), **self.environment}
        settings = [f"{name}={value}" for name, value in variables.items()]
        return ["env", *settings, self.python, str(own), json.dumps(asdict(self))]

    def batch(self) -> Batch:
        if self.batch_path is None:
            generator = torch.Generator().manual_seed(0)
            vocab_size = SHAPES[self.shape]["vocab_size"]
            ids = [torch.randint(vocab_size, (self.num_tokens,), generator=generator)]
        else:
            ids = [torch.tensor(s) for s in json.loads(Path(self.batch_path).read_text())]
        return [_labelled(sequence.to(self.device)) for sequence in ids]


def build(shape: str, device: str = "cpu", dtype: str = "float32") -> PreTrainedModel:
    """A model of the shape with random weights, in train mode."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        _MODEL_TYPES.get(shape, "qwen2"), **SHAPES[shape],
        max_position_embeddings=_MAX_POSITIONS, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.to(device, getattr(torch, dtype)).train()


def run(trial: Trial) -> Measurement:
    model = build(trial.shape, trial.device, trial.dtype)
    batch = trial.batch()
    num_tokens = sum(len(s["input_ids"]) for s in batch)
    prepare = _CONTENDERS[trial.contender](model, trial)
    warmup_tokens = num_tokens if trial.warmup_tokens is None else trial.warmup_tokens
    return measure(
        model, prepare(batch), num_tokens=num_tokens,
        start=prepare(_first_tokens(batch, _START_TOKENS)),
        warm_up=prepare(_first_tokens(batch, warmup_tokens)),
    )  # fmt: skip


def furlong_contender(model: PreTrainedModel, trial: Trial) -> Prepare:
    storage = furlong.Storage(**trial.storage) if trial.storage else None
    engine = furlong.Engine(model, storage=storage)
    options = furlong.ChunkOptions(**trial.dials)
    return lambda batch: lambda: engine.forward_backward(batch, options).loss


def _hf(model: PreTrainedModel, trial: Trial) -> Prepare:
    """transformers' own forward and loss, one sequence after the other."""

    def prepare(batch: Batch) -> Step:
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

    return prepare


def _hf_checkpointing(model: PreTrainedModel, trial: Trial) -> Prepare:
    """With `offload` among the dials the inputs of the layers wait in pinned host memory."""
    _checkpoint(model, **trial.dials)
    return _hf(model, trial)


def _trl(model: PreTrainedModel, trial: Trial) -> Prepare:
    """What SFTTrainer computes with `packing=True`, from its own parts: best-fit packing to the
    longest sequence, the padding-free collator (position ids isolate the sequences), gradient
    checkpointing, and the head fused with the loss, which makes no full logits."""
    from datasets import Dataset
    from trl import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    from trl.trainer.utils import add_fused_lm_head

    _checkpoint(model)
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))

    def prepare(batch: Batch) -> Step:
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

    return prepare


def _streambp(model: PreTrainedModel, trial: Trial) -> Prepare:
    """StreamBP (arXiv 2506.03077), by its package, as its README trains with it.

    A mask of ones is passed: without one its attention of a later chunk is not causal. It divides
    by the labels before they are shifted, one more than there are; the count is told beforehand,
    so that the gradients are the others'.
    """
    wrapped = _stream_model_class()(model, gradient_accumulation_steps=1, **trial.dials)
    wrapped.train()
    wrapped.gradient_checkpointing_enable()

    def prepare(batch: Batch) -> Step:
        (sequence,) = batch
        ids = sequence["input_ids"][None]
        num_labels = _num_labels(batch)

        def step() -> float:
            wrapped._valid_pos_num = num_labels - len(ids[0])
            loss = wrapped(
                input_ids=ids, labels=sequence["labels"][None], attention_mask=torch.ones_like(ids)
            ).loss
            return float(loss) * len(ids[0]) / num_labels

        return step

    return prepare


def _stream_model_class() -> Any:
    """StreamModel by its own file: its package imports trl, for trainers that nobody needs here."""
    from importlib.util import find_spec, module_from_spec, spec_from_file_location

    package = find_spec("streambp")
    assert package is not None and package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0], "stream_model.py")
    spec = spec_from_file_location("stream_model", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.StreamModel


_CONTENDERS: dict[str, Callable[[PreTrainedModel, Trial], Prepare]] = {
    "furlong": furlong_contender,
    "hf-full": _hf,
    "hf-checkpointing": _hf_checkpointing,
    "trl-packing": _trl,
    "streambp": _streambp,
}


def _checkpoint(model: PreTrainedModel, **dials: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name changes in transformers 6
        model.gradient_checkpointing_enable(**dials)


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
