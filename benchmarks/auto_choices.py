"""Plans of ``strategy="auto"`` beside others: ``python -m benchmarks.auto_choices --models resnet --bandwidth 1gbit``.

In each scenario the ranks train by ``auto`` until it has chosen. Then its choice, its best other candidates, plain sums
and one method for all variables are measured in turns. The tables have how many pairs of plans were predicted in the
right order, how much longer the chosen plan's step is than that of the best one within the bounds (regret), and after
how many steps it was chosen. A call goes on where an interrupted one ended.
"""

import itertools
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, TypedDict

import torch
from rich.console import Console

from benchmarks import scenarios
from grace.bench.common import options
from grace.bench.common.results import Row
from grace.bench.common.tables import Columns, table
from grace.bench.common.text import digits
from grace.bench.ranks.rank_program import Emit, join_run, run_as_rank
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

MODELS = "transformer,resnet,lstm,ncf,mlp"
METHODS = "fp16,block(bits=4),qsgd,efsignsgd,topk(ratio=0.01),powersgd(rank=4)"
"""Methods that are measured for all variables, beside plain sums."""
OWN = 3
"""Number of the planner's other candidates that are measured, the best ones."""
APART = 0.10
"""Relative difference of two plans from which on their order counts."""
SHORT = 0.35
"""Seconds of a step up to which one is made before those that count, to fill caches."""
MOST, LEAST = 10, 2
"""Steps of a turn at most, and turns of each plan at least."""
NEAR = 0.3
"""The part of the step of the fastest plan that ``auto`` may choose by which others may be longer, and have all turns:
between them noise could decide."""


class PlanRow(TypedDict, total=False):
    """Row of a plan.

    Attributes:
        name: "none" for plain sums, the method, or "planned" and what the planner calls it.
        predicted_ms, measured_ms: the step as predicted, and the median of its turns.
        turns_ms: the median step of each turn.
        allowed: True if the plan is within ``auto``'s bounds.
        single: True if it has one method for all variables.
        chosen: True if ``auto`` has taken it.
    """

    name: str
    predicted_ms: float
    measured_ms: float
    turns_ms: list[float]
    allowed: bool
    single: bool
    chosen: bool


def order(plans: Sequence[PlanRow]) -> tuple[int, int]:
    """Return how many pairs were predicted in the order in which they were measured, of those that differ by 10 %."""
    right = pairs = 0
    for one, other in itertools.combinations(plans, 2):
        faster, slower = sorted((one, other), key=lambda plan: plan["measured_ms"])
        if slower["measured_ms"] > (1 + APART) * faster["measured_ms"]:
            pairs += 1
            right += slower["predicted_ms"] > faster["predicted_ms"]
    return right, pairs


def to_fastest(mine: PlanRow, others: Sequence[PlanRow]) -> float:
    """Return a plan's step over that of the fastest of others.

    Every other round tells which one is the fastest, and the rest how much faster it is, and the other way round: of
    equal plans one is always fastest by chance, and that would be taken for regret. Turns of one round are compared
    with each other, so that what disturbs for a while disturbs both.

    >>> mine, other, noisy = ({"turns_ms": turns} for turns in ([4.0, 4.0], [2.0, 2.0], [1.0, 3.0]))
    >>> to_fastest(mine, [other]), round(to_fastest(mine, [mine, other, noisy]), 3)
    (2.0, 1.667)
    """
    found = []
    for half in (0, 1):
        fastest = min(others, key=lambda plan: median(plan["turns_ms"][half::2]))
        turns = zip(mine["turns_ms"][1 - half :: 2], fastest["turns_ms"][1 - half :: 2], strict=False)
        found.append(median(one / other for one, other in turns))
    return fmean(found)


def judge(plans: Sequence[PlanRow]) -> Row:
    """Return the verdict on the plans of a scenario, as values of its row.

    - ``right``, ``pairs``: numbers of pairs whose order was predicted, and of those that differ (:func:`order`).
    - ``chosen``, ``step_ms``: the name of the plan that ``auto`` has taken, and its measured step.
    - ``regret``: its step over that of the best plan within the bounds, minus 1 (:func:`to_fastest`).
    - ``to_plain``, ``to_single``: its step over that of plain sums, and of the best single method within the bounds.
    """
    plain = next(plan for plan in plans if plan["name"] == "none")
    chosen = next((plan for plan in plans if plan["chosen"]), plain)
    allowed = [plan for plan in plans if plan["allowed"] or plan is plain]
    single = [plan for plan in allowed if plan["single"] or plan is plain]
    right, pairs = order(plans)
    return {
        "right": right,
        "pairs": pairs,
        "chosen": chosen["name"],
        "step_ms": chosen["measured_ms"],
        "regret": max(0.0, to_fastest(chosen, allowed) - 1),
        "to_plain": to_fastest(chosen, [plain]),
        "to_single": to_fastest(chosen, single),
    }


