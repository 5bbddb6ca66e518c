"""What an uncompressed step says of predictions."""

from dataclasses import replace

import pytest

from grace.core.backend import LocalBackend
from grace.core.variable import Variable
from grace.planner.calibration import Calibration, Key
from grace.planner.costs import Codec, Curve
from grace.planner.grouped import grouped
from grace.planner.network import Links
from grace.planner.planning import fitted, measured_step
from grace.planner.problem import Problem
from grace.planner.search import Candidate
from grace.planner.step import Timeline
from grace.planner.works import DENSE
from grace.strategy.builder import OneNode

VARIABLES = [Variable(f"w{i}", (1024, 1024)) for i in range(8)]
TIMELINE = Timeline({v.name: 0.01 * (8 - i) for i, v in enumerate(VARIABLES)}, 0.04, 0.08, 0.01)
LINKS = Links(bandwidth=125e6, latency=1e-4)
GATHERED = "allgather, topk, residual"


def calibration():
    curves = {
        kind: {2: Curve.through([(n, LINKS.seconds(kind, n, 2)) for n in (1e3, 1e5, 1e7)])}
        for kind in ("allreduce", "allgather")
    }
    codecs = {DENSE: Codec(), GATHERED: Codec()}
    return Calibration(Key.of(LocalBackend(), ["here"], "numpy", 1), 0.0, curves, codecs=codecs)


def problem(made):
    return Problem(VARIABLES, TIMELINE, made.costs(), OneNode(2))


def step(made, method="none"):
    return problem(made).predict(grouped(VARIABLES, 2, method)).step


@pytest.mark.parametrize("off", [0.8, 0.95, 1.0, 1.03, 1.15, 2.5])
def test_an_uncompressed_step_is_predicted_as_it_was_measured(off):
    made = calibration()
    plain = step(made) * off
    assert step(fitted(problem(made), made, plain)) == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("off", [0.8, 1.1])
def test_the_fault_of_sums_is_little_of_other_predictions(off):
    made = calibration()
    plain = step(made) + (off - 1) * LINKS.seconds("allreduce", sum(v.nbytes for v in VARIABLES), 2)
    found = fitted(problem(made), made, plain)
    assert step(found, "topk") == pytest.approx(step(made, "topk"), rel=0.06)
    assert found.contention.wire < 0.3


@pytest.mark.parametrize("method", ["none", "topk"])
def test_what_is_learned_from_begins_with_the_prediction(method):
    made = calibration()
    made = fitted(problem(made), made, 1.3 * step(made))  # with contention, and fixed work
    strategy = grouped(VARIABLES, 2, method)
    one = Candidate(method, strategy, problem(made).predict(strategy))
    assert measured_step(problem(made), one, 1.0).predicted() == pytest.approx(one.prediction.step)


def test_what_a_slow_link_takes_longer_is_no_work_of_every_step():
    links = Links(bandwidth=1.25e6, latency=1e-4)
    curve = Curve.through([(n, links.seconds("allreduce", n, 2)) for n in (1e3, 1e5, 1e7)])
    made = calibration()
    made = replace(made, curves={**made.curves, "allreduce": {2: curve}})
    found = fitted(problem(made), made, 1.3 * step(made))
    assert found.step < 0.1 * TIMELINE.compute  # of a step that takes a hundred times as long
    assert step(found, "topk") == pytest.approx(step(made, "topk"), rel=0.3)
