"""Checksums by which processes compare weights: of values and of their places."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from furlong.errors import ElsewhereError
from furlong.runtime.distributed import consensus
from furlong.runtime.distributed.consensus import _hash_of, weights_checksum, whole_checksums

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.uint8)


def drawn(dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    return torch.randint(200, (6, 6), dtype=torch.int64).to(dtype)


def test_an_error_is_raised_on_all_by_the_process_that_had_it_or_else_by_one_that_quotes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process with a new model has not read, and knows of no error in the others' plans."""
    fine = consensus._Word("a step", "", False, {}, 1)
    quoted = consensus._Word("a step", "no plan of process 2", True, {}, None)
    failed = consensus._Word("a step", "no memory", False, {}, None)
    for words, number in (([fine, quoted], 1), ([fine, quoted, failed], 2)):
        said = dict(enumerate(words))
        monkeypatch.setattr(consensus, "_said", lambda *_, said=said: said)
        with pytest.raises(ElsewhereError) as caught:
            consensus.exchange(SimpleNamespace(dp=1), 1, "a step")  # type: ignore[arg-type]
        text = str(caught.value)
        assert f"process {number}" in text and words[number].failure in text


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "changed",
    [
        lambda w: w.t().contiguous(), lambda w: w.flip(0), lambda w: w.flip(1), lambda w: -w,
        lambda w: w.roll(1), lambda w: w[:, [1, 0, 2, 3, 4, 5]], lambda w: w.flip(0, 1),
    ],
)  # fmt: skip
def test_a_weight_in_another_order_has_another_checksum(
    dtype: torch.dtype, changed: Callable[[Tensor], Tensor]
) -> None:
    for weight in (drawn(dtype), torch.eye(6).cumsum(0).to(dtype)):
        assert weights_checksum([changed(weight)]) != weights_checksum([weight])
    vector = drawn(dtype)[0]
    assert weights_checksum([vector.flip(0)]) != weights_checksum([vector])


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_values_have_one_checksum_whatever_their_strides(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = drawn(dtype)
    known = weights_checksum([weight, weight[0, 0], weight[:0]])
    spread = torch.stack([weight, weight], 2)[:, :, 1].t().contiguous().t()
    assert not spread.is_contiguous()
    monkeypatch.setattr(consensus, "_CPU_BLOCK", 14)  # two rows and a bit
    assert weights_checksum([spread, spread[0, 0], spread[:0]]) == known


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sums_of_parts_in_their_places_add_up_to_that_of_the_whole(dtype: torch.dtype) -> None:
    """A zero adds nothing: so shards can be compared with a whole weight, wherever it is cut."""
    weight = drawn(dtype)
    for axis in range(2):
        parts = [torch.zeros_like(weight) for _ in range(3)]
        for part, at in zip(parts, torch.arange(6).split(2), strict=True):
            part.index_copy_(axis, at, weight.index_select(axis, at))
        assert sum(map(_hash_of, parts)) == _hash_of(weight)


def sums_in_layouts(rank: int) -> list[list[int]]:
    """The checksums of a matrix, of experts and of what only some processes hold, in layouts."""
    weights = [drawn(torch.float32), torch.arange(210.0).view(5, 6, 7), torch.ones(3)]
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    layouts = [
        (line, [Shard(0)]), (square, [Replicate(), Shard(0)]), (square, [Shard(0), Shard(0)])
    ]  # fmt: skip
    found = [whole_checksums(weights)]
    found += [whole_checksums([distribute_tensor(w, *of) for w in weights]) for of in layouts]
    two_axes = [distribute_tensor(w, square, [Shard(1), Shard(0)]) for w in weights[:2]]
    return [*found, [*whole_checksums(two_axes), found[0][2]]]


@pytest.mark.slow
def test_a_checksum_is_that_of_the_whole_weight_in_every_layout() -> None:
    for found in run_ranks(sums_in_layouts, num_ranks=4):
        assert len({tuple(sums) for sums in found}) == 1
