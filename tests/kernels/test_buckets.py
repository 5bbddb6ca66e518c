"""Kernels that work bucket by bucket, at the ends of buckets."""

import numpy as np
import pytest

from grace.compressors.qsgd import QSGD
from grace.kernels import Stream
from grace.kernels.constants import GAUSSIAN_STEPS
from grace.kernels.numba.primitives import NumbaKernels
from grace.kernels.numba.rounding import _threshold
from tests.support.data import EPSILON, REFERENCE, data, same
from tests.support.implementations import ALL, OTHERS, InTensorFlow, crossed

BUCKETS = (1, 5, 32, 512, 1024, 5000)  # 32 and 1024 are what the compiled loops take at a time
BYTE = 8  # elements that pack() takes at a time
FLOAT32_MAX_BITS = 0x7F7FFFFF


def lengths(bucket: int) -> list[int]:
    """Return lengths of no bucket, one and two; of one element more, and of the next but for one."""
    return sorted({k * bucket + more for k in (0, 1, 2) for more in (0, 1, bucket - 1)})


def near(got, wanted, x) -> None:
    np.testing.assert_allclose(got, wanted, rtol=4 * EPSILON, atol=4 * EPSILON * np.abs(x).max(initial=0))


@pytest.mark.parametrize("it", OTHERS)
def test_quantized_buckets_equal_the_reference_at_their_ends(it):
    for bucket in BUCKETS[1::2] if isinstance(it, InTensorFlow) else BUCKETS:
        for n in lengths(bucket):
            x, out = data("gaussian", n, n), data("heavy", n, n + 1)
            for levels, norm, stream in ((7, "max", Stream(n, 3)), (3, "max", None), (3.5, "rms", None)):
                codes, scales = it.run("quantize", x, levels, bucket, norm, stream)
                wanted_codes, wanted_scales = REFERENCE.quantize(x, levels, bucket, norm, stream)
                same(codes, wanted_codes)
                same(scales, wanted_scales)
                wanted = REFERENCE.dequantize(out.copy(), codes, scales, levels, bucket, 0.5)
                near(it.run("dequantize", out, codes, scales, levels, bucket, 0.5), wanted, np.abs(out) + 4)


@pytest.mark.parametrize("it", OTHERS)
def test_other_kernels_equal_the_reference_at_the_ends_of_what_they_take_at_a_time(it):
    eager = isinstance(it, InTensorFlow)  # each call takes milliseconds
    for n in lengths(BYTE) if eager else sorted({*lengths(BYTE), *lengths(32), *lengths(1024)}):
        x, out = data("gaussian", n, n), data("heavy", n, n + 1)
        packed = REFERENCE.pack_signs(x)
        same(it.run("pack_signs", x), packed)
        near(it.run("add_signs", out, packed, None, 0.5), REFERENCE.add_signs(out.copy(), packed, None, 0.5), out)
        for bits in range(1, 9):
            codes = np.random.default_rng(n).integers(0, 1 << bits, n).astype(np.uint8)
            packed, table = REFERENCE.pack(codes, bits), data("gaussian", 1 << bits, bits)
            same(it.run("pack", codes, bits), packed)
            same(it.run("unpack", packed, bits, n), codes)
            wanted = REFERENCE.add_table(out.copy(), packed, bits, table, None, 0.5)
            near(it.run("add_table", out, packed, bits, table, None, 0.5), wanted, np.abs(out) + 4)
        same(it.run("above", x, 0.5), REFERENCE.above(x, 0.5))
        same(it.run("round_powers", x, Stream(n)), REFERENCE.round_powers(x, Stream(n)))
        same(it.run("bucketize", x, np.float32([2]), np.float32([-1, 0, 1])),
             REFERENCE.bucketize(x, np.float32([2]), np.float32([-1, 0, 1])))  # fmt: skip


def test_every_level_is_the_quotient_that_a_division_gives():
    codes = np.arange(256, dtype=np.uint8)
    for levels in (*range(1, 128), *GAUSSIAN_STEPS):
        given = codes[: int(2 * levels + 1)], np.float32([1]), levels, codes.size, 1.0
        zeros = np.zeros(given[0].size, np.float32)
        same(NumbaKernels().dequantize(zeros.copy(), *given), REFERENCE.dequantize(zeros, *given))


@pytest.mark.parametrize("levels", [1, 1.5])
def test_the_threshold_of_two_bits_is_the_smallest_magnitude_that_rounds_up(levels):
    drawn, most = np.random.default_rng(0).integers(1, FLOAT32_MAX_BITS, 10_000), FLOAT32_MAX_BITS + 1
    scales = np.concatenate([drawn, np.arange(1, 2000), np.arange(most - 50, most)]).astype(np.uint32).view(np.float32)
    found = np.float32([_threshold(scale, float(levels)) for scale in scales])

    def up(x):
        return np.floor(x / scales * np.float32(levels) + np.float32(0.5 - levels % 1)) >= 1

    assert up(found).all()
    assert not up(np.nextafter(found, np.float32(0))).any()


@pytest.mark.parametrize("it", OTHERS)
def test_random_indices_equal_the_reference_at_the_ends_of_what_is_drawn_at_a_time(it):
    for k in (1023, 1024, 1025, 2049):
        for n in (k, 2048, 2049, 65_537):
            if k <= n:
                wanted = REFERENCE.random_indices(Stream(k, n), n, k)
                same(it.run("random_indices", Stream(k, n), n, k, np.zeros(1, np.float32)), wanted)


@crossed(ALL, ("shape",), [(), (0,), (1,), (40,)])
def test_a_bucket_takes_no_more_room_than_the_tensor_has(it, shape):
    """A bucket of 2^40 elements would need terabytes."""
    x = np.asarray(data("gaussian", shape))
    for norm in ("l2", "max"):
        one, whole = (QSGD(levels=7, norm=norm, bucket_size=size) for size in (max(1, x.size), 1 << 40))
        k, stream = it.kernels, Stream(1)
        made = [k.quantize(k.flat(it.to(x)), 7, qsgd.bucket_size, norm, stream) for qsgd in (one, whole)]
        for mine, theirs in zip(*made, strict=True):
            same(it.back(mine), it.back(theirs))
        if getattr(k, "traced", None) is None:  # compressors take no tensors of unknown sizes
            decoded = [qsgd.decompress(*qsgd.compress(it.to(x), "w")) for qsgd in (one, whole)]
            same(it.back(decoded[0]), it.back(decoded[1]))
