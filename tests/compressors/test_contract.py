"""Contracts of every method in NumPy, torch and TensorFlow, by plain operations, by compiled loops and in graphs."""

import contextlib

import numpy as np
import pytest
import torch

import grace
from grace.communicators import ScatterMerge, ScatterReduce
from grace.core.context import Context
from grace.core.registry import legal_communicators
from grace.exchange.codec import PiecewiseCompressor
from grace.kernels import NumpyKernels, kernels_of
from grace.kernels.torch import fused as torch_kernels
from tests.support.data import EPSILON, REFERENCE, data, same
from tests.support.drawing import drawn
from tests.support.grouping import in_groups
from tests.support.methods import SPECS, communicator_of, make, sent
from tests.support.pairwise import pairwise

try:
    import tensorflow as tf

    from grace.kernels.tensorflow import primitives as tensorflow_kernels
except ImportError:
    tf = None

SHAPES = [(), (0,), (1,), (7,), (1025,), (33, 7), (0, 3), (8, 3, 3, 3), (70_001,)]
ONE_ROUND = [spec for spec in SPECS if make(spec).traits.rounds == 1]
DECIDES_BY_VALUES = ("dgc", "adaptive")
"""Methods that read numbers on the host: they work eagerly, and not in a graph."""


class Framework:
    """A framework: how arrays become its tensors, and by which kernels it computes."""

    def __init__(self, to, loops=False, graph=False):
        self.to, self.loops, self.graph = to, loops, graph

    @contextlib.contextmanager
    def running(self):
        """Compute with compiled loops, or without."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_kernels, "_USE_FUSED", self.loops)
            if tf is not None:
                patch.setattr(tensorflow_kernels, "_USE_FUSED", self.loops)
            yield

    def compress(self, spec, x, rank=1):
        """A fresh compressor, its payload and its ctx."""
        compressor, kept = make(spec, seed=5, step=3, rank=rank, size=2), []

        def compress(tensor):
            payload, ctx = compressor.compress(tensor, "layer/w")
            kept.append(ctx)
            return payload

        with self.running():
            run = tf.function(compress, autograph=False) if self.graph else compress
            return compressor, run(self.to(x)), kept[0]

    def received(self, payload):
        """A payload of another framework, out of its bytes."""
        found = []
        for tensor in payload:
            array, dtype = array_of(tensor), kernels_of(tensor).dtype(tensor)
            raw = self.to(np.frombuffer(array.tobytes() + b"\0", np.uint8))[: array.nbytes]
            found.append(kernels_of(raw).from_bytes(raw, dtype, array.shape))
        return found


def to_torch(x):
    return torch.from_numpy(np.array(x))


FRAMEWORKS = {
    "numpy": Framework(np.array),
    "torch": Framework(to_torch),
    "torch-loops": Framework(to_torch, loops=True),
}
if tf is not None:
    FRAMEWORKS |= {
        "tensorflow": Framework(tf.constant),
        "tensorflow-loops": Framework(tf.constant, loops=True),
        "graph": Framework(tf.constant, loops=True, graph=True),
    }
EAGER = [name for name, framework in FRAMEWORKS.items() if not framework.graph]


def usable(name, spec, *case):
    """True if a framework can compress this at all; NumPy has no bfloat16."""
    if FRAMEWORKS[name].graph and spec.startswith(DECIDES_BY_VALUES):
        return False
    return name != "numpy" or spec != "bf16"


def with_frameworks(parameters, names, *dimensions, allowed=usable):
    """Run a test with all pairs of frameworks and other values, a method's cases at once. TensorFlow starts slowly:
    `make check` leaves its cases out, and `make test` runs so many of them that every value is met."""
    cases = pairwise(names, *dimensions, allowed=allowed)
    slow = [case for case in cases if "tensorflow" in str(case[0]) or "graph" in str(case[0])]
    few = drawn(slow)
    marks = [pytest.mark.slow, pytest.mark.every]
    params = [
        pytest.param(*case, marks=marks if case in few else ()) for case in cases if case in few or case not in slow
    ]
    return in_groups(parameters, params, lambda *case: case[parameters.index("spec")])


def array_of(tensor):
    """Any payload tensor as an array; bfloat16 as its bits."""
    k = kernels_of(tensor)
    if k.dtype(tensor) != "bfloat16":
        return np.asarray(tensor)
    return np.asarray(k.to_bytes(tensor)).view(np.uint16).reshape(tuple(tensor.shape))


# -- payloads ------------------------------------------------------------------------------------------------


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


@with_frameworks(
    ("name", "spec", "shape", "kind"),
    [name for name in FRAMEWORKS if name != "numpy"],
    [spec for spec in SPECS if spec != "bf16"],
    SHAPES,
    ["gaussian", "heavy", "tied", "zeros"],
)
def test_every_framework_sends_what_numpy_does(name, spec, shape, kind, monkeypatch):
    x, calls = data(kind, shape, 1), []
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
            np.testing.assert_allclose(got, other, rtol=2 * EPSILON, atol=1e-12)
        else:
            assert calls
            check_codes(got, other, calls[0], (2 * calls[0][1]).bit_length())
    if FRAMEWORKS[name].graph or calls:
        return
    mine, reference = np.asarray(ours.decompress(payload, own_ctx)), compressor.decompress(wanted, ctx)
    tolerance = 1e-4 if spec.startswith("powersgd") else 4 * EPSILON
    np.testing.assert_allclose(mine, reference, rtol=tolerance, atol=tolerance * np.abs(x).max(initial=1))


DECODED = drawn(pairwise(EAGER, EAGER, allowed=lambda here, there: here != there))


@with_frameworks(
    ("pair", "spec", "shape"),
    DECODED,
    SPECS,
    [(), (0,), (1025,), (33, 7)],
    allowed=lambda pair, *case: all(usable(name, *case) for name in pair),
)
def test_a_payload_of_another_rank_and_framework_decodes_with_the_local_ctx(pair, spec, shape):
    here, there = (FRAMEWORKS[name] for name in pair)
    x = data("gaussian", shape, 2)
    theirs, payload, their_ctx = there.compress(spec, x, rank=0)
    ours, _, ctx = here.compress(spec, x)
    with here.running():
        got = np.asarray(ours.decompress(here.received(payload), ctx))
    with there.running():
        wanted = np.asarray(theirs.decompress(payload, their_ctx))
    np.testing.assert_allclose(got, wanted, rtol=4 * EPSILON, atol=4 * EPSILON)


@pytest.mark.skipif(tf is None, reason="TensorFlow is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith("powersgd")])
def test_the_loops_of_torch_and_tensorflow_send_the_same_bytes(spec):
    for shape in ((), (0, 3), (1025,), (8, 3, 3, 3)):
        x = data("gaussian", shape)
        ours, theirs = (FRAMEWORKS[name].compress(spec, x)[1] for name in ("tensorflow-loops", "torch-loops"))
        for a, b in zip(ours, theirs, strict=True):
            assert kernels_of(a).dtype(a) == kernels_of(b).dtype(b)
            same(array_of(a), array_of(b))


BYTES = {
    **{"none": 4004, "cast": 2002, "natural": 1001, "signsgd": 126, "signum": 126, "efsignsgd": 126 + 4},
    **{"onebit": 126 + 2 * 4, "terngrad": 251 + 4, "dynamic8": 1001 + 4, "block": 1001 + 2 * 4},
    **{"qsgd": 1001 + 2 * 4, "qsgd(levels=7)": 501 + 2 * 4, "qsgd(levels=1)": 251 + 2 * 4},
    **{"sketch": 751 + 64 * 4, "topk(ratio=0.01)": 10 * (4 + 2), "topk(ratio=0.3)": 300 * 4 + 126},
    **{"randomk(ratio=0.01)": 10 * 4, "topk(ratio=0.01) | natural": 10 * (1 + 2)},
}
"""Payload bytes of a vector of 1001 elements: codes are packed, and positions take 16 bits or are a bitmap."""


@in_groups(("spec",), [(spec,) for spec in BYTES])
def test_a_vector_takes_these_bytes(spec):
    for convert in (np.array, to_torch):
        assert sum(tensor.nbytes for tensor in sent(make(spec), convert(data("gaussian", 1001)))) == BYTES[spec]


# -- what comes back -----------------------------------------------------------------------------------------

EDGES = {
    "zeros": np.float32(0), "minus zeros": np.float32(-0.0), "denormal": np.float32(-1e-45), "tiny": np.float32(1e-38),
    "gaussian": None, "single": None, "large": np.float32(1e15),
}  # fmt: skip


def filled(kind, shape):
    if kind == "single":
        n = int(np.prod(shape))
        return (np.arange(n) == n // 2).reshape(shape).astype(np.float32)
    return data("gaussian", shape) if EDGES[kind] is None else np.full(shape, EDGES[kind], np.float32)


@with_frameworks(("name", "spec", "kind"), [name for name in EAGER if "tensorflow" not in name], SPECS, EDGES)
def test_any_tensor_comes_back_finite_in_its_shape_and_stays_as_it_was(name, spec, kind):
    for shape in ((), (0,), (1,), (2,), (33, 7), (2, 0, 3), (8, 3, 3, 3)):
        x = filled(kind, shape)
        tensor = FRAMEWORKS[name].to(x)
        compressor = make(spec)
        if kind == "large" and (spec in ("cast", "fp16") or "fp16" in spec):
            continue  # beyond the range of what is sent
        with FRAMEWORKS[name].running():
            decoded = np.asarray(compressor.decompress(*compressor.compress(tensor, "w")))
        same(np.asarray(tensor), x)
        assert (decoded.shape, decoded.dtype) == (shape, np.float32)
        assert np.isfinite(decoded).all()
        if kind == "zeros" and not compressor.votes:
            assert not decoded.any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@in_groups(("spec",), [(spec,) for spec in SPECS])
def test_bad_numbers_do_not_crash(spec):
    for bad in (np.nan, np.inf, -np.inf):
        for x in (np.full(33, bad, np.float32), data("gaussian", 33), data("gaussian", (20, 30))):
            x.reshape(-1)[5] = bad
            for name in ("numpy", "torch", "torch-loops"):
                if usable(name, spec):
                    compressor, payload, ctx = FRAMEWORKS[name].compress(spec, x)
                    assert tuple(compressor.decompress(payload, ctx).shape) == x.shape


@with_frameworks(("name", "spec", "shape"), EAGER, SPECS, [(), (0,), (7,), (3, 50), (20, 30), (20_003,)])
def test_accumulate_adds_the_weighted_decoding(name, spec, shape):
    framework, out = FRAMEWORKS[name], data("gaussian", shape, 1)
    compressor, payload, ctx = framework.compress(spec, data("gaussian", shape))
    with framework.running():
        wanted = out - 0.3 * np.float64(compressor.decompress(payload, ctx))
        got = np.asarray(compressor.accumulate(payload, ctx, framework.to(out), -0.3))
    assert got.shape == shape
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "spec", [s for s in ONE_ROUND if not make(s).votes and s != "bf16" and not (make(s).traits.varies and "|" in s)]
)
def test_the_aggregate_of_several_payloads_is_their_mean(spec):
    ranks = [make(spec, rank=rank, size=3) for rank in range(3)]
    encoded = [one.compress(data("gaussian", (20, 30), rank), "w") for rank, one in enumerate(ranks)]
    decoded = [np.float64(one.decompress(*sent)) for one, sent in zip(ranks, encoded, strict=True)]
    out = np.full((20, 30), np.nan, np.float32)
    got = ranks[0].aggregate([payload for payload, _ in encoded], encoded[0][1], out, 3)
    np.testing.assert_allclose(got, np.mean(decoded, axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_method_takes_every_float_directly(dtype):
    x = torch.tensor(data("gaussian", (20, 30))).to(getattr(torch, dtype))
    for spec in SPECS:
        method, other = make(spec), make(spec)
        got = method.decompress(*method.compress(x, "w"))
        wanted = other.decompress(*other.compress(x.float(), "w"))
        assert torch.equal(got, wanted.to(got.dtype)), spec
        assert got.dtype == (x.dtype if method.traits.exact else torch.float32), spec


def test_whole_numbers_are_refused_with_what_to_do():
    with pytest.raises(
        grace.ConfigError, match="topk: cannot compress 'w', which is of dtype int32: cast it to float32"
    ):
        make("topk").compress(np.int32([1, 2]), "w")


# -- whole steps ---------------------------------------------------------------------------------------------

LAYOUTS = {
    "0-d": lambda: torch.tensor(0.7),
    "empty": lambda: torch.zeros(3, 0),
    "odd": lambda: torch.linspace(-1, 1, 777),
    "transposed": lambda: torch.linspace(-1, 1, 63).view(9, 7).t(),
    "strided": lambda: torch.linspace(-1, 1, 77)[::2],
    "expanded": lambda: torch.tensor(0.5).expand(3, 5),
    "channels last": lambda: torch.linspace(-1, 1, 120).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
}
DTYPES = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.usefixtures("local")
@in_groups(("spec", "dtype", "layout"), pairwise(SPECS, DTYPES, LAYOUTS), lambda spec, *_: spec)
def test_any_tensor_is_exchanged_as_its_contiguous_copy(spec, dtype, layout):
    x = LAYOUTS[layout]().to(getattr(torch, dtype))
    kept = x.clone()
    communicator, dense = communicator_of(spec), communicator_of(spec)
    for _ in range(2):
        got = communicator.step(x, "w")
        assert (got.shape, got.dtype) == (x.shape, x.dtype)
        assert torch.isfinite(got).all()
        assert torch.equal(got, dense.step(kept.contiguous(), "w"))
    assert torch.equal(x, kept)
    if spec == "none":
        assert torch.equal(got, x)


def as_array(tensor):
    """A result as an array; bfloat16 as float32."""
    return np.asarray(tensor.float() if isinstance(tensor, torch.Tensor) else tensor).astype(np.float64)


@pytest.mark.usefixtures("local")
@with_frameworks(
    ("name", "spec", "dtype", "shape"),
    [name for name in ("numpy", "tensorflow") if name in FRAMEWORKS],
    [spec for spec in SPECS if not spec.startswith("powersgd")],
    DTYPES,
    [(), (0,), (3, 0), (1,), (33, 7)],
    allowed=lambda name, spec, dtype, shape: usable(name, spec) and (name, dtype) != ("numpy", "bfloat16"),
)
def test_steps_give_what_steps_in_torch_give(name, spec, dtype, shape):
    ours, theirs = communicator_of(spec), communicator_of(spec)
    for step in range(3):
        x = data("gaussian", shape, step)
        given = x.astype(dtype) if name == "numpy" else tf.cast(tf.constant(x), dtype)
        mine = ours.step(given, "w")
        other = theirs.step(to_torch(x).to(getattr(torch, dtype)), "w")
        assert kernels_of(mine).dtype(mine) == kernels_of(other).dtype(other) == dtype
        assert tuple(mine.shape) == tuple(other.shape) == shape
        mine, other = as_array(mine if name == "numpy" else tf.cast(mine, tf.float64)), as_array(other)
        assert np.isfinite(mine).all()
        np.testing.assert_allclose(mine, other, rtol=8 * EPSILON, atol=8 * EPSILON)


@in_groups(("spec",), [(spec,) for spec in ONE_ROUND])
def test_every_legal_communicator_gives_the_same_result_on_one_rank(spec):
    x = torch.from_numpy(data("gaussian", (20, 30)))
    wanted = communicator_of(spec).step(x, "w")
    for name in {"allgather", "broadcast", "allreduce"}.intersection(legal_communicators(make(spec))):
        assert torch.equal(grace.known("communicator")[name](make(spec), make(spec).traits.memory).step(x, "w"), wanted)


# -- TensorFlow's tensors, which cannot change ---------------------------------------------------------------

in_tensorflow = pytest.mark.skipif(tf is None, reason="TensorFlow is not installed")


def encoder(spec):
    """A function of a tensor and a step that returns a payload."""
    compressor = grace.make("compressor", spec)

    def encode(x, step):
        compressor.bind(Context(seed=5, step=step, rank=1, size=2))
        return compressor.compress(x, "layer/w")[0]

    return encode


@in_tensorflow
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["qsgd", "natural", "terngrad", "randomk", "qsgd(levels=3)"])
def test_a_step_in_a_tensor_gives_the_numbers_of_that_step(spec):
    x = data("gaussian", 3000)
    for name in ("tensorflow", "tensorflow-loops", "graph"):
        for step in (3, 4):
            run, reference = encoder(spec), make(spec, seed=5, step=step, rank=1, size=2)
            run = tf.function(run, autograph=False) if FRAMEWORKS[name].graph else run
            with FRAMEWORKS[name].running():
                payload = run(tf.constant(x), tf.constant(step))
            for a, b in zip(payload, reference.compress(x, "layer/w")[0], strict=True):
                np.testing.assert_allclose(np.asarray(a), b, rtol=2 * EPSILON if b.dtype == np.float32 else 0)


@in_tensorflow
@pytest.mark.slow
@pytest.mark.parametrize("memory", ["residual", "residual(beta=0.5, gamma=0.5)", "dgc(clip=1.0)", "dgc(nesterov=true)"])
def test_memories_work_on_tensors_that_cannot_change(memory):
    ours, theirs = (communicator_of("topk(ratio=0.1)", memory) for _ in range(2))
    for step in range(4):
        x = data("gaussian", (40, 5), step)
        kept = tf.constant(x)
        a, b = ours.step(kept, "w"), theirs.step(to_torch(x), "w")
        np.testing.assert_allclose(a, b, rtol=8 * EPSILON, atol=8 * EPSILON)
        assert np.array_equal(kept, x)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["qsgd", "efsignsgd", "cast", "natural"])
@pytest.mark.parametrize("shape", [(33, 7), (5,), ()], ids=str)
def test_shards_accumulate_alike(spec, shape):
    x, out = data("gaussian", shape, 1), data("gaussian", shape, 2)
    results = []
    for name in EAGER:
        pieces = PiecewiseCompressor(grace.make("compressor", spec), 3)
        payload, ctx = pieces.compress_pieces(FRAMEWORKS[name].to(x), "w")
        results.append(np.asarray(pieces.accumulate(payload, ctx, FRAMEWORKS[name].to(out), 0.5)))
        assert tuple(pieces.decompress(payload, ctx).shape) == shape
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=4 * EPSILON, atol=4 * EPSILON)


@in_tensorflow
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(33, 70), (150,), (5,), (), (0, 3)], ids=str)
def test_owners_of_shards_and_entries_give_alike(shape):
    for kind, spec in ((ScatterMerge, "topk(ratio=0.1)"), *((ScatterReduce, s) for s in ("qsgd", "efsignsgd", "cast"))):
        ours, theirs = kind(spec), kind(spec)
        for step in range(3):
            x = data("gaussian", shape, step)
            a, b = ours.step(tf.constant(x), "w"), theirs.step(to_torch(x), "w")
            np.testing.assert_allclose(a, b, rtol=4 * EPSILON, atol=4 * EPSILON)


@in_tensorflow
@pytest.mark.slow
def test_powersgd_approximates_alike():
    ours, theirs = communicator_of("powersgd(rank=2)"), communicator_of("powersgd(rank=2)")
    for step in range(3):
        x = data("gaussian", (33, 17), step)
        np.testing.assert_allclose(ours.step(tf.constant(x), "w"), theirs.step(to_torch(x), "w"), rtol=1e-3, atol=1e-4)
