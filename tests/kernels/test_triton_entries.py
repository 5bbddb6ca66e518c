"""Codecs of whole buckets of entries write the wires, residuals and means of the CPU's, bit for bit, in Triton's
interpreter or on a GPU; see test_triton_bits.py."""

import math

import numpy as np
import pytest
import torch

from grace.kernels.contract.primitives import Placed
from tests.support.data import data, same
from tests.support.implementations import INTERPRETED, OTHERS
from tests.support.methods import make

pytest.importorskip("numba", reason="the CPU's are compiled")
FOUND = [param for param in OTHERS if param.id == "triton"]
pytestmark = pytest.mark.skipif(not FOUND, reason="no GPU: test_triton.py runs this in Triton's interpreter")
SIZES = [0, 1, 33, 1500, 2049]
MOST = np.float32(2.0**100).view(np.uint32)


@pytest.fixture(params=[param.values[0] for param in FOUND], ids=["triton"] * len(FOUND))
def device(request):
    return torch.device(request.param.device)


def laid_out(method, sizes, wide=False):
    """Where payloads stand in a wire, and how many bytes they take; ``wide``: positions take 4."""
    shapes = [[(t.shape, str(t.dtype)) for t in method.compress(np.ones(n, np.float32), "w")[0]] for n in sizes]
    shapes = [[values, *((values[0], "int32") if wide else coded for coded in rest)] for values, *rest in shapes]
    offset, placed = 0, [[None] * len(one) for one in shapes]
    for item in (4, 2, 1):
        for row, one in zip(placed, shapes, strict=True):
            for column, (shape, dtype) in enumerate(one):
                if np.dtype(dtype).itemsize == item:
                    row[column] = Placed(offset, shape, dtype)
                    offset += item * math.prod(shape)
    return placed, offset


class Side:
    """A codec of one device, its tensors and what it wrote."""

    def __init__(self, method, wide, device=None, sizes=SIZES):
        from grace.kernels.fused.bucket_codecs import CODECS
        from grace.kernels.triton.sparse_codecs import CODECS as TRITON

        self.method, (self.placed, self.nbytes) = method, laid_out(method, sizes, wide)
        self.sizes, (name, options), self.device = sizes, method.bucket_codec(), device or torch.device("cpu")
        known = CODECS if device is None else TRITON
        self.codec = known[name](sizes, self.placed, **options, **({"device": device} if device else {}))

    def encode(self, gradients, residuals):
        given = [torch.from_numpy(g.copy()).to(self.device) for g in gradients]
        held = [None if r is None else torch.from_numpy(r.copy()).to(self.device) for r in residuals or []]
        following = [torch.full_like(g, 7) for g in given] if residuals else []
        rows = np.zeros((len(given), 3), np.uint64)
        for column, tensors in enumerate((given, held, following)):
            for i, tensor in enumerate(tensors):
                rows[i, column] = 0 if tensor is None else tensor.data_ptr()
        wire = torch.zeros(self.nbytes + 4 * len(given) + 64, dtype=torch.uint8, device=self.device)
        factors = (
            np.full((len(given), 2), (0.7, 0.3), np.float32) if residuals else np.ones((len(given), 2), np.float32)
        )
        words = [self.method.context.stream(f"v{i}", shared=True).words for i in range(len(given))]
        streams = np.array(words, np.uint32)
        end = self.nbytes, "uint8", [1.0] * len(given), 2.0
        common = rows, factors, np.uint64(wire.data_ptr()), MOST, streams
        sound = self.codec.encode(*common, end) if self.codec.on_device else self.codec.encode(*common)
        sound = [bool(one) for one in (sound.tolist() if self.codec.on_device else sound)]
        return wire.cpu().numpy()[: self.nbytes], [x.cpu().numpy() for x in following], sound

    def decode(self, wires):
        wires = [torch.from_numpy(wire.copy()).to(self.device) for wire in wires]
        outs = [torch.full((n,), math.nan, device=self.device) for n in self.sizes]
        places = [np.array([x.data_ptr() for x in tensors], np.uint64) for tensors in (outs, wires)]
        assert self.codec.decode(*places, len(wires), 1.0)
        return [out.cpu().numpy() for out in outs]


SPECS = [
    "topk(ratio=0.02)", "topk(ratio=0.2)", "topk(ratio=0.1, chunk=64)", "topk(chunk=1024)",
    "randomk(ratio=0.03, unbiased=true)",
]  # fmt: skip


@pytest.mark.parametrize(("spec", "wide"), [(SPECS[0], True), *((spec, False) for spec in SPECS)])
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
def test_wires_residuals_and_means_are_the_cpus(device, spec, wide):
    kinds, wires = ["gaussian", "zeros", "denormal"], []
    cpu, gpu = Side(make(spec), wide), Side(make(spec), wide, device)
    for step in range(2):
        gradients = [data(kinds[(i + step) % 3], n, n + step) for i, n in enumerate(SIZES)]
        residuals = [data("gaussian", n, 1) if n != 33 else None for n in SIZES] if step else None
        gradients[-1][3] = np.inf if step else 1
        wanted, got = cpu.encode(gradients, residuals), gpu.encode(gradients, residuals)
        assert got[2] == wanted[2] == [True] * (len(SIZES) - 1) + [not step]
        same(got[0], wanted[0])
        for one, other in zip(got[1], wanted[1], strict=True):
            same(one, other)
        wires.append(wanted[0])
    for given in (wires[:1], wires):
        for one, other in zip(gpu.decode(given), cpu.decode(given), strict=True):
            same(one, other)


BUDGETS = {
    "topk(ratio=0.01)": (18, 26),
    "topk(ratio=0.1)": (18, 26),
    "topk(ratio=0.01, chunk=1024)": (4.5, 12.5),
    "topk(ratio=0.1, chunk=64)": (5.5, 13.5),  # of which 0.6 are the payload
    "randomk(ratio=0.01)": (4.5, 12.5),
}
"""The most bytes an element to encode without a residual, and with one. To decode: 8, and the payload."""
LAUNCHES = {"topk(ratio=0.01)": 7, "topk(ratio=0.1)": 7, "randomk(ratio=0.01)": 3}
"""The most to encode a bucket, of those that need more than 2."""


@pytest.mark.skipif(not INTERPRETED, reason="counts what the interpreter loads and stores")
@pytest.mark.parametrize("spec", BUDGETS)
def test_elements_are_read_and_written_seldom_and_buckets_take_few_launches(device, spec, monkeypatch):
    from grace.kernels.triton import sparse_codecs
    from grace.kernels.triton.launching import recorded
    from tests.support.moved import moved

    monkeypatch.setattr(sparse_codecs, "PROGRAMS", 2)  # of many elements each, as on GPUs
    n, given = 1 << (12 if "chunk" in spec else 15), []
    gpu = Side(make(spec), False, device, [n])
    x, residual = data("gaussian", n, 1), data("gaussian", n, 2)
    for residuals, most in zip((None, [residual]), BUDGETS[spec], strict=True):
        with moved() as encoding:
            given.append(gpu.encode([x], residuals)[0])
        assert 4 * n < encoding.total <= most * n
    with moved() as decoding:
        gpu.decode(given)
    assert 4 * n < decoding.total <= 8 * n + len(given) * gpu.nbytes
    gpu = Side(make(spec), False, device, SIZES)
    with recorded() as encoding:
        wire, *_ = gpu.encode([data("gaussian", size) for size in SIZES], None)
    with recorded() as decoding:
        gpu.decode([wire, wire])
    assert 0 < len(encoding) <= LAUNCHES.get(spec, 2)
    assert 0 < len(decoding) <= 2
