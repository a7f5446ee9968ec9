"""Checkpoints as publishers quantize them: experts in MXFP4, linear layers in FP8."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from helpers.vision_checkpoints import tensors

Packed = tuple[dict[str, Tensor], Tensor]
"""What stands in files for a weight, by what its name ends with, and the floats that it means."""

_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(weight: Tensor) -> Packed:
    """Pack experts (E, in, out): two codes a byte, one exponent for 32 weights along `in`."""
    groups = weight.float().mT.unflatten(-1, (-1, 32))  # (E, out, in / 32, 32)
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-60)
    exponents = largest.log2().floor() - 2
    codes = (groups[..., None] / exponents.exp2()[..., None] - _FP4).abs().argmin(-1)
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    scales = (exponents[..., 0] + 127).to(torch.uint8)
    values = (_FP4[codes] * exponents.exp2()).flatten(-2).mT
    return {"_blocks": blocks, "_scales": scales}, values.contiguous()


def fp8(weight: Tensor, block: tuple[int, int] | None) -> Packed:
    """Pack a matrix: a scale for each block, of which the last may lack rows or columns, or one
    for the weight, beside one for activations."""
    rows, columns = weight.shape
    high, wide = block or weight.shape
    grid = [
        [weight[i : i + high, j : j + wide].float().abs().amax() / 448
         for j in range(0, columns, wide)]
        for i in range(0, rows, high)
    ]  # fmt: skip
    scales = torch.tensor(grid)
    each = scales.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]
    codes = (weight.float() / each).to(torch.float8_e4m3fn)
    packed = {"": codes, "_scale_inv": scales if block else scales[0, 0]}
    return packed, codes.float() * each


def publish(
    source: Path, folder: Path, pack: Callable[[Tensor], Packed], packs: Callable[[str], bool],
    quantization: dict[str, Any],
) -> Path:  # fmt: skip
    """Write to `folder / "packed"` the checkpoint of `source` with the weights packed that `packs`
    names, and to `folder / "floats"` the bfloat16 checkpoint that it stands for; return `folder`.
    """
    packed, floats = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in tensors(source).items():
        floats[name] = tensor.bfloat16()
        if not packs(name):
            packed[name] = floats[name]
            continue
        parts, values = pack(tensor)
        floats[name] = values.bfloat16()
        packed |= {f"{name}{end}": part for end, part in parts.items()}
        if parts.keys() == {"", "_scale_inv"} and not parts["_scale_inv"].ndim:
            packed[f"{name.removesuffix('weight')}activation_scale"] = torch.tensor(0.5)
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    for kind, weights, more in (
        ("packed", packed, {"quantization_config": quantization}), ("floats", floats, {}),
    ):  # fmt: skip
        (folder / kind).mkdir(parents=True)
        made = {name: x.contiguous() for name, x in weights.items()}
        save_file(made, folder / kind / "model.safetensors", metadata={"format": "pt"})
        (folder / kind / "config.json").write_text(json.dumps(config | more))
        for file in source.iterdir():
            if file.name.startswith(("tokenizer", "preprocessor")):
                (folder / kind / file.name).write_bytes(file.read_bytes())
    return folder
