"""One curve of sampled_learning.py: a small model learns windows of real text.

AdamW with warm-up and cosine, one window per update, in chunks; the gradient is exact or sampled.
Seconds are those of the CPU: on one thread they are what a free core would take, whoever else uses
the machine.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from furlong.planners.options import ChunkOptions
from furlong.planners.spaco import Sampling

WINDOW_TOKENS = 4_096
CHUNK_TOKENS = 64
VOCAB_SIZE = 1_024
NUM_HELD_OUT = 4

_MODEL = {
    "num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 384, "vocab_size": VOCAB_SIZE,
}  # fmt: skip
_WARMUP_RATIO = 0.1
_WEIGHT_DECAY = 0.1
_MOST_GRADIENT_NORM = 1.0
_SEED_STRIDE = 2**32

Rule = Literal["exact", "unbiased", "fixed", "paper"]


@dataclass(frozen=True, slots=True)
class Curve:
    """What is trained, and how."""

    rule: Rule
    rate: float
    lr: float
    """The highest, at the end of the warm-up."""
    seed: int
    """Of the weights, the order of the windows and the draws."""
    num_updates: int
    chunk_tokens: int = CHUNK_TOKENS

    @property
    def file_name(self) -> str:
        parts = (
            self.rule, f"rate{self.rate:g}", f"lr{self.lr:g}", f"seed{self.seed}",
            f"{self.num_updates}updates", f"chunk{self.chunk_tokens}",
        )  # fmt: skip
        return "-".join(parts) + ".json"

    def options(self, update: int) -> ChunkOptions:
        """Those of one update; a draw depends on seed and update alone."""
        sampling = None
        if self.rule != "exact":
            seed = self.seed * _SEED_STRIDE + update
            # all tokens have labels: unless told so, unbiased would draw every chunk
            label_rate = self.rate if self.rule == "unbiased" else None
            sampling = Sampling(rate=self.rate, rule=self.rule, label_rate=label_rate, seed=seed)
        return ChunkOptions(size=self.chunk_tokens, sample=sampling)


@dataclass(frozen=True, slots=True)
class Learned:
    """A finished curve."""

    curve: Curve
    seconds: float
    """CPU seconds of training."""
    loss: float
    """Held out, behind the last update, in nats per token."""
    drawn_share: float
    """Share of chunks that got a backward."""
    taken_s: float
    """CPU seconds of all of it, start and evaluations too."""

    @property
    def update_s(self) -> float:
        """CPU seconds of one update."""
        return self.seconds / self.curve.num_updates

    def write(self, folder: Path) -> None:
        """All or nothing: a curve that was cut short leaves no file."""
        target = folder / self.curve.file_name
        unfinished = target.with_suffix(".part")
        unfinished.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        unfinished.replace(target)

    @classmethod
    def read(cls, path: Path) -> Learned:
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**(values | {"curve": Curve(**values["curve"])}))


def learn(
    curve: Curve, trained: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]]
) -> Learned:
    """Train a model from random weights; windows are lists of token ids."""
    import torch
    from transformers import get_scheduler

    import furlong
    from furlong.config.schema import TrainConfig
    from furlong.train.optim import build_optimizer

    started_s = time.process_time()
    model = _model(curve.seed)
    engine = furlong.Engine(model)
    settings = TrainConfig(lr=curve.lr, weight_decay=_WEIGHT_DECAY)
    optimizer = build_optimizer(model, settings)
    order = torch.randperm(len(trained), generator=torch.Generator().manual_seed(curve.seed))
    warmup_updates = max(1, round(_WARMUP_RATIO * curve.num_updates))
    schedule = get_scheduler("cosine", optimizer, warmup_updates, curve.num_updates + 1)
    shares: list[float] = []

    def update(number: int) -> None:
        schedule.step()  # the first rate, of no step, is zero
        window = trained[int(order[number % len(order)])]
        result = engine.forward_backward([_labelled(window)], curve.options(number))
        shares.append(_drawn_share(result.plan))
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MOST_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = _cpu_seconds(lambda: [update(number) for number in range(curve.num_updates)])
    return Learned(
        curve, seconds, _evaluate(engine, held_out), statistics.fmean(shares),
        time.process_time() - started_s,
    )  # fmt: skip


def _model(seed: int) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        **_MODEL, max_position_embeddings=WINDOW_TOKENS, use_cache=False, tie_word_embeddings=True,
        attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen2ForCausalLM(config).train()


def _labelled(window: Sequence[int]) -> dict[str, Any]:
    import torch

    ids = torch.as_tensor(window, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids.clone()}


def _evaluate(engine: Any, held_out: Sequence[Sequence[int]]) -> float:
    """Exact, and in one chunk per window: the fastest."""
    batch = [_labelled(window) for window in held_out]
    options = ChunkOptions(size=WINDOW_TOKENS)
    return float(engine.forward_backward(batch, options, backward=False).loss)


def _drawn_share(plan: Any) -> float:
    from furlong.plan.plan import Backward

    drawn = {a.chunk for actions in plan.actions for a in actions if isinstance(a, Backward)}
    return len(drawn) / len(plan.chunks)


def _cpu_seconds(step: Callable[[], object]) -> float:
    before_s = time.process_time()
    step()
    return time.process_time() - before_s
