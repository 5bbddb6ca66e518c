"""Single methods' start values and sums, and the methods that a compressor must define."""

import inspect

import numpy as np
import pytest

import grace
from grace.core.compressor import Compressor
from tests.support.data import data, same
from tests.support.methods import make, sent


def test_powersgd_starts_alike_on_every_rank_and_keeps_q_only_if_warm():
    first, second = make("powersgd", rank=0, size=2), make("powersgd", rank=1, size=2)
    x = data("gaussian", (6, 4))
    same(next(first.exchange(x, "w"))[0], next(second.exchange(x, "w"))[0])
    assert (next(first.exchange(x, "w"))[0] != next(first.exchange(x, "v"))[0]).any()
    cold = make("powersgd(warm_start=false)")
    cold.compress(x, "w")
    assert len(cold.state) == 0


def test_powersgd_takes_rank_rows_and_columns():
    assert sum(tensor.nbytes for tensor in sent(make("powersgd(rank=2)"), data("gaussian", (30, 5, 4)))) == 4 * 2 * 50


def test_no_compression_accumulates_sixteen_bits_in_float32():
    none = make("none", size=3)
    ranks = [np.float16([1, 2048]), np.float16([2**-12, 1]), np.float16([2**-12, 1])]
    out = none.aggregate([[x] for x in ranks], None, np.zeros(2, np.float16), 3)
    same(out, (np.sum(np.float32(ranks), axis=0) / np.float32(3)).astype(np.float16))


def test_a_compressor_without_its_methods_says_which_are_missing():
    class Nothing(Compressor):
        name = "nothing"

    with pytest.raises(TypeError, match="Nothing must define compress"):
        Nothing().compress(np.zeros(1), "w")
    with pytest.raises(TypeError, match="Nothing must define decompress"):
        Nothing().decompress([], None)


def test_every_builtin_compressor_is_documented_with_its_source():
    for name, cls in grace.known("compressor").items():
        if not cls.__module__.startswith("grace.compressors."):
            continue
        assert ">>>" in inspect.getdoc(cls), name
        assert name in ("none", "cast") or "Source" in inspect.getdoc(cls), name
