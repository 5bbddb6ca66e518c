"""What ``auto`` measures, tries and keeps, in steps whose times are made up."""

import json
from types import SimpleNamespace

import pytest

from grace.core.backend import LocalBackend
from grace.core.variable import Variable
from grace.errors import ConfigError, ExchangeError
from grace.planner import clock
from grace.planner.driver import CHECKED, HELD, PLAIN, ROUNDS, SETTLED, TIMED, WARM, Driver
from grace.planner.grouped import grouped

VARIABLES = [Variable("w", (64, 64)), Variable("b", (64,))]
METHODS = {"none": "none", "fp16": "fp16", "topk": "topk"}
STRATEGIES = {name: grouped(VARIABLES, 1, spec) for name, spec in METHODS.items()}
TRYING = len(METHODS) * ROUNDS * (SETTLED + TIMED)
UNTIL_TRYING, UNTIL_CHOSEN = WARM + HELD + PLAIN, WARM + HELD + PLAIN + TRYING


class Planner:
    """Measures nothing, and finds three candidates."""

    seconds = 11.6

    def __init__(self, fails=None):
        self.fails, self.took = fails, {}

    def measure(self, gradients, timeline, plain):
        if self.fails is not None:
            raise self.fails
        self.gradients, self.timeline, self.plain = gradients, timeline, plain

    def candidates(self):
        return [SimpleNamespace(name=name, strategy=STRATEGIES[name]) for name in ("topk", "fp16", "none")]

    def learned(self, seconds):
        self.took = dict(seconds)

    def explained(self, chosen, why):
        return {"chosen": chosen, "why": why}, why or f"{chosen} is taken"


class Run:
    """A training run whose steps take what ``seconds`` says, by what they are exchanged with."""

    def __init__(self, monkeypatch, seconds, fails=None, refuses=(), **options):
        self.now, self.seconds, self.using, self.refuses = 0.0, dict(seconds), "none", refuses
        self.used, self.said = [], []
        monkeypatch.setattr(clock.time, "perf_counter", lambda: self.now)
        self.planner = Planner(fails)
        backend = LocalBackend()
        self.driver = Driver(self.planner, backend, STRATEGIES["none"], self.switch, self.said.append, **options)

    def switch(self, strategy):
        name = next(name for name, one in STRATEGIES.items() if one == strategy)
        if name in self.refuses:
            raise ConfigError("it does not suit this run")
        self.using = name

    def steps(self, count):
        for _ in range(count):
            self.used.append(self.using)
            took = self.seconds[self.using]
            self.now += 0.010
            for name in ("b", "w"):
                self.driver.ready(name)
                self.now += 0.001
            self.driver.computed(lambda: {"w": "a gradient"})
            self.now += took
            self.driver.exchanged()
            self.now += 0.002
            self.driver.stepped()
            self.now += 0.005  # what the user does between steps


def test_the_timeline_starts_at_the_first_gradient(monkeypatch):
    run = Run(monkeypatch, {"none": 0.1, "fp16": 0.2, "topk": 0.3})
    run.steps(UNTIL_TRYING)
    timeline = run.planner.timeline
    assert timeline.ready == pytest.approx({"b": 0.0, "w": 0.001})
    found = timeline.forward, timeline.backward, timeline.optimizer
    assert found == pytest.approx((0.015, 0.002, 0.002))
    assert run.planner.plain == pytest.approx(0.119)
    assert run.planner.gradients == {"w": "a gradient"}


def test_what_disturbs_steps_is_not_planned_by(monkeypatch):
    run = Run(monkeypatch, {"none": 0.1, "fp16": 0.2, "topk": 0.3})
    run.steps(WARM + HELD + SETTLED)
    run.seconds["none"] = 0.4
    run.steps(3)
    run.seconds["none"] = 0.1
    run.steps(PLAIN - SETTLED - 3)
    assert run.planner.plain == pytest.approx(0.119)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"none": 0.1, "fp16": 0.05, "topk": 0.02}, "topk"),
        ({"none": 0.1, "fp16": 0.05, "topk": 0.2}, "fp16"),
        ({"none": 0.1, "fp16": 0.12, "topk": 0.2}, "none"),
        ({"none": 0.1, "fp16": 0.099, "topk": 0.2}, "none"),  # not faster by enough
    ],
)
def test_the_fastest_is_kept_if_it_is_faster(monkeypatch, seconds, chosen):
    run = Run(monkeypatch, seconds)
    run.steps(UNTIL_CHOSEN + CHECKED + 5)
    assert run.used[:UNTIL_TRYING] == ["none"] * UNTIL_TRYING
    assert set(run.used[UNTIL_TRYING:UNTIL_CHOSEN]) == set(METHODS)
    assert set(run.used[UNTIL_CHOSEN:]) == {chosen}
    assert run.driver.plan["chosen"] == chosen
    assert run.planner.took == pytest.approx({name: took + 0.019 for name, took in seconds.items()})
    assert not run.driver.left


def test_back_if_it_does_not_hold_what_it_promised(monkeypatch):
    run = Run(monkeypatch, {"none": 0.1, "fp16": 0.09, "topk": 0.05})
    run.steps(UNTIL_CHOSEN)
    assert run.using == "topk"
    run.seconds["topk"] = 0.15
    run.steps(CHECKED + 1)
    assert run.used[-1] == "none"
    assert run.driver.plan["chosen"] == "none"
    assert any("topk took 169 ms a step instead of 69" in line for line in run.said)


