"""InfiniPipe's windows (its 3.3.3), the yardstick of what stages hold in token-level 1F1B."""

from furlong.planners.orders import backward_places, count_ahead


def windows(counts, num_stages, stage):
    """The chunks whose graphs a stage holds, in forward places, each time it has most of them:
    right before each backward up to the last one that a forward precedes."""
    num_chunks = sum(counts)
    num_ahead = count_ahead(counts, num_stages, stage)
    if num_ahead == num_chunks:
        return [set(range(num_chunks))]
    places = backward_places(counts)
    order = sorted(range(num_chunks), key=places.__getitem__)
    return [
        set(range(num_ahead + done + 1)).difference(order[:done])
        for done in range(num_chunks - num_ahead)
    ]