def verdict(scenario: Row) -> str:
    """Return the verdict on a scenario, in two sentences."""
    return (
        "{right} of {pairs} pairs in the right order. After {settled} steps it took {chosen}: regret {regret:.1%}, "
        "{to_plain:.2f} of plain sums' step."
    ).format_map(scenario)


def measure(settings: Namespace, model: str, backend: Backend, emit: Emit) -> None:
    """Let ``auto`` choose, then measure plans in turns; rank 0 calls ``emit`` with each event."""
    began = time.perf_counter()
    torch.manual_seed(0)
    work = workload(model, backend.rank)
    stepper = Stepper(in_optimizer("auto", strategy="auto"), work.model, work.loss)
    optimizer = stepper.exchange
    settled, uncompressed = _train_until_settled(stepper)
    planner = optimizer._grace.driver.planner
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
        about: Row = {"settled": settled, "uncompressed": uncompressed, "planning": planning}
        about["seconds"] = time.perf_counter() - began
        about["plan"] = str(plan)
        emit({"scenario": {**about, "missing": missing, "plans": rows, **judge(rows)}})


def _train_until_settled(stepper: Stepper) -> tuple[int, int]:
    """Train until ``auto`` has chosen; return the steps that took, and those of them before it tried anything.

    Raises:
        ExchangeError: nothing was planned; rank 0 has said why.
    """
    auto, steps, plain = stepper.exchange._grace.driver, 0, 0
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


def _plans(settings: Namespace, problem: Problem, plan: Plan) -> tuple[list[PlanRow], list[Strategy], dict[str, str]]:
    """Return a row and the strategy of each plan, plain sums first, the chosen one among them; and why methods cannot
    be used."""
    made, missing = dict[str, Strategy](), dict[str, str]()
    for method in ["none", *options.methods(settings.methods)]:
        try:
            made[method] = uniform_strategy(problem.variables, problem.ranks, method, nodes=problem.nodes)
            problem.predict(made[method])
        except ConfigError as error:
            made.pop(method, None)
            missing[method] = str(error)
    single = set(made)
    others = [one for one in plan.candidates if not one.baseline][:OWN]
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


def _take_turns(runs: Sequence[PlanRun], settings: Namespace, backend: Backend, emit: Emit) -> None:
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


def show(console: Console, row: Row) -> None:
    """Show the plans of a scenario, with predicted and measured steps, and the verdict; the chosen plan is bold."""
    columns: Columns[PlanRow] = {
        "plan": lambda plan: plan["name"],
        "predicted\nms": lambda plan: digits(plan["predicted_ms"]),
        "measured\nms": lambda plan: digits(plan["measured_ms"]),
        "within\nbounds": lambda plan: "yes" if plan["allowed"] else "no",
    }

    def style(plan: PlanRow) -> str:
        return "bold" if plan["chosen"] else "" if plan["allowed"] else "dim"

    console.print(f"\n{scenarios.name_of(row)}", table(row["plans"], columns, style=style), verdict(row), sep="\n")
    for left_out, why in row["missing"].items():
        console.print(f"Left out: {left_out}: {why}", style="dim")


def show_all(console: Console, rows: Sequence[Row]) -> None:
    """Show a table of all scenarios, and their regret."""
    columns: Columns[Row] = {
        "": scenarios.name_of,
        "order": lambda row: f"{row['right']}/{row['pairs']}",
        "regret": lambda row: f"{row['regret']:.1%}",
        "to\nplain": lambda row: f"{row['to_plain']:.2f}",
        "to\nsingle": lambda row: f"{row['to_single']:.2f}",
        "settled": lambda row: str(row["settled"]),
        "planned\nin": lambda row: f"{row['planning']:.2g} s",
    }
    regrets = [row["regret"] for row in rows]
    console.print("", table(rows, columns), sep="\n")
    console.print(f"\nRegret: median {median(regrets):.1%}, worst {max(regrets):.1%}.")


def rank_main(folder: str, model: str) -> None:
    """Measure, as one of the ranks."""
    with join_run(folder, Namespace) as (settings, backend, emit):
        measure(settings, model, backend, emit)


def main() -> None:
    """Measure the scenarios that are not there yet, and show all."""
    parser = scenarios.parser_of(__doc__, MODELS, "2,4", "out/auto_choices.json", 1.0)
    parser.add_argument("--methods", default=METHODS, help="compressors, each of which makes a plan (%(default)s)")
    given, console = parser.parse_args(), Console(highlight=False, markup=False)
    rates, ranks = scenarios.bandwidths_and_ranks(given)
    each = itertools.product(ranks, rates, options.split(given.models))
    wanted = [{"model": model, "ranks": count, "bandwidth": rate} for count, rate, model in each]
    show_all(console, scenarios.measure("benchmarks.auto_choices", given, wanted, show, console))


if __name__ == "__main__":
    if "RANK" in os.environ:  # the ranks of a scenario run this file, too
        run_as_rank(rank_main)
    else:
        main()
