"""``python -m benchmarks.planner_rows``: which scenarios it measures, and in which order."""

import time

from benchmarks.planner_rows import RANKS, RATES, Rows


def test_short_scenarios_come_first_and_none_begins_when_the_time_is_over():
    rows = Rows(["transformer", "mlp"], [rate or None for rate in RATES], RANKS)
    found = list(rows.scenarios)
    assert len(found) == 16
    assert (found[0]["model"], found[0]["bandwidth"], found[0]["ranks"]) == ("mlp", None, 2)
    assert (found[-1]["model"], found[-1]["bandwidth"], found[-1]["ranks"]) == ("transformer", 100e6, 4)
    rows.ends = time.monotonic()
    assert list(rows.scenarios) == []
