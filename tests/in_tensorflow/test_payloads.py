"""Payloads are the same in every framework: same input, seed, name, step and rank."""

# ruff: noqa: E402 - what is imported after TensorFlow needs it

import contextlib
import warnings

import numpy as np
import pytest
import torch

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import grace
from grace.communicators import ScatterMerge, ScatterReduce
from grace.core.context import Context
from grace.core.registry import known
from grace.exchange.pieces import PiecewiseCompressor
from grace.kernels import NumpyKernels, kernels_of
from grace.kernels.tensorflow import fused
from grace.kernels.torch import fused as torch_kernels
from tests.support.data import EPSILON, REFERENCE
from tests.support.pairwise import pairwise

pytestmark = pytest.mark.slow

SPECS = [
    *sorted(known("compressor")), "bf16", "qsgd(levels=7, bucket_size=64)", "qsgd(levels=1, norm=l2)",
    "topk(ratio=0.3)", "randomk(unbiased=true)", "threshold(value=1.5)", "dgc(ratio=0.05, sample=0.1)",
    "sketch(quantiles=5)", "powersgd(rank=3)", "topk(ratio=0.1) | qsgd(levels=7)", "threshold(value=1) | efsignsgd",
]  # fmt: skip
SHAPES = [(), (0,), (1,), (7,), (1025,), (33, 7), (0, 3), (8, 3, 3, 3), (5000,)]
NEEDS_VALUES = ("dgc", "adaptive")
"""Methods that decide on the host by numbers that they read: they work eagerly, not in a graph."""


