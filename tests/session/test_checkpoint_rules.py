"""Changes that a checkpoint may bring to a resumed run, and refusals, after which nothing has changed."""

import pytest
import torch

import grace
from grace.strategy import ShardPlan, Sync
from tests.support.checkpoints import SHAPES, load, made, saved_by, sealed
from tests.support.pools import on_ranks, ranks_of
from tests.support.strategies import executed, strategy_of, whole
from tests.support.training import Given, copied, digest, state_of, train_given, weights

# -- what is per rank ----------------------------------------------------------------------------------------


def mixed():
    """PowerSGD, whose factors all ranks share, and signum, whose momentum is a rank's own."""
    model = Given(SHAPES)
    part = {"w": ShardPlan(Sync("allreduce"), "powersgd"), "v": ShardPlan(Sync("allgather"), "signum")}
    return model, executed(model, strategy_of(*[whole(name, shape, part[name]) for name, shape in SHAPES.items()]))


@on_ranks()
def test_each_component_says_itself_what_is_a_ranks_own():
    """Before and after the first step."""
    model, optimizer = mixed()
    new = optimizer.full_state_dict()
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(copied(new))
    train_given(model, optimizer, range(2))
    saved = copied(optimizer.full_state_dict())
    model, optimizer = mixed()
    optimizer.load_state_dict(saved)
    kept, own = state_of(optimizer)["compressor"], [rank["compressor"]["v"] for rank in saved["grace"]["ranks"]]
    assert digest(kept["v"]) == digest(own[grace.rank()])
    assert digest(own[0]) != digest(own[1])
    return digest(kept["w"])


# -- what is refused -----------------------------------------------------------------------------------------


def bent(kind):
    """A checkpoint with something that does not fit."""
    saved = saved_by(everyone=False)
    state, entry = saved["grace"]["state"]["memory"], saved["grace"]
    if kind == "shape":
        state["w"] = torch.zeros(3)
    elif kind == "dtype":
        state["w"] = state["w"].double()
    elif kind == "kind":
        state["w"] = {"velocity": state["w"]}
    elif kind == "variable":
        entry["pieces"]["w"]["shape"] = [8, 12]
    elif kind == "missing":
        del state["w"]
    elif kind == "unknown":
        state["gone"] = torch.zeros(3)
    elif kind == "form":
        del entry["step"]
    elif kind == "groups":
        saved["param_groups"][0]["params"].append(7)
    elif kind == "entry":
        saved["state"][0]["momentum_buffer"] = {1: Broken()}
    elif kind == "plain":
        del saved["grace"]
    else:
        entry.update(CHANGED[kind])
    return saved if kind in UNSEALED else sealed(saved)


CHANGED = {
    "version": {"version": 99},
    "components": {"components": "allgather, qsgd, none"},
    "seed": {"seed": 5},
    "step": {"step": 5},
}
UNSEALED = ("missing", "unknown", "form", "plain", "version", "step")
"""Damages whose checksums are left as they were."""


class Broken(list):
    """A list at which torch's own load fails, halfway."""

    def __iter__(self):
        raise RuntimeError("torch could not load this")


BENT = {
    "shape": "'w', which should have the shape [12, 8], and has [3]",
    "dtype": "'w', which should be float32, and is float64",
    "kind": "'w', which should be a tensor, and is a dict",
    "variable": "shape [8, 12], and in this run it has the shape [12, 8]",
    "missing": "should hold the memory of 'w', and does not",
    "form": "'step' is missing",
    "groups": "ValueError",
    "entry": "torch could not load this",
    "plain": "saved by a plain optimizer, or without the optimizer's state",
    "version": "version 99",
    "components": "saved with allgather, qsgd, none",
    "seed": "seed=5",
    "step": "its checksum differs",
    "unknown": "'gone'",
}


@on_ranks()
def test_what_does_not_fit_is_refused_before_anything_changes():
    model, optimizer = made()
    train_given(model, optimizer, range(5, 7))
    for kind, words in BENT.items():
        said = load(optimizer, bent(kind))
        assert words in said, kind
        assert "memory='keep'" in said or kind not in ("shape", "dtype", "kind", "variable", "missing")
    for kind in ("shape", "variable", "missing"):
        said = load(optimizer, bent(kind), "keep")
        assert "was dropped" in said
        assert "'w'" in said
    train_given(model, optimizer, range(7, 9))
    return digest(weights(model))


# -- what may change -----------------------------------------------------------------------------------------

PARAMETERS = [
    ("topk(ratio=0.1)", "topk(ratio=0.4)", None),
    ("topk(ratio=0.1) | qsgd(levels=7)", "topk(ratio=0.1) | qsgd(levels=15)", None),
    ("qsgd(levels=7)", "qsgd(levels=15, bucket_size=64)", "scatter_reduce"),
    ("powersgd(rank=1)", "powersgd(rank=3)", None),
]


@on_ranks()
def test_a_methods_parameters_may_change_and_no_residual_is_lost():
    ends = []
    for before, after, communicator in PARAMETERS:
        memory = "residual" if before.startswith("qsgd") else None
        saved = saved_by(before, memory, communicator)
        model, optimizer = made(after, memory, communicator)
        said = load(optimizer, saved)
        assert ("powersgd(rank=3)" if before.startswith("powersgd") else "") in said
        assert bool(said) == before.startswith("powersgd"), said
        state, wanted = state_of(optimizer), copied(saved["grace"]["ranks"][grace.rank()])
        kept = {kind: digest(state[kind]) == digest(wanted[kind]) for kind in wanted if kind != "compressor"}
        assert kept
        assert all(kept.values()), before
        train_given(model, optimizer, range(3, 5))
        ends.append(digest(weights(model)))
    return ends


def keeping(saved):
    """Return the parts of checkpoints that are kept after changes of everything."""
    changes = {
        "method": made("onebit", seed=3),
        "memory": made("topk(ratio=0.1)", "residual(beta=0.5)"),
        "none": made("qsgd", "none"),
        "new variable": made(shapes={**SHAPES, "new": (50,)}),
        "gone variable": made(shapes={"w": (12, 8)}),
        "other shape": made(shapes={**SHAPES, "v": (41,)}),
    }
    answers = {}
    for what, (model, optimizer) in changes.items():
        entry = {**optimizer.state_dict(), "grace": saved["grace"]}  # torch's part is of its own parameters
        refused = load(optimizer, entry)
        answers[what] = refused, load(optimizer, entry, "keep"), copied(state_of(optimizer)["memory"])
        assert optimizer._grace.context.step == 3
        train_given(model, optimizer, range(3, 5))
    return answers


@pytest.mark.parametrize("size", [2, 3])
def test_keep_keeps_what_fits_and_says_what_it_drops(two_ranks, size):
    saved = two_ranks.run(saved_by)[0]
    ranks = saved["grace"]["ranks"]
    for rank, answers in enumerate(ranks_of(size).run(keeping, saved)):
        mean = {name: (ranks[0]["memory"][name] + ranks[1]["memory"][name]) / 2 for name in SHAPES}
        own = ranks[rank]["memory"] if size == 2 else mean
        for what, (refused, said, kept) in answers.items():
            assert ("memory='keep'" in refused) == (what != "new variable"), (what, refused)
            lost = {"none": {"w", "v"}, "gone variable": {"v"}, "other shape": {"v"}}.get(what, set())
            assert kept.keys() == own.keys() - lost, what
            assert all(torch.equal(kept[name], own[name]) for name in kept), what
            assert all(repr(name) in said for name in lost), what
            assert bool(said) == bool(lost), said
