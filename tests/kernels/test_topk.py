"""Top-k is exact on the data that its sampled fast path finds hardest."""

import numpy as np
import pytest

from grace.kernels.fused.primitives import FusedKernels
from tests.support.data import EPSILON, REFERENCE, same
from tests.support.implementations import OTHERS, crossed

SIZES = [(1 << 14) - 1, 1 << 14, 20_011]


def adversarial(name: str, n: int) -> np.ndarray:
    rng = np.random.default_rng(n)
    x = rng.standard_normal(n).astype(np.float32)
    i = np.arange(n)
    sampled = np.zeros(n, bool)  # what the fast path looks at, for a stride of 8
    j = np.arange(n // 8)
    sampled[j * 8 + j * 7 % 8] = True
    return {
        "all equal": np.ones(n, np.float32),
        "all zero": np.zeros(n, np.float32),
        "ascending": np.sort(np.abs(x)),
        "descending": -np.sort(-np.abs(x)),
        "two values": np.where(x > 0, np.float32(1), np.float32(-1 - EPSILON)),
        "large only where sampled": np.where(sampled, 1 + np.abs(x), x / 100).astype(np.float32),
        "small only where sampled": np.where(sampled, x / 100, 1 + np.abs(x)).astype(np.float32),
        "periodic": np.sin(2 * np.pi * i / 8).astype(np.float32),
        "one spike": np.where(i == n - 1, np.float32(3e38), np.float32(0)),
        "mostly zero": np.where(i % 997 == 0, x, 0).astype(np.float32),
        "denormal": (i % 50 * 1.4012984643e-45).astype(np.float32),
        "last bit": np.float32(1) + (i % 3 * EPSILON).astype(np.float32),
        "nan and inf": np.where(i % 1000 == 0, np.nan, np.where(i % 777 == 0, -np.inf, x)).astype(np.float32),
    }[name]


NAMES = [
    "all equal", "all zero", "ascending", "descending", "two values", "large only where sampled",
    "small only where sampled", "periodic", "one spike", "mostly zero", "denormal", "last bit", "nan and inf",
]  # fmt: skip


@crossed(OTHERS, ("name", "n"), NAMES, SIZES)
def test_topk_is_exact_on(it, name, n):
    x = adversarial(name, n)
    order = np.argsort(~(x.view(np.uint32) & np.uint32(0x7FFFFFFF)), kind="stable")
    for k in (1, 2, 63, 512, n // 100, n // 8, n // 8 + 1, n // 2, n):
        same(it.run("topk", x, k), np.sort(order[:k]).astype(np.int32))


@crossed(OTHERS, ("name", "n"), NAMES, SIZES)
def test_topk_is_exact_of_chunks_of(it, name, n):
    x = adversarial(name, n)
    for chunk, k in ((32, 1), (256, 3), (1024, 10), (1024, 1024), (4096, 41)):
        same(it.run("topk_chunks", x, chunk, k), REFERENCE.topk_chunks(x, chunk, k))


@pytest.mark.parametrize("name", NAMES)
def test_topk_is_exact_where_the_sample_is_sparsest(name):
    n = 300_001
    x = adversarial(name, n)
    for k in (1, 8192, n // 8):
        same(FusedKernels().topk(x, k), REFERENCE.topk(x, k))


@pytest.mark.parametrize("n", SIZES)
def test_the_brute_force_definition_agrees_with_the_reference(n):
    for name in NAMES:
        x = np.nan_to_num(adversarial(name, n), nan=1.0, posinf=2.0, neginf=-3.0)
        k = n // 50
        order = sorted(range(n), key=np.abs(x).__getitem__, reverse=True)  # stable: equals stay in index order
        assert REFERENCE.topk(x, k).tolist() == sorted(order[:k])
