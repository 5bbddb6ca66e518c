"""The bytes that a prediction reckons with are those that exchanges send."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest

from grace.communicators import Allgather
from grace.communicators.choice import build_communicator
from grace.core.context import Context
from grace.core.registry import known, legal_communicators, make
from grace.core.route import EngineTraits
from grace.core.variable import Variable
from grace.errors import ConfigError, PayloadError
from grace.exchange.sparse_rows import SparseRows
from grace.planner.costs import CodecCost, Cost, Curve
from grace.planner.exchange_costs import DENSE, Costs, codec_key, costs_of_shards, costs_of_strategy
from grace.planner.network import Links, MeasuredNetwork
from grace.planner.step_simulation import most_sent
from grace.session.bucket_limits import Limits
from grace.session.sharding import uniform
from grace.session.step_runner import StepRunner
from grace.strategy import ShardPlan, Strategy, Sync, VariablePlan
from grace.strategy.builder import OneNode
from grace.strategy.execution import make_shards
from tests.support.drawing import THOROUGH
from tests.support.grouping import in_groups
from tests.support.pairwise import pairwise
from tests.support.pretended import Pretended, sent_by

SHAPES = {"w": (60, 41), "odd": (1003,), "kernel": (8, 3, 3, 3), "one": (1,), "scalar": (), "none": (0,)}
VARIABLES = [Variable(name, shape) for name, shape in SHAPES.items()]
METHODS = [
    *(name for name in known("compressor") if name != "composed"),
    *("qsgd(levels=7)", "powersgd(rank=3)", "topk(ratio=0.1) | qsgd(levels=7)", "randomk(ratio=0.1) | fp16"),
    *("threshold | natural", "dgc | efsignsgd", "topk(ratio=1.0)"),
]
LARGE = [v for v in VARIABLES if v.numel > 1]
LINKS = Links(bandwidth=1e9, latency=1e-5)


def pairs():
    """Every method with every communicator that carries it."""
    return [(method, kind) for method in METHODS for kind in legal_communicators(make("compressor", method))]


def quiet(compressor, communicator):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return build_communicator(compressor, None, communicator)


def gradients_of(variables, step):
    rng = np.random.default_rng(step)
    found = {}
    for v in variables:
        values = rng.standard_normal(v.shape).astype(v.dtype)
        found[v.name] = SparseRows(values[:3], np.arange(3)) if v.sparse else values
    return found


def exchanged(shards, variables, ranks, rank, by_ring=False, steps=4, concatenates=False):
    """Bytes that leave a rank in a step, those of payloads, and the runner."""
    backend = Pretended(ranks, rank, by_ring, concatenates)
    runner = StepRunner(variables, shards, backend, Context(rank=rank, size=ranks))
    runner._nodes = ["here"] * ranks
    runner.agree()
    sent, payloads = [], []
    for step in range(steps):
        before = runner.traffic.sent_bytes, sum(runner.traffic.payload_bytes.values())
        gradients = gradients_of(variables, step)
        for bucket in runner.buckets:
            own = [runner.shards[name] for name in bucket.names]
            views = [shard.slice_of(gradients[shard.whole.name]) for shard in own]
            runner.start_round_trip(bucket, views, [True] * len(views))
        try:
            runner.finish_step(lambda bucket: [None] * len(bucket.variables))
        except PayloadError:  # what others are said to have broadcast need not be a payload
            runner.abort()
        sent.append(runner.traffic.sent_bytes - before[0])
        payloads.append(sum(runner.traffic.payload_bytes.values()) - before[1])
    runner.close()
    return sent[-1], payloads[-1], runner


def costs_for(shards, bits=None, **more):
    """Costs that name what these shards need."""
    keys = [DENSE, *(codec_key(shard.communicator) for shard in shards)]
    return Costs(more.pop("network", LINKS), {key: CodecCost(bits=bits) for key in keys}, **more)


def bits_of(runner, payload):
    """Return the bits sent per element of variables whose sizes follow from the data."""
    varying = [s for s in runner.shards.values() if s.communicator.compressor.traits.varies]
    n = sum(s.variable.numel for s in varying)
    dense = sum(s.variable.nbytes for s in runner.shards.values() if s not in varying)
    return 8 * (payload - dense) / n if n else None


RANKS = [(2, 0), (4, 3)]
CASES = [(*pair, *RANKS[number % 2]) for number, pair in enumerate(pairs())]
"""Every pair on one of the numbers of ranks in turn; tests/exchange/test_route_bytes.py has all numbers."""
if THOROUGH:
    CASES = [(*pair, *ranks) for pair in pairs() for ranks in RANKS]


@in_groups(("method", "kind", "ranks", "rank"), CASES, lambda method, *_: method)
def test_every_method_sends_the_bytes_that_are_predicted(method, kind, ranks, rank):
    shards = uniform(VARIABLES, quiet(method, kind), Limits(2000))
    sent, payload, runner = exchanged(shards, VARIABLES, ranks, rank)
    root = kind == "reduce_broadcast" and rank == 0
    bits = bits_of(runner, payload)
    costs = costs_for(shards, None if bits is None else bits / (2 if root else 1))
    found = costs_of_shards(shards, ranks, costs)
    varies = bits is not None
    # every collective is counted in whole bytes; what the data decide is padded, and differs by variable
    slack = (8 + len(VARIABLES)) * ranks * len(found) * 2 if varies else 2 * sum(len(w.transfers) for w in found)
    assert sent_by(found, rank) == pytest.approx(sent, abs=slack, rel=0.02 if varies else 1e-12)
    assert [work.names for work in found] == [tuple(bucket.names) for bucket in runner.buckets]


def collectives(runner):
    """Kinds of the last step's collectives, sorted, without those of starting up."""
    return sorted(kind for kind, _ in runner.channel.log)


