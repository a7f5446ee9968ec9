"""Pydantic's errors in words for somebody who writes a run file."""

from __future__ import annotations

import re

from pydantic_core import ErrorDetails

from furlong.units import count_words


def words_of(error: ErrorDetails) -> str:
    """The words for the values that a key takes."""
    context = error.get("ctx", {})
    match error["type"]:
        case "int_parsing" | "int_type" | "int_from_float" | "int_parsing_size":
            return "a whole number"
        case "float_parsing" | "float_type":
            return "a number"
        case "finite_number":
            return "a finite number"
        case "string_type":
            return "a text"
        case "bool_parsing" | "bool_type":
            return "true or false"
        case "string_too_short":
            return "a text that is not empty"
        case "too_short":
            return f"a list of at least {count_words(context['min_length'], 'item')}"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return error["msg"].replace("Input should be", "a number")
    return re.sub(r"^Input should be |^Value error, ", "", error["msg"])
