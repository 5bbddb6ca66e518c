"""What methods promise of their errors: unbiased ones by a z test, contractions by their bounds."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import grace
from tests.support.data import data, z_limit
from tests.support.methods import SPECS, decoded, make

UNBIASED = [spec for spec in SPECS if make(spec).traits.unbiased and "terngrad" not in spec and spec != "none"]
UNBIASED += ["qsgd(levels=1, norm=l2)", "qsgd(levels=3, bucket_size=100)", "randomk(ratio=0.1, unbiased=true)"]
"""All but terngrad, which is unbiased for the clipped tensor: test_value_quantizers.py."""


@pytest.mark.parametrize(("spec", "kind"), list(zip(UNBIASED, itertools.cycle(["gaussian", "heavy"]), strict=False)))
def test_unbiased_methods_pass_a_z_test(spec, kind):
    assert grace.make("compressor", spec).traits.unbiased
    x = torch.from_numpy(data(kind, 1000, 3))
    compressor, steps = make(spec), 2000
    rng = np.random.default_rng(0)
    # a bias shows along the gradient itself, along its signs, over all elements, or in a random direction
    directions = np.stack([x.numpy(), np.sign(x.numpy()), np.ones(1000), *rng.standard_normal((5, 1000))])
    errors = np.empty((steps, len(directions)))
    for step in range(steps):
        compressor.context.step = step
        errors[step] = directions @ np.float64(compressor.decompress(*compressor.compress(x, "w")) - x)
    spread = errors.std(axis=0, ddof=1)
    moving = spread > 1e-4 * np.abs(directions * x.numpy()).sum(axis=1)  # unlike the sum of a fixed selection
    z = errors.mean(axis=0)[moving] / (spread[moving] / math.sqrt(steps))
    assert moving.sum() >= 6
    assert np.abs(z).max() < z_limit(len(directions))
    if kind == "gaussian":  # the test has the power to see a bias of five percent
        assert spread[0] * z_limit(len(directions)) / math.sqrt(steps) < 0.05 * float(x @ x)


# -- contractions ------------------------------------------------------------------------------------------

KINDS = ["gaussian", "heavy", "tied", "mostly-zero"]


def energies(compressor, x) -> tuple[float, float]:
    """||x - C(x)||^2 and ||x||^2."""
    error = np.float64(x) - decoded(compressor, torch.from_numpy(x))
    return float((error**2).sum()), float((np.float64(x) ** 2).sum())


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(1, 2000), ratio=st.floats(0.001, 1), seed=st.integers(0, 1000))
def test_topk_leaves_at_most_one_minus_k_over_n(kind, n, ratio, seed):
    error, total = energies(make(f"topk(ratio={ratio})"), data(kind, n, seed))
    k = max(1, round(ratio * n))
    assert error <= (1 - k / n) * total * (1 + 1e-12)


@pytest.mark.parametrize("kind", ["heavy", "mostly-zero"])
def test_randomk_leaves_one_minus_k_over_n_on_average(kind):
    x, compressor, steps = data(kind, 500, 1), make("randomk(ratio=0.1)"), 2000
    left = np.empty(steps)
    for step in range(steps):
        compressor.context.step = step
        error, total = energies(compressor, x)
        assert error <= total
        left[step] = error / total
    z = (left.mean() - 0.9) / (left.std(ddof=1) / math.sqrt(steps))
    assert abs(z) < z_limit()


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(1, 2000), seed=st.integers(0, 1000))
def test_efsignsgd_leaves_what_its_formula_says(kind, n, seed):
    x = data(kind, n, seed)
    error, total = energies(make("efsignsgd"), x)
    # where x is 0 the sign is +1: the formula holds for any choice of sign there
    assert error == pytest.approx(total - np.abs(np.float64(x)).sum() ** 2 / n, rel=1e-5, abs=1e-5 * total)


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (8, 3, 3, 3), (4, 4), (50,)])
def test_powersgd_contracts_and_warm_start_improves_it(rank, shape):
    x = data("gaussian", shape, 3)
    warm, errors = make(f"powersgd(rank={rank})"), []
    for step in range(20):
        warm.context.step = step
        error, total = energies(warm, x)
        assert error <= total * (1 + 1e-6)
        errors.append(error / total)
    singular = np.linalg.svd(np.float64(x).reshape(shape[0], -1), compute_uv=False) ** 2
    best = 1 - singular[:rank].sum() / singular.sum()
    assert errors[-1] <= errors[0] + 1e-6
    assert best - 1e-6 <= errors[-1] <= best + 0.05


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_recovers_a_matrix_of_its_rank(rank):
    x = data("gaussian", (40, rank), 1) @ data("gaussian", (rank, 25), 2)
    error, total = energies(make(f"powersgd(rank={rank})"), x)
    assert error <= 1e-9 * total
