"""Records of ranks while they train: complete, properly nested, and without any effect on what they compute."""

import contextlib
import math
import os
import threading
import time
from collections import Counter, defaultdict

import pytest

import grace
from grace.exchange.tracing import recorder
from grace.exchange.tracing.summary import PHASES, summarize
from grace.exchange.tracing.timeline import load, merged
from tests.support import strategies
from tests.support.pools import on_ranks
from tests.support.training import Given, ddp, digest, distributed, loss_of, made_up, net, refusal, sgd, train, weights

STEPS = 4
SHAPES = {"matrix": (20, 30), "tiny": (1,)}


@contextlib.contextmanager
def recorded(folder, steps=50, skip=0):
    """Record in a folder, if one is given, what runs in this context."""
    if folder is None:
        yield
        return
    settings = {recorder.FOLDER: str(folder), recorder.STEPS: str(steps), recorder.SKIP: str(skip)}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]
        if recorder.run is not None:
            recorder.run.write()
        recorder.run = recorder.active = None


def plainly(**choices):
    """Train the small network."""
    model = net()
    optimizer = distributed(model, **choices)
    train(model, optimizer, range(STEPS))
    optimizer._grace.runner.pending_means()  # waits for exchanges beside training
    return model, optimizer.traffic


def by_rows(strategy=None, **choices):
    """A model with a sparse embedding, an empty parameter and a scalar; variables are cut as the strategy says."""
    model = strategies.mixed()
    optimizer = strategies.executed(model, strategy, **choices)
    strategies.train(model, optimizer, range(STEPS))
    return model, optimizer.traffic


def through_ddp(**choices):
    """Train the small network under DDP, in several buckets."""
    model = net()
    wrapped, optimizer = ddp(model, bucket_cap_mb=0.001), sgd(model.parameters())
    state = grace.torch.register_ddp_hook(wrapped, **choices)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(wrapped, step).backward()
        optimizer.step()
    return model, state.traffic


def overflowing(**choices):
    """Rank 1 overflows in one step, which rolls back, and whose update a scaler would leave out."""
    model = Given(SHAPES)
    optimizer = distributed(model, **choices)
    for step in range(STEPS):
        optimizer.zero_grad()
        given = made_up(SHAPES, step, grace.rank())
        if step == 1 and grace.rank() == 1:
            given["matrix"].flat[0] = math.inf
        model.backward(given)
        if step == 1:
            optimizer.synchronize()
        else:
            optimizer.step()
    return model, optimizer.traffic


def outcome(folder, how, choices, steps=50, skip=0):
    """The bits of the weights, and the bytes of each variable, of one training."""
    with recorded(folder, steps, skip):
        model, traffic = how(**choices)
        return digest(weights(model)), dict(traffic.payload_bytes)


RUNS = {
    "topk": (plainly, {"compressor": "topk(ratio=0.1)"}),
    "none, many groups": (plainly, {"compressor": "none", "group_bytes": 1000}),
    "several rounds": (plainly, {"compressor": "powersgd(rank=2)"}),
    "unequal sizes": (plainly, {"compressor": "threshold(value=0.001)"}),
    "scatter_reduce": (plainly, {"compressor": "qsgd(levels=7)", "communicator": "scatter_reduce"}),
    "reduce_broadcast": (plainly, {"compressor": "topk(ratio=0.1)", "communicator": "reduce_broadcast"}),
    "reduce_broadcast, sums": (plainly, {"compressor": "none", "communicator": "reduce_broadcast"}),
    "stale": (plainly, {"compressor": "topk(ratio=0.1)", "communicator": "reduce_broadcast(staleness=1)"}),
    "hierarchical": (plainly, {"compressor": "topk(ratio=0.1)", "hierarchical": True}),
    "sparse rows": (by_rows, {"compressor": "topk(ratio=0.5)"}),
    "parts": (by_rows, {"strategy": "partitioned_ps(min_shard_bytes=0)"}),
    "ddp": (through_ddp, {"compressor": "topk(ratio=0.1)"}),
    "overflow": (overflowing, {"compressor": "topk(ratio=0.1)"}),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_trace_is_whole_and_changes_nothing(two_ranks, tmp_path, run):
    how, choices = RUNS[run]
    answers = zip(*(two_ranks.run(outcome, folder, how, choices) for folder in (None, str(tmp_path))), strict=True)
    ranks = load(tmp_path)
    assert [rank.facts["rank"] for rank in ranks] == [0, 1]
    for rank, (plain, traced) in zip(ranks, answers, strict=True):
        assert traced == plain
        check(rank, traced[1], everyone=run not in ("hierarchical", "parts"), late=int(run == "stale"))
    check_format(merged(ranks))
    summary = summarize(ranks)
    assert summary.step == pytest.approx(sum(summary.parts.values()))
    assert min(summary.parts.values()) >= 0
    assert {cost.name for cost in summary.variables} == set(ranks[0].facts["variables"])


def check(rank, payload_bytes, everyone, late):
    """Every variable was in every phase (``everyone``: in a hierarchy only a node's leader compresses), every wait saw
    the end of a collective, and all bytes are there; those of ``late`` steps are not counted in the traffic yet."""
    assert [step["args"]["step"] for step in rank.steps] == list(range(STEPS))
    phases = Counter((e["name"], e["args"]["variable"]) for e in rank.events if "variable" in e.get("args", {}))
    for name in rank.facts["variables"] if everyone else ():
        for phase in () if phases["encode", name] >= STEPS else PHASES:  # encoded in one pass, or step by step
            assert phases[phase, name] >= STEPS, (phase, name)
        assert phases["decode", name] >= STEPS, name
    sent: Counter = Counter()
    for event in rank.events:
        if event["name"] == "payload":
            sent.update(event["args"])
    assert {name: nbytes * (STEPS - late) / STEPS for name, nbytes in sent.items()} == payload_bytes
    begun = {e["id"]: e for e in rank.events if e["ph"] == "b"}
    ends = {e["id"]: e["ts"] for e in rank.events if e["ph"] == "e"}
    assert begun
    assert set(begun) == set(ends)
    assert all(ends[i] >= begun[i]["ts"] for i in begun)
    assert all(e["args"]["bytes"] >= 0 and e["args"]["label"] and e["args"]["communicator"] for e in begun.values())
    for wait in [e for e in rank.events if e["name"] == "wait"]:
        stop, group = wait["ts"] + wait["dur"], wait["args"]["variables"]
        over = [ends[i] for i, e in begun.items() if e["args"]["variables"] == group and ends[i] <= stop]
        assert over
        assert max(over) >= wait["ts"] or late  # a exchange_thread may still have to decode what has come


def check_format(trace):
    """Chrome's format: known kinds of events, no negative times, and complete events that nest."""
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["ph"] in "XMibe"
        assert {"name", "pid", "tid"} <= set(event)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["name"]))
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert set(tracks) <= named
    for events in tracks.values():
        open_until: list[float] = []
        for start, negative, name in sorted(events):
            while open_until and open_until[-1] <= start + 1e-3:
                open_until.pop()
            assert not open_until or start - negative <= open_until[-1] + 1e-3, name
            open_until.append(start - negative)


