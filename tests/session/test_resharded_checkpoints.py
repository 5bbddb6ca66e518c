"""Checkpoints of runs under strategies: in plain programs, resumed, and under another strategy."""

import numpy as np
import pytest
import torch

import grace
from grace.core.registry import make
from grace.strategy import ShardPlan, Sync
from tests.support.pairwise import pairwise
from tests.support.pools import ranks_of
from tests.support.strategies import (
    BUILDERS,
    Mixed,
    Tables,
    cut,
    executed,
    mixed,
    reduced,
    spec_for,
    strategy_of,
    train,
    weights,
    whole,
)
from tests.support.training import copied, digest, made_up, state_of

pytestmark = pytest.mark.ranks

STOP, END = 3, 6


def adagrad(parameters):
    """An optimizer with state, which takes sparse gradients."""
    return torch.optim.Adagrad(parameters, lr=0.1)


FOR_ROWS = ("fp16", "qsgd", "topk(ratio=0.3)")


def compressed(builder, compressor):
    """A builder of the list with a compressor for matrices, and topk for sparse variables."""
    name = make("builder", builder).name
    if name == "size_threshold":
        return {"name": name, "bytes": 64, "large": compressor if compressor in FOR_ROWS else "topk(ratio=0.3)"}
    if name == "by_type":
        return {"name": name, "matrices": compressor, "sparse": "topk(ratio=0.4)"}
    rules = [{"match": {"sparse": True}, "compressor": "topk(ratio=0.4)"}, {"match": {}, "compressor": compressor}]
    return {**make("builder", builder).to_dict(), "compressor": rules}


def begin(builder, compressor, folder=None):
    """Train halfway, save, and train to the end."""
    model = mixed()
    optimizer = executed(model, compressed(spec_for(builder, grace.size()), compressor), adagrad)
    train(model, optimizer, range(STOP))
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if folder is not None:
        torch.save(checkpoint, f"{folder}/{grace.rank()}.pt")
    halfway = copied(checkpoint)
    train(model, optimizer, range(STOP, END))
    return halfway, digest(weights(model))


def resume(builder, compressor, folder):
    """Load what ``begin`` saved into a model that started elsewhere, and train to the end."""
    saved = torch.load(f"{folder}/{grace.rank()}.pt", weights_only=True)
    model = mixed(seed=99)
    optimizer = executed(model, compressed(spec_for(builder, grace.size()), compressor), adagrad)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, range(STOP, END))
    return digest(weights(model))


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_checkpoint_loads_in_a_plain_program(two_ranks, builder):
    for saved, _ in two_ranks.run(begin, builder, "topk(ratio=0.3)" if "size" in builder else "fp16"):
        assert saved["optimizer"].pop("grace")["components"].startswith("strategy ")
        model = Mixed()
        model.load_state_dict(saved["model"], strict=True)
        optimizer = adagrad(model.parameters())
        wanted = copied(saved["optimizer"])
        optimizer.load_state_dict(saved["optimizer"])
        assert digest(optimizer.state_dict()) == digest(wanted)
        assert {key for state in wanted["state"].values() for key in state} == {"step", "sum"}
        (model(torch.tensor([[1, 2]])) ** 2).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("ranks", "builder", "compressor"),
    pairwise([2, 3], BUILDERS, ["topk(ratio=0.3)", "powersgd(rank=1)"]),
    indirect=["ranks"],
)
def test_a_resumed_run_equals_one_that_never_stopped(ranks, tmp_path, builder, compressor):
    uninterrupted = [end for _, end in ranks.run(begin, builder, compressor, str(tmp_path))]
    assert len(set(uninterrupted)) == 1
    assert ranks.run(resume, builder, compressor, str(tmp_path)) == uninterrupted


# -- under another strategy --------------------------------------------------------------------------------

DENSE, TABLES = {"w": (12, 5), "v": (8,)}, {"t": (9, 4)}
TOPK = "topk(ratio=0.2)"


def collective(compressor=TOPK, memory=None):
    return ShardPlan(Sync("allgather"), compressor, memory)


