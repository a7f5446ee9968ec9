"""`furlong train`: trains what a run file and flags describe."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from furlong.config.sources import parse_run

_RESUME = "--resume"
# oneDNN, which computes bfloat16 on a CPU, compiles a kernel for every new length of a chunk. It
# keeps 1,024 of them, and torch's layer above it as many, unless told otherwise before their first
# use. `furlong.cost.model` counts what these keep.
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_NUM_KERNELS = "64"


def run(arguments: Sequence[str]) -> int:
    config = parse_run(
        arguments,
        switches={_RESUME: "go on with the run in out, from its newest whole checkpoint"},
    )
    from furlong.train.start import open_run

    with ExitStack() as stack:
        opened = open_run(stack, config, resume=_RESUME in arguments)
        if opened.report is not None:
            return 0
        for cache in _KERNEL_CACHES:
            os.environ.setdefault(cache, _NUM_KERNELS)
        # torch and transformers are loaded when all that they are not needed for is sound.
        from furlong.train.run import train_opened

        train_opened(stack, config, opened)
    return 0
