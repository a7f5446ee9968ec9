"""The section `parallel`: the layout over devices, of which a run takes data parallelism alone."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator
from pydantic_core import PydanticCustomError

from furlong.config.numbers import Positive

_SECTION = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ParallelConfig(BaseModel):
    """Layout over devices."""

    model_config = _SECTION

    dp: Positive | Literal["auto"] = "auto"
    """Data parallel ranks."""
    sp: Positive | Literal["auto"] = 1
    """Ranks that share a sequence."""
    pp: Positive | Literal["auto"] = 1
    """Pipeline stages."""


class TrainedLayout(ParallelConfig):
    """Layout over devices, as far as a run can be trained in it: data parallelism."""

    @field_validator("sp", "pp")
    @classmethod
    def _is_one(cls, value: object) -> object:
        """Accepts what this release carries out."""
        if value not in ("auto", 1):
            raise PydanticCustomError(
                "not_in_release", "1 or auto: the rest is not in this release"
            )
        return value
