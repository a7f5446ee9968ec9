"""Shards of MosaicML's streaming format."""

from __future__ import annotations

import json
from typing import Any

import numpy as np


def mds_shard(rows: list[dict[str, Any]], encodings: dict[str, str]) -> bytes:
    """A shard as MosaicML's writer makes it: number of rows, where each begins, columns, rows."""
    names = sorted(encodings)
    columns = {
        "column_names": names,
        "column_encodings": [encodings[name] for name in names],
        "column_sizes": [None] * len(names),
    }
    head = json.dumps(columns).encode()
    bodies = []
    for row in rows:
        cells = []
        for name in names:
            if encodings[name] == "str":
                cells.append(str(row[name]).encode())
                continue
            array = np.array(row[name], encodings[name].partition(":")[2] or "uint32")
            own = b"" if ":" in encodings[name] else bytes([32])
            axes = np.array(array.shape, "<u2").tobytes()
            cells.append(own + bytes([array.ndim << 2 | 1]) + axes + array.tobytes())
        bodies.append(np.array([len(cell) for cell in cells], "<u4").tobytes() + b"".join(cells))
    starts = np.cumsum([8 + 4 * len(rows) + len(head), *map(len, bodies)]).astype("<u4")
    return np.uint32(len(rows)).tobytes() + starts.tobytes() + head + b"".join(bodies)
