"""ReduceBroadcast with compression, there and back: oracles, overflows, and missing gradients."""

import functools

import numpy as np
import pytest
import torch

import grace
from grace.core.registry import make
from grace.strategy import ShardPlan, Sync, VariablePlan
from grace.torch.parameters import make_variables
from tests.exchange.test_aggregates import DGCMemory, Residual, largest
from tests.support.pools import on_ranks
from tests.support.strategies import Tables, cut, executed, reduced, sgd, strategy_of, train, weights, whole
from tests.support.training import SPECS, Given, digest, loss_of, made_up, net, state_of

SUMMED = [spec for spec in SPECS if make("compressor", spec).traits.summable]


def wrap(model, part, optimizer=sgd):
    """The optimizer with the same part for all variables."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return executed(model, strategy_of(*(VariablePlan(v, (part,)) for v in make_variables(parameters))), optimizer)


def trained(compressor, sync="reduce_broadcast", destination=None, memory=None):
    model = net()
    part = ShardPlan(Sync(sync, **({} if destination is None else {"destination": destination})), compressor, memory)
    optimizer = wrap(model, part, lambda parameters: sgd(parameters, 0.01))
    train(model, optimizer, range(5), loss_of)
    return weights(model)


@pytest.mark.parametrize("compressor", SUMMED)
def test_payloads_that_may_be_summed_give_what_all_reduce_gives(ranks, compressor):
    got, wanted = (ranks.run(trained, compressor, sync)[0] for sync in ("reduce_broadcast", "allreduce"))
    tolerance = {"fp16": 1e-4, "bf16": 1e-3}.get(compressor, 2e-6)
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("compressor", ["signsgd", "signum"])
def test_votes_are_counted_once(ranks, compressor):
    """A majority, compressed again, is itself."""
    got, wanted = (ranks.run(trained, compressor, sync)[0] for sync in ("reduce_broadcast", "allgather"))
    assert digest(got) == digest(wanted)


# -- topk both ways, against NumPy -------------------------------------------------------------------------

SHAPE, SIZES, RATIO, STEPS = (13, 5), (9, 4), 0.2, 6


def send(memory, gradient):
    """The entries of largest magnitude of what a memory makes of a gradient, and zeros elsewhere."""
    x = memory.before(gradient)
    sent = np.zeros_like(x)
    places = largest(x.ravel(), max(1, round(RATIO * x.size)))
    sent.ravel()[places] = x.ravel()[places]
    memory.after(x, sent)
    return sent


@pytest.mark.parametrize(("memory", "model"), [("residual", Residual), ("dgc", DGCMemory)])
@on_ranks(2, 3)
def test_topk_both_ways_keeps_two_memories(memory, model):
    """Gradients that come out, and all that is remembered, at each step."""
    size, rank = grace.size(), grace.rank()
    tables, roots = Tables({"w": SHAPE}), (size - 1, 0)
    parts = [reduced(root, f"topk(ratio={RATIO})", memory) for root in roots]
    optimizer = executed(tables, strategy_of(cut("w", SHAPE, parts, 0, SIZES)))
    there = {part: [model() for _ in range(size)] for part in range(2)}
    back = {part: Residual() for part in range(2)}  # momentum is applied once
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    for step in range(STEPS):
        optimizer.zero_grad()
        tables.backward(made_up({"w": SHAPE}, step, rank))
        optimizer.step()
        state = state_of(optimizer)
        for part, rows in enumerate((slice(0, 9), slice(9, 13))):
            name = f"w/part_{part}"
            gradients = [made_up({"w": SHAPE}, step, other)["w"][rows] for other in range(size)]
            sent = [send(one, g) for one, g in zip(there[part], gradients, strict=True)]
            close(tables.w.grad[rows], send(back[part], sum(sent) / np.float32(size)))
            kept, mine = state["memory"][name], there[part][rank]
            if memory == "dgc":
                close(kept["velocity"], mine.velocity)
                close(kept["accumulated"], mine.accumulated)
            else:
                close(kept, mine.left)
            assert (name in state["answer_memory"]) == (rank == roots[part])
            if rank == roots[part]:
                close(state["answer_memory"][name], back[part].left)


ROWS, TABLE = 7, (11, 4)


def rows_of(step, rank):
    draws = np.random.default_rng((step, rank))
    return draws.integers(0, TABLE[0], ROWS), draws.standard_normal((ROWS, TABLE[1])).astype(np.float32)


def rows_by(compressor, kind):
    model, sizes = Tables({}, {"t": TABLE}), (4, 7)
    parts = [
        ShardPlan(Sync(kind, **({"destination": root} if kind == "reduce_broadcast" else {})), compressor, "residual")
        for root in (grace.size() - 1, 0)
    ]
    optimizer = executed(model, strategy_of(cut("t.weight", TABLE, parts, 0, sizes, sparse=True)))
    summed, seen = np.zeros(TABLE), []
    for step in range(STEPS):
        optimizer.zero_grad()
        model.backward({"t": rows_of(step, grace.rank())})
        optimizer.step()
        summed += model.t.weight.grad.to_dense().numpy()
        seen.append((summed.copy(), state_of(optimizer)))
    return seen


@pytest.mark.filterwarnings("ignore:.*not a contraction")
@pytest.mark.parametrize("kind", ["reduce_broadcast", "allgather"])
@pytest.mark.parametrize(
    "compressor",
    [
        "topk(ratio=0.1)",
        "topk(ratio=0.3)",
        "threshold(value=1.0)",
        "topk(ratio=0.1) | qsgd(levels=7)",
        "onebit",
        "fp16",
    ],
)
def test_rows_lose_nothing(ranks, compressor, kind):
    """The sums, and the residuals on the way there (their mean) and back, are the mean of all gradients so far.

    Ranks have different numbers of rows, whose positions are coded in different ways.
    """
    answers, size = ranks.run(rows_by, compressor, kind), ranks.size
    total = np.zeros(TABLE)
    for step in range(STEPS):
        for rank in range(size):
            np.add.at(total, rows_of(step, rank)[0], rows_of(step, rank)[1] / size)
        for summed, _ in (seen[step] for seen in answers):
            np.testing.assert_array_equal(summed, answers[0][step][0])
            kept = np.zeros(TABLE)
            for part, rows in enumerate((slice(0, 4), slice(4, 11))):
                name = f"t.weight/part_{part}"
                for _, state in (seen[step] for seen in answers):
                    kept[rows] += np.asarray(state["memory"].get(name, 0)) / size
                    kept[rows] += np.asarray(state.get("answer_memory", {}).get(name, 0))
            assert np.abs(kept).sum() > 0.1 or compressor == "fp16"
            np.testing.assert_allclose(summed + kept, total, rtol=1e-4, atol=1e-5)


# -- steps that go wrong -----------------------------------------------------------------------------------

KINDS = ("topk(ratio=0.2)", "none", "fp16", "powersgd(rank=1)", "qsgd", "threshold(value=0.5)", "randomk(ratio=0.3)")


@pytest.mark.parametrize("compressor", KINDS)
@on_ranks(2, 3)
def test_every_rank_sees_an_overflow_and_keeps_what_it_remembers(compressor):
    """Before, in and after a step in which the last rank's gradient of 'a' holds a NaN."""
    shapes = {"a": (8, 6), "b": (8, 6)}
    model = Tables(shapes)
    own = [reduced(grace.size() - 1, compressor), reduced(0, compressor)]
    optimizer = executed(model, strategy_of(cut("a", (8, 6), own, 0, (5, 3)), whole("b", (8, 6), own[0])))
    states = []
    for step in range(4):
        optimizer.zero_grad()
        gradients = made_up(shapes, step, grace.rank())
        if step == 2 and grace.rank() == grace.size() - 1:
            gradients["a"][0, 1] = np.nan
        model.backward(gradients)
        optimizer.synchronize()
        finite = [bool(torch.isfinite(p).all()) for p in (model.a.grad[:5], model.a.grad[5:], model.b.grad)]
        assert finite == [step != 2, True, True]
        states.append(state_of(optimizer))
    assert digest(states[2]) == digest(states[1])
    assert not states[0].get("memory") or digest(states[3]) != digest(states[2])


