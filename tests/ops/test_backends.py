"""Every backend against dense attention under autograd: values and all gradients."""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import emulated_flash4
import pytest
import torch
from emulated_cuda import EmulatedCUDA
from helpers.covering import Design

from furlong.cost.machine import Machine
from furlong.ops.backends import cpu_flash, cuda_flash, cudnn, reference, select
from furlong.ops.backends.base import Block, Tally
from furlong.ops.backends.cpu_flash import CPUFlash
from furlong.ops.backends.cuda_flash import CUDAFlash, CUDAFlash3, CUDAFlash4
from furlong.ops.backends.cudnn import CUDNN
from furlong.ops.backends.reference import Reference
from furlong.ops.backends.select import CallKind, ProbedBackend, choose_backend

CASES = {
    "causal square": (37, 37, Block(0, 0.3)),
    "single token": (1, 1, Block(0, 0.3)),
    "full prefix": (21, 50, Block(50, 0.3)),
    "far prefix": (21, 50, Block(400, 0.3)),
    "window inside the square": (41, 41, Block(0, 0.3, window=7)),
    "window of one": (9, 9, Block(0, 0.3, window=1)),
    "window reaching the prefix": (41, 30, Block(30, 0.3, window=16)),
    "window covering the prefix": (11, 30, Block(30, 0.3, window=64)),
    "window, more rows than keys": (40, 10, Block(10, 0.3, window=48)),
    "window, more rows than keys that all rows but few see": (40, 25, Block(25, 0.3, window=48)),
    "window, more rows than keys far away": (64, 32, Block(96, 0.3, window=128)),
    "tiles of a long window": (110, 70, Block(70, 0.3, window=60)),
    "softcap square": (19, 19, Block(0, 0.3, softcap=2.0)),
    "softcap prefix with window": (19, 40, Block(40, 0.3, window=25, softcap=2.0)),
    "cuDNN square": (40, 40, Block(0, 0.3)),
    "square of several calls": (42, 42, Block(0, 0.3)),
    "square inside a window": (37, 37, Block(0, 0.3, window=40)),
    "odd rows and keys": (35, 49, Block(50, 0.3)),
    "odd keys, even rows": (22, 49, Block(50, 0.3)),
    "keys of two calls": (34, 24, Block(24, 0.3)),
    "one call": (16, 12, Block(12, 0.3, window=64)),
}
NUM_CALLS = {
    "cuDNN square": (6, 0),
    "square of several calls": (6, 0),
    "one call": (1, 0),
    "odd rows and keys": (9, 4),
    "odd keys, even rows": (6, 2),
    "keys of two calls": (6, 0),
    "causal square": (6, 1),
    "square inside a window": (6, 1),
}
"""Calls of cuDNN and of flash attention, with `small_cudnn`."""
CUDA = (CUDAFlash, CUDNN)
UNCAPPED = [case for case in CASES if "softcap" not in case]
BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}


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

    q, dout = draw(num_rows, heads[0], 16), draw(num_rows, heads[0], 16)
    kv = draw(num_keys, 2, heads[1], 16)  # as a store keeps them
    return *(x.transpose(0, 1) for x in (q, kv[:, 0], kv[:, 1], dout)), block


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
        float((a.detach().double() - b.detach()).norm() / max(b.detach().norm(), floor))
        for a, b in pairs
    )


BLOCKS = Design(
    {
        "case": list(CASES),
        "backend": (Reference, CPUFlash, *CUDA),
        "heads": ((2, 2), (6, 2), (4, 1)),
        "dtype": list(BOUNDS),
        "in_tiles": (False, True),
    },
    {"backend": lambda c: c["case"] in UNCAPPED or c["backend"] not in CUDA},
    steering=("case", "backend"),
)


