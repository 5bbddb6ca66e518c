"""Promises of methods about their errors: unbiased ones by a z test, contractions by their bounds."""

import itertools
import math

import numpy as np
import pytest
import torch

import grace
from tests.support.data import data, z_limit
from tests.support.methods import SPECS, decoded, make

UNBIASED = [spec for spec in SPECS if make(spec).traits.unbiased and "terngrad" not in spec and spec != "none"]
UNBIASED += ["qsgd(levels=1, norm=l2)", "qsgd(levels=3, bucket_size=100)", "randomk(ratio=0.1, unbiased=true)"]
"""All but terngrad, which is unbiased for the clipped tensor: its formula is in exchange/test_aggregates.py."""


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


def energies(compressor, x) -> tuple[float, float]:
    """||x - C(x)||^2 and ||x||^2."""
    error = np.float64(x) - decoded(compressor, torch.from_numpy(x))
    return float((error**2).sum()), float((np.float64(x) ** 2).sum())


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
