"""Ends of what terngrad, signum, dynamic8 and sketch take; exchange/test_aggregates.py has their formulas."""

import numpy as np
import pytest
import torch

from grace.compressors.dynamic8 import TABLES
from grace.core.registry import make
from grace.errors import ConfigError


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


@pytest.mark.parametrize("value", [0.1, -5.0])
def test_terngrad_keeps_a_tensor_without_spread(value):
    for shape in [(), (1,), (1000,)]:
        x = np.full(shape, value, np.float32)
        assert (round_trip("terngrad", x) == x).all()


# -- formulas --------------------------------------------------------------------------------------------------


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


# -- sketch ----------------------------------------------------------------------------------------------------
