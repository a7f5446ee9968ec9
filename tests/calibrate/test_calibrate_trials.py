"""Trials: what is held out is not fitted, and the fit's terms are told apart."""

from furlong.calibrate.trials import trials


def test_held_out_trials_differ_in_how_chunks_are_cut():
    own = trials(1024)
    fitted = {(t.subject, t.options.size, t.options.keep, t.options.order) for t in own
              if not t.held_out}  # fmt: skip
    unseen = [t for t in own if t.held_out]
    assert {t.subject for t in unseen} == {"own", "narrow"}
    for trial in unseen:
        options = trial.options
        assert (trial.subject, options.size, options.keep, options.order) not in fitted


def test_sizes_follow_the_largest_chunk():
    for small, large in zip(trials(256), trials(1024), strict=True):
        assert 4 * small.options.size - large.options.size in range(-2, 3)
        assert small.options.keep == large.options.keep and small.subject == large.subject


def test_a_trial_tells_what_it_runs():
    assert str(trials(1024)[4]) == (
        "own: 1,024 tokens, chunks of 256, keep input, 0 retained, layer-first 1"
    )
    assert str(trials(1024)[5]).startswith("own: 10 x 102 tokens, chunks of 1,024, keep kv")
