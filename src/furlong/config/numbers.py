"""Numbers of a run's configuration, from YAML or from a flag's text.

`1000`, `1e3` and `1000.0` are the same whole number wherever they stand. A truth value is no
number, and neither is infinity.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from furlong.units import parse_bytes

MAX_WHOLE = 10**12
MAX_BYTES = 2**60
_NOT_FINITE = ("inf", "infinity", "nan")


def _refuse_odd(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("truth_value", "Input should be a number, not true or false")
    if isinstance(value, str) and value.strip().lower().lstrip("+-.") in _NOT_FINITE:
        raise PydanticCustomError("finite_number", "Input should be a finite number")
    return value


def _read_whole(value: object) -> object:
    _refuse_odd(value)
    if isinstance(value, str):
        for kind in (int, float):
            with suppress(ValueError):
                return kind(value)
    return value


def _read_amount(value: object) -> object:
    number = _read_whole(value)
    if number == "auto" or number is None or not isinstance(number, str):
        return number
    return parse_bytes(number)


Number = Annotated[float, BeforeValidator(_refuse_odd), Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_read_whole), Field(le=MAX_WHOLE)]
Natural = Annotated[Whole, Field(ge=0)]
Positive = Annotated[Whole, Field(gt=0)]
AmountBytes = Annotated[int, BeforeValidator(_read_amount), Field(ge=0, le=MAX_BYTES)]
"""Bytes, also written as `512MiB`, `24GiB` or `80GB`."""
