"""InfiniPipe's windows (section 3.3.3): the graphs that stages should hold in token-level 1F1B."""


def backward_places(counts):
    """Return the position in backward order of each chunk in forward order (InfiniPipe's f2b);
    `counts`: chunks of each group."""
    return [sum(counts[:i]) + place for i, n in enumerate(counts) for place in reversed(range(n))]


def windows(counts, num_stages, stage):
    """Return the chunks, by forward position, whose graphs a stage holds each time it holds most:
    before each backward, up to the last one that a forward precedes."""
    num_chunks = sum(counts)
    num_ahead = min(num_stages - 1 - stage + max(counts) - 1, num_chunks)
    if num_ahead == num_chunks:
        return [set(range(num_chunks))]
    places = backward_places(counts)
    order = sorted(range(num_chunks), key=places.__getitem__)
    return [
        set(range(num_ahead + done + 1)).difference(order[:done])
        for done in range(num_chunks - num_ahead)
    ]
