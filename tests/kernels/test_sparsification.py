"""Every implementation equals the NumPy reference: sparsification."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from grace.kernels import Stream
from tests.support.data import REFERENCE, close, data, same
from tests.support.examples import VECTORS
from tests.support.kernel_cases import WEIGHTS, others

BAD = st.sampled_from([np.nan, -np.nan, np.inf, -np.inf])


@others
@given(x=VECTORS, part=st.floats(0, 1), bad=st.lists(st.tuples(st.integers(0, 2**31), BAD), max_size=4))
def test_topk_gives_the_same_indices(it, x, part, bad):
    for position, value in bad:
        x[position % max(1, x.size) : position % max(1, x.size) + 1] = value
    k = round(part * x.size)
    same(it.run("topk", x, k), REFERENCE.topk(x, k))


@others
@given(x=VECTORS, bits=st.integers(5, 7), part=st.floats(0, 1), bad=st.lists(BAD, max_size=4))
def test_topk_of_chunks_is_that_of_each(it, x, bits, part, bad):
    x[: 3 * len(bad) : 3] = bad[: x[: 3 * len(bad) : 3].size]
    chunk = 1 << bits
    k = max(1, round(part * chunk))
    found = it.run("topk_chunks", x, chunk, k)
    same(found, REFERENCE.topk_chunks(x, chunk, k))
    each = [x[low : low + chunk] for low in range(0, x.size, chunk)]
    wanted = [REFERENCE.topk(one, -(-k * one.size // chunk)) + chunk * place for place, one in enumerate(each)]
    same(found, np.concatenate([np.empty(0, np.int32), *wanted]).astype(np.int32))


@others
def test_16_bits_tell_the_places_of_chunks(it):
    for n, chunk, k in ((200_001, 1024, 10), (70_000, 32, 1), (131_072, 4096, 1), (0, 64, 1)):
        found = REFERENCE.topk_chunks(data("gaussian", n), chunk, k)
        low = it.run("narrow", found)
        same(low, found.astype(np.uint16).view(np.int16))
        same(it.run("widen_chunks", low, chunk, k), found)


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
