"""Twins: models whose modeling file is loaded with every float32 in it replaced by float64.

transformers rounds to float32 inside a float64 model (norms, routers, scans). In a twin only
furlong could round, so any difference from the unchunked forward comes from the chunks.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        return compile(_widened(self.get_data(self.path).decode()), self.path, "exec")


def _widened(source: str) -> str:
    source = re.sub(r"\btorch\.float(32)?\b(?!\d)", "torch.float64", source)
    return source.replace(".float()", ".double()")


def twin_class(original: type) -> Any:
    """Return the twin of a model's class, from a separate module with the changed source."""
    return getattr(_twin_module(original.__module__), original.__name__)


@cache
def _twin_module(name: str) -> ModuleType:
    original = importlib.util.find_spec(name)
    assert original is not None and original.origin is not None
    own = f"{name}_in_float64"
    loader = _Loader(own, original.origin)
    spec = importlib.util.spec_from_file_location(own, original.origin, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[own] = module
    loader.exec_module(module)
    return module
