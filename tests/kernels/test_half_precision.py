"""16-bit floats in compiled loops: every pattern, every place where rounding turns, and both frameworks' arrays."""

import math

import numpy as np
import pytest
import torch

from grace.kernels.numba.half_precision import HALVES, _narrow, _widen
from grace.kernels.numba.primitives import NumbaKernels
from grace.kernels.torch.fused import FusedTorchKernels
from tests.support.data import REFERENCE, data, same
from tests.support.implementations import tf

FUSED, TORCH = NumbaKernels(), FusedTorchKernels()
FORMATS = ("float16", "bfloat16")
TORCHS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
PATTERNS = np.arange(1 << 16, dtype=np.uint16)


def wide(patterns, dtype):
    """Return the values of bit patterns, by definition."""
    if dtype == "float16":
        return patterns.view(np.float16).astype(np.float32)
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def narrowed(x, dtype):
    """Patterns of the nearest numbers, by NumPy or by definition."""
    if dtype == "float16":
        return REFERENCE.cast(x, "float16").view(np.uint16)
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def same_or_nan(got, wanted):
    """Equal bits, but for those of NaN."""
    assert got.dtype == wanted.dtype
    assert (np.isnan(got) == np.isnan(wanted)).all()
    kept = ~np.isnan(wanted)
    same(got[kept], wanted[kept])


def turning():
    """float32s where rounding to either format turns: all halves, the middles between them, and their neighbours."""
    steps = [(np.arange(1 << 19, dtype=np.uint32) << 13) + np.uint32(more) for more in (0, 1, 0xFFF, 0x1000, 0x1001)]
    brain = [(np.arange(1 << 16, dtype=np.uint32) << 16) + np.uint32(more) for more in (0, 1, 0x7FFF, 0x8000, 0x8001)]
    small = (np.arange(1 << 10).astype(np.float32) * np.float32(2.0**-26)).view(np.uint32)  # denormal halves and less
    return np.concatenate([*steps, *brain, small, small | np.uint32(1 << 31)]).view(np.float32)


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_pattern_becomes_its_number(dtype):
    out = np.empty(PATTERNS.size, np.float32)
    _widen(out, PATTERNS, np.float32(1), HALVES[dtype])
    same_or_nan(out, wide(PATTERNS, dtype))


@pytest.mark.parametrize("dtype", FORMATS)
def test_numbers_become_the_nearest_pattern_ties_to_even(dtype):
    x = turning()
    out = np.empty(x.size, np.uint16)
    _narrow(out, x, np.float32(1), HALVES[dtype])
    nan = np.isnan(x)
    same(out[~nan], narrowed(x[~nan], dtype))
    assert np.isnan(wide(out[nan], dtype)).all()


def test_numpy_arrays_are_cast_both_ways_in_any_layout():
    x = data("mixed", (30, 7), 1).T
    half = FUSED.cast(x, "float16")
    same(half, REFERENCE.cast(x, "float16"))
    same(FUSED.cast(half, "float32"), half.astype(np.float32))
    same(FUSED.cast(half[:, ::2], "float32"), half[:, ::2].astype(np.float32))
    scalar = FUSED.cast(np.float32(0.1).reshape(()), "float16")
    same(scalar, np.float16(0.1).reshape(()))
    with pytest.raises(TypeError, match="NumPy has no bfloat16"):
        FUSED.cast(x, "bfloat16")


@pytest.mark.parametrize("by", [1, 3, 2.0**-3])
def test_numpy_halves_are_divided_once(by):
    x, half = data("gaussian", 1001, 1), data("heavy", 1001, 2).astype(np.float16)
    for given, out in ((half, np.float32), (x, np.float16), (half, np.float16), (half, np.float64), (x, np.float64)):
        wanted = REFERENCE.divide(np.zeros(1001, out), given, by)
        same(FUSED.divide(np.zeros(1001, out), given, by), wanted)
        same(FUSED.divide(np.zeros(2002, out)[::2], given, by), wanted)


