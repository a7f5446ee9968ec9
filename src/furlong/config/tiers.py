"""The tier of kept tensors, from YAML or from a flag's text: one word, or a mapping of kinds."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

Kind = Literal["kv", "inputs", "attention", "graphs"]
TierName = Literal["device", "host", "disk"]
_KINDS, _TIERS = get_args(Kind), get_args(TierName)


def _read(value: object) -> object:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with suppress(ValueError):  # a flag's mapping, which `sources` has written as JSON
            value = json.loads(value)
    if not isinstance(value, Mapping):
        if value not in ("auto", *_TIERS):
            required = f"auto, {', '.join(_TIERS)} or a mapping of kinds, as {{attention: host}}"
            raise told(required=required, change=_near(value, ("auto", *_TIERS)))
        return value
    for kind, tier in value.items():
        if kind not in _KINDS:
            required = f"a mapping of kinds among {', '.join(_KINDS)}"
            raise told(required=required, change=_near(kind, _KINDS))
        if tier not in _TIERS:
            required = f"one of {', '.join(_TIERS)} for {kind}"
            raise told(required=required, change=_near(tier, _TIERS))
    return value


def _near(name: object, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"did you mean {close[0]}?" if close else "set chunks.tier, such as host"


def told(**parts: str) -> PydanticCustomError:
    """An error with parts of its message: required and change, also given and the key."""
    return PydanticCustomError("told", "{required}", dict(parts))


TierDial = Annotated[Literal["auto"] | TierName | dict[Kind, TierName], BeforeValidator(_read)]


def names_tier(value: object, tier: str) -> bool:
    """Whether a value of chunks.tier puts anything on `tier`."""
    return tier in value.values() if isinstance(value, Mapping) else value == tier
