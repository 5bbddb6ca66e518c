"""block against its formula, in every implementation of the kernels."""

import math

import numpy as np
import pytest
from scipy.linalg import hadamard

from grace.compressors.block import Block
from grace.core.context import Context
from tests.support.data import EPSILON, REFERENCE, same
from tests.support.kernel_cases import every
from tests.support.pairwise import pairwise

FORMATS = {"int8": (8, "int"), "int4": (4, "int"), "fp8": (8, "fp8")}
SHAPES = [(), (1,), (0, 3), (7,), (33, 17), (2, 1300)]
CASES = pairwise(FORMATS, [1, 33, 512], [0, 32], ["nearest", "stochastic"], SHAPES)
cases = pytest.mark.parametrize(("kind", "size", "rotated", "rounding", "shape"), CASES)


def numbers(shape, seed=0):
    """Gaussian ones, with an outlier and a zero."""
    x = np.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)
    if x.size > 4:
        x.reshape(-1)[[2, 3]] = 20, 0
    return x


def block_of(kind, size, rotated, rounding, step=0):
    bits, form = FORMATS[kind]
    made = Block(bits, form, size, rotated, rounding)
    made.bind(Context(step=step))
    return made


def turned(x):
    """H x / sqrt(32) of each 32, in float64; what is left at the end stays."""
    flat = np.float64(x).reshape(-1)
    whole = flat.size // 32 * 32
    return np.concatenate([(flat[:whole].reshape(-1, 32) @ hadamard(32) / math.sqrt(32)).reshape(-1), flat[whole:]])


def spacing(kind, y, scale):
    """Between the two numbers of so few bits that y lies between."""
    if kind != "fp8":
        return scale / (127 if kind == "int8" else 7) * np.ones_like(y)
    scaled = np.abs(y) / np.where(scale > 0, scale, 1) * 448
    return scale / 448 * 2.0 ** (np.floor(np.log2(np.maximum(scaled, 2.0**-6))) - 3)  # of what is below 2^-6: 2^-9


@every
@cases
def test_each_element_becomes_a_neighbour_in_units_of_its_blocks_largest(
    monkeypatch, it, kind, size, rotated, rounding, shape
):
    monkeypatch.setattr("grace.compressors.block.kernels_of", lambda tensor: it.kernels)
    x, block = numbers(shape), block_of(kind, size, rotated, rounding)
    payload, ctx = block.compress(it.to(x), "w")
    assert [it.back(part).nbytes for part in payload] == [
        math.ceil(x.size * block.bits / 8),
        4 * math.ceil(x.size / size),
    ]
    got = it.back(block.decompress(payload, ctx))
    assert got.shape == shape
    assert got.dtype == np.float32
    y, there = (turned(x), turned(got)) if rotated else (np.float64(x).reshape(-1), np.float64(got).reshape(-1))
    scale = np.repeat([np.abs(y[i : i + size]).max() for i in range(0, y.size, size)], size)[: y.size]
    np.testing.assert_allclose(it.back(payload[1]), scale[::size], rtol=1e-5, atol=64 * EPSILON * scale.max(initial=0))
    bound = spacing(kind, y, scale) * (0.5 if rounding == "nearest" else 1)
    assert (np.abs(there - y) <= bound + 64 * EPSILON * scale.max(initial=0)).all()
    twice = it.back(block.accumulate(payload, ctx, it.to(got), -1.0))
    assert np.abs(twice).max(initial=0) <= 64 * EPSILON * scale.max(initial=0)


@every
@cases
def test_every_implementation_sends_what_the_reference_sends(monkeypatch, it, kind, size, rotated, rounding, shape):
    x, block = numbers(shape, 1), block_of(kind, size, rotated, rounding, step=5)
    monkeypatch.setattr("grace.compressors.block.kernels_of", lambda tensor: REFERENCE)
    wanted, ctx = block.compress(x, "w")
    decoded = block.decompress(wanted, ctx)
    monkeypatch.setattr("grace.compressors.block.kernels_of", lambda tensor: it.kernels)
    got, ctx = block.compress(it.to(x), "w")
    if not rotated:  # sums of a rotation may be rounded otherwise
        for mine, theirs in zip(got, wanted, strict=True):
            same(it.back(mine), theirs)
    mine = it.back(block.decompress([it.to(part) for part in wanted], ctx))
    np.testing.assert_allclose(mine, decoded, rtol=1e-5, atol=64 * EPSILON * np.abs(x).max(initial=0))


@pytest.mark.parametrize("kind", FORMATS)
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
        block = block_of("int4", 512, rotated, "nearest")
        errors.append(float(np.square(block.decompress(*block.compress(x, "w")) - x).mean()))
    assert errors[1] < errors[0] / 2
