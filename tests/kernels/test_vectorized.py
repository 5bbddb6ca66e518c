"""Hot compiled loops stay vectorized: their machine code has the instructions that compute with several elements.

Each loop is compiled here, for what is in Numba's cache has no assembly any more. It is asked for an instruction that
its arithmetic needs, on registers of at least 256 bits.
"""

import platform
import re

import pytest
from llvmlite.binding import get_host_cpu_features
from numba import boolean, float32, float64, int32, int64, njit, uint8, uint16, uint32

from grace.kernels.numba import (
    buckets,
    half_precision,
    loops,
    packing,
    primitives,
    products,
    quantization,
    rounding,
    selection,
)
from tests.support.drawing import THOROUGH

FLOATS, WORDS, HALVES, BYTES, INDICES = float32[::1], uint32[::1], uint16[::1], uint8[::1], int32[::1]
MATRIX = float32[:, ::1]
STREAM = (uint32,) * 4
HOT = [
    (loops._random_blocks, (WORDS, int64, *STREAM), "pmuludq"),
    (loops._max_bits, (WORDS,), "pmaxud"),
    (rounding._sum_squares, (FLOATS,), r"(mul|fmadd\d+)pd"),
    (rounding._round_bucket, (FLOATS, WORDS, float32, float64, BYTES), "divps"),
    (rounding._round_bucket, (FLOATS, WORDS, float32, float64, BYTES), "cvttps2dq"),
    (rounding._round_nearest, (FLOATS, float32, float64, BYTES, *[float32] * 3, boolean), "divps"),
    (rounding._round_to_two_bits, (FLOATS, float32, float64, BYTES, *[float32] * 3), r"cmp\w*ps"),
    (rounding._dequantize_bucket, (FLOATS, BYTES, float32, float32, float32, float32), "cvtdq2ps"),
    (rounding._dequantize_to, (FLOATS, BYTES, float32, float32, float32, float32), "cvtdq2ps"),
    (primitives._sum_abs, (FLOATS,), "addpd"),
    (primitives._feistel, (WORDS, int64, int64, *STREAM), "pmuludq"),
    (primitives._combine, (float32, FLOATS, float32, FLOATS, FLOATS), "mulps"),
    (primitives._add, (FLOATS, FLOATS, float32), "mulps"),
    (primitives._signs, (FLOATS, FLOATS), r"cmp\w*ps"),
    (buckets._add_kept, (FLOATS, FLOATS, FLOATS, float32, float32), "mulps"),
    (buckets._subtract_signs, (FLOATS, float32, float32), r"cmp\w*ps"),
    (packing._pack_fours, (BYTES, BYTES), "psrlw"),
    (packing._unpack_fours, (BYTES, BYTES), "psllw"),
    (packing._pack_twos, (BYTES, BYTES), "psrld"),
    (packing._unpack_twos, (BYTES, BYTES), "pslld"),
    (packing._pack_signs, (FLOATS, BYTES), r"cmp\w*ps"),
    (packing._add_either, (FLOATS, BYTES, float32, float32), "addps"),
    (selection._filter_part, (WORDS, uint32, int64, INDICES, WORDS, int64), "psubd"),
    (selection._kth_of_few, (WORDS, int64), r"pcmp\w*"),
    (selection._above, (WORDS, uint32, INDICES), "psubd"),
    (selection._collect, (WORDS, uint32, int64, INDICES), "psubd"),
    (selection._count_digits, (WORDS, uint32, int64, int64), "psubd"),
    (primitives._scaled, (FLOATS, float64, FLOATS), "mulpd"),
    (quantization._round_powers_tile, (WORDS, WORDS, BYTES), "psrld"),
    (quantization._add_powers, (FLOATS, BYTES, float32), "mulps"),
    (quantization._side_sums, (FLOATS,), "addpd"),
    (quantization._sum, (FLOATS,), "addpd"),
    (quantization._sum_squared_deviations, (FLOATS, float64), "mulpd"),
    (quantization._clip, (FLOATS, float32, FLOATS), "minps"),
    (products._product, (MATRIX, MATRIX, MATRIX), r"fmadd\d+ps"),
    (products._transposed_product, (MATRIX, MATRIX, MATRIX), r"fmadd\d+ps"),
    (products._add_product, (MATRIX, MATRIX, MATRIX, float32, float32), "mulps"),
    (half_precision._narrow, (HALVES, FLOATS, float32, int64), "psrld"),
    (half_precision._widen, (FLOATS, HALVES, float32, int64), "pslld"),
    (half_precision._share, (HALVES, HALVES, float32, int64), "divps"),
    (half_precision._add_half, (FLOATS, HALVES, float32, int64), "mulps"),
    (half_precision._largest, (HALVES,), "pmaxuw"),
]

pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="knows the instructions of x86-64 only"),
    pytest.mark.skipif(not get_host_cpu_features().get("avx2"), reason="this processor has no AVX2"),
]


def packed(loop, given, instruction):
    """The lines of a loop's assembly with an instruction on vectors."""
    options = {name: value for name, value in loop.targetoptions.items() if name not in ("nopython", "cache")}
    fresh = njit(**options)(loop.py_func)
    fresh.compile(given)
    return re.findall(rf"^\s+v{instruction}\s.*%[yz]mm.*$", fresh.inspect_asm(fresh.signatures[0]), re.MULTILINE)


FEW = list({loop.py_func.__module__: (loop, *more) for loop, *more in reversed(HOT)}.values())
"""A loop of each module: to compile one takes up to a second, and what is lost with its vectors is speed alone."""
RUN = HOT if THOROUGH else FEW


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize(
    ("loop", "given", "instruction"), RUN, ids=[f"{loop.py_func.__name__}-{name}" for loop, _, name in RUN]
)
def test_a_hot_loop_is_vectorized(loop, given, instruction):
    assert packed(loop, given, instruction), (
        f"{loop.py_func.__module__}.{loop.py_func.__name__} is not vectorized: its machine code has no v{instruction} "
        "with 256 or 512 bits. See the top of grace/kernels/numba/loops.py for what a loop must do without."
    )


def test_loops_that_are_not_vectorized_are_found():
    @njit
    def raising(x, y):
        for i in range(x.size):
            x[i] = x[i] / y[i]

    @njit(error_model="numpy")
    def shifted(x, low, high):
        for i in range(low, high):  # a place below 0 counts from the end
            x[i] = x[i] * float32(3)

    @njit(error_model="numpy")
    def vectorized(x, y):
        for i in range(x.size):
            x[i] = x[i] / y[i]

    assert not packed(raising, (FLOATS, FLOATS), "divps")
    assert not packed(shifted, (FLOATS, int64, int64), "mulps")
    assert packed(vectorized, (FLOATS, FLOATS), "divps")
