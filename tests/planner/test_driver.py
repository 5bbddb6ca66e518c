"""Measurements, trials and choices of ``auto``, in steps whose times are made up."""

import json
from types import SimpleNamespace

import pytest

from grace.core.backend import LocalBackend
from grace.core.variable import Variable
from grace.errors import ConfigError, ExchangeError
from grace.exchange.sparse_rows import SparseRows
from grace.planner import step_timer
from grace.planner.driver import HELD, PLAIN, TRIALS, TRIED, WARM, WATCH_FIRST, Driver
from grace.planner.uniform_plans import uniform_strategy
from tests.support.planners import TURN, UNTIL_TRYING

VARIABLES = [Variable("w", (64, 64)), Variable("b", (64,))]
METHODS = {"none": "none", "fp16": "fp16", "topk": "topk", "qsgd": "qsgd"}
STRATEGIES = {name: uniform_strategy(VARIABLES, 1, spec) for name, spec in METHODS.items()}
ROUND = 4 * TURN
"""Steps of the first round: of the baseline and three candidates."""
UNTIL_CHOSEN = UNTIL_TRYING + ROUND + (TRIALS - ROUND) // (2 * TURN) * 2 * TURN
"""Steps until a choice, where two are left after the first round."""


GRADIENT = SparseRows(None, None)


class Planner:
    """Measures nothing, and finds three candidates."""

    def __init__(self, fails=()):
        self.fails, self.took = dict(fails), {}

    def fail(self, what):
        if what in self.fails:
            raise self.fails[what]

    def measure_links(self, plain):
        self.plain = plain
        self.fail("links")

    def measure_methods(self, gradients, tables, timeline):
        self.gradients, self.tables, self.timeline = gradients, tables, timeline
        self.fail("methods")

    def find_candidates(self, skew):
        self.fail("candidates")
        self.skew = skew
        return [SimpleNamespace(name=name, strategy=STRATEGIES[name]) for name in ("topk", "qsgd", "fp16", "none")]

    def explained(self, chosen, seconds):
        self.fail("explained")
        self.took = dict(seconds)
        return {"chosen": chosen}, f"{chosen} is taken"


class Several(LocalBackend):
    """Says that there are several ranks, all of which tell the same."""

    size = 2


class Run:
    """A training run whose steps take what ``seconds`` says, by what they are exchanged with."""

    def __init__(self, monkeypatch, seconds, fails=(), refuses=(), backend=None, **options):
        self.now, self.seconds, self.using, self.refuses = 0.0, dict(seconds), "none", refuses
        self.used, self.said = [], []
        monkeypatch.setattr(step_timer.time, "perf_counter", lambda: self.now)
        self.planner = Planner(fails)
        backend = backend or LocalBackend()
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
            self.driver.computed(lambda: {"w": GRADIENT})
            self.now += took
            self.driver.exchanged()
            self.now += 0.002
            self.driver.stepped()
            self.now += 0.005  # what the user does between steps


SECONDS = {"none": 0.1, "fp16": 0.05, "topk": 0.02, "qsgd": 0.03}


def test_the_timeline_starts_at_the_first_gradient(monkeypatch):
    run = Run(monkeypatch, SECONDS)
    run.steps(UNTIL_TRYING)
    timeline = run.planner.timeline
    assert timeline.ready == pytest.approx({"b": 0.0, "w": 0.001})
    found = timeline.forward, timeline.backward, timeline.optimizer
    assert found == pytest.approx((0.015, 0.002, 0.002))
    assert run.planner.plain == pytest.approx(0.119)
    assert run.planner.gradients == {"w": GRADIENT}
    assert run.planner.tables == {"w"}


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        (SECONDS, "topk"),
        ({**SECONDS, "topk": 0.2}, "qsgd"),
        ({**SECONDS, "topk": 0.2, "qsgd": 0.2}, "fp16"),
        ({"none": 0.1, "fp16": 0.12, "topk": 0.2, "qsgd": 0.2}, "none"),
        ({"none": 0.1, "fp16": 0.099, "topk": 0.2, "qsgd": 0.2}, "none"),  # not faster by enough
    ],
)
def test_the_fastest_is_kept_if_it_is_faster(monkeypatch, seconds, chosen):
    run = Run(monkeypatch, seconds)
    run.steps(UNTIL_TRYING + TRIALS)
    assert run.driver.settled
    assert run.used[:UNTIL_TRYING] == ["none"] * UNTIL_TRYING
    assert set(run.used[UNTIL_TRYING:][:ROUND]) == set(METHODS)
    run.steps(5)
    assert set(run.used[UNTIL_TRYING + TRIALS :]) == {chosen}
    assert run.driver.plan == {"chosen": chosen}
    assert run.planner.took == pytest.approx({name: took + 0.019 for name, took in seconds.items()})


