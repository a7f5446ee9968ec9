"""Plans as JSON files that a person can read: one chunk and one action per line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, get_args

from furlong.plan.text import format_action, format_chunk, parse_action, parse_chunk, unreadable
from furlong.plan.values import ChunkPlan, Tier, Tiers

VERSION = 5
"""The version of the JSON form. Other versions are refused: a plan is cheap to make again."""

_MADE_FOR = "made_for"
_NUMBERS = ("sp_size", "frozen_stages")
_SWITCHES = ("sampled", "report_loss", "two_phases", "regathers")


def save_plan(plan: ChunkPlan, made_for: Mapping[str, Any] | None = None) -> str:
    """JSON that a person can read: one chunk and one action per line. `made_for`: plain values that
    `load_plan` passes over, such as the model and the devices."""
    plain = {
        name: json.dumps(getattr(plan, name))
        for name in (*_NUMBERS, *_SWITCHES, "seq_lens", "stages")
    }
    values = ({} if made_for is None else {_MADE_FOR: json.dumps(made_for)}) | {
        "version": str(VERSION),
        "tiers": json.dumps(asdict(plan.tiers)),
        **plain,
        "chunks": _lines([format_chunk(chunk, plan.sp_size) for chunk in plan.chunks]),
        "actions": "[" + ", ".join(_lines(map(format_action, a)) for a in plan.actions) + "]",
    }
    return "{\n" + ",\n".join(f'"{name}": {value}' for name, value in values.items()) + "\n}\n"


def _lines(texts: Iterable[str]) -> str:
    return json.dumps(list(texts), indent=1)


def load_plan(text: str) -> ChunkPlan:
    """The plan that `save_plan` wrote. Says nothing about legality: that is `plan.check`."""
    try:
        saved = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unreadable(f"text that is no JSON ({error})", "a saved plan") from None
    if not isinstance(saved, dict) or saved.get("version") != VERSION:
        version = saved.get("version") if isinstance(saved, dict) else None
        raise unreadable(f"version {version!r}", f"version {VERSION}")
    expected = {"version", *(field.name for field in fields(ChunkPlan))}
    saved.pop(_MADE_FOR, None)
    if saved.keys() != expected:
        odd = ", ".join(sorted(saved.keys() ^ expected))
        raise unreadable(f"fields missing or unknown: {odd}", ", ".join(sorted(expected)))
    for name in _SWITCHES:
        if not isinstance(saved[name], bool):
            raise unreadable(f"{name} = {saved[name]!r}", "true or false")
    plain: dict[str, Any] = {name: saved[name] for name in _SWITCHES}
    plain |= {name: _whole_numbers([saved[name]], name)[0] for name in _NUMBERS}
    if not isinstance(saved["actions"], list):
        raise unreadable("actions that are no list", "one list of actions per rank")
    return ChunkPlan(
        seq_lens=_whole_numbers(saved["seq_lens"], "seq_lens"),
        chunks=tuple(
            parse_chunk(chunk, sp_size=plain["sp_size"], source=f"chunk {index} of a saved plan")
            for index, chunk in enumerate(_texts(saved["chunks"], "chunks"))
        ),
        stages=_whole_numbers(saved["stages"], "stages"),
        actions=tuple(
            tuple(
                parse_action(action, source=f"rank {rank}, action {index} of a saved plan")
                for index, action in enumerate(_texts(actions, f"actions of rank {rank}"))
            )
            for rank, actions in enumerate(saved["actions"])
        ),
        tiers=_tiers(saved["tiers"]),
        **plain,
    )


def read_made_for(text: str) -> Any:
    """The `made_for` that `save_plan` was given, if nobody edited it; empty where it was given
    none."""
    return json.loads(text).get(_MADE_FOR, {})


def _tiers(values: Any) -> Tiers:
    kinds = [field.name for field in fields(Tiers)]
    required = f"a tier for each of {', '.join(kinds)}"
    if not isinstance(values, dict):
        raise unreadable(f"tiers = {values!r:.80}", required)
    if odd := values.keys() ^ set(kinds):
        raise unreadable(f"kinds of tiers missing or unknown: {', '.join(sorted(odd))}", required)
    for kind, tier in values.items():
        if tier not in get_args(Tier):
            required = f"one of {', '.join(get_args(Tier))}"
            raise unreadable(f"tiers.{kind} = {tier!r:.80}", required)
    return Tiers(**values)


def _whole_numbers(values: Any, name: str) -> tuple[int, ...]:
    # bool is an int to Python, and true no length to us
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise unreadable(f"{name} = {values!r:.80}", "whole numbers")
    return tuple(values)


def _texts(values: Any, name: str) -> list[str]:
    if not isinstance(values, list) or any(not isinstance(value, str) for value in values):
        raise unreadable(f"{name} = {values!r:.80}", "a list of short texts")
    return values
