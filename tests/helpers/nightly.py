"""Seeds of the long random tests: a few for every pull request, many others every night.

`scripts/test --nightly` sets FURLONG_SEED to the day's date and prints it.
"""

import os
from typing import Any

import pytest

SEED = int(os.environ.get("FURLONG_SEED", "0"))


def seeds(num_slow: int, num_nightly: int) -> list[Any]:
    """Return pytest parameters: slow seeds, the same in every run, and nightly ones of the day."""
    first = SEED * 10_000 + num_slow
    return [
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(num_slow)),
        *(pytest.param(first + i, marks=pytest.mark.nightly) for i in range(num_nightly)),
    ]
