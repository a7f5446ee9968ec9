"""Skrull's placement: worked examples, the theorem of when it succeeds, and a plain reference."""

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from papers.skrull_forms import flops

from furlong.plan.plan import Place
from furlong.planners.chunks import place_by_load

FIRST, SECOND, BOTH = Place(0, 1), Place(1, 1), Place(0, 2)
lengths = st.lists(st.integers(1, 60), min_size=1, max_size=14)


def work_of(seq_lens):
    return [flops(seq_len, 8, 2) for seq_len in seq_lens]


def place(seq_lens, bucket_tokens, sp_size):
    work = work_of(seq_lens)
    return place_by_load(seq_lens, work, bucket_tokens=bucket_tokens, sp_size=sp_size)


def rank_tokens(seq_lens, places, sp_size):
    return [
        sum(Fraction(n, p.size) for n, p in placed if p.first <= rank < p.stop)
        for placed in [list(zip(seq_lens, places, strict=True))]
        for rank in range(sp_size)
    ]


def reference(seq_lens, bucket_tokens, sp_size, *, as_printed=False):
    """Algorithms 1 and 3 line by line. Returns places, and how often it rolled back.

    as_printed: RollBack as in the paper's listing, RB[rank] <- RB[rank] - S + S/N for one rank.
    """
    order = sorted(range(len(seq_lens)), key=lambda i: seq_lens[i])
    work = [Fraction(w) for w in work_of(seq_lens)]
    room, load = [Fraction(bucket_tokens)] * sp_size, [Fraction(0)] * sp_size
    result, rollbacks, at, whole = [None] * len(seq_lens), 0, 0, Place(0, sp_size)
    shared = set()  # on one rank a shared sequence has the place of a local one
    while at < len(order):
        i = order[at]
        share = Fraction(seq_lens[i], sp_size)
        for rank in (load.index(min(load)), room.index(max(room))):
            if room[rank] >= seq_lens[i]:
                result[i] = Place(rank, 1)
                room[rank] -= seq_lens[i]
                load[rank] += work[i]
                break
        else:
            rank = room.index(min(room))
            if room[rank] >= share:
                result[i] = whole
                shared.add(i)
                room = [r - share for r in room]
                load = [w + work[i] / sp_size for w in load]
            else:
                local = [x for x in order[:at] if result[x] == Place(rank, 1) and x not in shared]
                if not local:
                    return None, rollbacks
                rollbacks += 1
                x = local[0]
                result[x] = whole
                shared.add(x)
                if as_printed:
                    room[rank] += Fraction(seq_lens[x], sp_size) - seq_lens[x]
                    load[rank] += work[x] / sp_size - work[x]
                else:
                    room = [r - Fraction(seq_lens[x], sp_size) for r in room]
                    load = [w + work[x] / sp_size for w in load]
                    room[rank] += seq_lens[x]
                    load[rank] -= work[x]
                continue
        at += 1
    return result, rollbacks


def test_worked_example_with_roll_backs():
    lens = [4, 5, 5, 6, 9]
    places = place(lens, 15, 2)
    assert places == [BOTH, BOTH, FIRST, SECOND, BOTH]
    assert rank_tokens(lens, places, 2) == [14, 15]
    assert reference(lens, 15, 2) == (places, 2)


def test_worked_example_without_roll_back():
    lens = [2, 3, 4, 5, 6, 12]
    assert place(lens, 20, 2) == [FIRST, SECOND] * 3
    assert reference(lens, 20, 2)[1] == 0


@given(lengths, st.integers(1, 60), st.integers(1, 8))
def test_succeeds_exactly_where_all_tokens_fit(seq_lens, bucket_tokens, sp_size):
    allowed = {Place(0, sp_size), *(Place(rank, 1) for rank in range(sp_size))}
    places = place(seq_lens, bucket_tokens, sp_size)
    assert (places is not None) == (sum(seq_lens) <= sp_size * bucket_tokens)
    if places is not None:
        assert max(rank_tokens(seq_lens, places, sp_size)) <= bucket_tokens
        assert allowed.issuperset(places)


@settings(max_examples=200)
@given(lengths, st.integers(1, 60), st.sampled_from((1, 2, 4, 8)))
def test_agrees_with_the_reference(seq_lens, bucket_tokens, sp_size):
    # group sizes that are powers of two, so that loads are exact here too
    assert place(seq_lens, bucket_tokens, sp_size) == reference(seq_lens, bucket_tokens, sp_size)[0]


def test_roll_back_as_printed_never_works():
    """Wherever it is reached it fails on a batch that fits, or fills a rank beyond its bucket."""
    draw, reached = random.Random(0), 0
    for _ in range(1500):
        seq_lens = [draw.randint(1, 60) for _ in range(draw.randint(2, 14))]
        sp_size = draw.randint(2, 8)
        bucket_tokens = -(-(sum(seq_lens) + draw.randint(0, 20)) // sp_size)
        places, rollbacks = reference(seq_lens, bucket_tokens, sp_size, as_printed=True)
        if rollbacks:
            reached += 1
            full = places and max(rank_tokens(seq_lens, places, sp_size)) > bucket_tokens
            assert places is None or full
    assert reached > 300


def test_roll_back_as_printed_fails_on_the_worked_example():
    assert reference([4, 5, 5, 6, 9], 15, 2, as_printed=True)[0] is None


def test_paper_settings_are_not_local_beyond_a_bucket():
    """26K tokens for a rank: what is longer cannot be local, and 8 ranks hold 208K."""
    assert place([26 * 1024], 26 * 1024, 8) == [FIRST]
    assert place([26 * 1024 + 1], 26 * 1024, 8) == [Place(0, 8)]
    assert place([208 * 1024], 26 * 1024, 8) == [Place(0, 8)]
    assert place([208 * 1024 + 1], 26 * 1024, 8) is None


@pytest.mark.parametrize("lens", [[], [0, 0]])
def test_nothing_to_place(lens):
    assert place(lens, 0, 4) == [FIRST] * len(lens)
