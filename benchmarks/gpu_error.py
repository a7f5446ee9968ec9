"""Errors of bfloat16 gradients on a device, in 1, 16 and 64 chunks, by those of Hugging Face's own
unchunked bfloat16 backward: `gpu_error.py '{"tiny": false, "device": "cuda"}'` prints JSON.

The truth is the float32 gradient of the same weights, which both dtypes can hold. Widths are those
of Qwen2.5-0.5B, in four layers.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import torch
from gpu_point import MODELS, Setting, build, model_config
from torch import Tensor

import furlong

_NUM_CHUNKS = (1, 16, 64)
_NUM_LAYERS = 4
_NUM_TOKENS, _TINY_TOKENS = 4_096, 512


def ratios(*, tiny: bool, device: str) -> dict[str, float]:
    """Our error over Hugging Face's, by the number of chunks."""
    name = next(iter(MODELS))
    config, _ = model_config(Setting(name, "", 0, 0, tiny, device))
    config = config | {"num_hidden_layers": _NUM_LAYERS}
    num_tokens = _TINY_TOKENS if tiny else _NUM_TOKENS
    model = build(config, torch.device(device), is_lora=False)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config["vocab_size"], (num_tokens,), generator=generator).to(device)
    truth = _unchunked(model, ids)
    ours = {}
    for num_chunks in _NUM_CHUNKS:
        options = furlong.ChunkOptions(size=-(-num_tokens // num_chunks))
        batch = [{"input_ids": ids, "labels": ids}]
        furlong.forward_backward(model, batch, options, compute_dtype=torch.bfloat16)
        ours[str(num_chunks)] = _error(_taken(model), truth)
    for parameter in model.parameters():  # the rotary frequencies stay float32
        parameter.data = parameter.data.bfloat16()
    own = _error(_unchunked(model, ids), truth)
    return {name: error / own for name, error in ours.items()}


def _unchunked(model: Any, ids: Tensor) -> list[Tensor]:
    model(input_ids=ids[None], labels=ids[None], use_cache=False).loss.backward()
    return _taken(model)


def _taken(model: Any) -> list[Tensor]:
    grads = [p.grad.float() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return grads


def _error(given: list[Tensor], truth: list[Tensor]) -> float:
    """Relative L2 error over all parameters."""
    off = sum(float((g - t).norm()) ** 2 for g, t in zip(given, truth, strict=True))
    return math.sqrt(off / sum(float(t.norm()) ** 2 for t in truth))


if __name__ == "__main__":
    print(json.dumps(ratios(**json.loads(sys.argv[1]))))
