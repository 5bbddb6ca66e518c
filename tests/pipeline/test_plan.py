"""Plans as files, and what they refuse; layouts; and exchanges of a stage."""

import dataclasses
import json

import pytest

from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.pipeline.planning.exchange_prediction import LEAST, Exchanges
from grace.pipeline.planning.pipeline_plan import PipelinePlan, Stage
from grace.pipeline.planning.rank_layout import Devices, groups_of
from grace.planner.costs import DefaultCodecs
from grace.planner.exchange_costs import Costs
from grace.planner.network import Links
from tests.pipeline.graphs import chain, plan

GRAPH = chain(6, nbytes=1e6, parameters=1e6, rows=8)


@pytest.fixture(scope="module")
def made():
    return plan(GRAPH, 3, 8, Links(1e9), memory=1e9, compressor="topk(ratio=0.01)")


def test_plans_are_read_as_they_were_written(made, tmp_path):
    made.save(tmp_path / "plan.json")
    assert PipelinePlan.load(tmp_path / "plan.json") == made
    made.check(GRAPH, 3)
    assert made.limit == 1e9
    assert made.compressor == "topk(ratio=0.01)"
    assert "1f1b" in str(made) or "gpipe" in str(made)
    assert str(made).count("\n") == len(made.stages) + 2


def test_plans_for_another_run_are_refused(made):
    with pytest.raises(ConfigError, match="another model"):
        made.check(chain(7), 3)
    with pytest.raises(ConfigError, match="for 3 ranks, and there are 4"):
        made.check(GRAPH, 4)
    made.check(GRAPH, 3, {"grace": made.versions["grace"], "torch": "2.13"})
    with pytest.raises(ConfigError, match=r"of grace \S+, and this is 9.9: plan again"):
        made.check(GRAPH, 3, {"grace": "9.9"})
    first = dataclasses.replace(made.stages[0], sends=("x",))
    if len(made.stages) > 1:
        with pytest.raises(ConfigError, match="later stages read"):
            dataclasses.replace(made, stages=(first, *made.stages[1:])).check(GRAPH, 3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"versions": {"plan": 0}}, "no plan of version 1"),
        ({"colour": "red"}, "plan.json, colour: unknown key; known: model, stages, .*versions"),
        ({"batch": "8"}, "plan.json, batch: must be a whole number"),
        ({"stages": {}}, "stages: must be a list, not {}"),
        ({"stages": []}, "at least one stage"),
        ({"microbatches": 3}, "do not divide a batch of 8"),
        ({"schedule": "fast"}, "unknown; there are gpipe"),
        ({"recompute": 1}, "recompute: must be true or false"),
        ({"batch": True}, "plan.json, batch: must be a whole number"),
        ({"seconds": 10**400}, "is too large"),
        ({"memory": ["much"]}, r"memory\[0\]: must be a number, not 'much'"),
    ],
)
def test_damaged_plans_are_refused(made, change, says, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**made.to_dict(), **change}))
    with pytest.raises(ConfigError, match=says):
        PipelinePlan.load(path)
    document = made.to_dict()
    del document["stages"][0]["nodes"]
    with pytest.raises(ConfigError, match=r"the plan, stages\[0\].nodes: is missing"):
        PipelinePlan.from_dict(document)
    document = made.to_dict()
    document["stages"][0]["nodes"] = []
    with pytest.raises(ConfigError, match="stage 0 has no nodes"):
        PipelinePlan.from_dict(document)
    path.write_text("no")
    with pytest.raises(ConfigError, match="is not JSON"):
        PipelinePlan.load(path)


@pytest.mark.parametrize(
    ("ranks", "more", "says"),
    [
        ([(0, 1), (2,)], {"schedule": "zero_bubble"}, "unknown; there are gpipe, 1f1b"),
        ([(rank,) for rank in range(5)], {}, "1f1b needs at least as many micro-batches as stages: 5, not 4"),
        ([(0,), (1,), (0,)], {}, "each in one stage"),
        ([(0, 0)], {}, "each once"),
        ([(0,), (2,)], {}, "0 to N - 1"),
        ([(0, 1, 2)], {}, "do not divide 2 rows"),
    ],
)
def test_plans_that_cannot_run_are_refused(ranks, more, says):
    stages = tuple(Stage((f"n{i}",), own) for i, own in enumerate(ranks))
    with pytest.raises(ConfigError, match=says):
        PipelinePlan("k", stages, batch=8, microbatches=4, **more)