FRAGMENTS = {"optimizer": "nesterov", "period": 8, "fragments": 2, "delay": 3}
IN_FRAGMENTS = {
    "version": 1,
    "rules": [{"match": {}, "sync": {"type": "allgather"}, "compressor": "topk(ratio=0.2)", "outer": FRAGMENTS}],
}


def in_fragments(folder):
    """Eight steps. Rank 1 sends a fragment only when both ranks have made two more steps."""
    released = threading.Event()

    @contextlib.contextmanager
    def held():
        assert grace.rank() == 0 or released.wait(60)
        yield

    with recorded(folder):
        model = net()
        optimizer = distributed(model, strategy=IN_FRAGMENTS)
        runner = optimizer._grace.runner
        runner.callbacks.computing = held
        for step in range(8):
            train(model, optimizer, range(step, step + 1))
            fragment = runner.outer_rounds.fragments[step // 4]
            while step % 4 == 0 and grace.rank() == 0 and not hasattr(fragment.under_way[0].round_trip, "handle"):
                time.sleep(0.001)
            if step % 4 == 2:
                grace.barrier()
                released.set()
            if step % 4 == 3:
                released.clear()


def test_training_goes_on_in_the_trace_while_fragments_travel(two_ranks, tmp_path):
    two_ranks.run(in_fragments, str(tmp_path))
    ranks = load(tmp_path)
    check_format(merged(ranks))
    for rank in ranks:
        for name, steps in (("drift", [0, 4]), ("outer step", [3, 7])):
            assert [step_of(rank, event) for event in rank.events if event["name"] == name] == steps
    first = ranks[0]
    backward = [e for e in first.events if e["name"] == "backward"]
    applied = [e for e in first.events if e["name"] == "outer step"]
    for number in range(2):
        begun = [e for e in first.events if e["ph"] == "b" and e["args"]["label"].startswith(f"grace.outer.{number}.")]
        ends = {e["id"]: e["ts"] for e in first.events if e["ph"] == "e"}
        assert begun[0]["ts"] <= backward[4 * number + 1]["ts"]
        assert backward[4 * number + 2]["ts"] + backward[4 * number + 2]["dur"] <= ends[begun[0]["id"]]
        assert max(ends[e["id"]] for e in begun) <= applied[number]["ts"]


def step_of(rank, event):
    """The step in which an event lies."""
    (step,) = [s["args"]["step"] for s in rank.steps if s["ts"] <= event["ts"] <= s["ts"] + s["dur"]]
    return step


def test_steps_have_their_parts_and_only_the_wanted_ones_are_recorded(two_ranks, tmp_path):
    two_ranks.run(outcome, str(tmp_path), plainly, {"compressor": "topk(ratio=0.1)"}, 2, 1)
    for rank in load(tmp_path):
        assert [step["args"]["step"] for step in rank.steps] == [1, 2]
        names = Counter(e["name"] for e in rank.events)
        assert names["compress"] + names["encode"] == 2 * len(rank.facts["variables"])
        for step in rank.steps:
            inside = {
                e["name"]: e
                for e in rank.events
                if e["ph"] == "X" and step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"]
            }
            order = ["forward", "backward", "synchronize", "optimizer"]
            starts = [inside[name]["ts"] for name in order]
            assert starts == sorted(starts)
            assert inside["forward"]["ts"] == step["ts"]
            assert inside["optimizer"]["ts"] >= inside["synchronize"]["ts"] + inside["synchronize"]["dur"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (recorder.STEPS, "0", "GRACE_TRACE_STEPS must be a whole number of at least 1, not '0'"),
        (recorder.SKIP, "few", "GRACE_TRACE_SKIP must be a whole number of at least 0, not 'few'"),
        (recorder.FOLDER, "/dev/null/x", "GRACE_TRACE=/dev/null/x: cannot write /dev/null/x/rank"),
    ],
)
@on_ranks()
def test_settings_that_cannot_be_are_refused_on_all_ranks(name, value, message):
    os.environ.update({recorder.FOLDER: "/dev/null", name: value})
    assert message in refusal(plainly, kind=grace.GraceError)


def test_nothing_is_recorded_unless_it_is_asked_for():
    plainly(compressor="topk(ratio=0.1)")
    assert recorder.run is None
    assert recorder.active is None
    assert recorder.phase("compress") is recorder.phase("wait", "wait")