@pytest.mark.parametrize(
    "part",
    [reduced(1, "topk(ratio=0.3)"), reduced(0), ShardPlan(Sync("allgather"), "topk(ratio=0.3)")],
    ids=lambda p: "part",
)
@on_ranks(2, 3)
def test_an_overflow_among_rows(part):
    model = Tables({}, {"t": TABLE})
    optimizer = executed(model, strategy_of(whole("t.weight", TABLE, part, sparse=True)))
    states = []
    for step in range(4):
        optimizer.zero_grad()
        rows, values = rows_of(step, grace.rank())
        if step == 2 and grace.rank() == grace.size() - 1:
            values[0, 0] = np.nan
        model.backward({"t": (rows, values)})
        optimizer.synchronize()
        assert bool(torch.isfinite(model.t.weight.grad.to_dense()).all()) == (step != 2)
        optimizer.step()
        states.append(digest(state_of(optimizer)))
    assert states[2] == states[1]
    assert part.compressor == "none" or states[3] != states[2]


@pytest.mark.parametrize("compressor", ["none", "topk(ratio=1.0)"])
@on_ranks(2, 3)
def test_missing_gradients_count_as_zero_unless_all_are_missing(compressor):
    """Rank 0 has no gradient of 'a' in the second step, and no rank has one in the third."""
    shapes, size = {"a": (8, 6), "b": (5,)}, grace.size()
    model = Tables(shapes)
    own = [reduced(size - 1, compressor, "none"), reduced(0, compressor, "none")]
    optimizer = executed(model, strategy_of(cut("a", (8, 6), own, 0, (5, 3)), whole("b", (5,), own[0])))
    for step, having in enumerate([range(size), range(1, size), []]):
        optimizer.zero_grad()
        given = made_up(shapes, step, grace.rank())
        if grace.rank() not in having:
            del given["a"]
        model.backward(given)
        optimizer.step()
        if having:
            wanted = sum(made_up(shapes, step, rank)["a"] for rank in having) / size
            np.testing.assert_allclose(model.a.grad, wanted, rtol=1e-6, atol=1e-7)
        else:
            assert model.a.grad is None


