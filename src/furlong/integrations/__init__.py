"""Doors of other libraries' training loops to the engine."""

from furlong.integrations.collated import unpad
from furlong.integrations.losses import TokenLoss
from furlong.integrations.trainer import Trainer

__all__ = ["TokenLoss", "Trainer", "unpad"]