def test_it_is_settled_soon():
    assert UNTIL_TRYING <= 15
    assert (TRIED + 1) * TURN < TRIALS
    assert UNTIL_TRYING + TRIALS <= 60


def turns(used):
    """Whose turns there were, one after the other."""
    return used[UNTIL_TRYING::TURN]


def test_who_is_not_far_behind_has_further_turns(monkeypatch):
    run = Run(monkeypatch, {"none": 0.04, "fp16": 0.045, "topk": 0.03, "qsgd": 0.035})
    run.steps(UNTIL_TRYING + TRIALS)
    assert turns(run.used)[:4] == ["none", "topk", "qsgd", "fp16"]
    assert turns(run.used)[4:10] == ["topk", "qsgd", "none"] * 2


def test_nothing_is_tried_further_where_one_is_far_ahead(monkeypatch):
    run = Run(monkeypatch, {**SECONDS, "qsgd": 0.1})
    run.steps(UNTIL_TRYING + ROUND)
    assert run.driver.settled
    assert run.driver.plan == {"chosen": "topk"}


BUSY = {"none": 0.03, "fp16": 0.05, "topk": 0.02, "qsgd": 0.05}


@pytest.mark.parametrize(
    ("first", "later", "chosen"),
    [
        ({**SECONDS, "topk": 0.029}, {"topk": 0.033, "qsgd": 0.030}, "qsgd"),
        (BUSY, {name: 3 * seconds for name, seconds in BUSY.items()}, "topk"),
        ({**SECONDS, "none": 0.03, "fp16": 0.029}, {"fp16": 0.05, "topk": 0.05, "qsgd": 0.05}, "none"),
    ],
    ids=["another's first turn was disturbed", "all turns take longer", "nothing stays faster"],
)
def test_all_turns_count_beside_those_of_the_baseline_in_the_same_minutes(monkeypatch, first, later, chosen):
    run = Run(monkeypatch, first)
    run.steps(UNTIL_TRYING + ROUND)
    run.seconds.update(later)
    run.steps(TRIALS - ROUND + 1)
    assert run.used[-1] == chosen
    assert run.driver.plan == {"chosen": chosen}


def test_the_next_best_has_turns_where_the_best_gets_slower(monkeypatch):
    run = Run(monkeypatch, {"none": 0.1, "topk": 0.02, "qsgd": 0.022, "fp16": 0.024})
    run.steps(UNTIL_TRYING + ROUND)
    run.seconds["topk"] = 0.15
    run.steps(UNTIL_CHOSEN - UNTIL_TRYING - ROUND + 1)
    assert set(turns(run.used)[-3:]) == {"qsgd", "fp16"}
    assert run.driver.plan == {"chosen": "qsgd"}


def test_uncompressed_sums_stay_where_turns_differ_by_more_than_what_is_gained(monkeypatch):
    run = Run(monkeypatch, {"none": 0.06, "fp16": 0.2, "topk": 0.04, "qsgd": 0.2})
    run.steps(UNTIL_TRYING + ROUND)
    run.seconds["topk"] = 0.065
    run.steps(2 * TURN)
    run.seconds["topk"] = 0.06
    run.steps(TRIALS - ROUND)
    assert run.driver.settled
    assert run.driver.plan == {"chosen": "none"}


@pytest.mark.parametrize("what", ["links", "methods", "candidates", "explained"])
@pytest.mark.parametrize("error", [ConfigError("no link"), RuntimeError("generator raised StopIteration")])
def test_training_goes_on_uncompressed_whatever_fails(monkeypatch, what, error):
    run = Run(monkeypatch, SECONDS, {what: error})
    run.steps(UNTIL_CHOSEN + 5)
    assert run.used[-1] == "none"
    assert run.driver.plan is None
    assert sum(str(error) in line for line in run.said) == 1
    assert "training goes on uncompressed" in run.said[-1]