def plans_of(kind, size, compressor=TOPK, memory=None):
    """Strategies that differ in their cuts and destinations."""

    def at(destination):
        return reduced(destination % size, compressor, memory)

    own = collective(compressor, memory)
    dense = {
        "whole": [whole("w", (12, 5), own), whole("v", (8,), own)],
        "rows": [cut("w", (12, 5), [own] * 3, 0, (5, 3, 4)), cut("v", (8,), [own] * 2, 0, (3, 5))],
        "columns": [cut("w", (12, 5), [own, at(1)], 1, (2, 3)), cut("v", (8,), [at(0), own], 0, (6, 2))],
        "ps": [whole("w", (12, 5), at(0)), whole("v", (8,), at(1))],
        "ps moved": [whole("w", (12, 5), at(1)), whole("v", (8,), at(0))],
        "ps cut": [cut("w", (12, 5), [at(0), at(-1), at(1)], 0, (1, 4, 7)), cut("v", (8,), [at(1), at(0)], 0, (4, 4))],
    }[kind]
    table = {
        "whole": whole("t.weight", (9, 4), own, True),
        "rows": cut("t.weight", (9, 4), [own] * 2, 0, (4, 5), True),
        "columns": cut("t.weight", (9, 4), [own, at(0)], 0, (2, 7), True),
        "ps": whole("t.weight", (9, 4), at(0), True),
        "ps moved": whole("t.weight", (9, 4), at(1), True),
        "ps cut": cut("t.weight", (9, 4), [at(0), at(-1)], 0, (6, 3), True),
    }[kind]
    return [*dense, table]


KINDS = ("whole", "rows", "columns", "ps", "ps moved", "ps cut")


def steps(model, optimizer, numbers):
    for step in numbers:
        rows = np.random.default_rng((step, grace.rank())).integers(0, 9, 5)
        gradients = made_up({**DENSE, "t": (5, 4)}, step, grace.rank())
        optimizer.zero_grad()
        model.backward({**gradients, "t": (rows, gradients["t"])})
        optimizer.step()


def made(kind, compressor=TOPK, memory=None):
    model = Tables(DENSE, TABLES)
    if kind == "uniform":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, grace.DistributedOptimizer(optimizer, model, compressor, memory)
    return model, executed(model, strategy_of(*plans_of(kind, grace.size(), compressor, memory)))


def saved_under(kind, everyone=False, compressor=TOPK, memory=None):
    """A checkpoint after some steps."""
    model, optimizer = made(kind, compressor, memory)
    steps(model, optimizer, range(3))
    return copied(optimizer.full_state_dict() if everyone else optimizer.state_dict())


def loaded_under(kind, checkpoints, compressor=TOPK, memory=None, reset=False):
    """The state after loading, or the error; afterwards training goes on."""
    model, optimizer = made(kind, compressor, memory)
    refused = ""
    try:
        optimizer.load_state_dict(checkpoints[grace.rank() % len(checkpoints)], memory="reset" if reset else "strict")
    except grace.GraceError as error:
        refused = str(error)
    state = state_of(optimizer)
    if any(optimizer._grace.runner.backend.allgather_object(refused)):
        return refused
    steps(model, optimizer, range(3, 5))
    return {"state": state, "step": optimizer._grace.context.step, "weights": digest(weights(model))}


def joined(kind, size, values):
    """Whole variables out of parts; zeros where a part has nothing. None if a variable has nothing at all."""
    if kind == "uniform":
        kind = "whole"
    found = {}
    for plan in plans_of(kind, size):
        v = plan.variable
        parts = [values.get(part.name) for part in plan.part_variables()]
        zeros = [np.zeros(part.shape, np.float32) for part in plan.part_variables()]
        filled = [zero if part is None else np.asarray(part) for part, zero in zip(parts, zeros, strict=True)]
        found[v.name] = filled[0] if plan.axis is None else np.concatenate(filled, plan.axis)
        assert found[v.name].shape == v.shape
    return found


def answers_in(kind, size, states):
    """The memories of all destinations, which each stand on their destination only."""
    everything = {}
    for rank, state in enumerate(states):
        for name, value in state.get("answer_memory", {}).items():
            assert name not in everything
            everything[name] = value
            (root,) = {
                part.sync.destination
                for plan in plans_of(kind, size)
                for part, own in zip(plan.parts, plan.part_variables(), strict=True)
                if own.name == name
            }
            assert root == rank
    return joined(kind, size, everything)


def unsent(kind, size, states):
    """Return the mean over ranks of the memories, and those of the answers: further steps add them to the mean."""
    kept = [joined(kind, size, state["memory"]) for state in states]
    answers = answers_in(kind, size, states)
    return {name: sum(one[name] for one in kept) / len(kept) + value for name, value in answers.items()}


