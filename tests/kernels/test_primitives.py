"""Every implementation equals the NumPy reference: plumbing, arithmetic, random numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grace.kernels import Stream, kernels_of
from grace.kernels.torch.fused import FusedTorchKernels
from grace.kernels.torch.primitives import TorchKernels
from tests.support.data import HUGE, REFERENCE, close, data, same
from tests.support.examples import VECTORS
from tests.support.implementations import ALL, OTHERS, crossed
from tests.support.kernel_cases import FLOATS, SHAPES, STREAMS, WEIGHTS, every, others


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


@crossed(ALL, ("sizes", "dtype"), [[], [5], [2, 0, 3, 1]], ["float32", "uint8"])
def test_split_gives_the_parts_of_a_tensor(it, sizes, dtype):
    x = np.arange(sum(sizes)).astype(dtype)
    parts = it.kernels.split(it.to(x), sizes)
    assert [part.tolist() for part in map(it.back, parts)] == [part.tolist() for part in REFERENCE.split(x, sizes)]
    assert [it.back(part).dtype.name for part in parts] == [dtype] * len(sizes)
    same(np.concatenate([x[:0], *map(it.back, parts)]), x)


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


@crossed(ALL, ("dtype",), FLOATS)
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
        close(it.run("add", out, operand, weight), wanted, scale)


@others
@given(x=VECTORS, by=st.sampled_from([1, 2, 3, 7, 12, 2.0**-16]))
def test_divide_is_bit_for_bit(it, x, by):
    with np.errstate(over="ignore"):
        for dtype in ("float32", "float64"):
            wide = x.astype(dtype)
            wanted = REFERENCE.divide(np.zeros_like(wide), wide, by)
            same(it.run("divide", np.zeros_like(wide), wide, by), wanted)
        half = REFERENCE.cast(x, "float16")  # into a wider tensor: rounded in float32, not in float16
        wanted = half.astype(np.float32) / np.float32(by)
        same(it.run("divide", np.zeros_like(x), half, by), wanted)
        same(REFERENCE.divide(np.zeros_like(x), half, by), wanted)
        if by >= 1:
            zeros = np.zeros(x.shape, np.float16)
            same(it.run("divide", zeros, x, by), REFERENCE.divide(zeros.copy(), x, by))


@crossed(ALL, ("by",), [3.3, 70_000.0, 1e-3])
def test_sixteen_bits_are_divided_by_a_number_that_is_not_rounded_to_them(it, by):
    x = np.float16([1, 2.5, -10, 60])
    same(it.run("divide", np.zeros_like(x), x, by), (x.astype(np.float32) / np.float32(by)).astype(np.float16))


@every
def test_divide_works_in_place_and_on_scalars(it):
    x = it.to(np.float32([1, 2, 4]))
    assert it.back(it.kernels.divide(x, x, 3)).tolist() == (np.float32([1, 2, 4]) / np.float32(3)).tolist()
    same(it.run("divide", np.zeros((), np.float32), np.ones((), np.float32), 3), np.float32(1 / 3))


@others
@given(x=VECTORS)
def test_mean_abs_accumulates_in_float64(it, x):
    got, wanted = it.run("mean_abs", x), REFERENCE.mean_abs(x)
    assert got.dtype == np.float32
    assert got.shape == (1,)
    exact = math.fsum(map(abs, map(float, x))) / max(1, x.size)
    close(wanted, [exact], exact)
    close(got, wanted, exact)


@every
@given(x=VECTORS)
def test_signs_are_plus_one_from_zero_on(it, x):
    same(it.run("signs", x), np.where(x >= 0, np.float32(1), np.float32(-1)))
    same(it.run("signs", x.reshape(1, -1)).reshape(-1), it.run("signs", x))


@crossed(ALL, ("sizes",), [(1, 1, 1), (7, 5, 3), (33, 2, 8), (0, 3, 2), (3, 0, 2)])
def test_matmul_and_matmul_add_are_the_matrix_products(it, sizes):
    rows, columns, inner = sizes
    a, b = data("gaussian", (rows, inner), 1), data("gaussian", (inner, columns), 2)
    exact = a.astype(np.float64) @ b
    scale = np.abs(a).astype(np.float64) @ np.abs(b) * inner
    close(it.run("matmul", a, b), exact, scale)
    close(it.run("matmul", a.T.copy(), b, True), exact, scale)
    for shape in ((rows, columns), (rows * columns,), (rows, 1, columns)):
        out = data("gaussian", shape, 3)
        got = it.run("matmul_add", out, a, b.T.copy(), -0.5)
        close(got, out - 0.5 * exact.reshape(shape), np.abs(out) + scale.reshape(shape))
        got = it.run("matmul_add", out, a, b.T.copy(), 1.0, 2.0)
        close(got, 2 * out + exact.reshape(shape), 2 * np.abs(out) + scale.reshape(shape))
        got = it.run("matmul_add", np.full_like(out, np.nan), a, b.T.copy(), 2.0, 0.0)
        close(got, 2 * exact.reshape(shape), scale.reshape(shape))


@crossed(ALL, ("rows", "columns", "inner"), [1, 2, 6, 33], [1, 3, 4, 7, 8, 9], [1, 5, 1025])
def test_products_of_any_sizes_and_of_batches(it, rows, columns, inner):
    """Products of batches have the bits of products of single matrices, in loops and in BLAS."""
    a, b = data("gaussian", (3, rows, inner), 1), data("gaussian", (3, inner, columns), 2)
    exact, scale = a.astype(np.float64) @ b, np.abs(a).astype(np.float64) @ np.abs(b) * inner
    close(it.run("matmul", a, b), exact, scale)
    close(it.run("matmul", np.swapaxes(a, 1, 2).copy(), b, True), exact, scale)
    out = data("gaussian", (rows, inner), 3)
    left, right = data("gaussian", (rows, columns), 4), data("gaussian", (inner, columns), 5)
    product = left.astype(np.float64) @ right.T
    scale = np.abs(out) + np.abs(left) @ np.abs(right.T) * columns
    close(it.run("matmul_add", out, left, right, -1.0), out - product, scale)


@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 5), (2000,)])
@pytest.mark.parametrize("rank", range(1, 5))
def test_the_loops_leave_the_bits_of_the_difference(shape, rank):
    k, x = FusedTorchKernels(), torch.from_numpy(data("gaussian", shape))
    a, b = (torch.from_numpy(data("gaussian", (n, rank), n)) for n in (shape[0], math.prod(shape[1:])))
    product = k.matmul_add(torch.full(shape, math.nan), a, b, 1.0, 0.0)
    for out in (x.clone(), torch.stack([x, x], -1)[..., 0]):
        assert k.matmul_add(out, a, b, -1.0) is out
        assert torch.equal(out, x - product)


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
def test_orthogonalize_spans_the_columns_and_stays_finite(it, kind, shape):
    x = data(kind if kind in ("gaussian", "heavy", "zeros", "denormal") else "gaussian", shape)
    if kind == "rank-one":
        x = np.repeat(x[:, :1], shape[1], axis=1)
    if kind == "one-zero-column":
        x[:, 0] = 0
    if kind == "large":
        x *= np.float32(1e30)
    q = it.run("orthogonalize", x).astype(np.float64)
    assert q.shape == shape
    batch = it.run("orthogonalize", np.stack([x, x[::-1], x]))
    assert np.abs(batch - np.stack([q, batch[1], q])).max() == 0
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


@crossed(ALL, ("bad",), [None, 0, 2e12, np.nan, -np.inf])
def test_zero_columns_tells_whether_filling_changes_something(it, bad):
    matrices = [data("gaussian", (5, 4), 1), data("gaussian", (9, 1), 2)]
    if bad is not None:
        matrices[1][(slice(None) if bad == 0 else 3), 0] = bad
    told = bool(it.kernels.zero_columns([it.to(matrix) for matrix in matrices]))
    assert told == (bad is not None)


# -- random numbers ----------------------------------------------------------------------------------------


@others
@given(stream=STREAMS, n=st.integers(0, 2000))
def test_random_numbers_are_the_same_integers(it, stream, n):
    like = np.zeros(1, np.float32)
    assert (it.run("random_bits", stream, n, like).astype(np.int64) == REFERENCE.random_bits(stream, n)).all()


@pytest.mark.parametrize("like", [torch.zeros(6, dtype=torch.float16), torch.zeros(4, 6).t(), torch.zeros(12)[::2]])
def test_fused_random_numbers_do_not_depend_on_what_they_are_like(like):
    k, stream = FusedTorchKernels(), Stream(5, 6)
    same(k.uniform(stream, 21, like).numpy(), REFERENCE.uniform(stream, 21))
    same(k.random_indices(stream, 21, 9, like).numpy(), REFERENCE.random_indices(stream, 21, 9))
