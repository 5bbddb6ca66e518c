"""Index coding: the smallest form by the sizes alone, and one decoder."""

import itertools

import numpy as np
import torch

from grace.kernels import kernels_of
from grace.kernels.index_coding import coded_as, decode, encode
from tests.support.grouping import in_groups
from tests.support.pairwise import pairwise

VALUES = [1, 8, 1000, 65536, 65537, 300_000], [0.001, 0.02, 0.05, 0.1, 0.9, 1.0], [True, False]
CASES = [*itertools.product(*VALUES, ["numpy"]), *((*case, "torch") for case in pairwise(*VALUES))]
"""All forms in NumPy; torch's are chosen by the same sizes."""


@in_groups(("n", "ratio", "fixed", "framework"), CASES, lambda n, *_: str(n))
def test_positions_survive_in_the_smallest_form(n, ratio, fixed, framework):
    count = max(1, int(n * ratio))
    indices = np.sort(np.random.default_rng(0).choice(n, count, replace=False)).astype(np.int32)
    tensor = indices if framework == "numpy" else torch.from_numpy(indices)
    k = kernels_of(tensor)
    coded = encode(k, tensor, n, fixed)
    np.testing.assert_array_equal(np.asarray(decode(k, coded, n)), indices)
    sizes = [32 * count] + [16 * count] * (n <= 65536) + [8 * ((n + 7) // 8)] * fixed
    assert 8 * coded.nbytes == min(sizes)
    assert coded_as(n, count if fixed else None) == (k.dtype(coded), coded.shape[0] if fixed else None)


def test_both_frameworks_send_the_same_bytes():
    indices = np.arange(0, 60_000, 7, dtype=np.int32)
    for n, fixed in ((60_000, True), (60_000, False), (200_000, False)):
        a = encode(kernels_of(indices), indices, n, fixed)
        t = torch.from_numpy(indices)
        assert a.tobytes() == encode(kernels_of(t), t, n, fixed).numpy().tobytes()
