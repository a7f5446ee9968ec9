"""Length presets: stated shares are kept, seeds repeat, bad names are refused."""

import numpy as np
import pytest

from furlong.cost.lengths import K, length_preset, length_presets, sample_lengths
from furlong.errors import ConfigError

COUNT = 200_000


@pytest.mark.parametrize("name", length_presets())
def test_stated_shares_are_kept(name):
    preset = length_preset(name)
    drawn = np.array(sample_lengths(name, COUNT, seed=3))
    assert drawn.min() >= preset.shortest_tokens - 1 and drawn.max() <= preset.longest_tokens
    for tokens, share in preset.stated:
        spread = 4 * np.sqrt(share * (1 - share) / COUNT)
        assert abs((drawn < tokens).mean() - share) < spread, tokens
    points = preset.points()
    assert list(points) == sorted(points) and points[-1][1] == 1.0
    assert preset.source and preset.assumed


def test_llama3s_means_are_those_of_the_papers():
    drawn = np.array(sample_lengths("llama3-long-sft", 400_000, seed=1))
    short, long = drawn[drawn < 4 * K], drawn[drawn >= 4 * K]
    assert 900 < short.mean() < 1000
    assert long.mean() == pytest.approx(37_000, rel=0.04)


def test_githubs_long_sequences_hold_their_share_of_the_tokens():
    drawn = np.array(sample_lengths("github", 400_000, seed=1))
    assert drawn[drawn > 64 * K].sum() / drawn.sum() == pytest.approx(0.216, abs=0.01)


def test_the_same_seed_draws_the_same():
    assert sample_lengths("github", 50, seed=7) == sample_lengths("github", 50, seed=7)
    assert sample_lengths("github", 50, seed=7) != sample_lengths("github", 50, seed=8)
    assert sample_lengths("github", 10, seed=7) == sample_lengths("github", 50, seed=7)[:10]


def test_too_long_sequences():
    dropped = sample_lengths("github", 5000, seed=1, max_seq_len=32 * K)
    assert len(dropped) == 5000 and max(dropped) < 32 * K
    below = np.mean([n < 8 * K for n in dropped])
    assert below > 0.915
    assert sample_lengths("wikipedia", 9, seed=1, max_seq_len=10**6) == sample_lengths(
        "wikipedia", 9, seed=1
    )


def test_refusals():
    with pytest.raises(ConfigError, match="did you mean github"):
        sample_lengths("git-hub", 3)
    with pytest.raises(ConfigError, match="more than 500 tokens"):
        sample_lengths("github", 3, max_seq_len=400)