@on_ranks(2, 3)
def test_a_variable_without_gradients_keeps_what_is_remembered_of_it():
    """No rank has a gradient of 'a' in the third step."""
    shapes = {"a": (8, 6), "b": (5, 5)}
    model = Tables(shapes)
    part = reduced(1, "topk(ratio=0.2)")
    optimizer = executed(
        model, strategy_of(cut("a", (8, 6), [part, reduced(0, "topk")], 0, (5, 3)), *[whole("b", (5, 5), part)])
    )
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        given = made_up(shapes, step, grace.rank())
        model.backward({"b": given["b"]} if step == 2 else given)
        optimizer.step()
        state = state_of(optimizer)
        seen.append({name: digest({kind: state[kind].get(name) for kind in state}) for name in ("a/part_0", "b")})
    assert seen[2]["a/part_0"] == seen[1]["a/part_0"]
    assert seen[3]["a/part_0"] != seen[2]["a/part_0"]
    assert seen[2]["b"] != seen[1]["b"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@on_ranks(2, 3)
def test_other_dtypes(dtype):
    """The mean of whole numbers that are multiples of six, in parts."""
    model, numbers = Given({"w": (6, 3)}, dtype), torch.arange(18.0).view(6, 3) * 6
    parts = (reduced(1), ShardPlan(), reduced(0, "topk(ratio=1.0)"))
    optimizer = executed(model, strategy_of(VariablePlan(make_variables({"w": model.w})[0], parts, 0, (3, 1, 2))))
    model.backward({"w": numbers * grace.rank()})
    optimizer.step()
    wanted = (numbers * (grace.size() - 1) / 2).to(dtype)
    torch.testing.assert_close(model.w.grad, wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
