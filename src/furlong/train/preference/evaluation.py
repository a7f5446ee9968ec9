"""The loss of pairs that are not trained on, and how many of them are the right way round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from torch import nn

from furlong.data.loader import Batch
from furlong.train.batches.engines import Engines
from furlong.train.batches.fitting import Fitting
from furlong.train.evaluation import Evaluation, evaluating, losses_of
from furlong.train.figures.used_memory import UsedMemory


def evaluate_pairs(
    engines: Engines,
    model: nn.Module,
    batches: Iterable[Batch],
    fitting: Fitting,
    *,
    used: UsedMemory | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """The mean loss and figures of all pairs; see `evaluate`."""
    device = next(model.parameters()).device
    loss_sum, num_pairs, num_valid_tokens = 0.0, 0, 0
    sums: Counter[str] = Counter()
    with evaluating(model):
        for batch in batches:
            if should_stop():
                return None
            result = losses_of(engines, batch, device, fitting, used)
            count = len(batch.sequences) // 2
            loss_sum += result.loss_sum
            num_pairs += count
            num_valid_tokens += result.num_valid_tokens
            for name, mean in result.metrics.items():
                sums[name] += mean * count  # type: ignore[assignment]
    metrics = {name: total / num_pairs for name, total in sums.items()}
    return Evaluation(loss_sum / num_pairs, num_valid_tokens, metrics=metrics)