def data(shape, seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


class Framework:
    """How arrays become a framework's tensors, and what runs on them."""

    def __init__(self, to, fuses=False, graph=False):
        self.to, self.fuses, self.graph = to, fuses, graph

    @contextlib.contextmanager
    def running(self):
        before = fused._USE_FUSED, torch_kernels._USE_FUSED
        fused._USE_FUSED = torch_kernels._USE_FUSED = self.fuses
        try:
            yield
        finally:
            fused._USE_FUSED, torch_kernels._USE_FUSED = before

    def compress(self, spec, x, step=3):
        """A fresh compressor, its payload and its ctx."""
        compressor = grace.make("compressor", spec)
        compressor.bind(Context(seed=5, step=step, rank=1, size=2))
        with self.running():
            if not self.graph:
                return compressor, *compressor.compress(self.to(x), "layer/w")
            kept = []

            def compress(tensor):
                payload, ctx = compressor.compress(tensor, "layer/w")
                kept.append(ctx)
                return payload

            return compressor, tf.function(compress, autograph=False)(self.to(x)), kept[0]

    def from_array(self, array, dtype):
        """A payload tensor out of its bytes."""
        raw = self.to(np.frombuffer(array.tobytes() + b"\0", np.uint8))[: array.nbytes]
        return kernels_of(raw).from_bytes(raw, dtype, array.shape)


def to_torch(x):
    return torch.from_numpy(np.array(x))


FRAMEWORKS = {
    "numpy": Framework(np.array),
    "torch": Framework(to_torch),
    "torch-fused": Framework(to_torch, fuses=True),
    "tensorflow": Framework(tf.constant),
    "tensorflow-fused": Framework(tf.constant, fuses=True),
    "graph": Framework(tf.constant, graph=True),
    "graph-fused": Framework(tf.constant, fuses=True, graph=True),
}


def array_of(tensor):
    """Any payload tensor as an array; bfloat16 as its bits."""
    k = kernels_of(tensor)
    if k.dtype(tensor) != "bfloat16":
        return np.asarray(tensor)
    raw = np.asarray(k.to_bytes(tensor))
    return raw.view(np.uint16).reshape(tuple(tensor.shape))


def usable(name, spec, shape):
    """Whether a framework can compress this at all."""
    if name == "numpy" and spec == "bf16":
        return False  # NumPy has no bfloat16
    return not (FRAMEWORKS[name].graph and spec.startswith(NEEDS_VALUES))


# -- the same bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith("powersgd")])
def test_the_fused_kernels_of_torch_and_tensorflow_send_the_same_bytes(spec, shape):
    x = data(shape)
    ours, theirs = (FRAMEWORKS[name].compress(spec, x)[1] for name in ("tensorflow-fused", "torch-fused"))
    for a, b in zip(ours, theirs, strict=True):
        assert kernels_of(a).dtype(a) == kernels_of(b).dtype(b)
        assert tuple(a.shape) == tuple(b.shape)
        assert array_of(a).tobytes() == array_of(b).tobytes()


def check_codes(packed, wanted, call, bits):
    """Codes differ only where the scaled value is within rounding of a whole number, and by one then."""
    x, levels, bucket_size, _, stream = call
    codes, wanted_codes = (REFERENCE.unpack(p, bits, x.size).astype(int) for p in (packed, wanted))
    differ = np.flatnonzero(codes != wanted_codes)
    assert (np.abs(codes - wanted_codes)[differ] == 1).all()
    scales = REFERENCE.quantize(*call)[1].astype(np.float64)
    scaled = np.abs(x[differ].astype(np.float64)) / scales[differ // bucket_size] * levels
    scaled += REFERENCE.uniform(stream, x.size)[differ]
    assert (np.abs(scaled - np.round(scaled)) <= 4 * EPSILON * (levels + 1)).all()


SENT = pairwise(
    [name for name in FRAMEWORKS if name != "numpy"],
    [spec for spec in SPECS if spec != "bf16"],
    SHAPES,
    allowed=usable,
)


@pytest.mark.parametrize(("name", "spec", "shape"), SENT, ids=str)
def test_every_framework_sends_what_numpy_does(name, spec, shape, monkeypatch):
    x, calls = data(shape, 1), []
    quantize = NumpyKernels.quantize
    with monkeypatch.context() as patch:
        patch.setattr(NumpyKernels, "quantize", lambda self, *args: calls.append(args) or quantize(self, *args))
        compressor, wanted, ctx = FRAMEWORKS["numpy"].compress(spec, x)
    ours, payload, own_ctx = FRAMEWORKS[name].compress(spec, x)
    assert len(payload) == len(wanted)
    for got, other in zip(map(array_of, payload), wanted, strict=True):
        assert (got.dtype, got.shape) == (other.dtype, other.shape)
        if spec.startswith("powersgd"):
            continue  # an orthonormal basis is unique up to signs and rounding; its product is compared below
        if got.tobytes() == other.tobytes():
            continue
        if got.dtype == np.float32:
            np.testing.assert_allclose(got, other, rtol=2 * EPSILON, atol=0)
        else:
            assert calls
            check_codes(got, other, calls[0], (2 * calls[0][1]).bit_length())
    if FRAMEWORKS[name].graph:
        return
    mine, reference = np.asarray(ours.decompress(payload, own_ctx)), compressor.decompress(wanted, ctx)
    tolerance = 1e-4 if spec.startswith("powersgd") else 4 * EPSILON
    if not calls:
        np.testing.assert_allclose(mine, reference, rtol=tolerance, atol=tolerance)


PAIRS = [("tensorflow", "torch-fused"), ("torch", "tensorflow-fused"), ("numpy", "tensorflow"),
         ("tensorflow-fused", "numpy")]  # fmt: skip
DECODED = pairwise(
    PAIRS, SPECS, [(), (0,), (1025,), (33, 7)], allowed=lambda pair, *case: all(usable(name, *case) for name in pair)
)


@pytest.mark.parametrize(("pair", "spec", "shape"), DECODED, ids=str)
def test_a_payload_of_one_framework_decodes_in_another(pair, spec, shape):
    here, there = pair
    x = data(shape, 2)
    theirs, payload, their_ctx = FRAMEWORKS[there].compress(spec, x)
    dtypes = [kernels_of(tensor).dtype(tensor) for tensor in payload]
    ours, _, ctx = FRAMEWORKS[here].compress(spec, x)
    received = [FRAMEWORKS[here].from_array(array_of(t), dtype) for t, dtype in zip(payload, dtypes, strict=True)]
    with FRAMEWORKS[here].running():
        got = np.asarray(ours.decompress(received, ctx))
    with FRAMEWORKS[there].running():
        wanted = np.asarray(theirs.decompress(payload, their_ctx))
    np.testing.assert_allclose(got, wanted, rtol=4 * EPSILON, atol=4 * EPSILON)


def encoder(spec):
    """A function of a tensor and a step that returns a payload."""
    compressor = grace.make("compressor", spec)

    def encode(x, step):
        compressor.bind(Context(seed=5, step=step, rank=1, size=2))
        return compressor.compress(x, "layer/w")[0]

    return encode


@pytest.mark.parametrize("spec", ["qsgd", "natural", "terngrad", "randomk", "qsgd(levels=3)"])
def test_a_step_in_a_tensor_gives_the_numbers_of_that_step(spec):
    x = data((3000,))
    for name in ("tensorflow", "tensorflow-fused", "graph", "graph-fused"):
        for step in (3, 4):
            run = encoder(spec)
            run = tf.function(run, autograph=False) if FRAMEWORKS[name].graph else run
            with FRAMEWORKS[name].running():
                payload = run(tf.constant(x), tf.constant(step))
            _, wanted, _ = FRAMEWORKS["numpy"].compress(spec, x, step)
            for a, b in zip(payload, wanted, strict=True):
                np.testing.assert_allclose(np.asarray(a), b, rtol=2 * EPSILON if b.dtype == np.float32 else 0)


# -- whole steps ---------------------------------------------------------------------------------------------


def communicator_of(spec, memory=None):
    compressor = grace.make("compressor", spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return known("communicator")[compressor.traits.communicator](compressor, memory)


STEPS = pairwise(
    [spec for spec in SPECS if not spec.startswith("powersgd")],
    ["float16", "bfloat16", "float32", "float64"],
    [(), (0,), (1,), (33, 7)],
)


@pytest.mark.parametrize(("spec", "dtype", "shape"), STEPS, ids=str)
def test_steps_in_tensorflow_give_what_steps_in_torch_give(spec, dtype, shape):
    ours, theirs = communicator_of(spec), communicator_of(spec)
    for step in range(3):
        x = data(shape, step)
        a = ours.step(tf.cast(tf.constant(x), dtype), "w")
        b = theirs.step(to_torch(x).to(getattr(torch, dtype)), "w")
        assert kernels_of(a).dtype(a) == kernels_of(b).dtype(b)
        a, b = np.asarray(tf.cast(a, tf.float32)), b.float().numpy()
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=8 * EPSILON, atol=8 * EPSILON)


@pytest.mark.parametrize("memory", ["residual", "residual(beta=0.5, gamma=0.5)", "dgc(clip=1.0)", "dgc(nesterov=true)"])
def test_memories_work_on_tensors_that_cannot_change(memory):
    ours, theirs = (communicator_of("topk(ratio=0.1)", memory) for _ in range(2))
    for step in range(4):
        x = data((40, 5), step)
        kept = tf.constant(x)
        a, b = ours.step(kept, "w"), theirs.step(to_torch(x), "w")
        np.testing.assert_allclose(a, b, rtol=8 * EPSILON, atol=8 * EPSILON)
        assert np.array_equal(kept, x)


@pytest.mark.parametrize("spec", ["qsgd", "efsignsgd", "cast", "natural"])
@pytest.mark.parametrize("shape", [(33, 7), (5,), ()], ids=str)
def test_shards_accumulate_into_a_new_tensor(spec, shape):
    x, out = data(shape, 1), data(shape, 2)
    results = []
    for to in (np.array, to_torch, tf.constant):
        pieces = PiecewiseCompressor(grace.make("compressor", spec), 3)
        payload, ctx = pieces.compress_pieces(to(x), "w")
        results.append(np.asarray(pieces.accumulate(payload, ctx, to(out), 0.5)))
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=4 * EPSILON, atol=4 * EPSILON)
    a, b = ScatterReduce(spec).step(tf.constant(x), "w"), ScatterReduce(spec).step(to_torch(x), "w")
    np.testing.assert_allclose(a, b, rtol=4 * EPSILON, atol=4 * EPSILON)


@pytest.mark.parametrize("shape", [(33, 70), (150,), (5,), (), (0, 3)], ids=str)
def test_entries_merge_alike(shape):
    ours, theirs = ScatterMerge("topk(ratio=0.1)"), ScatterMerge("topk(ratio=0.1)")
    for step in range(3):
        x = data(shape, step)
        np.testing.assert_array_equal(ours.step(tf.constant(x), "w"), theirs.step(to_torch(x), "w"))


def test_powersgd_approximates_alike():
    ours, theirs = communicator_of("powersgd(rank=2)"), communicator_of("powersgd(rank=2)")
    for step in range(3):
        x = data((33, 17), step)
        a, b = ours.step(tf.constant(x), "w"), theirs.step(to_torch(x), "w")
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
