"""The builder ``auto``: what it takes, what it refuses, and what it plans for."""

import pytest

from grace.core.registry import make
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner.builders.auto import Auto, timeline
from grace.planner.uniform_plans import uniform_strategy
from grace.strategy.builder import OneNode
from grace.strategy.choices import STRATEGY, Choices

VARIABLES = [Variable("w", (500, 400)), Variable("b", (400,))]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"compressor": "topk"}, "chooses compressors and memories itself"),
        ({"memory": "residual"}, "chooses compressors and memories itself"),
        ({"quality": "best"}, "quality must be one of"),
        ({"reference": "tokp"}, "did you mean 'topk'"),
        ({"methods": 3}, "methods must be a list of specs, not 3"),
        ({"backward": -1.0}, "backward"),
        ({"seed": -1}, "seed"),
        ({"replan": 1.5}, "replan"),
        ({"bandwidth": "fast"}, "bandwidth must be Gbit/s above 0"),
        ({"bandwidth": 0}, "bandwidth must be Gbit/s above 0"),
        ({"bandwidth": True}, "bandwidth must be Gbit/s above 0"),
        ({"latency": "-1us"}, "latency must be seconds"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        Auto(**given)


@pytest.mark.parametrize(
    ("methods", "quality", "said"),
    [
        (["tokp"], "feedback", "did you mean 'topk'"),
        (["topk"], "unbiased", "topk with the memory residual, which is of the class 'feedback'.*take quality="),
        (["signsgd"], "half", "signsgd with the memory none, which is a vote"),
        ([{"compressor": "topk", "color": "red"}], "feedback", "has 'color'; there are compressor, memory and"),
        ([{"compressor": "topk", "communicator": "allreduce"}], "feedback", "allreduce"),
        (["reduce_broadcast(staleness=1)"], "feedback", "staleness=1.*, which applies means in later steps"),
    ],
    ids=str,
)
def test_methods_that_may_not_be_chosen_are_refused(methods, quality, said):
    with pytest.raises(ConfigError, match=said):
        Auto(methods=methods, quality=quality)  # before a run has made a step


def chosen(**options):
    strategy = Auto(**options).build(VARIABLES, OneNode(4))
    return {plan.variable.name: plan.parts[0].compressor for plan in strategy.plans}


def test_one_method_may_be_given_without_a_list():
    assert Auto(methods="fp16").methods == ["fp16"]
    assert chosen(methods={"compressor": "fp16"}, bandwidth="10mbit")["w"] == "cast"


def test_slow_links_are_worth_compression_and_fast_ones_are_not():
    assert chosen(bandwidth="10mbit")["w"] != "none"
    assert set(chosen(bandwidth=1000, latency="1us").values()) <= {"none", "cast"}


@pytest.mark.parametrize("bandwidth", ["10mbit", 0.01, "10000kbit", "0.01 gbit"])
def test_units_are_understood(bandwidth):
    assert Auto(bandwidth=bandwidth).costs(OneNode(2)).network.bandwidth == pytest.approx(1e7 / 8)


@pytest.mark.parametrize("quality", ["exact", "half", "unbiased"])
def test_no_plan_leaves_its_class(quality):
    problem = Auto(quality=quality).problem(VARIABLES, OneNode(4))
    allowed = {"exact": {"exact"}, "half": {"exact", "half"}, "unbiased": {"exact", "half", "unbiased"}}[quality]
    assert {method.quality for method in problem.candidates()} <= allowed


def test_a_method_is_feedback_with_a_memory_that_is_named():
    problem = Auto(methods=[{"compressor": "bf16", "memory": "residual"}]).problem(VARIABLES, OneNode(4))
    assert [(method.memory, method.quality) for method in problem.candidates()[1:]] == [("residual", "feedback")]


def test_the_strategy_says_who_built_it():
    strategy = Auto(methods=["fp16"], seed=7).build(VARIABLES, OneNode(2))
    assert strategy.builder["name"] == "auto"
    again = make("builder", {"name": "auto", **strategy.builder["params"]}).build(VARIABLES, OneNode(2))
    assert again.plans == strategy.plans


def test_gradients_come_in_reverse_and_rows_take_no_time():
    rows = Variable("rows", (1000, 8), sparse=True)
    assert timeline([rows, *VARIABLES], 2.004).ready == pytest.approx({"b": 0.004, "w": 2.004, "rows": 2.004})


def test_auto_is_asked_for_by_name_object_dict_or_environment(monkeypatch):
    for given in ("auto", " auto(seed=3)", {"name": "auto", "seed": 3}, Auto()):
        assert isinstance(Choices(strategy=given).auto_request().options, Auto)
    assert Choices().auto_request() is None
    monkeypatch.setenv(STRATEGY, "auto(replan=9)")
    assert Choices().auto_request().options.replan == 9
    assert Choices(strategy="parallax").auto_request() is None
    with pytest.raises(ConfigError, match="no parameter 'spede'"):
        Choices(strategy="auto(spede=3)").auto_request()


def test_it_starts_from_plain_sums():
    strategy = Choices(strategy="auto").auto_request().starting_choices(Choices()).strategy.build(VARIABLES, OneNode(2))
    assert strategy.to_dict()["variables"] == uniform_strategy(VARIABLES, 2).to_dict()["variables"]


def test_planning_starts_from_the_strategy_that_a_plan_without_compression_names():
    """A run that keeps it executes the strategy of its plan, to the letter."""
    auto = Auto(bandwidth="10gbit", methods=["fp16"])
    baseline = auto.baseline.build(VARIABLES, OneNode(2)).to_dict()
    assert baseline == auto.plan(VARIABLES, OneNode(2)).plain.strategy.to_dict()
