import pytest

from furlong.ops.backends import cudnn


@pytest.fixture
def small_cudnn(monkeypatch):
    """cuDNN's rules at a size that plain arithmetic computes at once."""
    small = {"_STEP": 2, "_MIN_SIZE": 4, "_MIN_CUT": 8, "_MAX_SIZE": 16}
    for name, size in small.items():
        monkeypatch.setattr(cudnn, name, size)
