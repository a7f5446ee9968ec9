"""Losses of `train.loss: dpo` and `kto` against the numbers of TRL's own trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl_cases import common, pairs, small, tokenizer, words

from furlong.data.loader import LoaderState, TrainBatch
from furlong.data.tokenize import Sequence
from furlong.train.objective import AnswerLogProb, AnswerLoss, KTOLoss, PairLoss

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def answers_of(
    models: tuple[Any, Any], ids: Tensor, mask: Tensor, wanted: Any
) -> list[AnswerLogProb]:
    """The answers of rows (B, T) whose tokens under `mask` are an answer's, by one forward each."""
    found = []
    for row, own, is_wanted in zip(ids, mask.bool(), wanted, strict=True):
        sums = []
        for model in models:
            logits = model(input_ids=row[None], attention_mask=(row != 0)[None]).logits[0, :-1]
            known = logits.log_softmax(-1).gather(-1, row[1:, None])[:, 0]
            sums.append(known[own[1:]].sum())
        found.append(AnswerLogProb(sums[0], float(sums[1].detach()), int(own[1:].sum()), is_wanted))
    return found


def loss_of(objective: AnswerLoss, units: list[list[AnswerLogProb]]) -> float:
    """The objective's mean over a batch of such units."""
    tokens = [torch.zeros(one.num_tokens + 1).int().numpy() for unit in units for one in unit]
    sequences = tuple(
        Sequence(number, "", own, own, counted=len(own) - 1) for number, own in enumerate(tokens)
    )
    learnt = objective.num_learnt
    beside = [one for unit in units for one in unit[learnt:]]
    shared = objective.shared(TrainBatch(sequences, LoaderState()), beside)
    return float(sum(objective.term(unit[:learnt], shared) for unit in units)) / len(units)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "own"),
    [
        ({"loss_type": ["apo_zero"]}, {"loss_type": "apo_zero"}),
        ({"loss_type": ["apo_down"]}, {"loss_type": "apo_down"}),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}, {"sft_weight": 0.3}),
    ],
    ids=str,
)  # fmt: skip
def test_dpo(tmp_path: Path, changes: dict[str, Any], own: dict[str, Any]) -> None:
    trainer = DPOTrainer(
        model=small(), ref_model=small(seed=1), processing_class=tokenizer(),
        args=DPOConfig(**common(tmp_path, beta=0.3, **changes)), train_dataset=pairs(),
    )  # fmt: skip
    batch = next(iter(trainer.get_train_dataloader()))
    theirs = float(trainer.compute_loss(trainer.model, batch).detach())
    models = (trainer.model, trainer.ref_model)
    ids, mask = batch["input_ids"], batch["completion_mask"]
    answers = answers_of(models, ids, mask, [None] * len(ids))
    half = len(answers) // 2  # TRL has all chosen answers before the rejected ones
    units = [[answers[i], answers[half + i]] for i in range(half)]
    assert loss_of(PairLoss(beta=0.3, **own), units) == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_kto(tmp_path: Path) -> None:
    data = Dataset.from_list(
        [{"prompt": words(i, 8), "completion": words(i + 1, 3 + i % 5), "label": bool(i % 3)}
         for i in range(8)]
    )  # fmt: skip
    arguments = common(tmp_path, beta=0.3, desirable_weight=1.5, undesirable_weight=0.75)
    trainer = KTOTrainer(
        model=small(), ref_model=small(seed=1), processing_class=tokenizer(),
        args=KTOConfig(**arguments | {"per_device_train_batch_size": 8}), train_dataset=data,
    )  # fmt: skip
    batch = next(iter(trainer.get_train_dataloader()))
    theirs = float(trainer.compute_loss(trainer.model, dict(batch)).detach())
    models = (trainer.model, trainer.ref_model)
    wanted = [bool(label) for label in batch["label"]]
    own, beside = (
        answers_of(models, batch[f"{kind}input_ids"], batch[f"{kind}completion_mask"], wanted)
        for kind in ("", "KL_")
    )
    units = [[one, other] for one, other in zip(own, beside, strict=True)]
    assert loss_of(KTOLoss(0.3, 1.5, 0.75), units) == pytest.approx(theirs, rel=1e-5)