@pytest.mark.parametrize(("case", "backend", "heads", "dtype", "in_tiles"), BLOCKS.cases(2))
def test_a_block_and_its_gradients(case, backend, heads, dtype, in_tiles, small_cudnn, monkeypatch):
    """On a CPU in one tile and in many; cuDNN in pieces of its own, and one of flash attention
    behind the last multiple."""
    if in_tiles:
        monkeypatch.setattr(cpu_flash, "_BAND_ROWS", 8)
        monkeypatch.setattr(reference, "_MAX_SCORE_ELEMENTS", 500)
    counted = EmulatedCUDA(max_rows=40)
    with counted if backend in CUDA else nullcontext():
        assert worst_error(backend(), case, heads, dtype) < BOUNDS[dtype]
    names = "_scaled_dot_product_cudnn_attention", "_flash_attention_forward"
    calls = tuple(counted.launches[name] for name in names)
    assert backend is not CUDNN or calls == NUM_CALLS.get(case, calls)


def test_pieces_of_a_head_group_keep_many_threads_busy():
    threads = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        assert worst_error(CPUFlash(), "full prefix", (6, 2), torch.float64) < 1e-13
    finally:
        torch.set_num_threads(threads)


def chosen_on(device, dtype, **kind):
    found = CallKind(torch.device(device), dtype, 16, **kind)
    return choose_backend(found, select.fitting_backends(found))


def test_a_backend_that_is_wrong_is_left_out(monkeypatch, caplog):
    monkeypatch.setattr(CPUFlash, "forward", lambda self, q, k, v, block: (q, q[..., 0]))
    assert isinstance(chosen_on("cpu", torch.float64), Reference)
    assert "CPUFlash left out" in caplog.text


SIZES = [
    (256, 256, 1, Block(0, 0.3)),
    (255, 255, 0, Block(0, 0.3)),
    (1000, 1000, 0, Block(0, 0.3)),  # two calls cost more than flash loses
    (128, 128, 0, Block(0, 0.3)),
    (1, 1, 0, Block(0, 0.3)),
    (8000, 8000, 7936 / 8000, Block(0, 0.3)),
    (8000, 32_768, 7936 / 8000, Block(32_768, 0.3)),
    (54_080, 54_080, 53_248 / 54_080, Block(0, 0.3)),
    (54_144, 8192, 1, Block(8192, 0.3)),
    (65_536, 65_536, 1, Block(0, 0.3)),
    (32_896, 32_896, 1, Block(0, 0.3)),
    (256, 256, 0, Block(0, 0.3, window=200)),
    (256, 256, 1, Block(256, 0.3, window=1000)),
    (8192, 1600, 1536 / 1600, Block(1600, 0.3)),  # 64 mod 128
    (8192, 6528, 1, Block(6528, 0.3)),  # a segment of the store
    (8192, 40_000, 39_936 / 40_000, Block(40_000, 0.3)),
    (8192, 192, 0, Block(192, 0.3)),
    (8191, 8192, 8064 / 8191, Block(8192, 0.3)),
    (8192, 1, 0, Block(1, 0.3)),
    (1, 8192, 0, Block(8192, 0.3)),
    (256, 8192, 0, Block(8192, 0.3, window=4000)),
]


@pytest.mark.parametrize("num_rows, num_keys, share, block", SIZES)
def test_cudnn_takes_what_torch_would_give_it_at_sizes_that_recur(num_rows, num_keys, share, block):
    """`share`: of the pairs of a full block, and about of a square's."""
    parts = cudnn.split_calls(num_rows, num_keys, block)
    fused, pairs = 0, 0
    for rows, keys, is_fused in parts:
        size = rows.stop - rows.start, keys.stop - keys.start
        own = replace(block, window=None).at(rows.start, keys.start).num_pairs(*size)
        fused, pairs = fused + is_fused * own, pairs + own
        assert not is_fused or all(256 <= n <= 2**15 and n % 128 == 0 for n in size)
    assert pairs == replace(block, window=None).num_pairs(num_rows, num_keys)
    assert share <= 1.03 * fused / pairs and (share < 1 or fused == pairs) and (share or not fused)
    torch.use_deterministic_algorithms(True)
    try:
        assert not any(part.is_fused for part in cudnn.split_calls(num_rows, num_keys, block))
    finally:
        torch.use_deterministic_algorithms(False)


def test_blocks_of_many_lengths_share_few_plans():
    shapes = set()
    for number in range(1, 1_000_000, 997):
        for block in (Block(number, 0.3), Block(0, 0.3)):
            rows = 8192 if block.distance else number
            for part in cudnn.split_calls(rows, number, block):
                if part.is_fused and (block.distance or part.rows == part.keys):
                    shapes.add((bool(block.distance), part.keys.stop - part.keys.start))
    assert len(shapes) <= 2 * 120  # of keys, and of squares


