"""Methods of several rounds, for all variables of a bucket together."""

import math

import numpy as np
import pytest
import torch

from grace.compressors.powersgd import SMALL, PowerSGD
from grace.core.compressor import Compressor, Traits
from tests.support.data import data, same
from tests.support.methods import make

SHAPES = [(20, 30), (3, 4, 5), (20, 30), (1000, 30), (), (0, 3), (30, 20), (7,), (5, 12), (20, 30), (1000, 30)]
NAMES = [f"v{i}" for i in range(len(SHAPES))]
frameworks = pytest.mark.parametrize("convert", [np.array, torch.from_numpy], ids=["numpy", "torch"])


def gradients(step, convert=torch.from_numpy, rank=0):
    found = [data("gaussian", shape, 100 * step + 10 * i + rank) for i, shape in enumerate(SHAPES)]
    return [convert(np.array(x, np.float32)) for x in found]


def run(rounds):
    """All rounds, as if this were the only rank."""
    payloads = next(rounds)
    while True:
        try:
            payloads = rounds.send(payloads)
        except StopIteration as end:
            return end.value


@frameworks
@pytest.mark.parametrize("spec", ["powersgd(rank=1)", "powersgd(rank=3)", "powersgd(rank=2, warm_start=false)"])
def test_powersgd_of_a_bucket_is_that_of_each_variable(spec, convert):
    assert any(math.prod(shape) > SMALL for shape in SHAPES)
    together, alone = make(spec), make(spec)
    for step in range(3):
        together.context.step = alone.context.step = step
        tensors = gradients(step, convert)
        given = [np.asarray(x).copy() for x in tensors]
        found = run(together.exchange_all(iter(tensors), NAMES))
        for name, x, before, (payload, ctx) in zip(NAMES, tensors, given, found, strict=True):
            wanted, own = alone.compress(x, name)
            assert ctx == own
            for a, b in zip(payload, wanted, strict=True):
                same(np.asarray(a), np.asarray(b))
            same(np.asarray(x), before)
        assert sorted(together.state) == sorted(alone.state)
        for name, q in alone.state.items():
            same(np.asarray(together.state[name]), np.asarray(q))
        together.state.commit()
        alone.state.commit()


@frameworks
def test_a_bad_number_in_one_matrix_leaves_those_beside_it_alone(convert):
    powersgd = make("powersgd(rank=2)")
    tensors = gradients(0, convert)
    wanted = run(powersgd.exchange_all(tensors, NAMES))
    powersgd.state.rollback()
    tensors[0][1, 2] = math.nan
    with np.errstate(invalid="ignore"):
        found = run(powersgd.exchange_all(tensors, NAMES))
    assert not np.isfinite(np.asarray(found[0][0][1])).all()
    for (payload, _), (clean, _) in list(zip(found, wanted, strict=True))[1:]:
        for a, b in zip(payload, clean, strict=True):
            same(np.asarray(a), np.asarray(b))


class Halves(Compressor):
    """The mean of the first half, then that of the second."""

    name = "halves"
    traits = Traits(category="quantization", summable=True, rounds=2)
    more = ""

    def exchange(self, tensor, name):
        half = len(tensor) // 2
        (first,) = yield [tensor[:half]]
        (second,) = yield [tensor[half:]]
        if name == self.more:
            yield [second]
        return [first, second], name


def test_a_users_method_runs_variable_by_variable_each_as_it_is_taken():
    taken = []

    def tensors():
        for n in (2, 4):
            taken.append(n)
            yield np.arange(n)

    rounds = Halves().exchange_all(tensors(), ["a", "b"])
    assert taken == []
    first = next(rounds)
    assert [p.tolist() for (p,) in first] == [[0], [0, 1]]
    assert taken == [2, 4]
    second = rounds.send([[10 * p] for (p,) in first])
    with pytest.raises(StopIteration) as end:
        rounds.send(second)
    (a, ctx_a), (b, ctx_b) = end.value.value
    assert ([x.tolist() for x in a], ctx_a) == ([[0], [1]], "a")
    assert ([x.tolist() for x in b], ctx_b) == ([[0, 10], [2, 3]], "b")


def test_a_method_that_goes_on_for_one_variable_is_refused():
    method = Halves()
    method.more = "b"
    with pytest.raises(TypeError, match=r"Halves.exchange\(\) yields more payloads of some variables than of others"):
        run(method.exchange_all([np.arange(2), np.arange(4)], ["a", "b"]))


def test_a_method_of_a_bucket_serves_single_tensors():
    class OfBuckets(PowerSGD):
        name = "of buckets"

        def exchange_all(self, tensors, names):
            means = yield [[tensor + 1] for tensor in tensors]
            return [(mean, name) for mean, name in zip(means, names, strict=True)]

    payload, ctx = OfBuckets().compress(np.float32([1]), "w")
    assert (payload[0].tolist(), ctx) == ([2], "w")
