"""Training on pairs of answers: `train.loss: dpo`."""
