"""Weights that are published quantized, in FP8 or MXFP4, read as the bfloat16 ones that they mean.

transformers reads slices of tensors in files, each process the rows of its share. Here slices of
codes and scales become slices of floats, so that stages, shares, conversions and exports are those
of a checkpoint in bfloat16. (transformers' own dequantization takes whole weights alone, rounds to
the dtype that is trained, and cuts FP8 weights into equal blocks, though in DeepSeek-V3's files the
last one has fewer rows.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

_STEP_NUMEL = 2**24
"""Numbers that are dequantized at a time, in float32."""


class _Weight:
    """A quantized weight, as safetensors' slices are: it is read as it is indexed."""

    def __init__(self, codes: Any, scales: Any) -> None:
        self.codes, self.scales = codes, scales

    def get_dtype(self) -> str:
        return "BF16"

    def get_shape(self) -> list[int]:
        return list(self.codes.get_shape())

    def rows(self, rows: slice) -> Tensor:
        """Return rows (indices on the first axis) of the weight."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Tensor:
        own, *others = index if isinstance(index, tuple) else (index,)
        num_rows, *sizes = self.get_shape()
        asked = range(num_rows)[slice(None) if own is ... else own]
        shape = torch.empty(len(asked), *sizes, device="meta")[:, *others].shape
        floats = torch.empty(shape, dtype=torch.bfloat16)
        step = max(1, _STEP_NUMEL // prod(sizes))
        for start in asked[::step]:
            stop = min(start + step, asked.stop)
            part = self.rows(slice(start, stop))[:, *others]
            floats[start - asked.start : stop - asked.start] = part
        return floats


class _Mxfp4(_Weight):
    """Experts (E, in, out). Codes (E, out, in / 32, 16): two in a byte; scales (E, out, in / 32):
    exponents of 2."""

    def get_shape(self) -> list[int]:
        experts, size, groups, num_bytes = self.codes.get_shape()
        return [experts, groups * num_bytes * 2, size]

    def rows(self, rows: slice) -> Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        floats: Tensor = convert_moe_packed_tensors(self.codes[rows], self.scales[rows])
        return floats


class _Fp8(_Weight):
    """Weights (..., rows, columns) with one scale for each block, of which the last ones may lack
    rows or columns, or one for all."""

    def __init__(self, codes: Any, scales: Any, block: tuple[int, ...]) -> None:
        super().__init__(codes, scales)
        shape, grid = self.get_shape(), list(scales.get_shape())
        self.grid = [1] * (len(shape) - len(grid)) + grid
        asked = [0] * (len(shape) - len(block)) + list(block)
        self.block = [
            wished or size // number
            for size, number, wished in zip(shape, self.grid, asked, strict=True)
        ]
        if any(-(-n // b) != m for n, m, b in zip(shape, self.grid, self.block, strict=True)):
            raise ValueError(f"scales of shape {grid} for a weight of shape {shape}, block {block}")

    def rows(self, rows: slice) -> Tensor:
        codes, scales = self.codes[rows], self.scales[...].reshape(self.grid)
        scales = (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
        for axis, (size, block) in enumerate(zip(self.get_shape(), self.block, strict=True)):
            places = torch.arange(size)[rows if axis == 0 else slice(None)]
            scales = scales.index_select(axis, places // block)
        return codes.float() * scales


def _floats(tensors: Mapping[str, Any], block: tuple[int, ...]) -> dict[str, Any]:
    """Return slices of tensors in files, with slices of floats in the place of codes and scales.
    Raises ValueError for codes without scales that fit them."""
    found, used = dict[str, Any](), set[str]()
    for name, codes in tensors.items():
        stem = name.removesuffix("_blocks")
        is_fp8 = codes.get_dtype() == "F8_E4M3"
        if not is_fp8 and stem == name:
            found[name] = codes
            continue
        scales = f"{name}_scale_inv" if is_fp8 else f"{stem}_scales"
        if scales not in tensors:
            raise ValueError(f"{name} without {scales}")
        # scales of activations are for products in FP8
        used |= {scales, f"{name.removesuffix('weight')}activation_scale"}
        found[stem] = (
            _Fp8(codes, tensors[scales], block) if is_fp8 else _Mxfp4(codes, tensors[scales])
        )
    return {name: one for name, one in found.items() if name not in used}


@contextmanager
def read_as_floats(quantization: Mapping[str, Any], *, is_empty: bool) -> Iterator[None]:
    """Context manager: let transformers read files of quantized weights as files in bfloat16.

    Args:
        quantization: The quantization_config of their config.json.
        is_empty: Whether only names and shapes are wanted.
    """
    from transformers import modeling_utils

    name = "convert_and_load_state_dict_in_model"
    load = getattr(modeling_utils, name)
    block = tuple(quantization.get("weight_block_size", (128, 128)) or ())

    def loaded(*given: Any, state_dict: dict[str, Any], **named: Any) -> Any:
        floats = _floats(state_dict, block)
        if is_empty:
            floats = {n: torch.empty(x.get_shape(), device="meta") for n, x in floats.items()}
        return load(*given, state_dict=floats, **named)

    with patch.object(modeling_utils, name, loaded):
        yield
