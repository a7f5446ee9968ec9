"""transformers' modeling files with float64 in the place of float32, for a process of its own.

Many families compute parts in float32 whatever the model's dtype is. Where those parts run in
float64, what is left of an error in float64 is furlong's own.
"""

from __future__ import annotations

import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any

_MODELING = re.compile(r"transformers\.models\.(?!auto\.)\w+\.modeling_\w+")
_WIDER = {
    "torch.float32": "torch.float64",
    ".float()": ".double()",
    "torch.float)": "torch.float64)",
}


class _WideLoader(SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, **_: Any) -> CodeType:  # type: ignore[override]
        source = bytes(data).decode("utf-8")
        for narrow, wide in _WIDER.items():
            source = source.replace(narrow, wide)
        return compile(source, str(path), "exec", dont_inherit=True)

    def get_code(self, fullname: str) -> CodeType:  # type: ignore[override]
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)  # never a cached file


class _WideFinder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not _MODELING.fullmatch(fullname):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _WideLoader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Let modeling files be loaded so from now on."""
    loaded = [name for name in sys.modules if _MODELING.fullmatch(name)]
    assert not loaded, f"{loaded[0]} was loaded before"
    sys.meta_path.insert(0, _WideFinder())
