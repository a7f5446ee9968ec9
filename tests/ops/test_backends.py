"""Every backend against dense attention under autograd: values and all gradients."""

import pytest
import torch

from furlong.ops.backend import Block
from furlong.ops.choose import choose_backend
from furlong.ops.cpu_flash import CPUFlash
from furlong.ops.cuda_flash import CUDNN, CUDAFlash
from furlong.ops.reference import Reference

CASES = {
    "causal square": (37, 37, Block(0, 0.3)),
    "single token": (1, 1, Block(0, 0.3)),
    "full prefix": (21, 50, Block(50, 0.3)),
    "far prefix": (21, 50, Block(400, 0.3)),
    "window inside the square": (41, 41, Block(0, 0.3, window=7)),
    "window of one": (9, 9, Block(0, 0.3, window=1)),
    "window reaching the prefix": (41, 30, Block(30, 0.3, window=16)),
    "window covering the prefix": (11, 30, Block(30, 0.3, window=64)),
    "tiles of a long window": (1100, 700, Block(700, 0.3, window=600)),
    "softcap square": (19, 19, Block(0, 0.3, softcap=2.0)),
    "softcap prefix with window": (19, 40, Block(40, 0.3, window=25, softcap=2.0)),
}


def dense(q, k, v, block):
    """Plain masked softmax attention; rows that see nothing are dropped by the caller."""
    num_groups = q.shape[0] // k.shape[0]
    keys, values = (t.repeat_interleave(num_groups, 0) for t in (k, v))
    scores = q @ keys.mT * block.scale
    if block.softcap is not None:
        scores = block.softcap * torch.tanh(scores / block.softcap)
    position = block.distance + torch.arange(q.shape[1], device=q.device)[:, None]
    key = torch.arange(k.shape[1], device=q.device)[None]
    hidden = key > position
    if block.window is not None:
        hidden = hidden | (position - key >= block.window)
    scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def inputs(case, heads, dtype, device="cpu"):
    num_rows, num_keys, block = CASES[case]
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    q, dout = draw(heads[0], num_rows, 16), draw(heads[0], num_rows, 16)
    return q, draw(heads[1], num_keys, 16), draw(heads[1], num_keys, 16), dout, block


def worst_error(backend, case, heads, dtype, device="cpu"):
    q, k, v, dout, block = inputs(case, heads, dtype, device)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    seen = block.visible_rows(q.shape[1], k.shape[1])
    out, lse = dense(wide[0][:, :seen], wide[1], wide[2], block)
    out.backward(dout[:, :seen].double())
    mine, my_lse = backend.forward(q, k, v, block)
    assert torch.all(my_lse[:, seen:] == -torch.inf) and torch.all(mine[:, seen:] == 0)
    grads = backend.backward(dout, q, k, v, mine, my_lse, block)
    pairs = [(mine[:, :seen], out), (my_lse[:, :seen], lse)]
    pairs += [(g, w.grad) for g, w in zip(grads, wide, strict=True)]
    floor = 0.1 * dout.double().norm()  # a true gradient may be zero (a single key)
    return max(
        float((a.double() - b.detach()).norm() / max(b.detach().norm(), floor)) for a, b in pairs
    )


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", [Reference(), CPUFlash()], ids=lambda b: type(b).__name__)
def test_float64_on_cpu(backend, case, heads):
    assert worst_error(backend, case, heads, torch.float64) < 1e-13


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("case", CASES)
def test_cpu_flash_in_lower_precision(case, dtype, bound):
    assert worst_error(CPUFlash(), case, (6, 2), dtype) < bound


def test_pieces_of_a_head_group_keep_many_threads_busy():
    threads = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        assert worst_error(CPUFlash(), "full prefix", (6, 2), torch.float64) < 1e-13
    finally:
        torch.set_num_threads(threads)


def test_the_choice_on_cpu_is_flash():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert isinstance(choose_backend(torch.device("cpu"), dtype, 16), CPUFlash)


def test_a_backend_that_is_wrong_is_left_out(monkeypatch, caplog):
    monkeypatch.setattr(CPUFlash, "forward", lambda self, q, k, v, block: (q, q[..., 0]))
    assert isinstance(choose_backend(torch.device("cpu"), torch.float64, 16), Reference)
    assert "CPUFlash left out" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if "softcap" not in c])
@pytest.mark.parametrize("backend", [CUDAFlash(), CUDNN()], ids=lambda b: type(b).__name__)
def test_on_cuda(backend, case):
    assert worst_error(backend, case, (6, 2), torch.bfloat16, "cuda") < 2e-2
