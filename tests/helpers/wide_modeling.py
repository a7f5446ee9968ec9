"""Models whose modeling file is read with every float32 in it replaced by float64.

transformers rounds to float32 inside a float64 model (norms, routers, scans). In a twin nothing is
rounded, so that whatever differs from its unchunked forward is the fault of the chunks.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        return compile(_widened(self.get_data(self.path).decode()), self.path, "exec")


def _widened(source: str) -> str:
    source = re.sub(r"\btorch\.float(32)?\b(?!\d)", "torch.float64", source)
    return source.replace(".float()", ".double()")


@cache
def twin_module(name: str) -> ModuleType:
    """The twin of a modeling module of transformers, a module of its own beside it."""
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


def build_twin(model_type: str, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A causal LM of random float64 weights, of which none is at its start; in train mode."""
    config = AutoConfig.for_model(model_type, **settings)
    original = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    twin = getattr(twin_module(original.__module__), original.__name__)
    config._attn_implementation = "sdpa" if twin._supports_sdpa else "eager"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = twin._from_config(config, dtype=torch.float64)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(0.1 * torch.randn_like(parameter))
                    else:
                        parameter.mul_(3)
    finally:
        torch.set_default_dtype(before)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.train()
