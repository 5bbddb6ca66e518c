"""Verdicts on plans: the order of predictions, and the regret, the chosen plan's step time beside the best one's."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from grace.bench.common.kept import Scenario

APART = 0.10
"""The part by which two plans must differ for their order to count."""
GOALS = {"order": 0.95, "regret": 0.05, "to_plain": 1.03, "to_single": 1.05, "settled": 60, "uncompressed": 15}
"""The least share of pairs in the right order, and the most of all else."""
Plan = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """The verdict on a scenario, or on several: then the worst of each.

    Attributes:
        right, pairs: pairs of plans that differ, and those of them whose order was predicted.
        chosen: the name of the plan that ``auto`` has taken.
        regret: the part by which its step is longer than that of the best plan within the bounds.
        to_plain: its step over that of plain sums.
        to_single: its step over that of the best single method within the bounds.
        settled, uncompressed: steps until the choice, and those of them before anything was tried.
    """

    right: int
    pairs: int
    chosen: str
    regret: float
    to_plain: float
    to_single: float
    settled: int
    uncompressed: int

    @property
    def order(self) -> float:
        """The share of pairs in the right order."""
        return self.right / self.pairs if self.pairs else 1.0

    def holds(self, goal: str) -> bool:
        """Return True if a goal of :data:`GOALS` is reached."""
        found = getattr(self, goal)
        return bool(found >= GOALS[goal] if goal == "order" else found <= GOALS[goal])


def order(plans: Sequence[Plan]) -> tuple[int, int]:
    """Return how many pairs were predicted in the order in which they were measured, of those that differ by 10 %.

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
    """Return the verdict on a scenario."""
    plans = scenario["plans"]
    plain = next(plan for plan in plans if plan["name"] == "none")
    chosen = next((plan for plan in plans if plan["chosen"]), plain)
    allowed = [plan["measured_ms"] for plan in plans if plan["allowed"] or plan is plain]
    single = [plan["measured_ms"] for plan in plans if plan is plain or (plan["allowed"] and plan["single"])]
    mine = chosen["measured_ms"]
    return Verdict(
        *order(plans),
        chosen["name"],
        max(0.0, mine / min(allowed) - 1),
        mine / plain["measured_ms"],
        mine / min(single),
        scenario["settled"],
        scenario["uncompressed"],
    )


def totals(scenarios: Sequence[Scenario]) -> tuple[Verdict, float]:
    """Return the worst of all scenarios, of which there must be one, and the median regret.

    Raises:
        ValueError: there is none.
    """
    if not scenarios:
        raise ValueError("there is no scenario")
    found = [judged(scenario) for scenario in scenarios]
    worst = max(found, key=lambda verdict: verdict.regret)
    most = {key: max(getattr(one, key) for one in found) for key in ("regret", "to_plain", "to_single", "settled")}
    right, pairs = sum(one.right for one in found), sum(one.pairs for one in found)
    uncompressed = max(one.uncompressed for one in found)
    total = Verdict(right, pairs, worst.chosen, **most, uncompressed=uncompressed)
    return total, median(one.regret for one in found)
