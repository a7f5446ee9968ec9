"""The section `model.rope`: keys are transformers' own names.

Types that depend on the position alone are listed; `dynamic` depends on the length of each call.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from furlong.config.numbers import Number, Positive


class RopeConfig(BaseModel):
    """Another rotary position embedding."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    rope_type: Literal["default", "linear", "yarn", "llama3", "longrope"] = Field(examples=["yarn"])
    """default changes rope_theta only; which keys a type needs, transformers says."""
    rope_theta: Annotated[Number, Field(gt=0)] | None = Field(default=None, examples=[1e6])
    """Base; null keeps the model's."""
    factor: Annotated[Number, Field(ge=1)] | None = Field(default=None, examples=[4])
    """How many times as many positions."""
    original_max_position_embeddings: Positive | None = None
    """Positions before any scaling; null takes the model's."""
    attention_factor: Number | None = None
    """yarn, longrope: scale of the attention; null infers it."""
    beta_fast: Number | None = None
    """yarn: rotations above which nothing is interpolated."""
    beta_slow: Number | None = None
    """yarn: rotations below which all is interpolated."""
    mscale: Number | None = None
    """yarn: scale of the attention factor."""
    mscale_all_dim: Number | None = None
    """yarn: scale of its divisor."""
    truncate: bool | None = None
    """yarn: whether the range between the betas is rounded to whole dimensions."""
    low_freq_factor: Number | None = None
    """llama3: below it all is interpolated."""
    high_freq_factor: Number | None = None
    """llama3: above it nothing is."""
    short_factor: tuple[Number, ...] | None = None
    """longrope: one factor per frequency, for runs within the original length."""
    long_factor: tuple[Number, ...] | None = None
    """longrope: the same beyond it; data.max_seq_len decides, once for the run."""