def test_an_engine_that_fails_is_heard(monkeypatch):
    run = Run(monkeypatch, SECONDS, {"links": ExchangeError("the others are gone")})
    with pytest.raises(ExchangeError, match="gone"):
        run.steps(UNTIL_TRYING)


def test_a_candidate_that_is_refused_is_left_out(monkeypatch):
    run = Run(monkeypatch, SECONDS, refuses=("topk",))
    run.steps(UNTIL_CHOSEN)
    assert run.driver.plan["chosen"] == "qsgd"
    assert "topk is left out: it does not suit this run" in " ".join(run.said)


class Straggling(Several):
    """The other rank's timeline is longer: it computes half a second more, for which this one waits."""

    def allgather_object(self, value):
        other = dict(value)
        if value.get("what") == "steps to plan by":
            timeline, plain = value["value"]
            other["value"] = (type(timeline)(timeline.ready, timeline.forward + 0.5, timeline.backward), plain)
        return [value, other]


def test_the_slowest_ranks_computing_counts(monkeypatch):
    run = Run(monkeypatch, {**SECONDS, "none": 0.6}, backend=Straggling())
    run.steps(UNTIL_TRYING)
    assert run.planner.timeline.forward == pytest.approx(0.515)
    assert run.planner.skew == pytest.approx(0.498)


class Alike(Several):
    def allgather_object(self, value):
        return [value, value]


def settled(monkeypatch, **options):
    run = Run(monkeypatch, SECONDS, backend=Alike(), **options)
    run.steps(UNTIL_CHOSEN + WATCH_FIRST)
    assert run.using == "topk"
    return run


def test_a_slower_link_is_told_once(monkeypatch):
    run = settled(monkeypatch)
    said, began = len(run.said), run.now
    run.seconds["topk"] = 0.2
    while len(run.said) == said:
        run.steps(1)
        assert run.now - began < 5.0
    assert "steps wait 200 ms for exchanges, and 20 when this was chosen: the link is slower" in run.said[-1]
    run.steps(200)
    assert len(run.said) == said + 1
    assert run.using == "topk"


def test_a_slower_link_is_planned_for_within_5_seconds(monkeypatch):
    run = settled(monkeypatch, replan=100_000)
    began = run.now
    run.seconds["topk"] = 0.2
    while run.using == "topk":
        run.steps(1)
    assert run.now - began < 5.0
    run.steps(HELD + PLAIN + TRIALS)
    assert run.driver.plan["chosen"] == "qsgd"


def test_a_disturbed_first_look_does_not_hide_a_slower_link(monkeypatch):
    run = Run(monkeypatch, SECONDS, backend=Alike())
    run.steps(UNTIL_CHOSEN)
    for seconds, count in ((0.2, WATCH_FIRST), (0.02, 50), (0.2, 50)):
        run.seconds["topk"] = seconds
        run.steps(count)
    assert "steps wait 200 ms for exchanges, and 20 when this was chosen" in run.said[-1]


@pytest.mark.parametrize("replan", [0, 100_000])
@pytest.mark.parametrize("told", [False, True])
def test_a_resumed_run_knows_the_link_that_its_plan_was_made_for(monkeypatch, told, replan):
    run = settled(monkeypatch)
    if told:
        run.seconds["topk"] = 0.2
        run.steps(50)
        assert "the link is slower" in run.said[-1]
    saved = {"plan": run.driver.document()}
    again = Run(monkeypatch, {**SECONDS, "topk": 0.2}, backend=Alike(), replan=replan)
    again.switch(STRATEGIES["topk"])
    again.driver.resume(again.driver.resumed_from(saved))
    again.steps(50)
    assert "steps wait 200 ms for exchanges, and 20 when this was chosen: the link is slower" in " ".join(again.said)
    again.steps(HELD + PLAIN + TRIALS)
    assert again.driver.plan["chosen"] == ("qsgd" if replan else "topk")


def test_steps_that_vary_are_no_slower_link(monkeypatch):
    run = settled(monkeypatch)
    said = len(run.said)
    for seconds in (0.03, 0.02, 0.035, 0.02) * 10:
        run.seconds["topk"] = seconds
        run.steps(3)
    assert len(run.said) == said


