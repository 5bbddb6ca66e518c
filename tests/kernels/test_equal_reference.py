"""Every implementation equals the NumPy reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grace.kernels import Kernels, Stream, kernels_of
from grace.kernels.torch.primitives import FusedTorchKernels, TorchKernels
from tests.support.data import EPSILON, HUGE, NUMBERS, REFERENCE, TINY, VECTORS, data, examples, same
from tests.support.implementations import ALL, OTHERS, crossed, memory, tf

STREAMS = st.builds(Stream, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1))
WEIGHTS = st.sampled_from([1.0, -1.0, 0.5, 1 / 3, -0.125])
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 3, 4), (0, 3)]
FLOATS = ["float16", "float32", "float64"]

others = pytest.mark.parametrize("it", OTHERS)
every = pytest.mark.parametrize("it", ALL)


def close(got, wanted, scale, floor=4 * TINY) -> None:
    """Within a few float32 roundings of numbers of magnitude ``scale``."""
    got, wanted = np.float64(got), np.float64(wanted)
    assert got.shape == wanted.shape
    unequal = got != wanted  # Inf minus Inf is no number
    error, scale = np.abs(np.subtract(got, wanted, where=unequal, out=np.zeros_like(got))), np.float64(scale)
    assert (error <= 4 * EPSILON * scale + floor).all()


# -- plumbing ----------------------------------------------------------------------------------------------


@crossed(OTHERS, ("shape", "dtype"), SHAPES, [*FLOATS, "uint8", "int32"])
def test_plumbing_equals_the_reference(it, shape, dtype):
    x = np.asarray(data("gaussian", shape) * 50).astype(dtype)
    k, tensor = it.kernels, it.to(x)
    same(it.run("flat", x), REFERENCE.flat(x))
    same(it.back(k.reshape(k.flat(tensor), shape)), x)
    same(it.back(k.zeros(shape, dtype, tensor)), np.zeros(shape, dtype))
    same(it.run("zero", x), np.zeros_like(x))
    assert k.nbytes(tensor) == x.nbytes
    assert k.dtype(tensor) == dtype
    raw = k.to_bytes(tensor)
    same(it.back(raw), REFERENCE.to_bytes(x))
    same(it.back(k.from_bytes(raw, dtype, shape)), x)
    assert k.to_list(k.flat(tensor)) == x.reshape(-1).tolist()


@every
def test_join_concatenates_into_out(it):
    parts = [data("gaussian", n, n) for n in (3, 0, 5)]
    whole = np.concatenate(parts)
    k, tensors = it.kernels, [it.to(part) for part in parts]
    same(it.back(k.join(tensors)), whole)
    out = it.to(np.ones_like(whole))
    joined = k.join(tensors, out)
    same(it.back(joined), whole)
    assert not k.mutable or joined is out


@every
def test_full_takes_numbers_and_scalar_tensors(it):
    like = it.to(np.float32([0]))
    assert it.kernels.to_list(it.kernels.full([1, math.inf, 0.25], "float32", like)) == [1, math.inf, 0.25]
    same(it.back(it.kernels.full([1, 2.0], "uint8", like)), np.uint8([1, 2]))
    scalar = it.kernels.reshape(it.kernels.full([0.5], "float32", like), ())
    assert it.kernels.to_list(it.kernels.full([1, scalar], "float32", like)) == [1, 0.5]


@pytest.mark.parametrize("kernels", [TorchKernels(), FusedTorchKernels()], ids=lambda k: k.name)
@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.arange(24.0).view(4, 6).t(),
        lambda: torch.arange(24.0)[1::2],
        lambda: torch.arange(4.0).expand(3, 4),
        lambda: torch.ones(1).expand(5),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "expanded", "expanded-vector", "channels-last"],
)
def test_flat_makes_any_layout_contiguous_in_index_order(kernels, view):
    x = view()
    flat = kernels.flat(x)
    assert flat.is_contiguous()
    assert flat.tolist() == x.numpy().reshape(-1).tolist()
    assert kernels.to_bytes(x).numpy().tobytes() == x.numpy().tobytes()


@others
@given(x=VECTORS)
def test_cast_rounds_to_nearest_even_and_overflows_to_inf(it, x):
    x = it.suited("cast", x)
    for dtype in FLOATS:
        same(it.run("cast", x, dtype), REFERENCE.cast(x, dtype))
    half = REFERENCE.cast(x, "float16")
    same(it.run("cast", half, "float32"), half.astype(np.float32))


@pytest.mark.parametrize("kernels", [TorchKernels(), FusedTorchKernels()], ids=lambda k: k.name)
@given(x=VECTORS)
def test_bfloat16_rounds_to_nearest_even(kernels, x):
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    cast = kernels.cast(torch.from_numpy(x), "bfloat16")
    assert kernels.dtype(cast) == "bfloat16"
    assert (kernels.to_bytes(cast).numpy().view(np.uint16) == rounded).all()


def test_numpy_refuses_bfloat16_by_name():
    with pytest.raises(TypeError, match="NumPy has no bfloat16"):
        REFERENCE.cast(np.zeros(1, np.float32), "bfloat16")


# -- arithmetic --------------------------------------------------------------------------------------------


@crossed(ALL, ("dtype", "shape"), FLOATS, SHAPES)
def test_all_finite_sees_a_single_bad_number_anywhere(it, dtype, shape):
    x = data("gaussian", shape).astype(dtype)
    assert it.kernels.all_finite(it.to(x)) == 1
    for position in range(x.size):
        for bad in (np.nan, np.inf, -np.inf):
            broken = x.copy()
            broken.reshape(-1)[position] = bad
            assert it.kernels.all_finite(it.to(broken)) == 0


@every
def test_all_finite_takes_the_largest_number_and_whole_numbers(it):
    assert it.kernels.all_finite(it.to(np.float32([HUGE, -HUGE, 1e-45])))
    assert it.kernels.all_finite(it.to(np.full(7, 255, np.uint8)))
    assert it.kernels.all_finite(it.to(np.full(3, -1, np.int32)))


@every
@pytest.mark.parametrize("dtype", FLOATS)
def test_all_finite_refuses_what_is_larger_than_asked(it, dtype):
    x = it.to(np.array([4, -4, 0.1], dtype))
    assert it.kernels.all_finite(x, 4.0) == 1
    assert it.kernels.all_finite(x, 3.9990234375) == 0
    for bad in (np.nan, np.inf, -np.inf):
        assert it.kernels.all_finite(it.to(np.array([1, bad], dtype)), 4.0) == 0


@pytest.mark.parametrize("kernels", [TorchKernels(), FusedTorchKernels()], ids=lambda k: k.name)
def test_all_finite_reads_bfloat16(kernels):
    x = torch.ones(5, dtype=torch.bfloat16)
    assert kernels.all_finite(x)
    x[1] = math.inf
    assert not kernels.all_finite(x)


FACTORS = [(1.0, 1.0), (1.0, 0.0), (0.9, 1.0), (-2.0, 1 / 3)]


@crossed(OTHERS, ("shape", "dtype", "factors"), SHAPES, FLOATS, FACTORS)
def test_combine_is_a_new_float32_tensor(it, shape, dtype, factors):
    a, b = factors
    x, y = data("heavy", shape, 1).astype(dtype), data("gaussian", shape, 2)
    k, tensor = it.kernels, it.to(x)
    got = k.combine(a, tensor, b, it.to(y))
    wanted = REFERENCE.combine(a, x, b, y)
    assert wanted.dtype == it.back(got).dtype == np.float32
    assert kernels_of(wanted) is not None  # an array, also where it has no dimensions
    close(it.back(got), wanted, np.abs(a * x) + np.abs(b * y))
    k.zero(got)
    same(it.back(tensor), x)


@others
@given(x=VECTORS, weight=WEIGHTS)
def test_add_accumulates_with_a_weight(it, x, weight):
    out = np.flip(x).copy() / np.float32(2)
    for operand in (x / np.float32(4), REFERENCE.cast(x, "float16")):
        operand = np.nan_to_num(operand, posinf=0, neginf=0)
        wanted = REFERENCE.add(out.copy(), operand, weight)
        scale = np.abs(out) + np.abs(weight * operand)
        close(it.run("add", out, operand, weight), wanted, scale, it.floor("add"))


@others
@given(x=VECTORS, by=st.sampled_from([1, 2, 3, 7, 12, 2.0**-16]))
def test_divide_is_bit_for_bit(it, x, by):
    with np.errstate(over="ignore"):
        for dtype in ("float32", "float64"):
            wide = it.suited("divide", x).astype(dtype)
            wanted = REFERENCE.divide(np.zeros_like(wide), wide, by)
            same(
                it.run("divide", np.zeros_like(wide), wide, by),
                it.suited("divide", wanted) if dtype == "float32" else wanted,
            )
        half = REFERENCE.cast(x, "float16")  # into a wider tensor: rounded in float32, not in float16
        wanted = half.astype(np.float32) / np.float32(by)
        same(it.run("divide", np.zeros_like(x), half, by), wanted)
        same(REFERENCE.divide(np.zeros_like(x), half, by), wanted)
        if by >= 1:
            zeros = np.zeros(x.shape, np.float16)
            same(it.run("divide", zeros, x, by), REFERENCE.divide(zeros.copy(), x, by))


@every
def test_divide_works_in_place_and_on_scalars(it):
    x = it.to(np.float32([1, 2, 4]))
    assert it.back(it.kernels.divide(x, x, 3)).tolist() == (np.float32([1, 2, 4]) / np.float32(3)).tolist()
    same(it.run("divide", np.zeros((), np.float32), np.ones((), np.float32), 3), np.float32(1 / 3))


@others
@given(x=VECTORS)
def test_mean_abs_accumulates_in_float64(it, x):
    x = it.suited("mean_abs", x)
    got, wanted = it.run("mean_abs", x), REFERENCE.mean_abs(x)
    assert got.dtype == np.float32
    assert got.shape == (1,)
    exact = math.fsum(map(abs, map(float, x))) / max(1, x.size)
    close(wanted, [exact], exact)
    close(got, wanted, exact, it.floor("mean_abs"))


@every
@given(x=VECTORS)
def test_signs_are_plus_one_from_zero_on(it, x):
    same(it.run("signs", x), np.where(x >= 0, np.float32(1), np.float32(-1)))
    same(it.run("signs", x.reshape(1, -1)).reshape(-1), it.run("signs", x))


@every
@pytest.mark.parametrize(("rows", "columns", "inner"), [(1, 1, 1), (7, 5, 3), (33, 2, 8), (0, 3, 2), (3, 0, 2)])
def test_matmul_and_matmul_add_are_the_matrix_products(it, rows, columns, inner):
    a, b = data("gaussian", (rows, inner), 1), data("gaussian", (inner, columns), 2)
    exact = a.astype(np.float64) @ b
    scale = np.abs(a).astype(np.float64) @ np.abs(b) * inner
    close(it.run("matmul", a, b), exact, scale)
    close(it.run("matmul", a.T.copy(), b, True), exact, scale)
    for shape in ((rows, columns), (rows * columns,), (rows, 1, columns)):
        out = data("gaussian", shape, 3)
        got = it.run("matmul_add", out, a, b.T.copy(), -0.5)
        close(got, out - 0.5 * exact.reshape(shape), np.abs(out) + scale.reshape(shape))


@pytest.mark.parametrize("kernels", [TorchKernels(), FusedTorchKernels()], ids=lambda k: k.name)
def test_matmul_add_takes_strided_out(kernels):
    out = torch.zeros(6, 4).t()
    a, b = torch.randn(4, 2), torch.randn(6, 2)
    kernels.matmul_add(out, a, b, 1.0)
    torch.testing.assert_close(out, a @ b.t())


@crossed(
    *(ALL, ("kind", "shape"), ["gaussian", "heavy", "zeros", "denormal", "rank-one", "one-zero-column", "large"]),
    [(1, 1), (9, 1), (9, 4), (5, 5), (200, 3)],
)
def test_orthonormalize_spans_the_columns_and_stays_finite(it, kind, shape):
    x = data(kind if kind in ("gaussian", "heavy", "zeros", "denormal") else "gaussian", shape)
    if kind == "rank-one":
        x = np.repeat(x[:, :1], shape[1], axis=1)
    if kind == "one-zero-column":
        x[:, 0] = 0
    if kind == "large":
        x *= np.float32(1e30)
    x = it.suited("orthonormalize", x)
    q = it.run("orthonormalize", x).astype(np.float64)
    assert q.shape == shape
    np.testing.assert_allclose(q.T @ q, np.eye(shape[1]), atol=2e-6)
    assert np.abs(q @ (q.T @ x) - x).max() <= 1e-5 * np.abs(x).max() + 1e-44


@every
def test_fill_zero_columns_replaces_only_all_zero_columns_and_huge_ones(it):
    x, other = data("gaussian", (5, 4), 1), data("gaussian", (5, 4), 2)
    x[:, 1] = 0
    x[1:, 2] = 0
    x[3, 3] = 2e12
    wanted = x.copy()
    wanted[:, [1, 3]] = other[:, [1, 3]]
    same(it.run("fill_zero_columns", x, other), wanted)


# -- random numbers ----------------------------------------------------------------------------------------


@others
@given(stream=STREAMS, n=st.integers(0, 2000))
def test_random_numbers_are_the_same_integers(it, stream, n):
    like = np.zeros(1, np.float32)
    assert (it.run("random_bits", stream, n, like).astype(np.int64) == REFERENCE.random_bits(stream, n)).all()
    same(it.run("uniform", stream, n, like), REFERENCE.uniform(stream, n))


@others
@examples(10)
@given(stream=STREAMS, n=st.integers(1, 5000), part=st.floats(0, 1))
def test_random_indices_are_the_same_integers(it, stream, n, part):
    k = round(part * n)
    same(it.run("random_indices", stream, n, k, np.zeros(1, np.float32)), REFERENCE.random_indices(stream, n, k))


@pytest.mark.parametrize("like", [torch.zeros(6, dtype=torch.float16), torch.zeros(4, 6).t(), torch.zeros(12)[::2]])
def test_fused_random_numbers_do_not_depend_on_what_they_are_like(like):
    k, stream = FusedTorchKernels(), Stream(5, 6)
    same(k.uniform(stream, 21, like).numpy(), REFERENCE.uniform(stream, 21))
    same(k.random_indices(stream, 21, 9, like).numpy(), REFERENCE.random_indices(stream, 21, 9))


# -- quantization ------------------------------------------------------------------------------------------


def check_quantized(x, levels, bucket_size, stream, got, wanted):
    """Codes are equal where scales are; where scales differ in the last bit, a code may differ by one only if the
    scaled value lies within rounding of a whole number."""
    (codes, scales), (wanted_codes, wanted_scales) = got, wanted
    assert codes.dtype == wanted_codes.dtype == np.uint8
    assert scales.dtype == wanted_scales.dtype == np.float32
    assert codes.shape == wanted_codes.shape
    assert scales.shape == wanted_scales.shape
    bits = np.abs(scales.view(np.int32) - wanted_scales.view(np.int32))
    assert (bits <= 1).all()
    differ = np.flatnonzero(codes != wanted_codes)
    assert (bits[differ // bucket_size] == 1).all()
    assert (np.abs(codes[differ].astype(int) - wanted_codes[differ]) == 1).all()
    value = np.abs(np.float64(x[differ])) / wanted_scales[differ // bucket_size] * levels
    value += REFERENCE.uniform(stream, x.size)[differ]
    assert (np.abs(value - np.round(value)) <= 4 * EPSILON * (levels + 1)).all()


LEVELS = st.sampled_from([1, 2, 7, 64, 127])
BUCKETS = st.sampled_from([1, 3, 64, 512, 1500, 10_000])


@others
@pytest.mark.parametrize("norm", ["l2", "max"])
@given(x=VECTORS, levels=LEVELS, bucket_size=BUCKETS, stream=STREAMS)
def test_quantize_gives_the_same_codes(it, norm, x, levels, bucket_size, stream):
    x = it.suited("quantize", x)
    got = it.run("quantize", x, levels, bucket_size, norm, stream)
    wanted = REFERENCE.quantize(x, levels, bucket_size, norm, stream)
    check_quantized(x, levels, bucket_size, stream, got, wanted)
    if norm == "max":
        same(got[0], wanted[0])
        same(got[1], wanted[1])


@others
@given(x=VECTORS, levels=LEVELS, bucket_size=BUCKETS, weight=WEIGHTS)
def test_dequantize_accumulates_with_a_weight(it, x, levels, bucket_size, weight):
    codes, scales = REFERENCE.quantize(x, levels, bucket_size, "max", Stream(1))
    out = data("gaussian", x.size, 9)
    term = np.float64(weight) * np.repeat(scales, bucket_size)[: x.size] * (codes.astype(np.float64) - levels) / levels
    wanted = REFERENCE.dequantize(out.copy(), codes, scales, levels, bucket_size, weight)
    close(wanted, out + term, np.abs(out) + np.abs(term))
    got = it.run("dequantize", out, codes, scales, levels, bucket_size, weight)
    close(got, wanted, np.abs(out) + np.abs(term), it.floor("dequantize"))


@others
@pytest.mark.parametrize("bits", range(1, 9))
@given(n=st.integers(0, 70), seed=st.integers(0, 2**32 - 1))
def test_pack_and_unpack_are_bit_for_bit(it, bits, n, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, n).astype(np.uint8)
    packed = it.run("pack", codes, bits)
    same(packed, REFERENCE.pack(codes, bits))
    same(it.run("unpack", packed, bits, n), codes)


@others
@given(x=VECTORS, weight=WEIGHTS, scale=st.one_of(st.none(), NUMBERS.map(abs)))
def test_signs_pack_and_accumulate_with_a_weight(it, x, weight, scale):
    x = it.suited("pack_signs", x)
    packed = it.run("pack_signs", x)
    same(packed, REFERENCE.pack_signs(x))
    out = data("gaussian", x.size, 9)
    factor = None if scale is None else np.float32([scale])
    wanted = REFERENCE.add_signs(out.copy(), packed, factor, weight)
    got = it.run("add_signs", out, packed, factor, weight)
    close(got, wanted, np.abs(out) + abs(weight) * (scale or 1), it.floor("add_signs"))


@every
def test_the_sign_of_nan_is_minus_and_of_negative_zero_plus(it):
    x = it.suited("pack_signs", np.float32([np.nan, -0.0, 0.0, -np.inf, np.inf, 1e-45, -1e-45]))
    signs = it.run("unpack", it.run("pack_signs", x), 1, 7).tolist()
    assert signs == [0, 1, 1, 0, 1, 1, int(x[-1] >= 0)]


# -- sparsification ----------------------------------------------------------------------------------------

BAD = st.sampled_from([np.nan, -np.nan, np.inf, -np.inf])


@others
@given(x=VECTORS, part=st.floats(0, 1), bad=st.lists(st.tuples(st.integers(0, 2**31), BAD), max_size=4))
def test_topk_gives_the_same_indices(it, x, part, bad):
    for position, value in bad:
        x[position % max(1, x.size) : position % max(1, x.size) + 1] = value
    k = round(part * x.size)
    same(it.run("topk", x, k), REFERENCE.topk(x, k))


@others
@given(x=VECTORS, part=st.floats(0, 1), weight=WEIGHTS)
def test_gather_and_scatter_add_accumulate_with_a_weight(it, x, part, weight):
    indices = REFERENCE.random_indices(Stream(3), x.size, round(part * x.size))
    values = it.run("gather", x, indices)
    same(values, x[indices])
    out = data("gaussian", x.size, 9)
    wanted = REFERENCE.scatter_add(out.copy(), indices, values, weight)
    got = it.run("scatter_add", out, indices, values, weight)
    close(got, wanted, np.abs(out) + np.abs(weight * np.float64(x)), it.floor("scatter_add"))


# -- layouts and choices -----------------------------------------------------------------------------------


def test_fused_kernels_take_strided_tensors_and_change_strided_out_in_place():
    k, stream = FusedTorchKernels(), Stream(1)
    base = torch.from_numpy(data("heavy", 2001))
    x, dense = base[::2], base[::2].numpy().copy()
    same(k.topk(x, 50).numpy(), REFERENCE.topk(dense, 50))
    same(k.pack_signs(x).numpy(), REFERENCE.pack_signs(dense))
    codes, scales = k.quantize(x, 127, 64, "max", stream)
    wanted = REFERENCE.quantize(dense, 127, 64, "max", stream)
    same(codes.numpy(), wanted[0])
    same(scales.numpy(), wanted[1])
    out = torch.zeros(20)
    k.scatter_add(out[::2], torch.tensor([1, 3], dtype=torch.int32), torch.tensor([5.0, 6.0]), 1.0)
    assert out.nonzero().view(-1).tolist() == [2, 6]


@every
def test_methods_with_out_change_it_in_place_where_tensors_can_change(it):
    k = it.kernels
    out = first = it.to(np.zeros(4, np.float32))
    indices, values = it.to(np.int32([0, 3])), it.to(np.float32([1, 2]))
    out = k.scatter_add(out, indices, values, 1.0)
    out = k.add_signs(out, it.to(np.uint8([0b0101])), None, 1.0)
    out = k.dequantize(out, it.to(np.uint8([2, 1, 1, 0])), it.to(np.float32([10])), 1, 4, 1.0)
    out = k.add(out, it.to(np.float32([0, 100, 0, 0])))
    assert it.back(out).tolist() == [12, 99, 1, -9]
    assert it.back(first).tolist() == ([12, 99, 1, -9] if k.mutable else [0, 0, 0, 0])


def test_kernels_are_found_by_the_tensors_type():
    assert kernels_of(np.zeros(1)).name == "numpy"
    assert kernels_of(torch.zeros(1)).name == "torch-fused"
    assert kernels_of(torch.nn.Parameter(torch.zeros(1))).name == "torch-fused"
    with pytest.raises(TypeError, match=r"no kernels for builtins\.list"):
        kernels_of([1.0])


@pytest.mark.skipif(tf is None, reason="TensorFlow is not installed")
def test_kernels_are_found_for_tensorflow_eagerly_and_in_graphs():
    names = []
    x = tf.constant([1.0])
    tf.function(lambda tensor: names.append(kernels_of(tensor).name))(x)
    assert [kernels_of(x).name, kernels_of(tf.Variable(x)).name, *names] == ["tensorflow-fused"] * 3


@pytest.mark.skipif(tf is None, reason="TensorFlow is not installed")
def test_memory_that_tensorflow_would_refuse_is_copied():
    for start in range(0, 72, 4):
        array = np.zeros(200, np.uint8)[start : start + 80].view(np.float32)
        assert (memory.as_tensor(array) + 1).numpy().tolist() == [1.0] * 20


def test_every_implementation_has_every_kernel():
    for param in ALL:
        if param.values[0] is None:
            continue
        kernels = getattr(param.values[0].kernels, "traced", param.values[0].kernels)
        assert isinstance(kernels, Kernels)
        assert not type(kernels).__abstractmethods__
