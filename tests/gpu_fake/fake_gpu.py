# ruff: noqa: E402 - the stand-in of a CUDA device comes before torch
"""A GPU that is not there: real steps of furlong on fake CUDA tensors, on a torch without CUDA.

    with FakeGPU(Card(cudnn=92000)) as gpu:
        model = build(config)                       # parameters on cuda:0, without memory
        furlong.forward_backward(model, batch, options)
    print(gpu.problems)

What it does

- Tensors on `cuda` are torch's FakeTensors: shapes, strides, dtypes and devices as on a GPU, every
  operator checked by its own schema and meta kernel, no values. Tensors on the CPU are real.
- `torch.cuda` streams, events, statistics and generators are stand-ins. Streams carry vector
  clocks: an access that nothing orders behind an earlier write of another stream is a RACE, and so
  is memory that goes back to the allocator while another stream still uses it. `copies` says when
  a copy is seen to be done by `query`: at once, never, or by chance.
- The attention operators are checked against what their C++ checks or silently assumes
  (MHA.cpp, sdp_utils.cpp, flash_api.cpp of torch 2.11 to 2.13): see `Rules`.
- It counts host syncs, and the kernels outside of products and attention with the bytes that they
  read and write (`kernels`, `kernel_bytes`).

What it cannot tell: values (an `item()` gives a number that lets checks pass), real times.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import traceback
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from unittest import mock

import guard

guard.load()

import torch
from emulated_cuda import window_bounds
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)


def _never_called(*_):
    raise AssertionError("fake tensors have no kernel")


# Of a CUDA build: where a device has a kernel of its own, autograd does not take operators apart.
_OF_CUDA = torch.library.Library("aten", "IMPL")
for _name in ("silu_backward", "_fused_rms_norm"):
    _OF_CUDA.impl(_name, _never_called, "CUDA")

TOUCH_NOTHING = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias",
    "_unsafe_view", "lift_fresh", "set_", "resize_", "is_same_size", "sym_size", "_version",
    "stride", "view", "t", "transpose", "expand", "_reshape_alias", "device",
}  # fmt: skip
SYNCS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim",
    "_unique2", "unique_consecutive", "bincount", "repeat_interleave",
}  # fmt: skip


NO_ELEMENTWISE = {
    "mm", "addmm", "addmm_", "bmm", "baddbmm",
    "_flash_attention_forward", "_flash_attention_backward",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
}  # fmt: skip


def where(limit: int = 3) -> str:
    """The innermost frames of furlong (or else of transformers) on the stack."""
    frames = [f for f in traceback.extract_stack() if "/furlong/" in f.filename]
    frames = [f for f in frames if "fake_gpu" not in f.filename]
    if not frames:
        frames = [f for f in traceback.extract_stack() if "/transformers/" in f.filename]
    shown = []
    for frame in frames[-limit:]:
        name = frame.filename.split("/furlong/")[-1].split("/transformers/")[-1]
        shown.append(f"{name}:{frame.lineno}")
    return " < ".join(reversed(shown))


class FakeStream:
    def __init__(self, device=None, priority=0, **_):
        self.gpu = FakeGPU.current
        self.number = len(self.gpu.streams)
        self.gpu.streams.append(self)
        self.clock: dict[int, int] = dict(self.gpu.host_clock)
        self.device = CUDA
        self.cuda_stream = self.number

    def tick(self) -> int:
        _merge(self.clock, self.gpu.host_clock)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def wait_event(self, event):
        self.tick()
        _merge(self.clock, event.clock)

    def wait_stream(self, other):
        _merge(self.clock, other.clock)

    def record_event(self, event=None):
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self):
        self.gpu.sync("stream.synchronize")
        _merge(self.gpu.host_clock, self.clock)

    def query(self):
        return True

    def __enter__(self):
        self._before = self.gpu.stream()
        self.gpu.local.stream = self
        return self

    def __exit__(self, *_):
        self.gpu.local.stream = self._before


class FakeEvent:
    def __init__(self, enable_timing=False, **_):
        self.gpu = FakeGPU.current
        self.clock: dict[int, int] = {}
        self.recorded = False
        self.seen_done = False

    def record(self, stream=None):
        stream = stream or self.gpu.stream()
        stream.tick()
        self.clock, self.recorded = dict(stream.clock), True
        self.seen_done = False

    def wait(self, stream=None):
        (stream or self.gpu.stream()).wait_event(self)

    def query(self):
        if not self.seen_done:
            policy = self.gpu.copies
            self.seen_done = policy == "fast" or (policy == "random" and random.random() < 0.5)
        if self.seen_done:
            _merge(self.gpu.host_clock, self.clock)
        return self.seen_done

    def synchronize(self):
        if not threading.current_thread().name.startswith("furlong-"):  # of a lane
            self.gpu.sync("event.synchronize")
        self.seen_done = True
        _merge(self.gpu.host_clock, self.clock)

    def elapsed_time(self, other):
        return 1.0


def _merge(clock, other):
    for number, time in other.items():
        if clock.get(number, 0) < time:
            clock[number] = time


@dataclass
class Accesses:
    """Of one storage: (first byte, last byte) -> by stream, the last write and the last read."""

    writes: dict = field(default_factory=dict)
    reads: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Card:
    """What the C++ asks of a device."""

    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    cudnn: int = 92000
    """torch 2.13 for CUDA 13 brings 9.20, for CUDA 12.6 and 12.8 older ones."""
    memory_bytes: int = 80 * 2**30


class Rules:
    """Checks the arguments of attention operators; `bad` gets what would fail or be wrong."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.shapes: Counter = Counter()

    def bad(self, kind, text):
        self.gpu.problem(kind, text)

    def aligned(self, what, *tensors):
        for x in tensors:
            size = x.element_size()
            if (x.storage_offset() * size) % 16:
                self.bad("ALIGN", f"{what}: starts at byte {x.storage_offset() * size % 16} of 16")
            if any(
                n > 1 and (s * size) % 16
                for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)
            ):
                self.bad("ALIGN", f"{what}: strides {x.stride()} are no multiples of 16 bytes")
            if x.stride(-1) != 1:
                self.bad("FAIL", f"{what}: last stride {x.stride(-1)}")
            if x.dtype not in (torch.float16, torch.bfloat16):
                self.bad("FAIL", f"{what}: dtype {x.dtype}")

    def flash(self, what, q, k, v, ends, max_q, max_k, is_causal, left, right):
        self.aligned(what, q, k, v)
        head_dim = q.shape[-1]
        if head_dim % 8 or head_dim > 256:
            self.bad("FAIL", f"{what}: head dim {head_dim}")
        if not (q.shape[-1] == k.shape[-1] == v.shape[-1]):
            self.bad("FAIL", f"{what}: head dims {q.shape[-1]} {k.shape[-1]} {v.shape[-1]}")
        if self.gpu.card.capability < (8, 0):
            self.bad("FAIL", f"{what}: needs sm80")
        if ends is not None:
            if ends.dtype != torch.int32 or ends.device.type != "cuda" or not ends.is_contiguous():
                self.bad("FAIL", f"{what}: cumulative lengths {ends.dtype} on {ends.device}")
            self.shapes["flash packed"] += 1
            return
        rows, keys = q.shape[1], k.shape[1]
        assert (max_q, max_k) == (rows, keys), (max_q, max_k, rows, keys)
        self.shapes["flash dense"] += 1
        found = window_bounds(keys, is_causal and rows > 1, left, right)
        is_open = left is not None and left >= 0 and (right is None or right < 0)
        if found is not None and is_open and not is_causal:
            blind = rows - found[1] - 1  # row t sees keys up to t + keys - rows + the right bound
            if blind > 0:
                self.bad(
                    "WRONG",
                    f"{what}: {rows} rows, {keys} keys, left {left}, right open: {blind} "
                    "rows lose keys that they see",
                )

    def cudnn(self, what, q, k, v, is_causal, others=()):
        card = self.gpu.card
        self.aligned(what, q, k, v, *others)
        rows, keys, d, dv = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
        self.shapes["cudnn"] += 1
        hopper = card.capability[0] in (9, 10)
        limit = 128
        if hopper and card.cudnn > 92200:
            limit = 256
        elif hopper and card.cudnn >= 91100 and (d, dv) == (192, 128):
            limit = 192
        if max(d, dv) > limit or d % 8 or dv % 8:
            raise RuntimeError(f"cuDNN: no plan for head dims {d} and {dv} (limit {limit})")
        if keys == 1:
            self.bad("UNSUPPORTED", f"{what}: 1 key (torch's own dispatcher refuses it)")
        if rows == 1 and q.shape[1] != k.shape[1]:
            self.bad("SUSPECT", f"{what}: 1 row with grouped heads")
        if card.cudnn <= 91500 and (rows % 128 or keys % 128):
            self.bad(
                "MEMORY",
                f"{what}: rows or keys not a multiple of 128 on cuDNN {card.cudnn}: torch itself "
                "takes cuDNN only above 9.15.0 (pytorch 169849)",
            )
        if "backward" in what and card.capability == (9, 0) and not is_causal and keys % 128 == 64:
            self.bad(
                "NAN",
                f"{what}: keys = 64 mod 128, not causal, on Hopper: dQ is NaN for rows with "
                "a log-sum-exp below -88.7 (pytorch 196678, trl 7181)",
            )


