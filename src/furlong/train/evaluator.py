"""The data sets that a run evaluates."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np
from torch import nn

from furlong.config.schema import TrainConfig
from furlong.data.dataset import DataSet
from furlong.data.loader import in_order
from furlong.data.tokenize import Sequence
from furlong.train.batches.engines import Engines
from furlong.train.batches.fitting import Fitting
from furlong.train.evaluation import HELD_OUT, TRAINING, Evaluation, evaluate
from furlong.train.figures.used_memory import UsedMemory
from furlong.train.preference.evaluation import evaluate_pairs


def evaluator(
    engines: Engines,
    model: nn.Module,
    fitting: Fitting,
    settings: TrainConfig,
    train: DataSet,
    held_out: DataSet | None,
    should_stop: Callable[[], bool],
) -> Callable[[UsedMemory], dict[str, Evaluation] | None] | None:
    """Evaluates the held-out sequences and the share of the training ones; None without either."""
    measure = evaluate_pairs if train.rows_per_record == 2 else evaluate
    sets: dict[str, Items[Sequence]] = {} if held_out is None else {HELD_OUT: held_out}
    if settings.eval_train_share:
        sets[TRAINING] = _share(train, settings.eval_train_share, settings.seed)
    if not sets:
        return None

    def evaluate_all(used: UsedMemory) -> dict[str, Evaluation] | None:
        evaluations = {}
        for name, sequences in sets.items():
            batches = in_order(sequences, settings.sequences_per_step, train.rows_per_record)
            evaluation = measure(
                engines, model, batches, fitting, used=used, should_stop=should_stop
            )
            if evaluation is None:
                return None
            evaluations[name] = evaluation
        return evaluations

    return evaluate_all


def _share(train: DataSet, share: float, seed: int) -> list[Sequence]:
    """The same sequences in every evaluation of a run, at least one, in the order of the data; a
    pair stays one."""
    each = train.rows_per_record
    num_drawn = len(train) // each
    num_chosen = max(1, round(share * num_drawn))
    chosen = np.sort(np.random.default_rng(seed).permutation(num_drawn)[:num_chosen])
    return [
        train[i] for record in chosen.tolist() for i in range(record * each, record * each + each)
    ]
