"""How good predictions are: errors, order, regret, and what corrections change; of rows, however they came about."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from grace.bench.common.kept import Scenario, relative_error
from grace.planner.corrections import Step, fitted_corrections
from grace.planner.explain import MARGIN

APART = 0.05
"""By how much two plans must differ for their order to count."""
GOALS = {"median": 0.10, "worst": 0.25, "order": 0.95, "regret": 0.05, "regret_measured": 0.02}
Plan = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """On a scenario; shares of what was measured, so that 0.1 is a tenth.

    Attributes:
        median, worst: errors of predictions, without a sign.
        right, pairs: pairs of plans that differ, and those of them whose order was predicted.
        chosen: the plan that is taken without measuring any.
        regret: by how much its step is longer than that of the best plan that could be taken.
        measured: the plan that is taken when as many steps of candidates were measured as ``auto`` measures.
        regret_measured: likewise.
    """

    median: float
    worst: float
    right: int
    pairs: int
    chosen: str
    regret: float
    measured: str
    regret_measured: float


@dataclass(frozen=True)
class Totals:
    """Of all scenarios.

    Attributes:
        median, worst: errors of all predictions.
        order: the share of pairs in the right order.
        regret, regret_measured: the largest of all scenarios.
        usual_regret, usual_regret_measured: medians of these.
        before, after: median and worst error of the sums that corrections are fitted to, without corrections and with
            those that all other steps on the same links and ranks taught.
        methods: the median of errors with their signs, by plan: below zero what takes longer than predicted.
        plans: how many were measured.
    """

    median: float
    worst: float
    order: float
    regret: float
    regret_measured: float
    usual_regret: float
    usual_regret_measured: float
    before: tuple[float, float]
    after: tuple[float, float]
    methods: dict[str, float]
    plans: int

    def holds(self, goal: str) -> bool:
        """Whether a goal of :data:`GOALS` is reached."""
        found = getattr(self, goal)
        return bool(found >= GOALS[goal] if goal == "order" else found <= GOALS[goal])


def order(plans: Sequence[Plan]) -> tuple[int, int]:
    """Pairs that were predicted in the order in which they were measured, of those that differ by 5 %.

    >>> rows = [{"predicted_ms": p, "measured_ms": m} for p, m in [(1, 1), (3, 2), (2, 3), (2.5, 3.1)]]
    >>> order(rows)
    (3, 5)
    """
    right = pairs = 0
    for one, other in combinations(plans, 2):
        faster, slower = sorted((one, other), key=lambda plan: plan["measured_ms"])
        if slower["measured_ms"] > (1 + APART) * faster["measured_ms"]:
            pairs += 1
            right += slower["predicted_ms"] > faster["predicted_ms"]
    return right, pairs


def judged(scenario: Scenario) -> Verdict:
    """All of it."""
    plans = scenario["plans"]
    errors = [abs(relative_error(plan)) for plan in plans]
    right, pairs = order(plans)
    plain = next(plan for plan in plans if plan["name"] == "none")
    able = [plan for plan in plans if plan["allowed"]] or [plain]
    chosen = next((plan for plan in plans if plan["chosen"]), plain)
    tried = min((plan for plan in plans if plan["tried"]), key=lambda plan: plan["first_ms"], default=plain)
    if tried["first_ms"] > (1 - MARGIN) * plain["first_ms"]:
        tried = plain
    return Verdict(
        median(errors),
        max(errors),
        right,
        pairs,
        chosen["name"],
        _regret(chosen, able),
        tried["name"],
        _regret(tried, able),
    )


def _regret(taken: Plan, able: Sequence[Plan]) -> float:
    return max(0.0, float(taken["measured_ms"] / min(plan["measured_ms"] for plan in able) - 1))


def totals(scenarios: Sequence[Scenario]) -> Totals:
    """Of scenarios, of which there must be one.

    Raises:
        ValueError: there is none.
    """
    if not scenarios:
        raise ValueError("there is no scenario")
    verdicts = [judged(scenario) for scenario in scenarios]
    plans = [plan for scenario in scenarios for plan in scenario["plans"]]
    errors = [abs(relative_error(plan)) for plan in plans]
    pairs = sum(verdict.pairs for verdict in verdicts)
    by_method: dict[str, list[float]] = {}
    for plan in plans:
        by_method.setdefault(plan["name"].partition(":")[0], []).append(relative_error(plan))
    before, after = corrected(scenarios)
    return Totals(
        median(errors),
        max(errors),
        sum(verdict.right for verdict in verdicts) / pairs if pairs else 1.0,
        max(verdict.regret for verdict in verdicts),
        max(verdict.regret_measured for verdict in verdicts),
        median(verdict.regret for verdict in verdicts),
        median(verdict.regret_measured for verdict in verdicts),
        (median(before), max(before)),
        (median(after), max(after)),
        {name: median(found) for name, found in by_method.items()},
        len(plans),
    )


def corrected(scenarios: Sequence[Scenario]) -> tuple[list[float], list[float]]:
    """Errors of all steps without corrections, and with corrections fitted to all steps on the same links and ranks but
    this one, so that none is corrected by itself."""
    clusters: dict[Any, list[Step]] = {}
    for scenario in scenarios:
        steps = [Step.from_dict(plan["step"]) for plan in scenario["plans"]]
        clusters.setdefault((scenario["ranks"], scenario["bandwidth"]), []).extend(steps)
    before, after = list[float](), list[float]()
    for steps in clusters.values():
        for i, step in enumerate(steps):
            before.append(abs(step.predicted() / step.seconds - 1))
            after.append(abs(step.predicted(fitted_corrections(steps[:i] + steps[i + 1 :])) / step.seconds - 1))
    return before, after