class _Mode(TorchDispatchMode):
    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        flat, _ = tree_flatten((args, kwargs))
        if any(isinstance(x, DTensor) for x in flat):  # of its own tensors it comes again
            return NotImplemented
        fakes = [x for x in flat if isinstance(x, FakeTensor)]
        on_cuda = any(isinstance(x, torch.device) and x.type == "cuda" for x in flat)
        if not fakes and not on_cuda:
            with no_dispatch():
                return func(*args, **kwargs)
        return self.gpu.obey(func, args, kwargs, flat, fakes)


class FakeGPU:
    """See above. `copies`: "fast", "slow" or "random"."""

    current: FakeGPU = None  # type: ignore[assignment]

    def __init__(self, card: Card | None = None, copies: str = "random"):
        self.card, self.copies = card or Card(), copies
        self.local = threading.local()
        self.counts: Counter = Counter()
        self.syncs: Counter = Counter()
        self.kernels: Counter = Counter()
        self.kernel_bytes: Counter = Counter()
        self.problems: dict[tuple[str, str], list] = {}
        self.host_clock: dict[int, int] = {}
        self.streams: list[FakeStream] = []
        self.accesses: dict[int, Accesses] = defaultdict(Accesses)
        self.pinned: set[int] = set()
        self.rules = Rules(self)
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        FakeGPU.current = self
        self.default = FakeStream()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        for patch in self._patches():
            self._stack.enter_context(patch)
        self._stack.enter_context(self.fake)
        self._stack.enter_context(_Mode(self))
        return self

    def __exit__(self, *error):
        self._stack.close()
        return False

    def stream(self):
        return getattr(self.local, "stream", self.default)

    def _patches(self):
        card = self.card
        props = mock.Mock(
            total_memory=card.memory_bytes, multi_processor_count=132, major=card.capability[0],
            minor=card.capability[1],
        )  # fmt: skip
        cuda = {
            "Stream": FakeStream,
            "Event": FakeEvent,
            "current_stream": lambda device=None: self.stream(),
            "default_stream": lambda device=None: self.default,
            "stream": lambda stream: stream,
            "synchronize": lambda device=None: self.sync("cuda.synchronize"),
            "empty_cache": lambda: None,
            "memory_allocated": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0,
            "reset_peak_memory_stats": lambda device=None: None,
            "memory_reserved": lambda device=None: 0,
            "mem_get_info": lambda device=None: (card.memory_bytes, card.memory_bytes),
            "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda state, device=None: None,
            "get_device_name": lambda device=None: card.name,
            "get_device_capability": lambda device=None: card.capability,
            "get_device_properties": lambda device=None: props,
            "host_memory_stats": dict,
            "memory_stats_as_nested_dict": lambda device=None: {
                "allocated_bytes": {"all": {"current": 0, "peak": 0}}
            },
            "current_device": lambda: 0,
            "device": lambda device=None: contextlib.nullcontext(),
            "is_available": lambda: False,
            "_lazy_init": lambda: None,
        }
        for name, stand_in in cuda.items():
            yield mock.patch.object(torch.cuda, name, stand_in)
        yield mock.patch.object(torch.backends.cudnn, "version", lambda: card.cudnn)
        generator = torch.Generator

        class Generator(generator):  # there is none on a CUDA device that is not there
            def __new__(cls, device="cpu"):
                return generator("cpu")

        yield mock.patch.object(torch, "Generator", Generator)
        yield mock.patch.object(FakeTensor, "data_ptr", _address, create=True)

        def listed(x):
            self.sync("tolist")
            return getattr(x, "gpu_values", None) or torch.zeros(tuple(x.shape)).tolist()

        yield mock.patch.object(FakeTensor, "tolist", listed, create=True)
        plain = torch.UntypedStorage.data_ptr

        def of_storage(storage):
            if storage.device.type in ("cuda", "meta"):
                return storage._cdata << 40
            return plain(storage)

        yield mock.patch.object(torch.UntypedStorage, "data_ptr", of_storage)

        def pinned(x, *_, **__):
            y = x.clone()
            self.pinned.add(_storage(y))
            return y

        yield mock.patch.object(torch.Tensor, "pin_memory", pinned)
        # torch would swap tensors of a subclass in place, which these do not allow
        yield mock.patch.object(torch.nn.Module, "_apply", _apply)
        from furlong.kv import pools

        def pinned_memory(num_bytes):
            self.counts["pinned slab"] += 1
            x = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            self.pinned.add(_storage(x))
            return x

        yield mock.patch.object(pools, "pinned_memory", pinned_memory)
        release, take = pools.Staging._release, pools.Staging.take

        def released(own, buffer):
            self.freed(buffer.memory, "a staging buffer")
            release(own, buffer)

        def taken(own, num_bytes, **options):
            buffer = take(own, num_bytes, **options)
            self.counts["prefetch refused: no room"] += buffer is None
            return buffer

        yield mock.patch.object(pools.Staging, "_release", released)
        yield mock.patch.object(pools.Staging, "take", taken)

    def sync(self, what):
        self.syncs[f"{what} at {where(2)}"] += 1
        self.counts["host syncs"] += 1
        for stream in self.streams:
            _merge(self.host_clock, stream.clock)

    def problem(self, kind, text):
        entry = self.problems.setdefault((kind, text), [0, where(4)])
        entry[0] += 1

    def obey(self, func, args, kwargs, flat, fakes):
        name = func.overloadpacket.__name__
        base = name.rstrip("_")
        if kwargs.get("generator") is not None:
            kwargs = {**kwargs, "generator": None}
        if name in SYNCS and func is not aten.repeat_interleave.self_int:
            self.sync(name)
        if name in ("_local_scalar_dense", "item"):
            self._read(fakes)
            dtype = fakes[0].dtype
            if hasattr(fakes[0], "gpu_value"):
                return fakes[0].gpu_value
            return True if dtype == torch.bool else 0.0 if dtype.is_floating_point else 0
        if name in ("equal", "is_nonzero"):
            self._read(fakes)
            return True
        if name == "nonzero":
            self._read(fakes)
            x = fakes[0]
            return torch.empty((min(x.numel(), 4), x.ndim), dtype=torch.int64, device=x.device)
        if name == "_to_copy" and _is_cpu(kwargs.get("device")) and fakes:
            return self._to_cpu(fakes[0], kwargs)
        if name == "copy_":
            return self._copied(func, args, kwargs)
        if name in ("index", "index_put", "_index_put_impl") or base in ("index_put",):
            self._boolean_index(args)
        self._check_devices(func, name, flat)
        self._check_attention(name, _with_defaults(func, args), kwargs)
        if name == "_to_copy" and not fakes:
            self._sent(args[0], kwargs)
        is_norm = name == "_fused_rms_norm"
        result = _rms_norm(*args) if is_norm else func(*args, **kwargs)
        if name == "_to_copy" and not fakes and args[0].numel() <= 64:
            with no_dispatch():  # what the host has just sent, it may ask for again
                result.gpu_values = args[0].tolist()
                if args[0].numel() == 1:
                    result.gpu_value = args[0].item()
        self._note(func, name, args, flat, result)
        return result

    def _check_devices(self, func, name, flat):
        """A real CPU tensor beside CUDA ones: fine if it has no dimensions, else torch refuses."""
        for x in flat:
            if isinstance(x, Tensor) and not isinstance(x, FakeTensor) and x.ndim:
                if name not in ("_to_copy", "index", "index_put_", "_index_put_impl_"):
                    self.problem("FAIL", f"{name} of CPU and CUDA tensors")
                elif name != "_to_copy":
                    self.sync(f"{name} with an index on the CPU")

    def _check_attention(self, name, args, kwargs):
        rules = self.rules
        if name == "_flash_attention_forward":
            q, k, v, ends, _, max_q, max_k, _, causal = args[:9]
            window = kwargs.get("window_size_left"), kwargs.get("window_size_right")
            rules.flash("flash forward", q, k, v, ends, max_q, max_k, causal, *window)
        elif name == "_flash_attention_backward":
            dout, q, k, v, out, lse, ends, _, max_q, max_k, _, causal = args[:12]
            window = kwargs.get("window_size_left"), kwargs.get("window_size_right")
            rules.flash("flash backward", q, k, v, ends, max_q, max_k, causal, *window)
            rules.aligned("flash backward dout/out", dout, out)
            if lse.dtype != torch.float32 or not lse.is_contiguous():
                rules.bad("FAIL", f"flash backward: lse {lse.dtype} {lse.stride()}")
        elif name == "_scaled_dot_product_cudnn_attention":
            q, k, v = args[:3]
            rules.cudnn("cudnn forward", q, k, v, args[6])
        elif name == "_scaled_dot_product_cudnn_attention_backward":
            dout, q, k, v, out, lse = args[:6]
            rules.cudnn("cudnn backward", q, k, v, args[14], (dout, out))
            if lse.shape != (*q.shape[:3], 1) or lse.dtype != torch.float32:
                rules.bad("FAIL", f"cudnn backward: lse {tuple(lse.shape)} {lse.dtype}")
            # MHA.cpp on main: O's layout is inferred from Q's and then compared, batch stride too
            if _order(out) != _order(q):
                rules.bad(
                    "MAIN",
                    f"cudnn backward: out {out.stride()} in another order than q "
                    f"{q.stride()}: refused by torch after 2.13",
                )

    def _boolean_index(self, args):
        indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
        for x in indices:
            if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8):
                self.sync("a boolean index")

    def _read(self, tensors):
        stream = self.stream()
        stream.tick()
        for x in tensors:
            self._access(x, stream, writes=False)

    def _to_cpu(self, x, kwargs):
        self._read([x])
        if not kwargs.get("non_blocking"):
            self.sync("copy to the CPU")
        dtype = kwargs.get("dtype") or x.dtype
        with no_dispatch():
            return torch.zeros(tuple(x.shape), dtype=dtype)

    def _sent(self, x, kwargs):
        """A real CPU tensor goes to the device."""
        if not kwargs.get("non_blocking") and x.numel() > 1:
            self.sync("a blocking copy to the device")
        elif _storage(x) not in self.pinned and x.numel() > 1:
            self.syncs[f"a copy from pageable memory at {where(2)}"] += 1

    def _copied(self, func, args, kwargs):
        into, source = args[:2]
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        stream = self.stream()
        stream.tick()
        self._access(source, stream, writes=False)
        self._access(into, stream, writes=True)
        self._count("copy_", [source], [into])
        kinds = isinstance(source, FakeTensor), isinstance(into, FakeTensor)
        if kinds == (True, True):
            return func(*args, **kwargs)
        assert into.shape == source.shape, (into.shape, source.shape)
        way = "to the device" if kinds[1] else "to the host"
        cpu = source if kinds[1] else into
        if blocking:
            self.sync(f"a blocking copy {way}")
        elif _storage(cpu) not in self.pinned:
            self.syncs[f"a copy {way}, pageable at {where(2)}"] += 1
        return into

    def _note(self, func, name, args, flat, result):
        outputs = [x for x in tree_flatten(result)[0] if isinstance(x, FakeTensor)]
        inputs = [x for x in flat if isinstance(x, FakeTensor)]
        for storage in {*map(_storage, outputs)} - {*map(_storage, inputs)}:
            self.accesses.pop(storage, None)  # new memory, of the stream's own blocks
        if func.is_view or name in TOUCH_NOTHING:
            return
        self._count(name, [] if name in ("zero_", "fill_") else inputs, outputs)
        stream = self.stream()
        stream.tick()
        written = {id(x) for x in outputs}
        if func._schema.is_mutable:
            for argument, x in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written |= {id(y) for y in tree_flatten(x)[0]}
        for x in inputs:
            self._access(x, stream, writes=id(x) in written)
        for x in outputs:
            self._access(x, stream, writes=True)

    def _count(self, name, inputs, outputs):
        """A kernel that reads its inputs once, and writes its outputs once."""
        if name not in NO_ELEMENTWISE:
            self.kernels[name] += 1
            self.kernel_bytes[name] += sum(_touched(x) for x in (*inputs, *outputs))

    def _access(self, x, stream, *, writes):
        if not isinstance(x, Tensor) or x.numel() == 0:
            return
        if len(self.streams) == 1:
            return
        key, span = _storage(x), _span(x)
        seen = self.accesses[key]
        own, clock = stream.number, stream.clock
        for table, matters in ((seen.writes, True), (seen.reads, writes)):
            if not matters:
                continue
            for other_span, by_stream in table.items():
                if other_span[1] <= span[0] or span[1] <= other_span[0]:
                    continue
                for number, time in by_stream.items():
                    if number != own and clock.get(number, 0) < time:
                        what = "write" if table is seen.writes else "read"
                        self.problem(
                            "RACE",
                            f"{'write' if writes else 'read'} on stream {own} is not behind a "
                            f"{what} on stream {number}",
                        )
        table = seen.writes if writes else seen.reads
        table.setdefault(span, {})[own] = clock.get(own, 0)

    def freed(self, x, what):
        """Memory goes back to the allocator, whose next user is on the default stream."""
        seen = self.accesses.pop(_storage(x), None)
        if seen is None:
            return
        clock = dict(self.default.clock)
        _merge(clock, self.host_clock)
        for table in (seen.writes, seen.reads):
            for by_stream in table.values():
                for number, time in by_stream.items():
                    if clock.get(number, 0) < time:
                        self.problem("RACE", f"{what} is freed while stream {number} uses it")

    def clear(self):
        for counter in (
            self.counts,
            self.syncs,
            self.rules.shapes,
            self.kernels,
            self.kernel_bytes,
        ):
            counter.clear()
        self.problems.clear()


