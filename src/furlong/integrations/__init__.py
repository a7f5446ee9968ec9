"""Training loops of other libraries, with gradients computed by the engine."""

from furlong.integrations.transformers import TokenLoss, Trainer, unpad

__all__ = ["TokenLoss", "Trainer", "unpad"]
