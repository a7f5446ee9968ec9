"""The data sets that a run evaluates."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np
from torch import nn

from furlong.config.schema import TrainConfig
from furlong.data.loader import in_order
from furlong.data.tokenize import Sequence
from furlong.train.evaluation import HELD_OUT, TRAINING, Evaluation, evaluate
from furlong.train.fitting import Fitting
from furlong.train.replicas import Replicas
from furlong.train.used_memory import UsedMemory


def evaluator(
    replicas: Replicas,
    model: nn.Module,
    fitting: Fitting,
    settings: TrainConfig,
    train: Items[Sequence],
    held_out: Items[Sequence] | None,
    should_stop: Callable[[], bool],
) -> Callable[[UsedMemory], dict[str, Evaluation] | None] | None:
    """Evaluates the held-out sequences and the share of the training ones; None without either."""
    sets = {} if held_out is None else {HELD_OUT: held_out}
    if settings.eval_train_share:
        sets[TRAINING] = _share(train, settings.eval_train_share, settings.seed)
    if not sets:
        return None

    def evaluate_all(used: UsedMemory) -> dict[str, Evaluation] | None:
        evaluations = {}
        for name, sequences in sets.items():
            batches = in_order(sequences, settings.sequences_per_step)
            evaluation = evaluate(
                replicas, model, batches, fitting, used=used, should_stop=should_stop
            )
            if evaluation is None:
                return None
            evaluations[name] = evaluation
        return evaluations

    return evaluate_all


def _share(train: Items[Sequence], share: float, seed: int) -> list[Sequence]:
    """The same sequences in every evaluation of a run, at least one, in the order of the data."""
    num_chosen = max(1, round(share * len(train)))
    chosen = np.random.default_rng(seed).permutation(len(train))[:num_chosen]
    return [train[int(index)] for index in np.sort(chosen)]
