"""Doors of other libraries' training loops to the engine."""

from furlong.integrations.transformers import TokenLoss, Trainer, unpad

__all__ = ["TokenLoss", "Trainer", "unpad"]
