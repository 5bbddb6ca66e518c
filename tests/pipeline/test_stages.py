"""The dynamic program against trying everything, and what plans must be."""

import itertools
import math
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grace.errors import ConfigError
from grace.pipeline.planning.blocks import ModelBlock, units
from grace.pipeline.planning.exchange_prediction import Exchanges
from grace.pipeline.planning.graph import Graph
from grace.pipeline.planning.predict import predict_cut
from grace.pipeline.planning.rank_layout import Devices
from grace.pipeline.planning.schedules import schedule_error
from grace.pipeline.planning.search import SearchOptions, search
from grace.pipeline.planning.simulation import simulate_schedule
from grace.pipeline.planning.stage_costs import Setting, Space
from grace.pipeline.planning.stage_search import StageCut, StageSearch
from grace.planner.costs import DefaultCodecs
from grace.planner.exchange_costs import Costs
from grace.planner.network import Links
from tests.pipeline.graphs import chain, drawn, plan

FAST = Links(1e12)


def space_of(seed, count, devices, batch=8, nodes=1, limit=math.inf):
    """A drawn graph, a block for each of its nodes, on drawn links."""
    draws = random.Random(seed)
    graph = drawn(seed, count)
    made = [ModelBlock.of_nodes(graph, names) for names in units(graph)]
    between, inside = (Links(draws.choice([1.0, 10.0, 1000.0]), draws.choice([0.0, 0.1])) for _ in range(2))
    costs = Costs(between, DefaultCodecs(), inside)
    ranks = Devices(tuple(rank * nodes // devices for rank in range(devices)), between, inside)
    compressor = draws.choice([None, "fp16"])
    return Space(graph, made, ranks, Exchanges(costs, compressor), batch, limit, draws.choice([0.0, 1.0, 2.0]))


def exhaustive(search):
    """Return the cut with the shortest longest stage by brute force; None if no cut is possible."""
    count, stages, setting = search.space.count, search.stages, search.setting
    costs = {}

    def cuts(left, start, ranks, longest):
        """Yield all cuts of the blocks from ``start`` on into the last ``left`` stages."""
        if not left:
            yield StageCut(longest, (), ())
            return
        if (left, ranks) not in costs:
            costs[left, ranks] = search.cost(left, ranks).tolist()
        if setting.equal_stages:
            possible_replicas = (search.most,)
        else:
            possible_replicas = range(1, ranks - left + 2) if left > 1 else (ranks,)
        for end in range(start + 1, count - left + 2) if left > 1 else (count,):
            for replicas in possible_replicas:
                cost = costs[left, ranks][start][end][replicas]
                if math.isfinite(cost):
                    for rest in cuts(left - 1, end, ranks - replicas, max(longest, cost)):
                        yield StageCut(rest.longest, (end, *rest.ends), (replicas, *rest.replicas))

    ranks = search.most * stages if setting.equal_stages else search.devices
    every_cut = cuts(stages, 0, ranks, 0.0) if stages <= count else ()
    return min(every_cut, key=lambda cut: cut.longest, default=None)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_search_equals_brute_force(data):
    seed, count = data.draw(st.integers(0, 2**32)), data.draw(st.integers(1, 10))
    devices = data.draw(st.integers(1, 5))
    limit = data.draw(st.sampled_from([math.inf, 30.0, 100.0, 300.0]))
    batch, nodes = data.draw(st.sampled_from([8, 48])), data.draw(st.integers(1, 2))
    space = space_of(seed, count, devices, batch, nodes, limit)
    schedule = data.draw(st.sampled_from(["gpipe", "1f1b"]))
    setting = Setting(schedule, data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.booleans()))
    for stages in range(1, min(devices, space.count) + 1):
        if schedule_error(schedule, stages, setting.microbatches):
            continue
        one = StageSearch(space, setting, stages)
        found, best = one.cut(), exhaustive(one)
        assert (found is None) == (best is None)
        assert one.longest() == (math.inf if best is None else pytest.approx(best.longest))
        if found is not None:
            assert found.longest == pytest.approx(best.longest)
            assert sum(found.replicas) == devices
            assert found.ends[-1] == space.count
            made = predict_cut(space, setting, found)
            assert made is not None, "memory that the program counts is the rank's"
            space.graph.passed_on([stage.nodes for stage in made.stages])
            assert made.seconds >= max(1 * (s.forward + s.backward) * made.microbatches for s in made.stages) - 1e-9
            assert max(made.memory) <= limit * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_search_of_stages_with_as_many_replicas_equals_brute_force(data):
    space = space_of(data.draw(st.integers(0, 2**32)), data.draw(st.integers(4, 9)), 4, nodes=2)
    schedule, layout = data.draw(st.sampled_from(["gpipe", "1f1b"])), data.draw(st.sampled_from(["replicas", "stages"]))
    if space.count < 2:
        return
    setting = Setting(schedule, 4, data.draw(st.booleans()), layout, equal_stages=2)
    one = StageSearch(space, setting, 2)
    found, best = one.cut(), exhaustive(one)
    assert found.longest == pytest.approx(best.longest)
    made = predict_cut(space, setting, found)
    assert made.world_size == 4
    assert set(made.replicas) == {2}
    assert simulate_schedule(made.schedule, made.stages, made.microbatches).seconds == pytest.approx(
        made.seconds - made.exposed
    )


def test_a_uniform_chain_is_split_evenly():
    found = plan(chain(12, rows=8), 4, 8, FAST, stages=4, microbatches=8, schedule="1f1b")
    assert [len(stage.nodes) for stage in found.stages] == [3, 3, 3, 3]
    assert found.replicas == (1, 1, 1, 1)
    assert found.seconds == pytest.approx((8 + 4 - 1) * (3 * 3) / 8)


def test_a_heavy_head_is_split_unevenly():
    found = plan(chain(12, forward=[1.0] * 11 + [9.0], rows=8), 2, 8, FAST, stages=2, microbatches=8)
    sizes = [len(stage.nodes) for stage in found.stages]
    assert sizes == [7, 5] or sizes == [8, 4]
    slow = max(stage.forward + stage.backward for stage in found.stages)
    assert slow == pytest.approx(min(max(3 * k, 3 * (12 - k) + 8) for k in range(1, 12)) / 8)


def test_a_heavy_stage_gets_more_replicas_where_that_is_faster():
    heavy = chain(2, forward=[2.0, 1.0], backward=[4.0, 2.0], parameters=[1e8, 1e12], rows=16)
    found = plan(heavy, 3, 16, Links(1e10))
    assert found.replicas == (2, 1)
    turned = chain(2, forward=[1.0, 2.0], backward=[2.0, 4.0], parameters=[1e12, 1e8], rows=16)
    assert plan(turned, 3, 16, Links(1e10)).replicas == (1, 2)
    assert plan(heavy, 3, 16, Links(1e10), replicas=[1, 2]).seconds > found.seconds * 1.2
    assert plan(heavy, 2, 16, Links(1e10), stages=2).seconds > found.seconds * 1.2
    with pytest.raises(ConfigError, match="divides the rows"):
        plan(heavy, 3, 16, Links(1e10), stages=1)


def test_the_compressor_changes_the_plan_on_a_throttled_link():
    graph = chain(8, forward=0.01, backward=0.02, nbytes=2e6, parameters=4e6, rows=32)
    slow = Links(1e8 / 8, 1e-4)
    plain, sparse = (plan(graph, 4, 32, slow, compressor=spec) for spec in (None, "topk(ratio=0.01)"))
    assert plain.replicas != sparse.replicas
    assert len(sparse.stages) < len(plain.stages)
    again = plan(graph, 4, 32, slow, compressor="topk(ratio=0.01)", replicas=list(plain.replicas))
    assert sparse.seconds < again.seconds


def test_too_little_memory_names_the_stage_and_what_is_missing():
    graph = chain(4, parameters=[1e9, 1e9, 8e9, 1e9], rows=8)
    with pytest.raises(ConfigError, match=r"\(n2 to n2\) needs 24 GB, and may use 9 GB: 15 GB are"):
        plan(graph, 4, 8, FAST, memory=10e9)
    found = plan(graph, 4, 8, FAST, memory=30e9)
    assert max(found.memory) <= 27e9


def test_finer_blocks_are_tried_before_memory_is_said_not_to_suffice():
    graph = chain(66, parameters=1e6, rows=8)
    room = {"memory_margin": 0.0, "optimizer_state": 1.0, "microbatches": 1}
    found = plan(graph, 2, 8, FAST, memory=33 * 3e6 + 1000, **room)  # of 32 blocks none ends behind layer 33
    assert [len(stage.nodes) for stage in found.stages] == [33, 33]
    with pytest.raises(ConfigError, match=r"\(n\d+ to n\d+\) needs [\d.]+ [kM]?B, .* [kM]?B are missing$"):
        plan(graph, 2, 8, FAST, memory=30e6, **room)
    with pytest.raises(ConfigError, match="blocks=256 cuts finer"):
        plan(chain(1000, parameters=1e6, rows=8), 2, 8, FAST, memory=495 * 3e6, **room)


def test_the_least_shortage_is_said_if_devices_may_stay_unused():
    graph = chain(8, parameters=1e9, rows=8)
    with pytest.raises(ConfigError, match=r"used least \(4 stages, .* needs 6 GB, .* 2.4 GB are missing$"):
        plan(graph, 4, 8, FAST, memory=4e9, fewer=True)


def test_planning_ends_where_nodes_that_are_together_do_not_fit():
    graph = chain(4, parameters=1e9, rows=8)
    whole = Graph(graph.nodes, graph.inputs, graph.outputs, 8, (frozenset({"n0", "n3"}),))
    with pytest.raises(ConfigError, match=r"\(n0 to n3\) needs 16 GB, .*: 5 GB are missing$"):
        plan(whole, 2, 8, FAST, memory=11e9, memory_margin=0.0, microbatches=1)


def test_memory_makes_it_recompute_or_cut():
    graph = chain(8, kept=1e9, nbytes=1e6, rows=8)
    free = plan(graph, 2, 8, FAST)
    tight = plan(graph, 2, 8, FAST, memory=3e9, memory_margin=0.0)
    assert max(tight.memory) <= 3e9 < max(free.memory)
    assert tight.seconds >= free.seconds
    assert plan(graph, 1, 8, FAST, microbatches=1, memory=8.5e9, memory_margin=0.0).recompute is False
    with pytest.raises(ConfigError, match="memory does not suffice"):
        plan(graph, 1, 8, FAST, microbatches=1, recompute=False, memory=7e9, memory_margin=0.0)


def test_replicas_lie_within_nodes_and_stages_between_them_or_the_other_way():
    two = Costs(Links(1e8), DefaultCodecs(), Links(1e11))
    values = chain(4, nbytes=1e9, parameters=1e6, rows=8)  # much crosses, little is exchanged
    found = plan(values, 4, 8, two, nodes=[0, 0, 1, 1], stages=2, replicas=2)
    assert (found.layout, found.stages[0].ranks) == ("stages", (0, 2))
    weights = chain(4, nbytes=1e3, parameters=1e10, rows=8)
    found = plan(weights, 4, 8, two, nodes=[0, 0, 1, 1], stages=2, replicas=2)
    assert (found.layout, found.stages[0].ranks) == ("replicas", (0, 1))


def test_cuts_and_numbers_that_are_given_are_kept():
    graph = chain(6, rows=8)
    found = plan(graph, 3, 8, FAST, cuts=["n0", "n3"], microbatches=4, schedule="gpipe", recompute=True)
    assert [stage.nodes[-1] for stage in found.stages] == ["n0", "n3", "n5"]
    assert (found.microbatches, found.schedule, found.recompute) == (4, "gpipe", True)
    assert found.stages[0].backward == pytest.approx(3 / 4)  # 8 rows in 4 micro-batches: (2 + 1) 2 / 8
    assert len(plan(graph, 4, 8, FAST, stages=range(2, 4)).stages) in (2, 3)
    assert plan(graph, 4, 8, FAST, replicas=[1, 2, 1]).replicas == (1, 2, 1)
    some = [plan(graph, 3, 8, FAST, blocks=k).seconds for k in (2, 3)]
    assert plan(graph, 3, 8, FAST, blocks=[2, 3]).seconds == min(some)
    for wrong, says in (
        ({"blocks": 0}, "at least 1, not 0"),
        ({"stages": 7}, "no plan for 3 devices"),
        ({"cuts": ["n9"]}, "no node of the graph"),
        ({"cuts": ["n3", "n0"]}, "graph's order"),
        ({"schedule": "fast"}, "unknown"),
        ({"nodes": [0]}, "1 ranks, and there are 3"),
        ({"microbatches": 3}, "micro-batches divide the batch"),
    ):
        with pytest.raises(ConfigError, match=says):
            plan(graph, 3, 8, FAST, **wrong)


def test_tied_parameters_on_two_stages_are_summed_first():
    graph = chain(4, parameters=[4e8, 0, 0, 0], rows=8)
    nodes = list(graph.nodes)
    nodes[3] = type(nodes[3])(**{**vars(nodes[3]), "parameters": {"w0": 4e8}})
    tied = type(graph)(tuple(nodes), graph.inputs, graph.outputs, 8)
    found = plan(tied, 2, 8, Links(1e9), stages=2)
    assert [stage.exchange for stage in found.stages] == [pytest.approx(0.4)] * 2
    assert [stage.exchange for stage in plan(graph, 2, 8, Links(1e9), stages=2).stages] == [0.0, 0.0]


def test_a_value_for_a_later_stage_is_paid_at_every_cut_before_it():
    plain = chain(6, nbytes=1e6, rows=8)
    nodes = [*plain.nodes[:5], type(plain.nodes[5])("n5", ("n4", "n0"), 1e6, 1.0, 2.0)]
    skips = type(plain)(tuple(nodes), plain.inputs, plain.outputs, 8)
    found = plan(skips, 3, 8, Links(1e9), cuts=["n1", "n3"], microbatches=2, replicas=1)
    assert [stage.sends for stage in found.stages] == [("n0", "n1"), ("n0", "n3"), ()]
    assert [stage.sent for stage in found.stages] == [1e6, 1e6, 0.0]  # two values of half the rows
    assert [stage.returned for stage in found.stages] == [1e6, 1e6, 0.0]
    assert found.stages[0].crossing == pytest.approx(1e6 / 1e9)
    assert plan(plain, 3, 8, Links(1e9), cuts=["n1", "n3"], microbatches=2, replicas=1).stages[0].sent == 5e5


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.floats(50, 2000))
def test_plans_fit_or_the_error_says_what_is_missing(seed, limit):
    graph = drawn(seed, 12)
    says = ""
    try:
        found = plan(graph, 4, 8, FAST, memory=limit)
    except ConfigError as error:
        says = str(error)
    if says:
        assert re.search(r"B: [\d.]+ [kMG]?B are missing$", says)
        return
    assert max(found.memory) <= limit * 0.9 * (1 + 1e-9)
    found.check(graph, 4)


def test_the_same_is_found_again():
    graph = drawn(5, 60, 6)
    one, other = (plan(graph, 4, 8, Links(100.0), nodes=[0, 0, 1, 1]) for _ in range(2))
    assert one == other


@pytest.mark.parametrize("seed", range(6))
def test_what_is_chosen_is_near_the_best_of_all_that_could_be_played(seed):
    space = space_of(seed, 7, 3, batch=12, nodes=1 + seed % 2)
    chosen, best = search(space, SearchOptions()), math.inf
    for stages in range(1, 4):
        replicas = [of for of in itertools.product((1, 2, 3), repeat=stages) if sum(of) == 3]
        inner = itertools.combinations(range(1, space.count), stages - 1)
        for ends, of, many in itertools.product(inner, replicas, (1, 2, 3, 4, 6, 12)):
            for schedule in ("gpipe", "1f1b"):
                if all(space.rows(many, r) for r in of) and not schedule_error(schedule, stages, many):
                    made = predict_cut(space, Setting(schedule, many), StageCut(0.0, (*ends, space.count), of))
                    best = min(best, made.seconds)
    assert best * (1 - 1e-9) <= chosen.seconds <= best * 1.1
