"""Paths of a run's configuration: `~` is the home folder, and nothing else is expanded."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from furlong.config.tiers import told

_VARIABLE = re.compile(r"\$([A-Za-z_]\w*|\{\w+\}|\(.*\))")


def require_plain(path: str | None) -> str | None:
    """The same path. Raises PydanticCustomError for a variable in it, of which a folder with that
    very name would be made."""
    if path is not None and (found := _VARIABLE.search(path)):
        raise told(
            required=f"a path as it is: variables such as {found[0]} are not expanded, ~ is",
            change="write the path itself, or give the key as a flag, where the shell expands it",
        )
    return path


PlainPath = Annotated[str, AfterValidator(require_plain)]
