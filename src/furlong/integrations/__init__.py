"""Training loops of other libraries on the engine."""

from furlong.integrations.transformers import TokenLoss, Trainer, unpad

__all__ = ["TokenLoss", "Trainer", "unpad"]