@pytest.mark.parametrize("method", ["none", "fp16", "powersgd", "randomk"])
@pytest.mark.parametrize(("ranks", "rank"), [(3, 1), (4, 2), (5, 0)])
def test_small_sums_are_made_in_two_hops_where_the_engine_has_a_ring(method, ranks, rank):
    shards = uniform(VARIABLES, quiet(method, "allreduce"), Limits(2000))
    sent, _, runner = exchanged(shards, VARIABLES, ranks, rank, by_ring=True)
    found = costs_of_shards(shards, ranks, costs_for(shards, by_ring=True))
    transfers = [transfer for work in found for transfer in work.transfers]
    assert sent_by(found, rank) == pytest.approx(sent, abs=len(transfers))
    kinds = {transfer.kind for transfer in transfers}
    assert kinds == ({"allreduce"} if ranks < 4 else {"alltoall", "allgather"})
    assert collectives(runner) == sorted(4 * [transfer.kind for transfer in transfers])


VARYING = [(*pair, False) for pair in pairs() if make("compressor", pair[0]).traits.varies]
ROWS = [("none", "allgather", True), ("topk", "allgather", True)]


@in_groups(("method", "kind", "sparse"), [*VARYING, *ROWS])
def test_no_sizes_go_ahead_where_the_engine_gathers_unequal_payloads(method, kind, sparse):
    variables, counts = [replace(v, sparse=sparse) for v in LARGE if len(v.shape) > 1], []
    for concatenates in (False, True):
        shards = uniform(variables, quiet(method, kind), Limits(2000))
        sent, payload, runner = exchanged(shards, variables, 3, 1, concatenates=concatenates)
        bits = None if sparse else bits_of(runner, payload)
        rows = {v.name: 3.0 for v in variables if sparse}
        found = costs_of_shards(shards, 3, costs_for(shards, bits or 64.0, concatenates=concatenates, rows=rows))
        kinds = [transfer.kind for work in found for transfer in work.transfers]
        counts.append(len(kinds))
        turns = 3 if kind == "broadcast" else 1  # which is one from each rank
        each = [kind for kind in kinds for _ in range(turns if kind == "broadcast" else 1)]
        last = runner.channel.log[-len(each) :]  # the first step compares where nobody promised sizes
        assert sorted(kind for kind, _ in last) == sorted(each)
        assert sent_by(found, 1) == pytest.approx(sent, abs=100 * len(found), rel=0.02)
    legs = make("communicator", kind).legs(math.inf, EngineTraits())
    assert counts[1] == (counts[0] / 2 if [leg.collective.name for leg in legs] == ["allgather"] else counts[0])


STRATEGIES = [
    *("ps", "ps(destination=1)", "ps_load_balancing", "partitioned_ps(min_shard_bytes=0)", "parallax"),
    *("all_reduce(chunk_size=2)", "partitioned_all_reduce(min_shard_bytes=0, chunk_size=2)", "uniform"),
]