@pytest.mark.parametrize("case", CASES)
def test_pairs_of_a_block(case):
    num_rows, num_keys, block = CASES[case]
    pairs = int(block.mask(num_rows, num_keys, torch.device("cpu")).sum())
    assert block.num_pairs(num_rows, num_keys) == pairs
    squares = slice(0, 3), slice(3, 9)
    assert Block(0, 0.3, 2, squares=squares).num_pairs(9, 9) == 5 + 11
    assert Block(0, 0.3, squares=squares).num_pairs(9, 9) == 6 + 21


def test_kernels_are_counted_where_a_block_is_cut(small_cudnn):
    q, k, v, dout, block = inputs("odd rows and keys", (6, 2), torch.float64)
    (backend := CUDNN()).tally = Tally()
    with EmulatedCUDA():
        select._computed(backend, dout, q, k, v, block)
    tally = backend.tally.taken()
    assert tally.calls == {"cuDNN": 2 * 9, "FlashAttention 2": 2 * 4}
    assert tally.flops.total() == 14 * 35 * 49 * 6 * 16
    assert tally.flops["cuDNN"] == 14 * 34 * 48 * 6 * 16
    assert not backend.tally.calls
    with pytest.raises(NotImplementedError):  # softcap: a refused call is not counted
        backend.forward(q, k, v, replace(block, softcap=1.0))
    assert not backend.tally.calls


def test_a_row_beyond_the_window_of_every_key_sees_nothing():
    q, k = torch.ones(1, 1, 4), torch.ones(1, 257, 4)
    out, lse = CUDAFlash().forward(q, k, k, Block(distance=296, window=28, scale=1.0))
    assert not out.any() and lse.item() == -torch.inf


@pytest.mark.parametrize("capability, version, is_right", [
    ((9, 0), 91_501, True), ((10, 3), 92_000, True), ((9, 0), 91_500, False),
    ((8, 0), 92_000, False), ((12, 0), 92_000, False), ((9, 0), None, False),
])  # fmt: skip
def test_cudnn_is_a_candidate_where_torch_prefers_it(capability, version, is_right, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    found = select.fitting_backends(CallKind(torch.device("cuda"), torch.bfloat16, 64))
    assert [type(x) for x in found] == [CUDAFlash, *[CUDNN] * is_right]


@pytest.mark.parametrize("capability, fault, num", [
    ((9, 0), None, 1), ((9, 0), RuntimeError("no kernels"), 0), ((8, 0), None, 0),
])  # fmt: skip
def test_flash_attention_3_is_a_candidate_of_its_own(capability, fault, num, monkeypatch, caplog):
    """Through the functions by which torch would register it, which stay unregistered."""
    from torch.nn.attention import _fa3

    def module(name):
        if fault:
            raise fault

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92_000)
    kind = CallKind(torch.device("cuda"), torch.bfloat16, 64)
    assert not any(isinstance(x, CUDAFlash3) for x in select.fitting_backends(kind)), (
        "not installed"
    )
    monkeypatch.setattr(cuda_flash, "find_spec", lambda name: name == "flash_attn_interface")
    monkeypatch.setattr(_fa3, "_fa3_import_module", module)
    operators = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward
    monkeypatch.setattr(_fa3, "_fa3_flash_attention_forward_impl_default", operators[0])
    monkeypatch.setattr(_fa3, "_fa3_flash_attention_backward_impl", operators[1])
    found = select.fitting_backends(kind)
    assert [isinstance(x, CUDAFlash3) for x in found][-1] is bool(num)
    assert sum(isinstance(x, CUDAFlash3) for x in found) == num
    assert bool(fault) == ("cannot be called: no kernels" in caplog.text)
    if num:
        with EmulatedCUDA():
            assert worst_error(found[-1], "full prefix", (6, 2), torch.float64) < 1e-13


FLASH_4 = Design(
    {"case": list(CASES), "heads": ((2, 2), (6, 2)), "dtype": (torch.float64, torch.bfloat16)},
    steering=("case",),
)


