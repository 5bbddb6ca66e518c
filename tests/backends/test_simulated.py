"""One process that pretends many ranks: collectives, bytes, and real exchanges over it."""

import numpy as np
import pytest

from grace.backends.simulated import SimulatedRanks
from grace.core.backend import Handle
from grace.core.context import Context
from grace.core.route import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, GATHER, Carries, Collective, Leg
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.session.exchange_plan import UniformPlan
from grace.session.setup import build_step_runner


def made(framework, values, dtype):
    if framework == "numpy":
        return np.array(values, dtype)
    module = pytest.importorskip(framework)
    if framework == "torch":
        return module.tensor(values, dtype=getattr(module, dtype))
    return module.constant(values, dtype)


FRAMEWORKS = ["numpy", "torch", pytest.param("tensorflow", marks=pytest.mark.slow)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (3, 0), (3, 2)])
def test_every_collective_brings_what_equal_ranks_would(framework, size, rank):
    simulated = SimulatedRanks(size, rank)
    numbers, raw = made(framework, [1.0, 2.0, -3.0], "float32"), made(framework, [5, 6, 7], "uint8")
    gathered, kept = simulated.allgather(raw).wait(), raw
    assert [np.asarray(part).tolist() for part in gathered] == [[5, 6, 7]] * size
    assert all(part is not kept for part in gathered)
    (joined,) = simulated.concatenate(raw).wait()
    assert np.asarray(joined).tolist() == [5, 6, 7] * size
    parts = simulated.alltoall(raw).wait()
    own = [5, 6, 7] if size == 1 else [[5], [6], [7]][rank]
    assert [np.asarray(part).tolist() for part in parts] == [own] * size
    assert [np.asarray(part).tolist() for part in simulated.gather(raw, rank).wait()] == [[5, 6, 7]] * size
    assert np.asarray(simulated.allreduce(numbers).wait()).tolist() == [size, 2 * size, -3 * size]
    assert simulated.allgather_object({"a": rank}) == [{"a": rank}] * size
    if size > 1:
        assert simulated.gather(raw, (rank + 1) % size).wait() == []


def test_bytes_are_counted_as_every_backend_counts_them():
    def sent(do, rank=0):
        simulated = SimulatedRanks(4, rank)
        handle = do(simulated)
        assert isinstance(handle, Handle)
        return simulated.sent_bytes

    x, raw = np.zeros(8, np.float32), np.zeros(8, np.uint8)
    assert sent(lambda m: m.allreduce(x)) == 48  # 2 (W-1)/W of 32
    assert sent(lambda m: m.allgather(raw)) == sent(lambda m: m.concatenate(raw)) == 24
    assert sent(lambda m: m.alltoall(raw)) == 6
    assert (sent(lambda m: m.broadcast(raw, 0)), sent(lambda m: m.broadcast(raw, 1))) == (24, 0)
    assert (sent(lambda m: m.gather(raw, 0)), sent(lambda m: m.gather(raw, 1))) == (0, 8)


def test_others_broadcast_what_this_rank_does():
    simulated, own = SimulatedRanks(3), np.uint8([1, 2])
    every = [simulated.broadcast(own if r == 0 else np.zeros(2, np.uint8), r) for r in range(3)]
    assert [handle.wait().tolist() for handle in every] == [[1, 2]] * 3
    assert simulated.broadcast(np.uint8([9]), 0).wait().tolist() == [9]  # nothing like it was sent


def test_copies_of_large_tensors_are_shared(monkeypatch):
    monkeypatch.setattr("grace.backends.simulated.MOST_BYTES", 20)
    parts = SimulatedRanks(5).allgather(np.zeros(10, np.uint8)).wait()
    assert len({id(part) for part in parts}) == 2
    assert len(parts) == 5


def test_there_must_be_such_a_rank():
    with pytest.raises(ConfigError, match=r"of 2 ranks.*no rank 2"):
        SimulatedRanks(2, 2)


def test_collectives_of_users_become_known_ones_that_bring_as_many_tensors():
    own = Collective("tree", lambda *_: 1 / 0, lambda *_: 0.0)
    route = [Leg(own, Carries.GRADIENTS), Leg(own, Carries.MEANS, 1), Leg(ALL_TO_ALL, Carries.GRADIENTS)]

    def known(sums):
        return [(leg.collective, leg.carries, leg.root) for leg in SimulatedRanks(3).supported(route, sums)]

    gradients, means, untouched = known(sums=False)
    assert gradients == (ALL_GATHER, Carries.GRADIENTS, None)
    assert means == (GATHER, Carries.MEANS, 1)
    assert untouched == (ALL_TO_ALL, Carries.GRADIENTS, None)
    assert [collective for collective, *_ in known(sums=True)] == [ALL_REDUCE, ALL_REDUCE, ALL_TO_ALL]


def test_it_splits_and_tells_how_long_it_took():
    simulated = SimulatedRanks(4, 2)
    some = simulated.split([1, 2])
    assert (some.size, some.rank, simulated.split([0, 1])) == (2, 1, None)
    simulated.allgather(np.zeros(1 << 16, np.uint8))
    assert simulated.spent > 0
    assert simulated.duplicate().sent_bytes == 0


@pytest.mark.parametrize("spec", ["none", "fp16", "topk(ratio=0.1)", "efsignsgd", "powersgd(rank=2)", "threshold"])
@pytest.mark.parametrize("ranks", [2, 5])
def test_exchanges_over_it_give_what_one_rank_alone_gets(spec, ranks):
    """The mean of equal payloads is what one decodes to."""
    x = np.random.default_rng(0).standard_normal((20, 30)).astype(np.float32)

    def mean(size):
        simulated, variable = SimulatedRanks(size), Variable("w", x.shape)
        plan = UniformPlan(spec, None, "allgather" if spec == "efsignsgd" else None)
        runner = build_step_runner(lambda: [variable], lambda: plan, simulated, Context(seed=3))
        runner.start_round_trip(runner.buckets[0], [x.copy()], [True])
        (outcome,) = runner.finish_step(lambda bucket: [None])
        runner.close()
        return outcome.value, simulated.sent_bytes

    (alone, nothing), (together, sent) = mean(1), mean(ranks)
    np.testing.assert_allclose(together, alone, rtol=2e-3 if spec == "fp16" else 1e-5, atol=1e-6)
    assert nothing == 0 < sent
