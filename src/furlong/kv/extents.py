"""Which bytes of a range are free."""

from __future__ import annotations

from bisect import bisect_left


class Extents:
    """Free bytes of the range 0 to `num_bytes`, taken first fit and merged when given back."""

    def __init__(self, num_bytes: int = 0) -> None:
        self.num_bytes = num_bytes
        self._holes = [(0, num_bytes)] * (num_bytes > 0)  # sorted (start, stop)

    @property
    def free_at_end_bytes(self) -> int:
        start, stop = self._holes[-1] if self._holes else (0, 0)
        return stop - start if stop == self.num_bytes else 0

    def take(self, num_bytes: int) -> int | None:
        """Start of `num_bytes` that were free, or None where no hole is large enough."""
        for index, (start, stop) in enumerate(self._holes):
            if stop - start >= num_bytes:
                rest = (start + num_bytes, stop)
                self._holes[index : index + 1] = [rest] * (stop - start > num_bytes)
                return start
        return None

    def give(self, start: int, num_bytes: int) -> None:
        stop = start + num_bytes
        index = bisect_left(self._holes, (start, stop))
        if index < len(self._holes) and self._holes[index][0] == stop:
            stop = self._holes.pop(index)[1]
        if index > 0 and self._holes[index - 1][1] == start:
            index -= 1
            start = self._holes.pop(index)[0]
        self._holes.insert(index, (start, stop))

    def grow(self, num_bytes: int) -> None:
        """Append free bytes at the end."""
        self.num_bytes += num_bytes
        self.give(self.num_bytes - num_bytes, num_bytes)
