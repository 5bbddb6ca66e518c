"""Zeros, ties, infinities, seeds, and the contract itself."""

import inspect
import math

import numpy as np
import pytest
import torch

import grace
from grace.communicators import Allgather
from grace.core.compressor import Compressor
from tests.support.data import HUGE, data, same
from tests.support.methods import communicator_of, decoded, make, sent


@pytest.mark.parametrize("make_tensor", [np.array, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("levels", [1, 7, 127])
def test_qsgd_keeps_values_at_the_scale_and_never_exceeds_it(make_tensor, levels):
    qsgd = make(f"qsgd(levels={levels}, bucket_size=4)")
    x = np.float32([3, -3, 0, 1, HUGE, -HUGE, 1e-45, 0, 1e-45, -1e-45, 0, 0])
    for step in range(200):
        qsgd.context.step = step
        y = np.asarray(qsgd.decompress(*qsgd.compress(make_tensor(x.copy()), "w")))
        assert (y[[0, 1, 2, 4, 5, 8, 9, 10, 11]] == x[[0, 1, 2, 4, 5, 8, 9, 10, 11]]).all()
        assert abs(y[3]) <= 3


def test_powersgd_starts_alike_on_every_rank_and_keeps_q_only_if_warm():
    first, second = make("powersgd", rank=0, size=2), make("powersgd", rank=1, size=2)
    x = data("gaussian", (6, 4))
    same(next(first.exchange(x, "w"))[0], next(second.exchange(x, "w"))[0])
    assert (next(first.exchange(x, "w"))[0] != next(first.exchange(x, "v"))[0]).any()
    cold = make("powersgd(warm_start=false)")
    cold.compress(x, "w")
    assert len(cold.state) == 0


def test_randomk_draws_the_same_indices_on_every_rank_and_new_ones_every_step():
    ranks = [make("randomk(ratio=0.1)", rank=rank, size=2, step=step) for rank, step in ((0, 1), (1, 1), (0, 2))]
    a, b, c = (compressor.compress(data("gaussian", 300), "w")[1][1] for compressor in ranks)
    assert (a == b).all()
    assert set(a) != set(c)
    communicator, x = communicator_of("randomk(ratio=0.1)", "none"), data("gaussian", 300)
    assert (communicator.step(x, "w") != communicator.step(x, "w")).any()


@pytest.mark.parametrize("spec", ["qsgd(levels=1)", "natural", "terngrad"])
def test_stochastic_rounding_differs_by_rank_step_and_seed(spec):
    x = data("gaussian", 1000)
    base = decoded(make(spec, rank=0, step=1), x)
    same(base, decoded(make(spec, rank=0, step=1), x))
    for context in ({"rank": 1, "step": 1}, {"rank": 0, "step": 2}, {"rank": 0, "step": 1, "seed": 1}):
        assert (decoded(make(spec, **context), x) != base).mean() > 0.1


def test_powersgd_takes_rank_rows_and_columns():
    assert sum(tensor.nbytes for tensor in sent(make("powersgd(rank=2)"), data("gaussian", (30, 5, 4)))) == 4 * 2 * 50


def test_no_compression_accumulates_sixteen_bits_in_float32():
    none = make("none", size=3)
    ranks = [np.float16([1, 2048]), np.float16([2**-12, 1]), np.float16([2**-12, 1])]
    out = none.aggregate([[x] for x in ranks], None, np.zeros(2, np.float16), 3)
    same(out, (np.sum(np.float32(ranks), axis=0) / np.float32(3)).astype(np.float16))


def test_a_sign_is_one_whatever_the_loss_scale():
    sign = make("signsgd", loss_scale=1024.0)
    payload, ctx = sign.compress(np.float32([5, -5]), "w")
    out = sign.aggregate([payload], ctx, np.zeros(2, np.float32), 1)
    assert (out / 1024).tolist() == [1, -1]


def test_cast_makes_inf_of_what_is_out_of_range():
    same(decoded(make("fp16"), np.float32([65504, 65520, -1e30])), np.float32([65504, np.inf, -np.inf]))
    bf16 = make("bf16")
    got = bf16.decompress(*bf16.compress(torch.tensor([65520.0, 1.0, HUGE]), "w"))
    assert got.tolist() == [65536.0, 1.0, math.inf]


def test_a_users_compressor_in_plain_torch_works():
    class Half(Compressor):
        name = "half"
        traits = grace.Traits(category="quantization", contraction=True, memory="residual")

        def compress(self, tensor, name):
            return [tensor.half()], None

        def decompress(self, payload, ctx):
            return payload[0].float()

    x = torch.tensor([1.0, 0.1])
    assert torch.equal(Allgather(Half()).step(x, "w"), x.half().float())


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
