"""Triton's kernels have the reference's bits: at the limits of their programs, of odd numbers, and of every dtype.

They run on a GPU where there is one, and else in Triton's interpreter, which test_triton.py starts.
"""

import math

import numpy as np
import pytest

from grace.kernels import Stream
from tests.support.data import REFERENCE, close, data, same
from tests.support.implementations import OTHERS

torch = pytest.importorskip("torch")
FOUND = [param for param in OTHERS if param.id == "triton"]
pytestmark = pytest.mark.skipif(not FOUND, reason="no GPU: test_triton.py runs this in Triton's interpreter")
SIZES = {0: "gaussian", 1: "zeros", 33: "denormal", 1023: "huge", 1025: "mixed"}
STREAM = Stream(2**64 - 3, 2**32 - 1, 5)


@pytest.fixture(params=[param.values[0] for param in FOUND], ids=["triton"] * len(FOUND))
def it(request):
    return request.param


@pytest.fixture(params=SIZES.items(), ids=str)
def x(request):
    """Numbers of each kind, and of each size."""
    n, kind = request.param
    return data(kind, n, n)


def exactly(it, method, *args):
    """Call a kernel and the reference: the same bits."""
    copies = [arg.copy() if isinstance(arg, np.ndarray) else arg for arg in args]
    with np.errstate(all="ignore"):
        wanted, got = getattr(REFERENCE, method)(*copies), it.run(method, *args)
    for one, other in zip(*((v if isinstance(v, tuple) else (v,)) for v in (got, wanted)), strict=True):
        same(one, other)
    return wanted


def test_codes_and_what_is_made_of_them(it, x):
    out = data("gaussian", x.size, 1)
    for levels, bucket, stream in ((127, 64, STREAM), (7, 37, STREAM), (1, 5000, STREAM), (7, 32, None), (3, 64, None),
                                   (1.5, 128, None), (3.5, 37, None), (127.5, 5000, None)):  # fmt: skip
        codes, scales = exactly(it, "quantize", x, levels, bucket, "max" if levels in range(128) else "rms", stream)
        exactly(it, "dequantize", out, codes, scales, levels, bucket, 1 / 3)
        bits = int(2 * levels).bit_length()
        exactly(it, "unpack", exactly(it, "pack", codes, bits), bits, x.size)
    for bucket, stream in ((64, None), (37, STREAM), (5000, None)):
        codes, scales = exactly(it, "round_float8", x, bucket, stream)
        exactly(it, "add_float8", out, codes, scales, bucket, -1 / 3)
    exactly(it, "add_powers", out, exactly(it, "round_powers", x, STREAM), 1 / 3)
    exactly(it, "rotate", x)


def test_buckets_of_many_programs(it):
    for kind in ("mixed", "denormal"):
        x = data(kind, 9001, 3)
        for bucket in (9001, 4500):
            exactly(it, "quantize", x, 127, bucket, "max", STREAM)
            exactly(it, "quantize", x, 1.5, bucket, "rms", None)
            exactly(it, "round_float8", x, bucket, STREAM)
        got, wanted = (
            k("quantize", x, 127, 9001, "l2", STREAM) for k in (it.run, lambda m, *a: REFERENCE.quantize(*a))
        )
        close(got[1], wanted[1], wanted[1])


def test_signs_and_arithmetic(it, x):
    out = data("gaussian", x.size, 1)
    packed = exactly(it, "pack_signs", x)
    for scale in (None, np.float32([0.3]), np.float32([1e-40])):
        exactly(it, "add_signs", out, packed, scale, 1 / 3)
    exactly(it, "signs", x)
    exactly(it, "add", out, x, 1 / 3)
    exactly(it, "combine", 0.9, x, 1 / 3, out)
    for by in (3, 7, 2.0**-16):
        exactly(it, "divide", out, x, by)
    exactly(it, "max_abs", x)
    scale, edges, table = REFERENCE.max_abs(x), np.sort(data("gaussian", 255)), data("gaussian", 256)
    exactly(it, "add_table", out, exactly(it, "bucketize", x, scale, edges), 8, table, scale, 1 / 3)