@pytest.mark.parametrize(("case", "heads", "dtype"), FLASH_4.cases(2))
def test_flash_attention_4_computes_every_block(case, heads, dtype):
    """Softcap and windows too, by the signatures of its wheel."""
    backend = CUDAFlash4(emulated_flash4)
    assert worst_error(backend, case, heads, dtype) < BOUNDS[dtype]


def test_the_probe_of_flash_attention_4():
    """Packed slices, windows and softcap; one wrong bound or a refusal leaves it out."""
    for windowed, capped in itertools.product((False, True), repeat=2):
        kind = CallKind(torch.device("cpu"), torch.float64, 16, windowed, capped)
        assert select._probe(CUDAFlash4(emulated_flash4), kind) is None
    kind = CallKind(torch.device("cpu"), torch.float64, 16, is_windowed=True)

    class Wrong(CUDAFlash4):
        def _arguments(self, *given, **scores):
            return super()._arguments(*given, **scores) | {"window_size_left": None}

    assert "relative error" in select._probe(Wrong(emulated_flash4), kind)

    def refuse_heads(*_, **__):
        raise AssertionError("(head_dim, head_dim_v)=(160, 160) is not supported")

    refusing = SimpleNamespace(_flash_attn_fwd=refuse_heads)
    assert "not supported" in select._probe(CUDAFlash4(refusing), kind)

    class CompilerError(Exception):
        """As its compiler's errors derive."""

    def fail(*_, **__):
        raise CompilerError

    for broken in (SimpleNamespace(_flash_attn_fwd=fail), SimpleNamespace()):
        assert "Error" in select._probe(CUDAFlash4(broken), kind)


def test_flash_attention_4_is_a_candidate_ahead_of_cudnn(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92_000)
    monkeypatch.setattr(cuda_flash, "find_spec", lambda name: name.startswith("flash_attn."))
    kind = CallKind(torch.device("cuda"), torch.bfloat16, 64)
    capped = replace(kind, is_capped=True)
    assert select.fitting_backends(capped) == [], "not installed"
    monkeypatch.setattr(
        cuda_flash, "find_spec", lambda name: name in ("flash_attn", "flash_attn.cute")
    )
    monkeypatch.setattr(cuda_flash, "import_module", lambda name: emulated_flash4)
    assert [type(x) for x in select.fitting_backends(kind)] == [CUDAFlash, CUDNN, CUDAFlash4]
    assert [type(x) for x in select.fitting_backends(capped)] == [CUDAFlash4]
    assert select.fitting_backends(replace(capped, dtype=torch.float32)) == []
    monkeypatch.setattr(cuda_flash, "import_module", lambda name: refuse())
    assert [type(x) for x in select.fitting_backends(kind)] == [CUDAFlash, CUDNN]
    assert "cannot be called: no plan" in caplog.text


LENS = {"equal": [5, 5, 5], "unequal": [1, 9, 1, 3, 20], "single tokens": [1, 1, 1, 1]}


SQUARES = Design(
    {"backend": (Reference, CPUFlash, *CUDA), "lens": list(LENS), "window": (None, 1, 4)}
)


