"""Steps whose time is known, and what must hold of all others."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grace.communicators.choice import build_communicator
from grace.core.variable import Variable
from grace.planner.costs import CodecCost, Cost
from grace.planner.exchange_costs import DENSE, Costs, costs_of_shards
from grace.planner.network import Links
from grace.planner.step_simulation import BucketCosts, Timeline, Transfer, most_sent, simulate_step
from grace.session.bucket_limits import Limits
from grace.session.sharding import uniform
from tests.support.pretended import sent_by

TIMELINE = Timeline({"c": 1.0, "b": 2.0, "a": 4.0}, forward=1.0, backward=4.0, optimizer=0.5)


def sends(*seconds, **more):
    return tuple(Transfer("allreduce", s, 100.0 * s, **more) for s in seconds)


def step(works, timeline=TIMELINE):
    return simulate_step(timeline, works)


def test_nothing_to_exchange():
    found = step([])
    assert (found.step, found.compute, found.codec, found.exposed, found.sent) == (5.5, 5.5, 0, 0, 0)


def test_one_bucket_of_everything_overlaps_nothing():
    work = BucketCosts(("a", "b", "c"), start=0.5, transfers=sends(3.0), finish=0.25, memory=7.0)
    found = step([work])
    assert found.step == 5.5 + 0.5 + 3.0 + 0.25
    assert (found.codec, found.exposed, found.sent, found.memory) == (0.75, 3.0, 300.0, 7.0)
    assert found.events == [
        ("compute", -1, 0.0, 1.0),
        ("compute", -1, 1.0, 5.0),
        ("start", 0, 5.0, 5.5),
        ("wire", 0, 5.5, 8.5),
        ("finish", 0, 8.5, 8.75),
        ("compute", -1, 8.75, 9.25),
    ]


def test_computing_is_slower_beside_a_collective_that_takes_a_part_of_it():
    half = Transfer("allreduce", 2.0, contention=0.5)
    # backward goes on from 2.0 to 4.0 at half speed, and has 2.0 of its 3.0 seconds left then
    assert step([BucketCosts(("c",), transfers=(half,))]).step == 2.0 + 2.0 + 2.0 + 0.5
    # the second one waits in the queue of the wire until 4.0, and both are done at 6.0, as backward is
    both = [BucketCosts(("c",), transfers=(half,)), BucketCosts(("b",), transfers=(half,))]
    assert step(both).step == 6.0 + 1.0 + 0.5
    # one that starts behind backward slows nothing, but the codec of the next one
    late = [BucketCosts(("a",), transfers=(half,)), BucketCosts(("a",), start=1.5)]
    assert step(late).step == 5.0 + 2.0 + 0.5 + 0.5


def test_a_link_without_latency_or_end_costs_nothing():
    timeline = Timeline({"w": 1.0}, backward=1.0)
    shards = uniform([Variable("w", (1000,))], build_communicator("none", None, None))
    costs = Costs(Links(float("inf")), {DENSE: CodecCost()})
    assert step(costs_of_shards(shards, 8, costs), timeline).step == 1.0
    slow = step(costs_of_shards(shards, 2, Costs(Links(1e3), {DENSE: CodecCost()})), timeline)
    assert slow.step == pytest.approx(1 + 4 * (1000 + 1 + 10) / 1e3)


def test_what_is_sent_early_enough_is_hidden():
    works = [BucketCosts(("c",), transfers=sends(1.0)), BucketCosts(("b",), transfers=sends(2.0)), BucketCosts(("a",))]
    found = step(works)
    assert (found.step, found.exposed) == (5.5, 0.0)


def test_two_buckets_form_a_line():
    works = [BucketCosts(("c",), transfers=sends(2.5)), BucketCosts(("b",), transfers=sends(2.5), finish=0.25)]
    # backward: 1 to 5. The first travels from 2 to 4.5, though the second is there at 3, and that until 7
    found = step(works)
    assert [event for event in found.events if event[0] == "wire"] == [("wire", 0, 2.0, 4.5), ("wire", 1, 4.5, 7.0)]
    assert (found.step, found.exposed) == (7.75, 2.0)


def test_buckets_start_in_order_whatever_is_ready():
    early = [BucketCosts(("b",), transfers=sends(1.0)), BucketCosts(("c",), transfers=sends(1.0))]
    assert [e[2:] for e in step(early).events if e[0] == "wire"] == [(3.0, 4.0), (4.0, 5.0)]


def test_encoding_delays_backward_and_what_is_ready_later():
    works = [BucketCosts(("c",), start=0.5, transfers=sends(0.1)), BucketCosts(("b",), start=0.5, transfers=sends(0.1))]
    found = step(works)
    assert [event[2:] for event in found.events if event[0] == "start"] == [(2.0, 2.5), (3.5, 4.0)]
    assert (found.step, found.codec, found.exposed) == (6.5, 1.0, 0.0)


def test_gradients_that_the_timeline_does_not_name_come_last():
    assert step([BucketCosts(("other",), transfers=sends(1.0))]).step == 6.5


def test_collectives_that_follow_wait_for_backward_and_go_round_by_round():
    works = [
        BucketCosts(("c",), transfers=sends(0.5, 0.5), middle=0.25),
        BucketCosts(("b",), transfers=sends(0.5, 0.5, 0.5), middle=0.25, finish=0.125),
    ]
    found = step(works)
    # behind backward, at 5: the middle of the first, then that of the second while the first travels
    assert [event[1:] for event in found.events if event[0] == "middle"] == [
        (0, 5, 5.25),
        (1, 5.25, 5.5),
        (1, 6.25, 6.5),
    ]
    assert [event[1:] for event in found.events if event[0] == "wire"] == [
        *((0, 2, 2.5), (1, 3, 3.5)),
        *((0, 5.25, 5.75), (1, 5.75, 6.25), (1, 6.5, 7.0)),
    ]
    assert found.step == 7.0 + 0.125 + 0.5
    assert found.codec == pytest.approx(0.875)


def through(root, seconds=1.0):
    there = Transfer("gather", seconds, 100.0, root)
    return there, Transfer("broadcast", seconds, 0.0, root, 300.0)


def test_what_goes_through_roots_waits_in_one_queue():
    same = [BucketCosts(("a",), transfers=through(0), middle=0.5) for _ in range(4)]
    apart = [BucketCosts(("a",), transfers=through(root)) for root in range(4)]
    # gathers travel from 5 to 9; the first answer is computed while the second does, and the last two answers follow
    assert step(same).step == 5 + 4 * 2.0 + 0.5
    assert step(same).codec == 2.0
    assert step(same[:1]).step == 5 + 1.0 + 0.5 + 1.0 + 0.5
    assert (step(same).sent, step(apart).sent) == (1200.0, 600.0)
    assert (sent_by(same, 0), sent_by(same, 1), sent_by(apart, 3)) == (1200.0, 400.0, 600.0)


# -- what holds of all steps -------------------------------------------------------------------------------

QUARTERS = st.integers(0, 12).map(lambda n: n / 4)
KINDS = ["sum", "rounds", "root"]


@st.composite
def a_work(draw):
    kind = draw(st.sampled_from(KINDS))
    names = tuple(draw(st.sets(st.sampled_from("abc"), min_size=1)))
    seconds = [draw(QUARTERS) for _ in range(1 if kind == "sum" else draw(st.integers(1, 3)))]
    transfers = sends(*seconds, contention=draw(st.sampled_from([0.0, 0.25, 0.75])))
    if kind == "root":
        root, kinds = draw(st.integers(0, 2)), ("gather", "broadcast", "broadcast")
        transfers = tuple(Transfer(k, s, 1, root) for k, s in zip(kinds, seconds, strict=False))
    return BucketCosts(names, draw(QUARTERS), transfers, draw(QUARTERS), draw(QUARTERS))


STEPS = st.lists(a_work(), max_size=6)


def longer(draw, works):
    """The same, one thing of which takes longer."""
    i = draw(st.integers(0, len(works) - 1))
    more, work = draw(QUARTERS), works[i]
    what = draw(st.sampled_from(["start", "middle", "finish", "transfer"]))
    if what == "transfer" and work.transfers:
        j = draw(st.integers(0, len(work.transfers) - 1))
        slow = dataclasses.replace(work.transfers[j], seconds=work.transfers[j].seconds + more)
        work = dataclasses.replace(work, transfers=(*work.transfers[:j], slow, *work.transfers[j + 1 :]))
    elif what != "transfer":
        work = dataclasses.replace(work, **{what: getattr(work, what) + more})
    return [*works[:i], work, *works[i + 1 :]]


@settings(max_examples=150, deadline=None)
@given(data=st.data(), works=st.lists(a_work(), min_size=1, max_size=6))
def test_nothing_that_takes_longer_makes_a_step_faster(data, works):
    assert step(longer(data.draw, works)).step >= step(works).step - 1e-9


@settings(max_examples=80, deadline=None)
@given(works=STEPS, gaps=st.lists(QUARTERS, min_size=5, max_size=5), at=st.integers(0, 4), more=QUARTERS)
def test_more_computing_never_makes_a_step_faster(works, gaps, at, more):
    def timeline(gaps):
        c, b, a = gaps[1], gaps[1] + gaps[2], gaps[1] + gaps[2] + gaps[3]
        return Timeline({"c": c, "b": b, "a": a}, gaps[0], a, gaps[4])

    usual = step(works, timeline(gaps))
    slower = step(works, timeline([gap + more * (i == at) for i, gap in enumerate(gaps)]))
    assert slower.step >= usual.step - 1e-9


@settings(max_examples=80, deadline=None)
@given(works=STEPS)
def test_the_parts_add_up(works):
    found = step(works)
    assert found.step >= found.compute + found.codec - 1e-9
    assert found.step == pytest.approx(found.compute + found.codec + found.exposed)
    bound = found.compute + found.codec
    bound += sum(t.seconds for w in works for t in w.transfers)
    assert found.step <= bound + sum(w.middle * len(w.transfers) for w in works) + 1e-9
    assert all(begin <= end for _, _, begin, end in found.events)
    assert found.sent == pytest.approx(most_sent(works))


@settings(max_examples=25, deadline=None)
@given(
    numel=st.integers(1, 10**6), more=st.integers(1, 10**6), slower=st.floats(1, 100), later=st.floats(0, 1e-2),
    method=st.sampled_from(["none", "fp16", "qsgd", "topk", "powersgd"]), ranks=st.integers(2, 64),
)  # fmt: skip
def test_more_bytes_or_worse_links_never_predict_a_faster_step(numel, more, slower, later, method, ranks):
    codec = CodecCost(Cost(call=1e-5, element=1e-9), Cost(element=1e-10), Cost(element=1e-9, peer=1e-10))

    def predicted(n, links):
        communicator = build_communicator(method, None, None)
        shards = uniform([Variable(name, (n, 4)) for name in "cba"], communicator, Limits(10**9))
        keys = {DENSE, communicator.describe()}
        return step(costs_of_shards(shards, ranks, Costs(links, dict.fromkeys(keys, codec))))

    usual = predicted(numel, Links(1e8, 1e-5))
    assert predicted(numel + more, Links(1e8, 1e-5)).step >= usual.step
    assert predicted(numel, Links(1e8 / slower, 1e-5 + later)).step >= usual.step
