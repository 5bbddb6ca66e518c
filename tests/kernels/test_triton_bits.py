"""Triton's kernels of single variables have the reference's bits, at the limits of their programs and of odd numbers.

They run on a GPU where there is one, and else in Triton's interpreter, which test_triton.py starts.
"""

import numpy as np
import pytest

from grace.kernels import Stream
from tests.support.data import REFERENCE, data, same
from tests.support.implementations import OTHERS

torch = pytest.importorskip("torch")
FOUND = [param for param in OTHERS if param.id == "triton"]
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


def test_random_numbers_and_places(it, x):
    like = np.zeros(1, np.float32)
    exactly(it, "uniform", STREAM, x.size, like)
    exactly(it, "sample_indices", STREAM, x.size + 1, x.size, like)
    indices = exactly(it, "random_indices", STREAM, x.size + 1, x.size // 2, like)
    exactly(it, "scatter_add", data("gaussian", x.size + 1, 1), indices, x[: x.size // 2], 1 / 3)
    bitmap = exactly(it, "bitmap", np.sort(indices), x.size + 1)
    for count in (None, indices.size):
        exactly(it, "positions", bitmap, x.size + 1, count)
    if found := REFERENCE.positions(bitmap, x.size + 1).tolist():  # what is damaged writes nowhere else
        assert it.run("positions", bitmap, x.size + 1, len(found) - 1).tolist() == found[:-1]
        assert it.run("positions", bitmap, x.size + 1, len(found) + 2).tolist() == [*found, -1, -1]


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
    """A CUDA graph reads it there, because it makes the same launch at every step."""
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


@pytest.mark.parametrize("bad", [-np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_among_the_largest(it, bad):
    for place in (0, 2000):
        x = data("gaussian", 2001)
        x[place] = bad
        exactly(it, "topk", x, 3)


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
    """Return the elements from which the search for the largest makes its guess, as a mask."""
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


def test_tensors_with_gaps_are_left_to_torch(it):
    base = torch.from_numpy(data("gaussian", 64)).to(it.device)
    same(it.back(it.kernels.topk(base[::2], 5)), REFERENCE.topk(it.back(base)[::2].copy(), 5))
    out, places = torch.zeros(64, device=it.device), torch.tensor([1, 3], dtype=torch.int32, device=it.device)
    it.kernels.scatter_add(out[::2], places, torch.ones(2, device=it.device), 2.0)
    assert out.nonzero().view(-1).tolist() == [2, 6]


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