def test_ranks_of_layouts():
    assert groups_of("replicas", (3, 2, 1)) == ((0, 1, 2), (3, 4), (5,))
    assert groups_of("stages", (2, 2, 2)) == ((0, 3), (1, 4), (2, 5))
    for layout, replicas, says in (("stages", (2, 1), "as many replicas"), ("rows", (1,), "unknown")):
        with pytest.raises(ConfigError, match=says):
            groups_of(layout, replicas)


def test_crossing_passes_the_busiest_link():
    four = Devices((0, 0, 1, 1), Links(1e9), Links(1e10))
    assert four.crossing((0,), (1,), 1e9) == 0.1
    assert four.crossing((0,), (2,), 1e9) == 1.0
    assert four.crossing((0, 1), (2, 3), 1e9) == 1.0  # the node's link, for both
    assert four.crossing((0, 2), (1, 3), 1e9) == 0.05
    assert four.crossing((0, 1), (2,), 0.0) == 0.0
    assert Devices((0,) * 3, Links(1e9)).crossing((0, 1), (2,), 1e9) == 1.0  # one receives all
    assert Devices((0,) * 5, Links(1e9)).crossing((0, 1), (2, 3, 4), 6e9) == 3.0


def test_exchanges_share_the_links_that_they_pass():
    four = Devices((0, 0, 1, 1), Links(1e9), Links(1e10))
    assert four.exchange([(0, 1), (2, 3)], 0) == (False, 1)
    assert four.exchange([(0, 2), (1, 3)], 1) == (True, 2)
    assert four.exchange_network(True, 2).seconds("allreduce", 1e9, 2) == 2.0
    assert four.exchange_network(False, 1).seconds("allreduce", 1e9, 2) == 0.1


def test_exchanges_of_stages():
    link = Links(1e8, 1e-4)
    costs = Costs(link, DefaultCodecs())
    variables = [Variable(f"w{i}", (500, 500)) for i in range(4)]
    plain, sparse = Exchanges(costs), Exchanges(costs, "topk(ratio=0.01)")
    assert plain.seconds(variables, 1, link) == plain.seconds([], 2, link) == 0.0
    assert plain.seconds(variables, 2, link) > 4e6 / 1e8
    assert sparse.seconds(variables, 2, link) < plain.seconds(variables, 2, link) / 2
    assert plain.seconds(variables, 2, Links(1e7, 1e-4)) > 5 * plain.seconds(variables, 2, link)
    assert sparse.grace_bytes(variables, 2) >= 4e6 > sparse.grace_bytes(variables, 1) == 0.0
    with pytest.raises(ConfigError, match="topkk"):
        Exchanges(costs, "topkk")


def test_exchanges_by_strategies(monkeypatch):
    monkeypatch.setenv("GRACE_RESOURCES", "of-all-ranks.yaml")  # which the launcher names
    costs, slow = Costs(Links(1e8), DefaultCodecs()), Links(1e8)
    variables = [Variable("w", (1000, 1000)), Variable("b", (1000,))]
    sparse = {"sync": {"type": "allgather"}, "compressor": "topk(ratio=0.01)", "memory": "residual"}
    rules = {"version": 1, "rules": [{"match": {"ndim": 2}, **sparse}, {"match": {}, "sync": {"type": "allreduce"}}]}
    shapes = {"other": [3], "b": [1000], "w": [1000, 1000]}
    named = {"version": 1, "variables": {name: {"shape": shape, **sparse} for name, shape in shapes.items()}}
    plain = Exchanges(costs).seconds(variables, 2, slow)
    for strategy in ("auto", rules, named, "uniform(compressor=topk(ratio=0.01), communicator=allgather)"):
        found = Exchanges(costs, strategy=strategy)
        assert found.seconds(variables, 2, slow) < plain / 5
        assert found.seconds([LEAST], 2, slow) > 0
        assert found.grace_bytes(variables, 2) > 4e6
    exact, half, unbiased = (
        Exchanges(costs, strategy=f"auto(quality={quality})").seconds(variables, 2, slow)
        for quality in ("exact", "half", "unbiased")
    )
    assert unbiased < half < exact == plain
