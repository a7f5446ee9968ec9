"""Model FLOPs utilisation: the work that a step had to do, over what the device could have done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from furlong.cost.machine import known_card
from furlong.cost.seconds import sequence_flops
from furlong.cost.shape import ModelShape
from furlong.errors import UserError
from furlong.models.describe import describe


@dataclass(frozen=True, slots=True)
class MfuMeter:
    """Counts as PaLM (Chowdhery et al., 2022, appendix B) does, over the causal pairs only.

    A backward is two forwards of work, one where all matrices are frozen (adapters are small beside
    them); what is recomputed does not count.
    """

    shape: ModelShape
    peak_flops_per_s: float
    has_frozen_base: bool = False
    num_devices: int = 1

    def mfu(self, seq_lens: Iterable[int], seconds: float) -> float:
        """Share of the peak, 0 to 1, of a step over these sequences."""
        linear = 2 if self.has_frozen_base else 3
        flops = sum(sequence_flops(self.shape, n).times(linear, 3).total for n in seq_lens)
        return flops / (seconds * self.peak_flops_per_s * self.num_devices)


def build_meter(
    config: Any,
    device_name: str | None,
    dtype: torch.dtype,
    *,
    has_frozen_base: bool,
    num_devices: int = 1,
) -> MfuMeter | None:
    """A meter for a transformers config; None where the peak or the model's work is not known.

    The peaks that are known are those of bfloat16 on the devices of `cost.machine`.
    """
    card = known_card(device_name or "")
    if card is None or dtype != torch.bfloat16:
        return None
    try:
        shape = describe(config)
    except UserError:
        return None
    return MfuMeter(shape, card.peak_flops_per_s, has_frozen_base, num_devices)
