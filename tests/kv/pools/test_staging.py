import torch

from furlong.kv.pools import Event, Staging

MIB = 2**20


def staging(num_largest):
    def allocate(num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    return Staging(allocate, 32 * MIB, lambda event: None, Event, num_largest)


def test_a_tensor_larger_than_the_limit_is_prefetched_where_several_of_the_largest_are_let():
    """Remembered attention of 7B at 8,192 tokens; K,V and gradients of two segments."""
    assert not staging(0).has_room(56 * MIB)
    own = staging(3)
    assert own.has_room(56 * MIB)
    in_use = [own.take(56 * MIB) for _ in range(2)]
    assert own.has_room(56 * MIB)
    in_use.append(own.take(56 * MIB))
    assert not own.has_room(56 * MIB)
    own.give(in_use.pop(), Event())
    assert own.has_room(56 * MIB) and own.total_bytes == 3 * 56 * MIB
    four = staging(5)
    for size in (8, 16, 8, 16):
        assert four.has_room(size * MIB)
        four.take(size * MIB)


class Later(Event):
    """Done after so many looks."""

    def __init__(self, num_looks: int) -> None:
        self._num_looks = num_looks

    def done(self) -> bool:
        self._num_looks -= 1
        return self._num_looks < 0


def test_a_buffer_that_is_done_between_two_looks_is_not_taken_again():
    own = staging(0)
    first, second, _ = [own.take(16 * MIB) for _ in range(3)]
    for buffer in (first, second):
        own.give(buffer, Later(1000))
    first.free, second.free = Later(1), Later(1000)
    assert own.take(16 * MIB) is second
