"""The section `parallel`: the layout over devices."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from furlong.config.numbers import Positive

_SECTION = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ParallelConfig(BaseModel):
    """Layout over devices."""

    model_config = _SECTION

    dp: Positive | Literal["auto"] = Field(default="auto", examples=[2])
    """Data parallel replicas; auto: as many as the other sizes leave processes for."""
    sp: Positive | Literal["auto"] = 1
    """Processes that share a sequence; auto: what the search finds fastest."""
    pp: Positive | Literal["auto"] = 1
    """Pipeline stages; auto: what the search finds fastest."""