def _apply(module, fn, recurse=True):
    for child in module.children() if recurse else ():
        child._apply(fn)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                new = fn(parameter)
            if new is not parameter:
                module._parameters[name] = torch.nn.Parameter(new, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


def _with_defaults(func, args):
    """Positional arguments with the defaults that the dispatcher has cut off their end."""
    rest = [a for a in func._schema.arguments[len(args) :] if not a.kwarg_only]
    return (*args, *(a.default_value for a in rest))


def _address(x) -> int:
    return x.untyped_storage().data_ptr() + x.storage_offset() * x.element_size()


def _storage(x) -> int:
    return x.untyped_storage()._cdata


def _span(x) -> tuple[int, int]:
    size, first = x.element_size(), x.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
    return first * size, last * size


def _rms_norm(x, shape, *_):
    """The output, and the reciprocal of each row's root mean square."""
    rows = (*x.shape[: x.ndim - len(shape)], *(1 for _ in shape))
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)


def _touched(x) -> int:
    """Bytes of a tensor, each element of an expanded one once."""
    sizes = (n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return x.element_size() * math.prod(sizes)


def _is_cpu(device) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _order(x):
    """The order of the dimensions in memory, those of one element left out."""
    dims = [d for d in range(x.ndim) if x.shape[d] > 1]
    return sorted(dims, key=lambda d: -x.stride(d))


def build(model_type: str, *, dtype=torch.bfloat16, **settings):
    """A random model of a type, on the fake GPU, in train mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **settings)
    with CUDA:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.train()