@in_groups(
    ("builder", "compressor", "rank"), pairwise(STRATEGIES, ["none", "fp16", "qsgd", "topk(ratio=0.1)"], [0, 1, 2])
)
def test_strategies_send_the_bytes_that_are_predicted(builder, compressor, rank):
    strategy = make("builder", {**make("builder", builder).to_dict(), "compressor": compressor}).build(
        VARIABLES, OneNode(3)
    )
    shards = make_shards(strategy, VARIABLES)
    sent, *_ = exchanged(shards, VARIABLES, 3, rank)
    found = costs_of_strategy(strategy, costs_for(shards))
    assert sent_by(found, rank) == pytest.approx(sent, abs=3 * sum(len(work.transfers) for work in found))
    assert most_sent(found) == pytest.approx(max(sent_by(found, r) for r in range(3)))


def strategy_of(part, ranks, variables=VARIABLES):
    return Strategy(tuple(VariablePlan(v, (part,)) for v in variables), ranks)


def test_dtypes_travel_as_wide_as_they_are():
    variables = [Variable("half", (300,), "float16"), Variable("double", (70, 3), "float64")]
    shards = uniform(variables, quiet("none", "allreduce"))
    sent, *_ = exchanged(shards, variables, 2, 0)
    assert sent_by(costs_of_shards(shards, 2, costs_for(shards)), 0) == pytest.approx(sent, abs=2)


@pytest.mark.parametrize("kind", ["allgather", "reduce_broadcast"])
@pytest.mark.parametrize("compressor", ["none", "fp16", "topk(ratio=0.5)"])
def test_sparse_variables_send_their_rows(kind, compressor):
    variables = [Variable("table", (50, 8), sparse=True)]
    shards = uniform(variables, quiet(compressor, kind))
    sent, *_ = exchanged(shards, variables, 3, 1)
    (work,) = costs_of_shards(shards, 3, costs_for(shards, rows={"table": 3}))
    assert sent_by([work], 1) == pytest.approx(sent, abs=16)
    (all_rows,) = costs_of_shards(shards, 3, costs_for(shards))
    assert most_sent([all_rows]) > 5 * most_sent([work])


@pytest.mark.filterwarnings("ignore:.* is applied in a later step")
def test_delayed_exchanges_hold_what_is_under_way():
    parts = [ShardPlan(Sync("reduce_broadcast", staleness=n), "topk(ratio=0.1)") for n in (0, 1, 4)]
    found = []
    for part in parts:
        shards = make_shards(strategy_of(part, 3, LARGE), LARGE)
        found += costs_of_strategy(strategy_of(part, 3, LARGE), costs_for(shards))
    assert found[0].memory < found[1].memory < found[2].memory
    assert found[0].transfers == found[1].transfers


class OneLater(Allgather):
    """A user's communicator whose means are applied in the next step."""

    name = "one_later"
    delayed = True


def test_a_users_delayed_exchange_is_under_way_for_a_step():
    memory = []
    for kind in (Allgather, OneLater):
        shards = uniform(LARGE, kind("topk(ratio=0.1)"))
        memory.append(sum(work.memory for work in costs_of_shards(shards, 3, costs_for(shards))))
    assert memory[0] < memory[1]


def test_a_communicator_that_was_not_measured_is_named():
    shards = uniform(VARIABLES, quiet("topk", "allgather"))
    with pytest.raises(ConfigError, match=r"is carried by allgather, topk, residual, and nobody measured.*'allreduce"):
        costs_of_shards(shards, 2, Costs(LINKS, {DENSE: CodecCost()}))
    shards = uniform(VARIABLES, quiet("threshold", "allgather"))
    with pytest.raises(ConfigError, match="bytes the data decide: its codec must say the bits"):
        costs_of_shards(shards, 2, costs_for(shards))


@pytest.mark.parametrize(
    ("sync", "way"),
    [
        (Sync("allreduce", hierarchical=True), "'w' is reduced in each node first"),
        (Sync("none", period=4), "'w' is exchanged once in 4 steps"),
        (Sync("reduce_broadcast", staleness=1), "'w' is applied in a later step"),
    ],
)
def test_variables_that_not_all_ranks_exchange_in_every_step_are_named(sync, way):
    part = ShardPlan(sync, "none", "none")
    strategy = Strategy((VariablePlan(VARIABLES[0], (part,)),), world_size=4, nodes=2)
    with pytest.warns(UserWarning, match=f"{way}, and predicted as if all ranks exchanged it in every step"):
        costs_of_strategy(strategy, Costs(LINKS, dict.fromkeys((DENSE, "reduce_broadcast, none, none"), CodecCost())))


