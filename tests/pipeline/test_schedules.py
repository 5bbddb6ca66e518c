"""Schedules against torch's own orders, and their simulation against formulas for uniform stages."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grace.errors import ConfigError
from grace.pipeline.planning.pipeline_plan import Stage
from grace.pipeline.planning.schedules import SCHEDULES, Action, actions_of, schedule_error
from grace.pipeline.planning.simulation import simulate_schedule

NAMES = {"FORWARD": "F", "FULL_BACKWARD": "B"}


def timed(forward, backward, crossing=0.0, returning=0.0):
    """A stage that takes so long."""
    return Stage(("n",), (0,), forward=forward, backward=backward, crossing=crossing, returning=returning)


def of_torch(name, stages, microbatches):
    """Return the actions of torch's schedule on each stage."""
    schedule = object.__new__(pytest.importorskip("grace.pipeline.torch.point_to_point").SCHEDULE_CLASSES[name])
    schedule._num_stages, schedule._n_microbatches = stages, microbatches
    found = schedule._get_pipeline_order()
    return [
        [
            Action(NAMES[a.computation_type.name], a.microbatch_index)
            for a in found[stage]
            if a is not None and a.computation_type.name in NAMES
        ]
        for stage in range(stages)
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_orders_are_torchs(name):
    compared = 0
    for stages in range(1, 6):
        for microbatches in range(1, 13):
            if schedule_error(name, stages, microbatches):
                continue
            ours = [actions_of(name, stage, stages, microbatches) for stage in range(stages)]
            theirs = of_torch(name, stages, microbatches)
            if name == "1f1b":  # what it lists of the last stage counts forwards from 1; what it runs does not
                assert [a.kind for a in ours.pop()] == [a.kind for a in theirs.pop()]
            assert ours == theirs
            compared += 1
    assert compared >= 30


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_computes_every_microbatch_once(name):
    for stage in range(4):
        actions = actions_of(name, stage, 4, 8)
        assert sorted(actions) == [Action(kind, m) for kind in "BF" for m in range(8)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_uniform_stages_take_what_formulas_say(stages, microbatches):
    for name in SCHEDULES:
        step = simulate_schedule(name, [timed(1.0, 2.0)] * stages, microbatches)
        assert step.seconds == pytest.approx((microbatches + stages - 1) * 3.0)
        assert step.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_crossing_is_seen_once_for_each_stage_and_direction_in_one_microbatch():
    assert simulate_schedule("1f1b", [timed(1.0, 2.0, crossing=9.0, returning=9.0)], 1).seconds == 3.0
    assert (
        simulate_schedule("gpipe", [timed(1.0, 2.0, crossing=0.5, returning=0.25)] * 3, 1).seconds == 3 * 3.0 + 2 * 0.75
    )


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_steps_are_as_long_as_their_longest_stage_and_slower_parts_slow_them(name, data):
    count, many = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    if schedule_error(name, count, many):
        return
    number = st.floats(0, 10)
    stages = [timed(*(data.draw(number) for _ in range(4))) for _ in range(count)]
    step = simulate_schedule(name, stages, many)
    for stage, times in enumerate(stages):
        own = [e for e in step.events if e.stage == stage]
        assert all(one.end <= other.start + 1e-9 for one, other in pairwise(own))
        work = many * (times.forward + times.backward)
        assert sum(e.end - e.start for e in own) == pytest.approx(work)
        assert step.seconds >= work - 1e-6
    events = {(e.kind, e.stage, e.microbatch): e for e in step.events}
    for (kind, stage, m), event in events.items():
        if kind == "F" and stage:
            assert event.start >= events["F", stage - 1, m].end + stages[stage - 1].crossing - 1e-6
        if kind == "B" and stage + 1 < count:
            assert event.start >= events["B", stage + 1, m].end + stages[stage].returning - 1e-6
    slower = [timed(t.forward + 1, t.backward, t.crossing, t.returning) for t in stages]
    assert simulate_schedule(name, slower, many).seconds >= step.seconds


@pytest.mark.parametrize(
    ("name", "says"),
    [("1f1b", "as many micro-batches as stages: 4, not 2"), ("zbv", "'zbv' is unknown; .* gpipe, 1f1b")],
)
def test_what_torch_refuses_is_refused(name, says):
    with pytest.raises(ConfigError, match=says):
        actions_of(name, 0, 4, 2)
