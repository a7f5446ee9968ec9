"""The section `train`: the optimizer's steps, and the loss that they lower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from furlong.config.numbers import Natural, Number, Positive, Whole
from furlong.config.tiers import told


class TrainConfig(BaseModel):
    """The optimizer's steps."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    steps: Positive | None = 100
    """Optimizer steps; null leaves it to epochs."""
    epochs: Annotated[Number, Field(gt=0, le=1e6)] | None = Field(default=None, examples=[3])
    """Passes over the training data, instead of steps."""
    sequences_per_step: Positive = 32
    """Sequences in a global batch; with dpo, pairs of them."""
    lr: Number = Field(default=2.0e-5, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[Annotated[Number, Field(ge=0, lt=1)], Annotated[Number, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    """AdamW's two decay rates."""
    eps: Number = Field(default=1.0e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: Number = Field(default=0.0, ge=0)
    """Decay of trained weights with two or more axes; norms and biases never decay."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Course of the learning rate after warm-up."""
    warmup_ratio: Number = Field(default=0.03, ge=0, le=1)
    """Share of the steps in which the learning rate rises to lr."""
    max_grad_norm: Annotated[Number, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this norm; null leaves them."""
    seed: Whole = Field(default=0, ge=0, lt=2**32)
    """Seed of the data's order, of random weights and of dropout."""
    save_every_steps: Natural = 50
    """Steps between checkpoints, also one after the last step; 0 = none at all."""
    eval_every_steps: Natural = 50
    """Steps between evaluations; 0 = before the first and after the last step only."""
    loss: Literal["sft", "dpo"] = "sft"
    """sft learns what has labels; dpo learns to prefer the chosen of two answers to the rejected
    one, beside the model that the run begins with: data.train then holds pairs."""
    beta: Number = Field(default=0.1, gt=0)
    """With dpo: how strongly the model is held to the one it began with."""
    loss_type: Literal["sigmoid", "sigmoid_norm", "robust", "ipo"] = "sigmoid"
    """With dpo: the loss of a pair. sigmoid_norm and ipo go by the mean over an answer's tokens,
    the others by their sum."""
    label_smoothing: Number = Field(default=0.0, ge=0, lt=0.5)
    """With dpo: how likely a pair is the wrong way round; ipo has none."""
    eval_train_share: Number = Field(default=0.0, ge=0, le=1)
    """Share of the training sequences that evaluations read beside data.eval; 0 = none."""

    @model_validator(mode="before")
    @classmethod
    def _epochs_replace_the_default_steps(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("epochs") is not None:
            return {"steps": None, **values}
        return values

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            raise PydanticCustomError("run_length", "one of train.steps and train.epochs, not both")
        return self

    @model_validator(mode="after")
    def _options_of_a_loss(self) -> TrainConfig:
        for name in ("beta", "loss_type", "label_smoothing"):
            value = getattr(self, name)
            if self.loss == "sft" and value != type(self).model_fields[name].default:
                raise told(
                    key=f"train.{name} and train.loss",
                    given=f"train.{name} = {value} with train.loss: sft",
                    required="train.loss: dpo, whose option it is",
                    change=f"set train.loss to dpo, or remove train.{name}",
                )
        if self.loss_type == "ipo" and self.label_smoothing:
            raise told(
                key="train.label_smoothing and train.loss_type",
                given=f"train.label_smoothing = {self.label_smoothing} with train.loss_type: ipo",
                required="train.label_smoothing: 0, for a loss that has none",
                change="remove train.label_smoothing, or set train.loss_type to robust",
            )
        return self
