"""The section `data`: what the sequences are made of."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from furlong.config.numbers import Number, Positive
from furlong.config.paths import require_plain
from furlong.config.tiers import told
from furlong.config.words import words_of

_SECTION = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SourceConfig(BaseModel):
    """A source of sequences with more to say than its path."""

    model_config = _SECTION

    path: str = Field(min_length=1)
    """File or folder."""
    weight: Number = Field(default=1.0, gt=0, le=1000)
    """Sequences that an epoch draws from it, relative to those that it has."""
    split: str | None = None
    """Which split of a folder that holds several."""


def _listed(value: object) -> object:
    return [value] if isinstance(value, str | Mapping) else value


def _read_source(value: object) -> object:
    """One message about a source, where pydantic would have one per kind that it could be."""
    path = value.get("path") if isinstance(value, Mapping) else value
    if isinstance(path, str):
        require_plain(path)
    try:
        if isinstance(value, str) and value:
            return value
        return SourceConfig.model_validate({"path": value} if value == "" else value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        match first["type"]:
            case "extra_forbidden":
                close = difflib.get_close_matches(key, SourceConfig.model_fields, n=1, cutoff=0.75)
                raise told(
                    required=f"paths, or mappings of path, weight and split: {key} is none of them",
                    change=f"write {close[0]} for {key}" if close else f"remove {key}",
                ) from None
            case "missing":
                reason = f"{key} is missing"
            case _ if isinstance(value, int | float) and not isinstance(value, bool):
                reason = f"this is a number; as a path it is ./{value}"
            case _ if not key:
                reason = f"this is of type {type(value).__name__}"
            case _:
                reason = f"{key} should be {words_of(first)}"
        raise PydanticCustomError(
            "source",
            "paths, or mappings of path, weight and split: {reason}",
            {"reason": reason},
        ) from None


def _once(sources: tuple[str | SourceConfig, ...]) -> tuple[str | SourceConfig, ...]:
    if any(not isinstance(source, str) and source.weight != 1 for source in sources):
        raise PydanticCustomError("weight", "no weight: held-out sequences are read once each")
    return sources


def _without_null(value: Any) -> Any:
    """A flag's null arrives as a list of it, since a flag may be given several times."""
    return None if value == [None] else value


Sources = Annotated[
    tuple[Annotated[str | SourceConfig, BeforeValidator(_read_source)], ...],
    BeforeValidator(_listed),
    Field(min_length=1, examples=["books.jsonl"]),
]


class DataConfig(BaseModel):
    """The sequences."""

    model_config = _SECTION

    train: Sources
    """Text, .jsonl, .parquet files or folders, or {path, weight, split} for each of them."""
    eval: Annotated[
        Annotated[Sources, AfterValidator(_once)] | None, BeforeValidator(_without_null)
    ] = Field(default=None, examples=["held-out.jsonl"])
    """Held-out data, named in the same way."""
    format: Literal["auto", "text", "chat", "completion", "tokens", "preference"] = "auto"
    """auto goes by the fields of each source's first record: text, messages, prompt + completion
    or input_ids. With train.loss: dpo it is preference: chosen + rejected."""
    max_seq_len: Positive = 131072
    """Most tokens in a sequence."""
    too_long: Literal["error", "truncate", "drop"] = "error"
    """Treatment of a sequence above max_seq_len."""
    cache_dir: Annotated[str | None, AfterValidator(require_plain)] = None
    """Folder of tokenized data; null = furlong in the user's cache directory."""
