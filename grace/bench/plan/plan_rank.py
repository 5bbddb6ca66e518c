"""One rank of ``grace bench plan``.

Usage: python -m grace.bench.plan.plan_rank FOLDER MODEL, where FOLDER holds settings.json; rank 0 writes events.jsonl:

    {"blocks": n}           how many turns follow at most
    {"times_ms"}            the steps of a turn
    {"scenario": {...}}     all of it: facts, and plans with what was predicted and measured
"""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from grace.bench.plan.plan_command import PlanSettings
from grace.bench.ranks.rank_program import Emit, join_run, run_as_rank
from grace.bench.ranks.scenario import Scenario
from grace.bench.report.plan_table import PlanRow, judge
from grace.bench.step.contestants import Stepper, in_optimizer
from grace.bench.workloads.models import workload
from grace.core.backend import Backend
from grace.errors import ConfigError, ExchangeError
from grace.planner.error_budget import SLACK, allows, class_of
from grace.planner.explain import Plan, largest_share
from grace.planner.greedy import find_candidates
from grace.planner.problem import Problem
from grace.planner.uniform_plans import uniform_strategy
from grace.strategy.plan import Strategy

SHORT = 0.35
"""Seconds of a step up to which one is made before those that count, to fill caches."""
MOST, LEAST = 10, 2
"""Steps of a turn at most, and turns of each plan at least."""
NEAR = 0.3
"""The part of the step of the fastest plan that ``auto`` may choose by which others may be longer, and have all turns:
between them noise could decide."""


def measure(settings: PlanSettings, model: str, backend: Backend, emit: Emit) -> None:
    """Let ``auto`` choose, then measure plans in turns; rank 0 calls ``emit`` with each event."""
    began = time.perf_counter()
    torch.manual_seed(0)
    work = workload(model, backend.rank)
    stepper = Stepper(in_optimizer("auto", strategy="auto"), work.model, work.loss)
    optimizer = stepper.exchange
    settled, uncompressed = _train_until_settled(stepper)
    planner = optimizer._grace.auto.planner
    plan = optimizer.plan  # which the turns end
    # Rank 0 plans and predicts, from its own measurements; the others get its strategies.
    rows, made, missing = list[PlanRow](), list[Strategy](), dict[str, str]()
    planning = 0.0
    if backend.rank == 0:
        planning = _planning_seconds(planner.problem)
        rows, made, missing = _plans(settings, planner.problem, plan)
    given: list[tuple[Strategy, bool, bool]] = backend.allgather_object(
        [(strategy, row["allowed"], row["chosen"]) for strategy, row in zip(made, rows, strict=True)]
    )[0]
    runs = [PlanRun(stepper, backend, number, *each) for number, each in enumerate(given)]
    _take_turns(runs, settings, backend, emit)
    if backend.rank == 0:
        for row, run in zip(rows, runs, strict=True):
            row["measured_ms"] = 1e3 * median(run.turns)
            row["turns_ms"] = [round(1e3 * seconds, 4) for seconds in run.turns]
        about: Scenario = {"settled": settled, "uncompressed": uncompressed, "planning": planning}
        about["seconds"] = time.perf_counter() - began
        about["plan"] = str(plan)
        emit({"scenario": {**about, "missing": missing, "plans": rows, **judge(rows)}})


def _train_until_settled(stepper: Stepper) -> tuple[int, int]:
    """Train until ``auto`` has chosen; return the steps that took, and those of them before it tried anything.

    Raises:
        ExchangeError: nothing was planned; rank 0 has said why.
    """
    auto, steps, plain = stepper.exchange._grace.auto, 0, 0
    while not auto.settled:
        stepper()
        steps += 1
        plain += not auto.trying
    if auto.plan is None:
        raise ExchangeError("nothing was planned; rank 0 has said why")
    auto.link_watch = None  # what other plans take is no news of the link
    return steps, plain


def _planning_seconds(problem: Problem) -> float:
    """Return the seconds that planning takes once all methods are measured."""
    began = time.perf_counter()
    find_candidates(problem)
    return time.perf_counter() - began


