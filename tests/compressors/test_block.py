"""block against its formula, in every implementation of the kernels."""

import math

import numpy as np
import pytest
from scipy.linalg import hadamard

import grace
from grace.communicators import Allgather
from grace.compressors.block import BLOCKS, Block
from grace.core.context import Context
from grace.kernels.constants import GAUSSIAN_STEPS
from tests.support.data import EPSILON, REFERENCE, same
from tests.support.drawing import drawn
from tests.support.implementations import InTensorFlow
from tests.support.kernel_cases import every
from tests.support.pairwise import pairwise

FORMATS: dict = {f"int{bits} by {scale}": (bits, "int", scale) for bits in BLOCKS for scale in ("max", "rms")}
FORMATS["fp8"] = 8, "fp8", None
LARGEST = [kind for kind in FORMATS if "rms" not in kind]
SHAPES = [(), (1,), (0, 3), (7,), (33, 17), (2, 1300)]


def can_be(kind, size, rotated, rounding, shape):
    return kind in LARGEST or rounding == "nearest"


CASES = pairwise(FORMATS, [1, 33, 512], [0, 32], ["nearest", "stochastic"], SHAPES, allowed=can_be)


def numbers(shape, seed=0):
    """Gaussian ones, with an outlier and a zero."""
    x = np.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)
    if x.size > 4:
        x.reshape(-1)[[2, 3]] = 20, 0
    return x


def block_of(kind, size, rotated, rounding, step=0):
    bits, form, scale = FORMATS[kind]
    made = Block(bits, form, size, rotated, rounding, scale)
    made.bind(Context(step=step))
    return made


def turned(x):
    """H x / sqrt(32) of each 32, in float64; what is left at the end stays."""
    flat = np.float64(x).reshape(-1)
    whole = flat.size // 32 * 32
    return np.concatenate([(flat[:whole].reshape(-1, 32) @ hadamard(32) / math.sqrt(32)).reshape(-1), flat[whole:]])


def levels_of(kind):
    """The outermost level in steps."""
    bits, _, scale = FORMATS[kind]
    return 2 ** (bits - 1) - (1 if scale == "max" else 0.5)


def scale_of(kind, y):
    """The outermost level of a block."""
    if kind in LARGEST:
        return np.abs(y).max()
    return levels_of(kind) * GAUSSIAN_STEPS[levels_of(kind)] * math.sqrt(np.square(y).mean())


def spacing(kind, y, scale):
    """Between the two numbers of so few bits that y lies between."""
    if kind != "fp8":
        return scale / levels_of(kind) * np.ones_like(y)
    scaled = np.abs(y) / np.where(scale > 0, scale, 1) * 448
    return scale / 448 * 2.0 ** (np.floor(np.log2(np.maximum(scaled, 2.0**-6))) - 3)  # of what is below 2^-6: 2^-9


@every
def test_each_element_becomes_a_neighbour_in_units_of_its_blocks_largest(monkeypatch, it):
    """And what is sent, and decoded, is what the reference sends and decodes."""
    for kind, size, rotated, rounding, shape in drawn(CASES) if isinstance(it, InTensorFlow) else CASES:
        x, block = numbers(shape), block_of(kind, size, rotated, rounding, step=5)
        monkeypatch.setattr("grace.compressors.block.kernels_of", lambda tensor: REFERENCE)
        wanted, ctx = block.compress(x, "w")
        decoded = block.decompress(wanted, ctx)
        monkeypatch.setattr("grace.compressors.block.kernels_of", lambda tensor: it.kernels)
        payload, ctx = block.compress(it.to(x), "w")
        nbytes = [it.back(part).nbytes for part in payload]
        assert nbytes == [math.ceil(x.size * block.bits / 8), 4 * math.ceil(x.size / size)]
        if not rotated and kind in LARGEST:  # sums of a rotation or of squares may be rounded otherwise
            for mine, theirs in zip(payload, wanted, strict=True):
                same(it.back(mine), theirs)
        mine = it.back(block.decompress([it.to(part) for part in wanted], ctx))
        close = 64 * EPSILON * np.abs(x).max(initial=0)
        np.testing.assert_allclose(mine, decoded, rtol=1e-5, atol=close)
        got = it.back(block.decompress(payload, ctx))
        assert got.shape == shape
        assert got.dtype == np.float32
        y, there = (turned(x), turned(got)) if rotated else (np.float64(x).reshape(-1), np.float64(got).reshape(-1))
        scale = np.repeat([scale_of(kind, y[i : i + size]) for i in range(0, y.size, size)], size)[: y.size]
        rounded = 64 * EPSILON * scale.max(initial=0)
        np.testing.assert_allclose(it.back(payload[1]), scale[::size], rtol=1e-5, atol=rounded)
        bound = spacing(kind, y, scale) * (0.5 if rounding == "nearest" else 1)
        bound = np.maximum(bound, np.abs(y) - scale)  # beyond the outermost level
        assert (np.abs(there - y) <= bound + 64 * EPSILON * np.abs(y).max(initial=0)).all()
        twice = it.back(block.accumulate(payload, ctx, it.to(got), -1.0))
        assert np.abs(twice).max(initial=0) <= rounded


