"""A copy of an engine that several processes call is refused, by name."""

from __future__ import annotations

import copy
import pickle

import pytest
from distributed.sharded_cases import llama
from helpers.ranks import run_ranks

import furlong
from furlong.errors import ConfigError
from furlong.runtime.distributed.mesh import make_ranks


def copied(rank: int, sizes: tuple[int, int, int]) -> list[str]:
    engine = furlong.Engine(llama(), ranks=make_ranks(*sizes, "cpu"))
    said = []
    for copy_of in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError) as caught:
            copy_of(engine)
        said.append(caught.value.given)
    return said


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 1)])
def test_a_copy_is_refused(sizes: tuple[int, int, int]) -> None:
    told = "a copy, or a pickle, of an engine of 2 processes"
    assert run_ranks(copied, sizes, num_ranks=2) == [[told, told]] * 2