@pytest.mark.parametrize(("backend", "lens", "window"), SQUARES.cases(2))
def test_packed_slices(backend, lens, window):
    """One call for all slices against dense attention of each."""
    stops = list(itertools.accumulate(LENS[lens]))
    slices = tuple(slice(stop - n, stop) for n, stop in zip(LENS[lens], stops, strict=True))
    block = Block(0, 0.3, window, squares=slices)
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = (
        torch.randn(stops[-1], n, 8, generator=generator, dtype=torch.float64).transpose(0, 1)
        for n in (6, 2, 2, 6)
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    parts = [dense(*(x[:, rows] for x in leaves), block) for rows in slices]
    truth = torch.cat([out for out, _ in parts], 1)
    with EmulatedCUDA():
        out, lse = (engine := backend()).forward(q, k, v, block)
        strided = out.contiguous(), lse.mT.contiguous().mT
        grads = engine.backward(dout, q, k, v, *strided, block)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(out, truth.detach(), **close)
    torch.testing.assert_close(lse, torch.cat([x for _, x in parts], 1).detach(), **close)
    for mine, expected in zip(grads, torch.autograd.grad(truth, leaves, dout), strict=True):
        torch.testing.assert_close(mine, expected, **close)


@pytest.mark.parametrize("case", ["full prefix", "keys of two calls"])
@pytest.mark.parametrize("backend", [CUDAFlash, CUDNN])
def test_the_backward_takes_its_inputs_in_any_layout(backend, case, small_cudnn):
    """Outputs come merged, remembered or as a kernel left them."""
    q, k, v, dout, block = inputs(case, (6, 2), torch.float64)
    layouts = (
        lambda x: x,
        lambda x: x.contiguous(),
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.flip(-1).mT.contiguous().mT.flip(-1) if x.ndim == 3 else x.mT.contiguous().mT,
    )
    with EmulatedCUDA():
        engine = backend()
        out, lse = engine.forward(q, k, v, block)
        expected = engine.backward(dout, q, k, v, out, lse, block)
        for layout in layouts:
            others = layout(dout), q, k, v, layout(out), layout(lse)
            for mine, truth in zip(engine.backward(*others, block), expected, strict=True):
                torch.testing.assert_close(mine, truth, rtol=0, atol=0)
        for layout in layouts:
            heads = (layout(x) for x in (q, k, v))
            grads = engine.backward(dout, *heads, out, lse, block)
            for mine, truth in zip(grads, expected, strict=True):
                torch.testing.assert_close(mine, truth)


@pytest.mark.parametrize("backend", CUDA)
def test_signatures_and_shapes_of_the_real_operators(backend):
    """torch's own operators on the meta device: an argument or a shape that is wrong raises."""
    for case in UNCAPPED:
        *tensors, block = inputs(case, (6, 2), torch.bfloat16)
        check_on_meta(*(x.to("meta") for x in tensors), backend(), block)
    squares = slice(0, 1), slice(1, 6), slice(6, 9)
    q, k, v, dout = (
        torch.empty(9, n, 16, dtype=torch.bfloat16, device="meta").transpose(0, 1)
        for n in (6, 2, 2, 6)
    )
    for window in (None, 4):
        check_on_meta(q, k, v, dout, backend(), Block(0, 0.3, window, squares=squares))


def check_on_meta(q, k, v, dout, backend, block):
    out, lse, *grads = select._computed(backend, dout, q, k, v, block)
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_meta
    assert lse.shape == q.shape[:2] and lse.dtype == torch.float32
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert grad.shape == x.shape
        assert grad.dtype == x.dtype or (x is not q and grad.dtype == lse.dtype)


def test_narrow_values_are_narrow_for_cudnn_alone():
    """A latent's, of which cuDNN has a backward for (192, 128) and none for (192, 192)."""
    widths = []

    class Narrow(EmulatedCUDA):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "cudnn_attention" in func.overloadpacket.__name__:
                widths.extend(x.shape[-1] for x in args[:5] if isinstance(x, torch.Tensor))
            return super().__torch_dispatch__(func, types, args, kwargs)

    for value_width, expected in ((16, {24, 16}), (None, {24})):
        widths.clear()
        with Narrow():
            kind = CallKind(torch.device("cpu"), torch.float64, 24, value_width=value_width)
            assert select._probe(CUDNN(), kind) is None
            assert select._probe(CUDAFlash(), kind) is None
        assert set(widths) == expected


PROBED = Design(
    {"backend": (CUDAFlash, CUDNN), "windowed": (False, True), "token_major": (False, True)}
)


@pytest.mark.parametrize(("backend", "is_windowed", "is_token_major"), PROBED.cases(2))
def test_the_probe_covers_windows_and_packed_slices(
    backend, is_windowed, is_token_major, monkeypatch
):
    def fault(own=backend):
        with EmulatedCUDA():
            kind = CallKind(
                torch.device("cpu"), torch.float64, 16, is_windowed, False, is_token_major
            )
            return select._probe(own(), kind)

    assert fault() is None
    if backend is CUDNN:
        for name in ("_forward", "_backward"):  # the kinds of Gemma 3 on a card without a plan
            with monkeypatch.context() as patch:
                patch.setattr(cudnn, name, refuse)
                assert fault() == "no plan"
    with monkeypatch.context() as patch:
        plain = cuda_flash._square_window
        patch.setattr(
            cuda_flash,
            "_square_window",
            lambda block: plain(Block(0, 1.0, (block.window or 9) - 1)),
        )
        assert "relative error" in fault()
    with monkeypatch.context() as patch:
        plain = CUDAFlash.backward

        def twice(self, *given):
            return [(1 + bool(given[-1].squares)) * g for g in plain(self, *given)]

        patch.setattr(CUDAFlash, "backward", twice)
        assert "relative error" in fault()


def refuse(*_, **__):
    raise RuntimeError("no plan\nfor this")


def test_a_backend_that_refuses_in_the_middle_of_a_run_is_followed_by_the_next(monkeypatch, caplog):
    calls, plain = [], CUDAFlash.backward

    def backward(self, dout, q, *args):
        calls.append(q.shape[1])
        return plain(self, dout, q, *args) if q.shape[1] < 20 else refuse()

    kind = CallKind(torch.device("cpu"), torch.float64, 16)
    monkeypatch.setattr(CUDAFlash, "backward", backward)
    chosen = ProbedBackend()
    chosen._chosen[kind], chosen._untried[kind] = CUDAFlash(), [Reference()]
    monkeypatch.setattr(select, "_probe", lambda backend, kind: None)
    with EmulatedCUDA():
        for case in ("full prefix", "full prefix", "single token"):
            assert worst_error(chosen, case, (6, 2), torch.float64) < 1e-13
    assert calls == [21], "asked once"
    refusals = [r.getMessage() for r in caplog.records if "refuses" in r.getMessage()]
    assert len(refusals) == 1 and "21 rows and 50 keys" in refusals[0] and "no plan" in refusals[0]
    chosen._chosen[kind] = CUDAFlash()
    for error in (torch.OutOfMemoryError("full"), torch.AcceleratorError("illegal access")):
        monkeypatch.setattr(CUDAFlash, "forward", lambda *_, error=error: raised(error))
        with pytest.raises(type(error)):
            chosen.forward(*inputs("far prefix", (6, 2), torch.float64)[:3], Block(400, 0.3))


def raised(error):
    raise error


@pytest.mark.parametrize(
    "dtype, is_capped, why",
    [
        (torch.float32, False, "16 bits"),
        (torch.float64, False, "16 bits"),
        (torch.bfloat16, True, "softcap"),
    ],
)
def test_the_reference_on_cuda_is_taken_aloud(dtype, is_capped, why, caplog):
    assert isinstance(chosen_on("cuda", dtype, is_capped=is_capped), Reference)
    assert "plain reference" in caplog.text and why in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("case", UNCAPPED)
@pytest.mark.parametrize("backend", [CUDAFlash, CUDNN])
def test_on_cuda(backend, case):
    assert worst_error(backend(), case, (6, 2), torch.bfloat16, "cuda") < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("is_windowed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("backend", [CUDAFlash, CUDNN])
def test_the_probe_on_cuda(backend, head_dim, is_windowed):
    """Packed slices and large blocks among the rest."""
    device = torch.device("cuda")
    if backend is CUDNN and not cudnn.is_trusted(device):
        pytest.skip("cuDNN is no candidate on this card")
    for is_token_major in (False, True):
        kind = CallKind(device, torch.bfloat16, head_dim, is_windowed, False, is_token_major)
        assert select._probe(backend(), kind) is None


@pytest.mark.parametrize("backend", [CUDAFlash, CUDNN, CUDAFlash3, CUDAFlash4])
def test_rates_of_a_hopper_are_assumed_of_the_fastest_kernel_that_is_installed(
    backend, monkeypatch
):
    """Seconds of plans on this machine are those of the kernel that the run will take."""
    found = [CUDAFlash(), object.__new__(backend)]
    monkeypatch.setattr(select, "fitting_backends", lambda kind: found)
    name = select.fastest(CallKind(torch.device("cuda"), torch.bfloat16, 128))
    machine = Machine.named("H100").attended_by(name)
    assert f"attention by {name};" in machine.origin
    assert (machine == Machine.named("H100")) == (backend is CUDNN)