@pytest.mark.parametrize("kind", LARGEST)
@pytest.mark.parametrize("rotated", [0, 32])
def test_stochastic_rounding_is_right_on_average(kind, rotated):
    x, steps = numbers((64,), 2), 400
    total = np.zeros(64)
    for step in range(steps):
        block = block_of(kind, 64, rotated, "stochastic", step)
        total += block.decompress(*block.compress(x, "w"))
    y = turned(x) if rotated else np.float64(x)
    most = spacing(kind, y, np.abs(y).max()).max() if rotated else spacing(kind, y, np.abs(y).max())
    assert (np.abs(total / steps - x) <= 6 * most / 2 / math.sqrt(steps) + 1e-6).all()


def test_a_rotation_spreads_an_outlier():
    x = numbers((512,), 3)
    x[2] = 40
    errors = []
    for rotated in (0, 32):
        block = block_of("int4 by max", 512, rotated, "nearest")
        errors.append(float(np.square(block.decompress(*block.compress(x, "w")) - x).mean()))
    assert errors[1] < errors[0] / 2


def left(block, x):
    """||x - C(x)||^2 / ||x||^2."""
    lost = np.float64(block.decompress(*block.compress(x, "w"))) - x
    return np.square(lost).sum() / np.square(np.float64(x)).sum()


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "fp8"])
def test_the_nearest_leave_no_more_than_the_bound(kind):
    for size in (1, 2, 3, 5, 128, 129, 2048, 2304):
        check_bound(kind, size)


def check_bound(kind, size):
    block, levels, rng = block_of(kind, size, 0, "nearest"), levels_of(kind), np.random.default_rng(0)
    bound = (size - 1) / (size - 1 + 4 * levels**2)
    if kind not in LARGEST:
        step = GAUSSIAN_STEPS[levels]
        bound = step**2 / 4
        if size > (levels + 0.5) ** 2 * step**2:
            bound = (1 - levels * step / math.sqrt(size)) ** 2 + (1 - 1 / size) * step**2 / 4
    assert block.traits.contraction == (bound < 1)
    assert block.noisy == (bound >= 1)
    for few in sorted({1, 2, size // 2, size - 1, size} & set(range(1, size + 1))):
        for small in (0.0, 0.999 / (2 * levels)):  # what "max" rounds to 0, which is the worst
            x = np.full(size, small, np.float32)
            x[:few] = 1
            assert left(block, rng.permutation(x)) <= bound + 1e-6
    assert left(block, rng.standard_normal(size).astype(np.float32)) <= bound + 1e-6
    if kind not in LARGEST and size > 9:
        assert left(block, np.float32([1] + [0] * (size - 1))) == pytest.approx(bound, rel=1e-5)


def test_defaults_follow_from_bits():
    assert [Block(bits).spec for bits in BLOCKS] == ["block", "block(bits=4)", "block(bits=3)", "block(bits=2)"]
    for bits, size in BLOCKS.items():
        assert Block(bits).block_size == size
        assert Block(bits).norm == "max"
        assert Block(bits).traits.contraction
    assert Block(2, scale="max", block=33).spec == "block(bits=2, block=33, scale='max')"
    for given, why in {
        "format=fp8, scale=max": "leave it out",
        "scale=rms, rounding=stochastic": "not be unbiased",
    }.items():
        with pytest.raises(grace.ConfigError, match=why):
            grace.make("compressor", f"block({given})")
    with pytest.warns(UserWarning, match="not a contraction.*Use shorter blocks"):
        Allgather("block(bits=2, scale=rms, block=256)")
    with pytest.raises(grace.ConfigError, match="bits must be one of 8, 4, 3, 2, not 5"):
        Block(5)
