"""``python -m benchmarks.planner_rows``: which scenarios it measures, and in which order."""

import time

from benchmarks.planner_rows import GOALS, RANKS, RATES, Rows, missed, worst


def test_short_scenarios_come_first_and_none_begins_when_the_time_is_over():
    rows = Rows(["transformer", "mlp"], [rate or None for rate in RATES], RANKS)
    found = list(rows.scenarios)
    assert len(found) == 16
    assert (found[0]["model"], found[0]["bandwidth"], found[0]["ranks"]) == ("mlp", None, 2)
    assert (found[-1]["model"], found[-1]["bandwidth"], found[-1]["ranks"]) == ("transformer", 100e6, 4)
    rows.ends = time.monotonic()
    assert list(rows.scenarios) == []


def test_the_worst_of_each_figure_stands_beside_its_goal():
    fine = {"right": 3, "pairs": 3, "regret": 0.0, "to_plain": 0.5, "to_single": 1.0, "planning": 0.5}
    fine |= {"settled": 56, "uncompressed": 12}
    found = worst([fine, {**fine, "regret": 0.1, "settled": 70, "pairs": 4}])
    assert found["order"] == 6 / 7
    assert [goal for goal in GOALS if missed(goal, found[goal])] == ["order", "regret", "settled"]
    assert worst([{**fine, "right": 0, "pairs": 0}])["order"] == 1.0