def _plans(
    settings: PlanSettings, problem: Problem, plan: Plan
) -> tuple[list[PlanRow], list[Strategy], dict[str, str]]:
    """Return a row and the strategy of each plan, plain sums first, the chosen one among them; and why methods cannot
    be used."""
    made, missing = dict[str, Strategy](), dict[str, str]()
    for method in ["none", *settings.methods]:
        try:
            made[method] = uniform_strategy(problem.variables, problem.ranks, method, nodes=problem.nodes)
            problem.predict(made[method])
        except ConfigError as error:
            made.pop(method, None)
            missing[method] = str(error)
    single = set(made)
    others = [one for one in plan.candidates if not one.baseline][: settings.own]
    for one in [plan.chosen, *others]:
        if all(one.strategy.plans != other.plans for other in made.values()):
            made[f"planned: {one.name}"] = one.strategy
    rows: list[PlanRow] = [
        {
            "name": name,
            "predicted_ms": 1e3 * problem.predict(strategy).step,
            "allowed": _allowed(problem, strategy),
            "single": name in single,
            "chosen": strategy.plans == plan.chosen.strategy.plans,
        }
        for name, strategy in made.items()
    ]
    return rows, list(made.values()), missing


def _allowed(problem: Problem, strategy: Strategy) -> bool:
    """Return True if ``auto`` could choose it: of its class, and within the bound of every variable."""
    parts = {(part.compressor, part.memory) for plan in strategy.plans for part in plan.parts}
    fits = all(allows(problem.quality, class_of(compressor, memory)) for compressor, memory in parts)
    return fits and all(largest_share(problem, plan) <= SLACK for plan in strategy.plans)


class PlanRun:
    """Plan that is ready to train by, with memories of its own. Runners of later plans are made beside the first's."""

    def __init__(
        self, stepper: Stepper, backend: Backend, number: int, strategy: Strategy, allowed: bool, chosen: bool
    ):
        self.stepper, self.allowed, self.chosen = stepper, allowed, chosen
        self.session: Any = stepper.exchange._grace
        if number == 0:
            stepper.exchange.use_strategy(strategy)
            self.runner, self.plan = self.session.runner, self.session.plan
        else:
            self.runner, self.plan = self.session.build_runner(strategy)
        self.activate()
        # the second step: the first one allocates. All ranks take the slowest's, so that they make as many steps
        self.seconds = max(backend.allgather_object([self.step(), self.step()][-1]))
        self.turns: list[float] = []
        """The median seconds of each turn's steps, each on the rank that took longest for it."""

    def activate(self) -> None:
        """Let the next steps use this plan."""
        self.session.switch_runner(self.runner, self.plan)

    def step(self) -> float:
        """Make a step, and return its seconds."""
        began = time.perf_counter()
        self.stepper()
        return time.perf_counter() - began


def _take_turns(runs: Sequence[PlanRun], settings: PlanSettings, backend: Backend, emit: Emit) -> None:
    """Measure plans in turns, one round after the other, backwards in every other one; after two rounds the chosen one
    and those that are near the best alone."""
    emit({"blocks": settings.rounds * len(runs)})
    for number in range(max(LEAST, settings.rounds)):
        if number >= LEAST:
            least = min(median(run.turns) for run in runs if run.allowed)
            runs = [run for run in runs if run.chosen or median(run.turns) <= (1 + NEAR) * least]
        # backwards in every other round: what grows over a round, as heat, disturbs all plans alike
        for run in runs if number % 2 == 0 else runs[::-1]:
            run.activate()
            if run.seconds < SHORT:
                run.step()
            backend.allgather_object(None)  # nobody starts before what came earlier is done
            steps = min(MOST, max(1, round(settings.seconds / settings.rounds / run.seconds)))
            took = backend.allgather_object([run.step() for _ in range(steps)])
            # a step ends when the slowest rank's does
            run.turns.append(median(map(max, zip(*took, strict=True))))
            emit({"times_ms": [1e3 * seconds for seconds in took[0]]})


def main(folder: str, model: str) -> None:
    """Join the run, and measure."""
    with join_run(folder, PlanSettings) as (settings, backend, emit):
        measure(settings, model, backend, emit)


if __name__ == "__main__":
    run_as_rank(main)
