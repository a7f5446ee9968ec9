"""TRL's trainer for supervised fine-tuning with chunks, and its data."""

from __future__ import annotations

from datasets import Dataset
from trl import SFTTrainer

from furlong.integrations import Trainer


class ChunkedSFTTrainer(Trainer, SFTTrainer):  # type: ignore[misc]
    """All it takes."""


def prompts_and_completions() -> Dataset:
    records = [
        {"prompt": "x" * (1 + 5 * i % 7), "completion": " ".join(["ab", "cde"] * (1 + 11 * i % 5))}
        for i in range(60)
    ]
    return Dataset.from_list(records)