@pytest.mark.parametrize("shape", [(), (0,), (5, 7), (65_536,), (257, 257)], ids=str)
@pytest.mark.parametrize("dtype", FORMATS)
def test_torch_adds_and_divides_them_in_float32(dtype, shape):
    x = torch.from_numpy(np.asarray(data("heavy", shape, 1))).to(TORCHS[dtype])
    out = torch.from_numpy(np.asarray(data("gaussian", shape, 2)))
    for weight in (1.0, -0.3):
        wanted = out + np.float32(weight) * x.float()
        added = out.clone()
        assert TORCH.add(added, x, weight) is added
        torch.testing.assert_close(added, wanted, rtol=1e-6, atol=1e-6)
        assert weight != 1 or torch.equal(added, wanted)
    for by in (1, 2, 7):
        divided = torch.empty(shape)
        assert TORCH.divide(divided, x, by) is divided
        assert torch.equal(divided, x.float() / by)
        rounded = torch.empty(shape, dtype=x.dtype)
        assert torch.equal(TORCH.divide(rounded, out, by), (out / by).to(x.dtype))
        assert torch.equal(TORCH.divide(rounded, x, by), (x.float() / by).to(x.dtype))


@pytest.mark.parametrize("dtype", FORMATS)
def test_torch_takes_layouts_and_dtypes_that_the_loops_do_not(dtype):
    x = (torch.arange(600.0 * 400) % 200).view(600, 400).to(TORCHS[dtype])
    for given in (x.t(), x[:, ::2]):
        out = torch.ones(given.shape)
        assert torch.equal(TORCH.add(out, given, 2.0), 1 + 2 * given.float())
        assert torch.equal(TORCH.divide(torch.empty(given.shape), given, 4), given.float() / 4)
        strided = torch.zeros(*given.shape, 2)[..., 0]
        assert torch.equal(TORCH.add(strided, given.contiguous()), given.float())
        assert torch.equal(TORCH.divide(strided, given.contiguous(), 4), given.float() / 4)
    assert torch.equal(TORCH.divide(torch.empty(x.numel()), x, 3), x.float().view(-1) / 3)
    assert torch.equal(TORCH.add(torch.zeros(x.shape, dtype=torch.float64), x), x.double())
    other = x.to(TORCHS["bfloat16" if dtype == "float16" else "float16"])
    assert torch.equal(TORCH.divide(x.clone(), other, 2), x / 2)
    assert torch.equal(TORCH.add(x.clone(), x), 2 * x)


@pytest.mark.parametrize("dtype", FORMATS)
def test_all_finite_of_halves_knows_the_bounds(dtype):
    largest = torch.finfo(TORCHS[dtype]).max
    for n in (1, 31, 1000):
        x = torch.full((n,), -largest, dtype=TORCHS[dtype])
        assert TORCH.all_finite(x)
        assert TORCH.all_finite(x, largest)
        assert not TORCH.all_finite(x, largest * 0.99)
        for bad in (math.inf, -math.inf, math.nan):
            x[n // 2] = bad
            assert not TORCH.all_finite(x)
            assert not TORCH.all_finite(x, largest)
    assert TORCH.all_finite(torch.empty(0, dtype=TORCHS[dtype]))


@pytest.mark.skipif(tf is None, reason="TensorFlow is not installed")
@pytest.mark.parametrize("dtype", FORMATS)
def test_arrays_of_tensorflows_memory_are_computed_with_alike(dtype):
    from grace.kernels.tensorflow.host import host_kernels

    k, x, y = host_kernels(), data("gaussian", (9, 5), 1), data("heavy", (9, 5), 2)
    half = k.cast(x, dtype)
    assert half.dtype.name == dtype
    same(half.view(np.uint16), narrowed(x, dtype))
    exact = wide(half.view(np.uint16), dtype)
    same(k.cast(half, "float32"), exact)
    assert k.cast(half, "float64").dtype == np.float64
    same(k.add(y.copy(), half, 0.5), y + np.float32(0.5) * exact)
    same(k.divide(y.copy(), half, 3), exact / np.float32(3))
    same(k.divide(half.copy(), y, 3).view(np.uint16), narrowed(y / np.float32(3), dtype))
    same(k.divide(half.copy(), half, 3).view(np.uint16), narrowed(exact / np.float32(3), dtype))
    assert k.all_finite(half)
    assert not k.all_finite(k.cast(np.float32([1, np.inf]), dtype))