@pytest.mark.parametrize("fails", [ConfigError("no link"), ValueError("a defect")])
def test_training_goes_on_where_planning_fails(monkeypatch, fails):
    run = Run(monkeypatch, {"none": 0.1}, fails)
    run.steps(UNTIL_CHOSEN + 5)
    assert set(run.used) == {"none"}
    assert str(fails) in run.said[-1]


def test_an_engine_that_fails_is_heard(monkeypatch):
    run = Run(monkeypatch, {"none": 0.1}, ExchangeError("the others are gone"))
    with pytest.raises(ExchangeError, match="gone"):
        run.steps(UNTIL_TRYING)


def test_a_candidate_that_is_refused_is_left_out(monkeypatch):
    run = Run(monkeypatch, {"none": 0.1, "fp16": 0.05, "topk": 0.01}, refuses=("topk",))
    run.steps(UNTIL_CHOSEN)
    assert run.driver.plan["chosen"] == "fp16"
    assert "topk is left out: it does not suit this run" in " ".join(run.said)


def test_the_pause_is_announced(monkeypatch):
    run = Run(monkeypatch, {"none": 0.1, "fp16": 0.05, "topk": 0.02})
    run.steps(UNTIL_TRYING)
    assert run.said == ["grace: auto: measuring links and methods, then planning; about 12 s"]


def test_another_link_leads_to_another_plan(monkeypatch):
    run = Run(monkeypatch, {"none": 0.1, "fp16": 0.05, "topk": 0.02}, replan=50)
    run.steps(UNTIL_CHOSEN + CHECKED + 49)
    assert run.driver.plan["chosen"] == "topk"
    run.seconds = {"none": 0.01, "fp16": 0.02, "topk": 0.02}
    run.steps(1 + HELD + PLAIN + TRYING + CHECKED)
    assert run.driver.plan["chosen"] == "none"


def test_steps_with_several_exchanges_are_not_planned_by(monkeypatch):
    run = Run(monkeypatch, {"none": 0.1})
    for _ in range(UNTIL_TRYING):
        for _ in range(2):
            run.driver.computed(dict)
            run.driver.exchanged()
        run.driver.stepped()
    assert "has seen no whole step" in run.said[-1]
    assert not run.driver.left


def test_a_settled_plan_goes_on(monkeypatch):
    run = Run(monkeypatch, {"none": 0.1, "fp16": 0.05, "topk": 0.02}, replan=50)
    run.steps(UNTIL_CHOSEN + CHECKED + 20)
    saved = {"plan": run.driver.document()}
    again = Run(monkeypatch, {"none": 0.1, "fp16": 0.05, "topk": 0.02}, replan=50)
    found = again.driver.found(saved)
    assert found.strategy == STRATEGIES["topk"].to_dict()
    again.driver.resume(found)
    assert again.driver.left == run.driver.left == 30
    assert again.driver.plan == run.driver.plan


def test_what_was_only_tried_is_planned_anew(monkeypatch):
    run = Run(monkeypatch, {"none": 0.1, "fp16": 0.05, "topk": 0.02})
    run.steps(UNTIL_TRYING + SETTLED + TIMED + 1)
    assert run.using == "topk"
    saved = {"plan": run.driver.document()}
    again = Run(monkeypatch, run.seconds)
    again.switch(STRATEGIES["topk"])
    again.driver.resume(again.driver.found(saved))
    again.steps(1 + HELD + PLAIN + TRYING)
    assert again.used[:2] == ["topk", "none"]
    assert again.driver.plan["chosen"] == "topk"


@pytest.mark.parametrize("damage", ["{", "[]", '{"current": 1}'])
def test_a_damaged_plan_is_refused(monkeypatch, damage):
    run = Run(monkeypatch, {"none": 0.1})
    with pytest.raises(ConfigError, match="plan is damaged"):
        run.driver.found({"plan": damage})


def test_a_plan_for_another_cluster_is_left(monkeypatch):
    run = Run(monkeypatch, {"none": 0.1})
    told = json.loads(run.driver.document())
    assert run.driver.found({"plan": json.dumps({**told, "cluster": [8, 2]})}) is None
    assert run.driver.found(None) is None


@pytest.mark.parametrize("count", [WARM + 1, UNTIL_TRYING + 1, UNTIL_CHOSEN + CHECKED + 1])
def test_a_choice_by_hand_ends_planning(monkeypatch, count):
    run = Run(monkeypatch, {"none": 0.1, "fp16": 0.05, "topk": 0.02}, replan=10)
    run.steps(count)
    saved = {"plan": run.driver.document()}
    run.driver.stop()
    said, using = list(run.said), run.using
    run.steps(UNTIL_CHOSEN)
    assert (run.said, run.using, run.driver.plan) == (said, using, None)
    assert not run.driver.holds
    assert run.driver.document() == ""
    run.driver.resume(run.driver.found(saved))
    assert run.driver.watching
    assert json.loads(run.driver.document())["current"] == json.loads(saved["plan"])["current"]
