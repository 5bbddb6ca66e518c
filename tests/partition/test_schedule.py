"""Schedules against torch's own orders, and against formulas of uniform stages."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grace.errors import ConfigError
from grace.partition.orders import Action, check, orders, rank_of
from grace.partition.plan import SCHEDULES
from grace.partition.schedule import Times, most_kept, play

NAMES = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
LOCAL = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1), ("zero_bubble", 2)]
LOCAL += [("zbv", 2)]


def of_torch(name, ranks, local, microbatches):
    """What torch's schedule computes on each rank."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = object.__new__(
        {
            "gpipe": schedules.ScheduleGPipe,
            "1f1b": schedules.Schedule1F1B,
            "interleaved": schedules.ScheduleInterleaved1F1B,
            "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
            "zbv": schedules.ScheduleZBVZeroBubble,
        }[name]
    )
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = ranks, local, microbatches
    schedule._num_stages = schedule.num_stages = ranks * local
    schedule.number_of_rounds = max(1, microbatches // ranks)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    if local == 1 and name in ("gpipe", "1f1b"):
        found = schedule._get_pipeline_order()
    else:
        found = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}
    return [
        [
            Action(NAMES[a.computation_type.name], a.stage_index, a.microbatch_index)
            for a in found[rank]
            if a is not None and a.computation_type.name in NAMES
        ]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(("name", "local"), LOCAL)
def test_orders_are_torchs(name, local):
    compared = 0
    for ranks in range(1, 6):
        for microbatches in range(1, 13):
            if check(name, ranks, ranks * local, microbatches):
                continue
            ours, theirs = orders(name, ranks, ranks * local, microbatches), of_torch(name, ranks, local, microbatches)
            if name == "1f1b":  # what it lists of the last rank counts forwards from 1; what it runs does not
                assert [a.kind for a in ours.pop()] == [a.kind for a in theirs.pop()]
            assert ours == theirs
            compared += 1
    assert compared >= 30


@pytest.mark.parametrize(("name", "local"), LOCAL)
def test_every_stage_computes_every_microbatch_once(name, local):
    for rank, actions in enumerate(orders(name, 4, 4 * local, 8)):
        done = set(actions)
        assert len(done) == len(actions)
        for stage in range(4 * local):
            mine = rank_of(name, stage, 4) == rank
            for m in range(8):
                kinds = {kind for kind, s, n in done if (s, n) == (stage, m)}
                assert kinds == (
                    ({"F", "B"} if name in ("gpipe", "1f1b", "interleaved") else {"F", "I", "W"}) if mine else set()
                )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_uniform_stages_take_what_formulas_say(ranks, microbatches):
    f, b, many = 1.0, 2.0, microbatches
    uniform = [Times(f, b)] * ranks
    halves = [Times(f / 2, b / 2)] * (2 * ranks)
    for name in ("gpipe", "1f1b"):
        played = play(name, ranks, uniform, many)
        assert played.seconds == pytest.approx((many + ranks - 1) * (f + b))
        assert played.bubble == pytest.approx((ranks - 1) / (many + ranks - 1))
    if not check("interleaved", ranks, 2 * ranks, many) and many % ranks == 0:
        assert play("interleaved", ranks, halves, many).seconds == pytest.approx(
            many * (f + b) + (ranks - 1) * (f + b) / 2
        )
    if (
        not check("zero_bubble", ranks, ranks, many) and many % ranks == 0
    ):  # ZB1P of Qi et al.: (ranks - 1)(f + i - w), with i = w = b / 2
        assert play("zero_bubble", ranks, uniform, many).seconds == pytest.approx(many * (f + b) + (ranks - 1) * f)
    if many >= 2 * ranks - 1:
        assert play("zbv", ranks, halves, many).seconds == pytest.approx(many * (f + b) + (ranks - 1) * f / 2)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_crossing_is_seen_once_for_each_stage_and_direction_in_one_microbatch(name):
    if name == "1f1b":
        assert play(name, 1, [Times(1.0, 2.0, there=9.0, back=9.0)], 1).seconds == 3.0
        return
    assert play(name, 3, [Times(1.0, 2.0, there=0.5, back=0.25)] * 3, 1).seconds == 3 * 3.0 + 2 * 0.75


@pytest.mark.parametrize(("name", "local"), LOCAL)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_steps_are_as_long_as_their_longest_rank_and_slower_parts_slow_them(name, local, data):
    ranks, many = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    if check(name, ranks, ranks * local, many):
        return
    number = st.floats(0, 10)
    stages = [
        Times(*(data.draw(number) for _ in range(2)), 0.5, *(data.draw(number) for _ in range(2)))
        for _ in range(ranks * local)
    ]
    played = play(name, ranks, stages, many)
    for rank in range(ranks):
        own = [e for e in played.events if e.rank == rank]
        assert all(one.end <= other.start + 1e-9 for one, other in pairwise(own))
        work = many * sum(t.forward + t.backward for s, t in enumerate(stages) if rank_of(name, s, ranks) == rank)
        assert sum(e.end - e.start for e in own) == pytest.approx(work)
        assert played.seconds >= work - 1e-6
    ends = {(e.what, e.stage, e.microbatch): e for e in played.events}
    for (what, stage, m), event in ends.items():
        if what == "F" and stage:
            moved = stages[stage - 1].there if rank_of(name, stage, ranks) != rank_of(name, stage - 1, ranks) else 0.0
            assert event.start >= ends["F", stage - 1, m].end + moved - 1e-6
        if what in "BI" and stage + 1 < len(stages):
            moved = stages[stage].back if rank_of(name, stage, ranks) != rank_of(name, stage + 1, ranks) else 0.0
            assert event.start >= ends[what, stage + 1, m].end + moved - 1e-6
    slower = [Times(t.forward + 1, t.backward, t.weights, t.there, t.back) for t in stages]
    assert play(name, ranks, slower, many).seconds >= played.seconds


def test_what_is_kept_at_once():
    assert most_kept("gpipe", 4, 4, 6) == [[(6,)]] * 4
    assert most_kept("1f1b", 4, 4, 6) == [[(4,)], [(3,)], [(2,)], [(1,)]]
    assert max(sum(counts) for counts in most_kept("interleaved", 2, 4, 4)[0]) == 5
    zbv = most_kept("zbv", 4, 8, 12)
    assert all(max(sum(counts) for counts in of_rank) <= 8 for of_rank in zbv)  # as much as 1f1b's first rank


@pytest.mark.parametrize(
    ("name", "ranks", "stages", "microbatches", "says"),
    [
        ("1f1b", 4, 4, 2, "as many micro-batches as stages: 4, not 2"),
        ("gpipe", 2, 4, 2, "one stage on a rank, not 2"),
        ("zbv", 2, 2, 4, "two stages on a rank, not 1"),
        ("interleaved", 4, 8, 9, "no multiple"),
        ("gpipe", 2, 3, 2, "cannot be dealt to 2 ranks"),
        ("best", 2, 2, 2, "gpipe, 1f1b"),
    ],
)
def test_what_torch_refuses_is_refused(name, ranks, stages, microbatches, says):
    with pytest.raises(ConfigError, match=says):
        orders(name, ranks, stages, microbatches)
    assert SCHEDULES
