"""Memory that turns to NaN when it is given back finds every use after that."""

from __future__ import annotations

import pytest
from helpers.batches import batch
from helpers.tiny_families import build

import furlong
from furlong.kv.pools import DevicePool, Lease, StagedPool, Storage
from furlong.testing import reference_loss, take_grads, worst_relative_error

POISONED = Storage(poison=True)


def error_with_early_releases(
    target: str, storage: Storage | None, monkeypatch, keep: str
) -> float:
    """The worst error where leases end before their tensors are used."""
    model, sequences = build("llama"), batch([21])
    reference_loss(model, sequences)
    truth = take_grads(model)
    options = furlong.ChunkOptions(
        size=8, keep=keep, num_retained=0, offload=target, order="layer-first"
    )
    furlong.forward_backward(model, sequences, options, storage=storage)
    assert worst_relative_error(take_grads(model), truth) <= 1e-12
    for pool in (DevicePool, StagedPool):
        plain = pool.get

        def get(self, h, plain=plain):
            lease = plain(self, h)
            lease.release()
            return Lease(lease.tensor, lambda writes: None)

        monkeypatch.setattr(pool, "get", get)
    furlong.forward_backward(model, sequences, options, storage=storage)
    error = worst_relative_error(take_grads(model), truth)
    return float("inf") if error != error else error


@pytest.mark.parametrize("keep", ["input", "attention"])
@pytest.mark.parametrize("target", ["none", "cpu", "disk"])
@pytest.mark.few(3)
def test_a_lease_that_ends_too_early_is_seen(target, keep, monkeypatch):
    with pytest.raises(Exception, match=r"inf|modified by an inplace|assert"):
        assert error_with_early_releases(target, POISONED, monkeypatch, keep) <= 1e-12
