"""natural, terngrad, onebit, signum, dynamic8 and sketch against their formulas."""

import numpy as np
import pytest
import torch
from scipy.stats import binom

from grace.compressors.dynamic8 import TABLES
from grace.core.registry import make
from grace.errors import ConfigError
from tests.support.data import FALSE_ALARM


def gaussian(shape, seed=0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def round_trip(spec, x, step=0):
    compressor = make("compressor", spec)
    compressor.context.step = step
    return compressor.decompress(*compressor.compress(x, "w"))


# -- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "terngrad(clip=0)", "signum(momentum=-1)", "signum(momentum=2)", "dynamic8(table=other)", "sketch(quantiles=1)",
        "sketch(quantiles=257)", "sketch(quantiles=2.5)",
    ],
)  # fmt: skip
def test_parameters_out_of_range_are_refused(spec):
    with pytest.raises(ConfigError, match="must be"):
        make("compressor", spec)


# -- unbiased ------------------------------------------------------------------------------------------------


def outside(ups: np.ndarray, trials: int, p: np.ndarray) -> np.ndarray:
    """Where a count of successes is too far from its binomial distribution, by an exact two-sided test."""
    alpha = FALSE_ALARM / 2 / p.size
    return (binom.cdf(ups, trials, p) < alpha) | (binom.sf(ups - 1, trials, p) < alpha)


def test_terngrad_is_unbiased_for_the_clipped_tensor():
    trials, clip = 4000, 1.5
    x = gaussian(97, 3)
    limit = clip * x.astype(np.float64).std()
    clipped = np.clip(x.astype(np.float64), -limit, limit)
    scale = np.abs(clipped).max()
    assert scale < np.abs(x).max()
    decoded = round_trip(f"terngrad(clip={clip})", np.tile(x, trials)).reshape(trials, -1)
    sent = np.abs(decoded) > 0
    assert np.allclose(np.abs(decoded[sent]), scale, rtol=1e-6)
    assert (np.sign(decoded) == np.sign(x) * sent).all()
    assert not outside(sent.sum(axis=0), trials, np.minimum(1, np.abs(clipped) / scale)).any()


@pytest.mark.parametrize("value", [0.1, -5.0])
def test_terngrad_keeps_a_tensor_without_spread(value):
    for shape in [(), (1,), (1000,)]:
        x = np.full(shape, value, np.float32)
        assert (round_trip("terngrad", x) == x).all()


# -- formulas --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_signum_sends_the_signs_of_the_momentum(convert):
    momentum, moment, signum = 0.7, np.zeros((3, 5)), make("compressor", "signum(momentum=0.7)")
    followed = 0
    for step in range(12):
        gradient = gaussian((3, 5), step)
        moment = momentum * moment + (1 - momentum) * gradient
        sign = np.asarray(signum.decompress(*signum.compress(convert(gradient), "w")))
        assert np.allclose(np.asarray(signum.state["w"]), moment, atol=1e-6)
        assert (sign == np.where(moment >= 0, 1, -1)).all()
        followed += (sign != np.where(gradient >= 0, 1, -1)).sum()
        signum.state.commit()
    assert followed > 10  # the momentum, not the gradient, was sent


def test_signum_of_no_momentum_is_signsgd():
    signum, x = make("compressor", "signum(momentum=0)"), gaussian(50)
    for step in range(3):
        x = gaussian(50, step)
        assert (signum.decompress(*signum.compress(x, "w")) == round_trip("signsgd", x)).all()


def test_signum_keeps_one_momentum_per_variable_and_drops_that_of_a_failed_step():
    signum = make("compressor", "signum")
    signum.compress(np.float32([1]), "a")
    signum.compress(np.float32([-1]), "b")
    signum.state.commit()
    signum.compress(np.float32([np.nan]), "a")
    signum.state.rollback()
    assert signum.state["a"].tolist() == [np.float32(0.1)]
    assert signum.state["b"].tolist() == [-np.float32(0.1)]


def test_signum_does_not_notice_that_the_loss_scale_changes():
    plain, scaled = make("compressor", "signum"), make("compressor", "signum")
    for step, loss_scale in enumerate([1.0, 65536.0, 2.0, 0.5]):
        x = gaussian(100, step)
        scaled.context.loss_scale = loss_scale
        payload, _ = plain.compress(x, "w")
        same, _ = scaled.compress(x * np.float32(loss_scale), "w")
        assert payload[0].tolist() == same[0].tolist()


# -- dynamic8 --------------------------------------------------------------------------------------------------


def test_the_dynamic_tree_has_256_values_and_the_largest_is_1():
    table = TABLES["tree"]
    assert table.dtype == np.float32
    assert np.unique(table).size == table.size == 256
    assert (np.diff(table) > 0).all()
    assert table[-1] == 1
    assert (table == 0).sum() == 1
    assert table[0] > -1
    positive = table[table > 0][:-1]
    assert (positive == -table[table < 0][::-1]).all()
    # 64 in the first decade below 1, then half as many in each next one
    assert [((positive > 10.0**-d / 10) & (positive < 10.0**-d)).sum() for d in range(7)] == [64, 32, 16, 8, 4, 2, 1]


def test_dynamic8_decides_exactly_at_the_midpoints():
    table = TABLES["tree"]
    middle = ((table[:-1].astype(np.float64) + table[1:]) / 2).astype(np.float32)
    around = np.concatenate([middle, np.nextafter(middle, np.float32(-9)), np.nextafter(middle, np.float32(9)), [1]])
    x = around.astype(np.float32)
    (codes, _), _ = make("compressor", "dynamic8").compress(x, "w")
    wanted = np.abs(x.astype(np.float64)[:, None] - table.astype(np.float64)).argmin(axis=1)
    assert codes.tolist() == wanted.tolist()
    (torch_codes, _), _ = make("compressor", "dynamic8").compress(torch.from_numpy(x), "w")
    assert torch_codes.tolist() == wanted.tolist()


def test_dynamic8_keeps_its_own_values():
    x = TABLES["tree"] * np.float32(4)
    assert (round_trip("dynamic8", x) == x).all()


# -- sketch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 5, 64])
def test_sketch_of_no_more_elements_than_buckets_is_exact(n):
    x = gaussian(n)
    assert (round_trip("sketch", x) == x).all()