def test_random_numbers_and_places(it, x):
    like = np.zeros(1, np.float32)
    assert (it.run("random_bits", STREAM, x.size, like) == REFERENCE.random_bits(STREAM, x.size)).all()
    exactly(it, "uniform", STREAM, x.size, like)
    exactly(it, "sample_indices", STREAM, x.size + 1, x.size, like)
    indices = exactly(it, "random_indices", STREAM, x.size + 1, x.size // 2, like)
    out = data("gaussian", x.size + 1, 1)
    exactly(it, "scatter_add", out, indices, x[: x.size // 2], 1 / 3)
    exactly(it, "add_at", out, indices, np.float32([3]), 1 / 3)
    exactly(it, "zero_at", out, indices)
    bitmap = exactly(it, "bitmap", np.sort(indices), x.size + 1)
    for count in (None, indices.size):
        exactly(it, "positions", bitmap, x.size + 1, count)
    if found := REFERENCE.positions(bitmap, x.size + 1).tolist():  # what is damaged writes nowhere else
        assert it.run("positions", bitmap, x.size + 1, len(found) - 1).tolist() == found[:-1]
        assert it.run("positions", bitmap, x.size + 1, len(found) + 2).tolist() == [*found, -1, -1]
    exactly(it, "above", x, float(np.median(np.abs(x))) if x.size else 0.0)
    exactly(it, "where_code", np.sign(x).astype(np.int8).view(np.uint8), 255)


def test_bitmaps_of_many_programs(it, monkeypatch):
    from grace.kernels.triton import launching

    monkeypatch.setattr(launching, "PROGRAMS", 4)  # of several steps
    n, drawn = 40_003, np.random.default_rng(1).choice(40_003, 3000, replace=False)
    edges = [0, 31, 32, 16383, 16384, 32767, 32768, 40_002]
    for indices in (np.union1d(drawn, edges), np.arange(16384), np.array([n - 1]), np.array([], int)):
        bitmap = exactly(it, "bitmap", indices.astype(np.int32), n)
        exactly(it, "positions", bitmap, n, indices.size)
    assert it.run("positions", bitmap, n, 2).tolist() == [-1, -1]


def test_a_step_that_lies_in_memory_makes_the_same_numbers(it):
    """As a CUDA graph reads it, which is the same launch at every step."""
    for step in (0, 7, 2**32 - 1):
        there, here = Stream(2**64 - 3, torch.tensor([step], device=it.device or "cpu"), 5), Stream(2**64 - 3, step, 5)
        x, like = data("gaussian", 1025, 1), np.zeros(1, np.float32)
        assert (it.run("random_bits", there, 1025, like) == REFERENCE.random_bits(here, 1025)).all()
        assert (it.run("random_indices", there, 5000, 700, like) == REFERENCE.random_indices(here, 5000, 700)).all()
        for found, wanted in zip(
            it.run("quantize", x, 127, 64, "max", there), REFERENCE.quantize(x, 127, 64, "max", here), strict=True
        ):
            same(found, wanted)
        same(it.run("round_powers", x, there), REFERENCE.round_powers(x, here))


def test_columns_of_zeros_and_of_what_is_too_large_become_random(it):
    exactly(it, "random_matrix", STREAM, (700, 3), np.zeros(1, np.float32))
    for shape in ((700, 5), (1, 1), (3, 1), (0, 2)):
        x = data("gaussian", shape)
        x[:, :1] = 0
        for column, bad in enumerate((np.nan, 2.0**41, -np.inf), 1):
            x[-1:, column : column + 1] = bad
        exactly(it, "renew_columns", x, STREAM)


@pytest.mark.parametrize("bad", [-np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_seen_and_stays(it, bad):
    for place in (0, 2000):
        x = data("gaussian", 2001)
        x[place] = bad
        x[7] = np.float32(3)
        assert it.run("all_finite", x) == 0
        assert it.run("all_finite", np.delete(x, place)) == 1
        exactly(it, "topk", x, 3)
        exactly(it, "pack_signs", x)
        exactly(it, "signs", x)
        exactly(it, "above", x, 1.0)
        with np.errstate(all="ignore"):
            for method, args in (("combine", (1.0, x, 1 / 3, x)), ("divide", (x.copy(), x, 3)), ("max_abs", (x,))):
                wanted = getattr(REFERENCE, method)(*args)
                np.testing.assert_array_equal(it.run(method, *args), wanted)
        assert it.run("mean_abs", x)[0] == pytest.approx(REFERENCE.mean_abs(x)[0], nan_ok=True)


TIED = {
    "all zero": lambda n: np.zeros(n, np.float32),
    "two values": lambda n: np.where(np.arange(n) % 3 > 0, np.float32(1), np.float32(-1.0000001)),
    "last bit": lambda n: np.float32(1) + (np.arange(n) % 3 * 2.0**-23).astype(np.float32),
    "denormal": lambda n: (np.arange(n) % 50 * 1.4012984643e-45).astype(np.float32),
    "descending": lambda n: -np.sort(-np.abs(data("mixed", n))),  # all larger ones lie with the first programs
    "large where sampled": lambda n: np.where(sampled(n), 2, 1).astype(np.float32) * (1 + np.abs(data("gaussian", n))),
    "small where sampled": lambda n: np.where(sampled(n), 1e-3, 1).astype(np.float32) * data("gaussian", n),
}


def sampled(n):
    """Which elements the search for the largest makes its guess from."""
    stride, place = n // 4096, np.arange(4096)
    return np.isin(np.arange(n), place * stride + place * 7919 % stride if stride else place)


@pytest.mark.parametrize("name", TIED)
def test_the_largest_are_found_digit_by_digit(it, name, monkeypatch):
    from grace.kernels.triton import launching

    x = TIED[name](5000)
    for programs in (1024, 2):  # each of 2 takes four steps
        monkeypatch.setattr(launching, "PROGRAMS", programs)
        for k in (1, 2500) if programs == 2 else (63, 5000):
            exactly(it, "topk", x, k)
    exactly(it, "topk", x[:1500], 63)  # all of which is the sample


@pytest.mark.parametrize(
    ("name", "k", "wanted"), [("gaussian", 300, (True, False)), ("two values", 300, (False, True)),
                              ("large where sampled", 2500, (False, False))]
)  # fmt: skip
def test_a_guess_of_the_smallest_is_above_it_equal_or_known_to_have_failed(it, name, k, wanted, monkeypatch):
    from grace.kernels.triton import selection

    x = torch.from_numpy(TIED[name](5000) if name in TIED else data(name, 5000)).to(it.device)
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **more: made.append(empty(*args, **more)) or made[-1])
    it.kernels.topk(x, k)
    (counts,) = (found for found in made if found.shape == (selection.STATE.value,))
    above, equal = counts[selection.KNOWN.value : selection.KNOWN.value + 2].tolist()
    assert (above >= k, above < k <= above + equal) == wanted


def test_the_largest_of_chunks_are_found_by_halving(it):
    for name, given in TIED.items():
        for n, chunk, k in ((1500, 64, 3), (1500, 1024, 10), (32, 32, 32), (0, 64, 1)):
            x = given(n)
            x[5:6] = -np.nan if name != "all zero" else 0
            exactly(it, "topk_chunks", x, chunk, k)
    exactly(it, "topk_chunks", data("mixed", 4097), 4096, 41)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_16_bit_floats_are_computed_with_in_float32(it, dtype):
    k, device = it.kernels, it.device
    x = torch.from_numpy(data("mixed", 1025, 1)).to(device).to(dtype)
    y = torch.from_numpy(data("gaussian", 1025, 2)).to(device)
    wide = it.back(x.float())
    same(it.back(k.combine(0.9, x, 1 / 3, y)), REFERENCE.combine(0.9, wide, 1 / 3, it.back(y)))
    same(it.back(k.add(y.clone(), x, 1 / 3)), REFERENCE.add(it.back(y).copy(), wide, 1 / 3))
    same(it.back(k.divide(torch.zeros_like(y), x, 3)), REFERENCE.divide(np.zeros_like(wide), wide, 3))
    third = torch.from_numpy(REFERENCE.divide(np.zeros_like(wide), it.back(y), 3)).to(device)
    assert torch.equal(k.divide(torch.zeros_like(x), y, 3), third.to(dtype))
    assert torch.equal(k.signs(x), torch.where(x >= 0, 1.0, -1.0).to(dtype))
    finite = torch.where(x.float().abs() < 6e4, x, torch.zeros_like(x))
    assert k.all_finite(finite) == 1
    finite[1024] = -math.inf
    assert k.all_finite(finite) == 0
    assert k.all_finite(y, float(y.abs().max())) == 1
    assert k.all_finite(y, float(y.abs().max()) * 0.999) == 0


def test_sums_are_taken_in_float64(it, x):
    wide = np.abs(x.astype(np.float64))
    largest = wide.max(initial=0)
    close(it.run("mean_abs", x), REFERENCE.mean_abs(x), np.float64([wide.mean() if x.size else 0]))
    close(it.run("side_means", x), REFERENCE.side_means(x), np.float64([largest, largest]))
    close(it.run("clip_deviation", x, 1.5), REFERENCE.clip_deviation(x, 1.5), wide)


def test_what_kernels_do_not_take_is_left_to_torch(it):
    k, device = it.kernels, it.device
    base = torch.from_numpy(data("gaussian", 64)).to(device)
    dense = it.back(base)[::2].copy()
    same(it.back(k.pack_signs(base[::2])), REFERENCE.pack_signs(dense))
    same(it.back(k.topk(base[::2], 5)), REFERENCE.topk(dense, 5))
    out = torch.zeros(64, device=device)
    k.add_signs(out[::2], k.pack_signs(base[::2]), None, 1.0)
    same(it.back(out[::2]), REFERENCE.signs(dense))
    assert k.all_finite(base.double()) == 1
    same(it.back(k.add(base.double(), base, 2.0)), it.back(base).astype(np.float64) * 3)


def test_words_far_behind_the_start_are_counted_in_64_bits(it):
    from grace.kernels.random import philox
    from grace.kernels.triton.launching import launch
    from grace.kernels.triton.random import words_of
    from tests.support.triton_kernels import words_from

    out = torch.zeros(16, dtype=torch.uint32, device=it.device)
    launch(words_from, 1, out, 4 * 0xFFFFFFFE, *words_of(STREAM))
    key_low, key_high, step, draw = STREAM.words
    low, high = np.uint32([0xFFFFFFFE, 0xFFFFFFFF, 0, 1]), np.uint32([0, 0, 1, 1])
    wanted = philox((low, high, np.full_like(low, step), np.full_like(low, draw)), (key_low, key_high))
    assert (it.back(out) == np.stack(wanted, axis=1).reshape(-1)).all()
