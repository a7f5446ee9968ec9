"""Readers of flags' values for argparse, which shows what they raise."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from furlong.errors import ConfigError
from furlong.units import parse_bytes


def number(lowest: int, most: int, *, auto: bool = False) -> Callable[[str], int | None]:
    """A reader of whole numbers between two bounds; `auto`, where it may be given, is None."""

    def read(text: str) -> int | None:
        if auto and text == "auto":
            return None
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if not lowest <= value <= most:
            shown = text if len(text) <= 40 else text[:40] + "..."
            raise argparse.ArgumentTypeError(
                f"{shown!r} is no whole number of at least {lowest} and at most {most:,}"
            )
        return value

    return read


def tier_or_auto(text: str) -> object:
    """A tier or a mapping of kinds, as a run file has it; auto is None."""
    from furlong.planners.options import checked_tier

    source = "the flag --chunks.tier"
    value: object = text
    if text.lstrip().startswith("{"):
        from furlong.config.run_file import read_yaml

        value = read_yaml(text, source, "write it as '{attention: disk}'")
    try:
        return None if value == "auto" else checked_tier(value)
    except ConfigError as error:
        raise ConfigError(
            given=error.given, required=error.required, source=source, change=error.change
        ) from None


def amount(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def amount_or_auto(text: str) -> int | None:
    return None if text == "auto" else amount(text)