def test_a_variable_of_which_one_part_comes_later_is_named():
    later, now = (
        ShardPlan(Sync("reduce_broadcast", staleness=1), "none", "none"),
        ShardPlan(Sync("allreduce"), "none", "none"),
    )
    variable = VariablePlan(Variable("w", (4, 2)), (later, now), axis=0, sizes=(2, 2))
    codecs = dict.fromkeys((DENSE, "reduce_broadcast, none, none"), CodecCost())
    with pytest.warns(UserWarning, match="'w' is applied in a later step"):
        costs_of_strategy(Strategy((variable,), world_size=2), Costs(LINKS, codecs))


def test_codecs_cost_what_they_cost_for_the_bucket():
    shards = uniform([Variable("w", (1000,)), Variable("v", (24, 10))], quiet("powersgd", "allreduce"))
    codec = CodecCost(Cost(call=1.0), Cost(variable=2.0), Cost(element=3.0, peer=1.0))
    found = costs_of_shards(shards, 2, Costs(LINKS, {"allreduce, powersgd, residual": codec, DENSE: CodecCost()}))
    matrix, vector = sorted(found, key=lambda work: -len(work.transfers))
    assert (matrix.start, matrix.middle, matrix.finish) == (1.0, 2.0, 3 * 240 + 2 * 240)
    assert (vector.start, vector.middle, vector.finish, vector.names) == (0.0, 0.0, 0.0, ("w",))
    assert [transfer.kind for transfer in matrix.transfers] == ["allreduce"] * 2


@in_groups(("method", "kind"), pairs(), lambda method, kind: method)
def test_from_2_to_1024_ranks(method, kind):
    """Gathered bytes grow with the ranks, summed ones do not."""
    variables = [Variable(f"w{i}", (30000, 40000)) for i in range(4)]
    shards = uniform(variables, quiet(method, kind))
    bits = 4.0 if make("compressor", method).traits.varies else None
    worlds = [2, 4, 16, 64, 256, 1024]
    fast, usual = [], []
    for ranks in worlds:
        (work,) = costs_of_shards(shards, ranks, costs_for(shards, bits, network=Links(1e9)))
        fast.append(sum(transfer.seconds for transfer in work.transfers))
        (work,) = costs_of_shards(shards, ranks, costs_for(shards, bits))
        usual.append(sum(transfer.seconds for transfer in work.transfers))
        assert work.memory > 0
    assert usual == sorted(usual)
    assert all(slow > quick for slow, quick in zip(usual, fast, strict=True))
    growth = fast[-1] / fast[1]
    carrier = shards[0].communicator.name
    if carrier == "allreduce":
        assert growth < 2.1
    elif carrier.startswith("scatter"):  # pieces have scales and statuses of their own
        assert growth < 6
    elif carrier == "allgather":
        assert growth == pytest.approx(1023 / 3, rel=0.01)
    elif carrier == "broadcast":
        assert growth == pytest.approx(1024 * 10 / (4 * 2), rel=0.01)
    else:
        assert growth > 50  # all of it passes the destination's link


def test_sums_of_halves_take_what_those_were_measured_to_take():
    curves = {
        kind: Curve.through([(1e3, 1e-4), (1e6, slow)]) for kind, slow in [("allreduce", 1e-3), ("allreduce16", 2e-3)]
    }
    shards = uniform([Variable("w", (500_000 - 8,))], quiet("fp16", "allreduce"))
    codecs = {"allreduce, cast, none": CodecCost()}
    (halves,) = costs_of_shards(shards, 2, Costs(MeasuredNetwork(curves, 2, {"allreduce16": 0.5}), codecs))
    (unknown,) = costs_of_shards(shards, 2, Costs(MeasuredNetwork({"allreduce": curves["allreduce"]}, 2), codecs))
    assert halves.transfers[0].seconds == pytest.approx(2e-3, rel=0.01)
    assert unknown.transfers[0].seconds == pytest.approx(1e-3, rel=0.01)
    assert halves.transfers[0].kind == "allreduce"
    assert (halves.transfers[0].contention, unknown.transfers[0].contention) == (0.5, 0.0)
