"""The counter-based random numbers."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from grace.core.context import Context
from grace.kernels import Stream
from grace.kernels.numba.loops import _random_blocks, u32
from grace.kernels.numba.primitives import NumbaKernels
from grace.kernels.random import philox, stream_key
from grace.kernels.torch.primitives import _philox
from tests.support.data import FALSE_ALARM
from tests.support.implementations import ALL, InTensorFlow

every = pytest.mark.parametrize("it", ALL)
LIKE = np.zeros(1, np.float32)
FUSED = NumbaKernels()  # the fastest; the others draw the same
ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    ("rounds", "counter", "key", "answer"),
    [
        (7, (0, 0, 0, 0), (0, 0), "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (10, (0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, (ONES, ONES, ONES, ONES), (ONES, ONES), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (10, *PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_random123s_known_answers(rounds, counter, key, answer):
    words = philox(tuple(np.array([word], np.uint32) for word in counter), key, rounds)
    assert " ".join(f"{int(word[0]):08x}" for word in words) == answer


@every
def test_all_kernels_give_the_known_answer_of_a_zero_counter_and_key(it):
    bits = it.run("random_bits", Stream(0), 4, LIKE)
    assert " ".join(f"{int(word):08x}" for word in bits) == "5f6fb709 0d893f64 4f121f81 4f730a48"


@every
def test_element_i_does_not_depend_on_n(it):
    whole = it.run("random_bits", Stream(9, 8, 7), 300_000, LIKE)
    for n in (0, 1, 3, 4, 5, 1023, 1025, 70_001):
        part = it.run("random_bits", Stream(9, 8, 7), n, LIKE)
        assert part.shape == (n,)
        assert (part == whole[:n]).all()


@every
def test_key_step_and_draw_each_change_the_numbers(it):
    low, high = Stream(1, 2, 3), Stream(1 + (1 << 40), 2, 3)
    streams = [low, high, Stream(1, 3, 3), Stream(1, 2, 4), Stream(1, 2 + (1 << 31), 3), low.permuting()]
    drawn = [it.run("random_bits", stream, 100, LIKE) for stream in streams]
    for a, b in itertools.combinations(drawn, 2):
        assert (a == b).mean() < 0.05


@given(first=st.integers(2**32 - 5, 2**62), key=st.integers(0, 2**64 - 1), step=st.integers(0, 2**32 - 1))
def test_blocks_beyond_32_bits_use_the_second_counter_word(first, key, step):
    stream = Stream(key, step, 5)
    blocks = np.arange(first, first + 9, dtype=np.uint64)
    low, high = (blocks & np.uint64(ONES)).astype(np.uint32), (blocks >> np.uint64(32)).astype(np.uint32)
    counter = (low, high, np.full_like(low, step), np.full_like(low, 5))
    wanted = np.stack(philox(counter, stream.words[:2]), axis=1).reshape(-1)
    fused = np.empty(36, np.uint32)
    _random_blocks(fused, first, *(u32(word) for word in stream.words))
    assert (fused == wanted).all()
    torch_words = _philox([torch.from_numpy(word.astype(np.int64)) for word in counter], stream.words[:2])
    assert (torch.stack(torch_words, 1).view(-1).numpy() == wanted).all()
    below = philox((low, np.zeros_like(low), *counter[2:]), stream.words[:2])
    assert (np.stack(below, axis=1).reshape(-1)[high.repeat(4) > 0] != wanted[high.repeat(4) > 0]).any()


@every
def test_uniform_numbers_are_multiples_of_2_to_the_minus_24_below_one(it):
    u = it.run("uniform", Stream(3), 100_000, LIKE).astype(np.float64)
    assert u.min() >= 0
    assert u.max() < 1
    assert (u * 2**24 == np.floor(u * 2**24)).all()
    counts = np.histogram(u, 256, (0, 1))[0]
    assert ((counts - u.size / 256) ** 2 / (u.size / 256)).sum() < chi2.isf(FALSE_ALARM, 255)


def test_streams_differ_by_seed_variable_and_rank_unless_shared():
    first, second = Context(rank=0, size=2), Context(rank=1, size=2)
    assert first.stream("w") != second.stream("w")
    assert first.stream("w", shared=True) == second.stream("w", shared=True)
    assert first.stream("w", shared=True) != first.stream("v", shared=True)
    assert Context(seed=1).stream("w") != Context(seed=2).stream("w")
    assert Context(step=1).stream("w") != Context(step=2).stream("w")
    assert stream_key(0, "a", "1") != stream_key(0, "a\0001", "")


@every
@settings(max_examples=8)
@given(n=st.integers(1, 5000), part=st.floats(0, 1), key=st.integers(0, 2**64 - 1))
def test_random_indices_are_distinct_and_in_range(it, n, part, key):
    k = round(part * n)
    indices = it.run("random_indices", Stream(key, 1), n, k, LIKE)
    assert indices.dtype == np.int32
    assert np.unique(indices).size == k
    assert k == 0 or (indices.min() >= 0 and indices.max() < n)


@pytest.mark.slow
@every
def test_all_indices_of_every_small_n_are_a_permutation_and_k_of_them_its_start(it):
    sizes = [*range(1, 36), 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 4999, 5000]
    for n in (1, 7, 64, 1025) if isinstance(it, InTensorFlow) else sizes:  # each takes it half a second
        whole = it.run("random_indices", Stream(n), n, n, LIKE)
        assert sorted(whole) == list(range(n))
        assert (it.run("random_indices", Stream(n), n, (n + 1) // 2, LIKE) == whole[: (n + 1) // 2]).all()


@pytest.mark.parametrize(("n", "k"), [(2, 1), (5, 1), (6, 2), (17, 5), (100, 10), (257, 64)])
def test_every_index_is_drawn_equally_often(n, k):
    steps, counts = 8000, np.zeros(n)
    for step in range(steps):
        counts[FUSED.random_indices(Stream(11, step), n, k)] += 1
    # drawing without replacement has covariance p (1-p) n/(n-1) (I - 11^T/n) a step
    p = k / n
    statistic = ((counts - steps * p) ** 2).sum() / (steps * p * (1 - p) * n / (n - 1))
    assert statistic < chi2.isf(FALSE_ALARM, n - 1)


@pytest.mark.parametrize("n", [3, 4, 6, 9, 17, 32])
def test_every_ordered_pair_of_first_indices_is_drawn_equally_often(n):
    steps, counts = 8000, np.zeros((n, n))
    for step in range(steps):
        a, b = FUSED.random_indices(Stream(12, step), n, 2)
        counts[a, b] += 1
    pairs = counts[~np.eye(n, dtype=bool)]
    expected = steps / pairs.size
    assert ((pairs - expected) ** 2 / expected).sum() < chi2.isf(FALSE_ALARM, pairs.size - 1)
