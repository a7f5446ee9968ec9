"""A trainer of one's own: that of `furlong train`, and a histogram of the gradients of each step.

python examples/subclass_trainer.py RUN.yaml, or by torchrun

Each line of `gradients.jsonl` in the run's folder says of one step how many numbers of the clipped
gradient lie between two powers of two: those that underflow in 16 bits stand on the left.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import furlong
from furlong.train.processes import joined, read_launch

LOWEST, HIGHEST = -40, 10


class HistogramTrainer(furlong.Trainer):
    """A `Trainer` that looks at the gradients of its steps."""

    def step(self, batch: Any, data_s: float = 0.0) -> Any:
        figures = super().step(batch, data_s)
        counts = torch.zeros(HIGHEST - LOWEST)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                gradient = parameter.grad  # of several processes each has a part
                own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                sizes = own[own != 0].abs().log2().float().cpu()
                counts += sizes.clamp(LOWEST, HIGHEST - 1).histc(len(counts), LOWEST, HIGHEST)
        counts = torch.tensor(self.processes.sums(counts.tolist()))
        if self.processes.is_first:
            record = {
                "step": self.progress.step,
                "below": {2.0**power: int(n) for power, n in enumerate(counts, LOWEST + 1) if n},
            }
            with (self.run.path / "gradients.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        return figures


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with (
        joined(read_launch()) as processes,
        HistogramTrainer(sys.argv[1], processes=processes) as trainer,
    ):
        trainer.train()


if __name__ == "__main__":
    main()