def check_equal(got, wanted):
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    ("before", "after"),
    [(a, b) for i, a in enumerate([*KINDS, "uniform"]) for j, b in enumerate(KINDS) if (i + j) % 2 == 0],
)
def test_memories_are_cut_as_the_new_strategy_is(two_ranks, before, after):
    checkpoints = two_ranks.run(saved_under, before, True)
    answers = two_ranks.run(loaded_under, after, checkpoints[:1])
    assert not isinstance(answers[0], str), answers[0]
    assert {answer["step"] for answer in answers} == {5}
    assert len({answer["weights"] for answer in answers}) == 1
    for rank, own in enumerate(checkpoints[0]["grace"]["ranks"]):
        wanted = joined(before, 2, own["memory"])
        assert all(np.abs(value).sum() > 0 for value in wanted.values())
        if before in ("whole", "rows", "uniform") or after.startswith("ps"):
            check_equal(joined(after, 2, answers[rank]["state"]["memory"]), wanted)
    check_equal(unsent(after, 2, [a["state"] for a in answers]), unsent(before, 2, checkpoints[0]["grace"]["ranks"]))
    if before.startswith("ps") and after.startswith("ps"):
        kept = answers_in(before, 2, checkpoints[0]["grace"]["ranks"])
        assert all(np.abs(value).sum() > 0 for value in kept.values())
        check_equal(answers_in(after, 2, [answer["state"] for answer in answers]), kept)


@pytest.mark.parametrize(("before", "after"), [("whole", "rows"), ("rows", "whole"), ("uniform", "rows")])
def test_one_file_per_rank_will_do_where_no_destination_moves(two_ranks, before, after):
    checkpoints = two_ranks.run(saved_under, before)
    for rank, answer in enumerate(two_ranks.run(loaded_under, after, checkpoints)):
        wanted = joined(before, 2, checkpoints[rank]["grace"]["state"]["memory"])
        check_equal(joined(after, 2, answer["state"]["memory"]), wanted)


@pytest.mark.parametrize(("before", "after"), [("ps", "ps"), ("ps", "ps cut"), ("ps cut", "whole"), ("whole", "ps")])
@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 3)])
def test_on_another_number_of_ranks(before, after, old, new):
    """Every rank starts with the mean of the memories; a destination's answers stay whole, and with it. Where there is
    none any more they are added to the residuals."""
    checkpoint = ranks_of(old).run(saved_under, before, True)[0]
    answers = ranks_of(new).run(loaded_under, after, [checkpoint])
    assert not isinstance(answers[0], str), answers[0]
    kept = [joined(before, old, own["memory"]) for own in checkpoint["grace"]["ranks"]]
    mean = {name: sum(one[name] for one in kept) / old for name in kept[0]}
    sent_back = answers_in(before, old, checkpoint["grace"]["ranks"])
    if not after.startswith("ps"):  # every rank adds what was left out of the mean: the mean over ranks has it once
        mean = {name: value + sent_back[name] for name, value in mean.items()}
    for answer in answers:
        check_equal(joined(after, new, answer["state"]["memory"]), mean)
    if before.startswith("ps") and after.startswith("ps"):
        check_equal(answers_in(after, new, [answer["state"] for answer in answers]), sent_back)


# -- what is refused ---------------------------------------------------------------------------------------


def test_another_kind_of_memory_is_refused(two_ranks):
    checkpoints = two_ranks.run(saved_under, "whole", True, TOPK, "residual")
    for message in two_ranks.run(loaded_under, "rows", checkpoints[:1], TOPK, "residual(beta=0.5)"):
        assert "'w'" in message
        assert "residual(beta=0.5)" in message
        assert "memory='reset'" in message
    for answer in two_ranks.run(loaded_under, "rows", checkpoints[:1], TOPK, "residual(beta=0.5)", True):
        assert answer["state"].get("memory", {}) == {}


def test_a_file_per_rank_is_refused_where_the_destination_moved(two_ranks):
    checkpoints = two_ranks.run(saved_under, "ps")
    messages = two_ranks.run(loaded_under, "ps moved", checkpoints)
    for message, name in zip(messages, ("'w'", "'v'"), strict=True):
        assert name in message
        assert "full_state_dict()" in message
        assert "memory='reset'" in message