def test_another_link_leads_to_another_plan(monkeypatch):
    run = Run(monkeypatch, SECONDS, replan=50)
    run.steps(UNTIL_CHOSEN + 49)
    assert run.driver.plan["chosen"] == "topk"
    run.seconds = {"none": 0.01, "fp16": 0.02, "topk": 0.02, "qsgd": 0.02}
    run.steps(1 + HELD + PLAIN + TRIALS)
    assert run.driver.plan["chosen"] == "none"


def test_steps_with_several_exchanges_are_not_planned_by(monkeypatch):
    run = Run(monkeypatch, SECONDS)
    for _ in range(UNTIL_TRYING):
        for _ in range(2):
            run.driver.computed(dict)
            run.driver.exchanged()
        run.driver.stepped()
    assert "has seen no whole step" in run.said[-1]
    assert not run.driver.steps_left


def test_a_settled_plan_goes_on(monkeypatch):
    run = Run(monkeypatch, SECONDS, replan=50)
    run.steps(UNTIL_CHOSEN + 20)
    saved = {"plan": run.driver.document()}
    again = Run(monkeypatch, SECONDS, replan=50)
    found = again.driver.resumed_from(saved)
    assert found.strategy == STRATEGIES["topk"].to_dict()
    again.driver.resume(found)
    assert again.driver.steps_left == run.driver.steps_left == 30
    assert again.driver.plan == run.driver.plan


def test_what_was_only_tried_is_planned_anew(monkeypatch):
    run = Run(monkeypatch, SECONDS)
    run.steps(UNTIL_TRYING + TURN + 1)
    assert run.using == "topk"
    saved = {"plan": run.driver.document()}
    again = Run(monkeypatch, run.seconds)
    again.switch(STRATEGIES["topk"])
    again.driver.resume(again.driver.resumed_from(saved))
    again.steps(1 + HELD + PLAIN + TRIALS)
    assert again.used[:2] == ["topk", "none"]
    assert again.driver.plan["chosen"] == "topk"


@pytest.mark.parametrize("damage", ["{", "[]", '{"current": 1}'])
def test_a_damaged_plan_is_refused(monkeypatch, damage):
    run = Run(monkeypatch, SECONDS)
    with pytest.raises(ConfigError, match="plan is damaged"):
        run.driver.resumed_from({"plan": damage})


def test_on_another_cluster_all_is_planned_anew_from_the_strategy_that_was(monkeypatch):
    run = Run(monkeypatch, SECONDS, replan=50)
    assert run.driver.resumed_from(None) is None
    run.steps(UNTIL_CHOSEN + 20)
    told = json.loads(run.driver.document())
    elsewhere = {**told["strategy"], "cluster": {"world_size": 8, "nodes": 2}}
    again = Run(monkeypatch, SECONDS, replan=50)
    saved = {"plan": json.dumps({**told, "strategy": elsewhere, "cluster": [8, 2]})}
    found = again.driver.resumed_from(saved)
    assert found.strategy == STRATEGIES["topk"].to_dict()
    again.switch(STRATEGIES["topk"])
    again.driver.resume(found)
    assert again.driver.plan is None
    again.steps(1 + UNTIL_CHOSEN - WARM)
    assert again.used[:2] == ["topk", "none"]
    assert again.driver.plan == {"chosen": "topk"}


@pytest.mark.parametrize("count", [WARM + 1, UNTIL_TRYING + 1, UNTIL_CHOSEN + 1])
def test_a_choice_by_hand_ends_planning(monkeypatch, count):
    run = Run(monkeypatch, SECONDS, replan=10)
    run.steps(count)
    saved = {"plan": run.driver.document()}
    run.driver.stop()
    said, using = list(run.said), run.using
    run.steps(UNTIL_CHOSEN)
    assert (run.said, run.using, run.driver.plan) == (said, using, None)
    assert not run.driver.after_backward
    assert run.driver.document() == ""
    run.driver.resume(run.driver.resumed_from(saved))
    assert run.driver.steps_left > 0
    assert json.loads(run.driver.document())["current"] == json.loads(saved["plan"])["current"]
