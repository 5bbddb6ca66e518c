"""The whole catalogue over real ranks: all of them hold the same bits, a bad number on one rank is seen by all and
remembered by none, and a run resumes."""

import itertools
import math

import pytest
import torch

import grace
from grace.core.registry import known, legal_communicators, make
from tests.support.methods import SPECS
from tests.support.pairwise import pairwise
from tests.support.pools import on_ranks
from tests.support.training import Given, digest, distributed, made_up, plain_sgd, state_of, used, weights

METHODS = [*SPECS, "block(bits=4, hadamard=32)", "block(format=fp8, rounding=stochastic)", "block(bits=2, scale=rms)"]
COMMUNICATORS = (*known("communicator"), "reduce_broadcast(destination=1)")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SHAPES = {
    **{"matrix": (20, 30), "odd": (13, 7), "kernel": (3, 2, 3, 3)},
    **{"one": (1,), "scalar": (), "empty": (0, 3), "zeros": (31,)},
}
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
PAIRS = [
    (method, communicator)
    for method in METHODS
    for communicator in COMMUNICATORS
    if communicator.partition("(")[0] in legal_communicators(make("compressor", method))
]
OTHERS = pairwise([2, 3], DTYPES, BAD, ["matrix", "kernel", "one"], [25 << 20, 1])
CASES = [(size, *pair, *others) for pair, (size, *others) in zip(PAIRS, itertools.cycle(OTHERS), strict=False)]
CASES += [(4, method, "allreduce", *OTHERS[0][1:]) for method, name in PAIRS if name == "allreduce"]  # in two hops
"""Every legal pair with the other settings in turn."""


def optimizer_of(model, compressor, **choices):
    return distributed(model, compressor, optimizer=plain_sgd, **choices)


def steps(model, optimizer, numbers):
    for step in numbers:
        optimizer.zero_grad()
        model.backward(given(step))
        optimizer.step()


def given(step):
    gradients = made_up(SHAPES, step, grace.rank())
    gradients["zeros"][:] = 0
    return gradients


@pytest.mark.parametrize(("size", "compressor", "communicator", "dtype", "bad", "where", "group_bytes"), CASES, ids=str)
@on_ranks()
def test_ranks_hold_the_same_bits_and_a_bad_number_is_seen_by_all_and_remembered_by_none(
    size, compressor, communicator, dtype, bad, where, group_bytes
):
    """Two good steps, one in which a single number of rank 1's gradient is bad, and a good one."""
    model = Given(SHAPES, DTYPES[dtype])
    optimizer = optimizer_of(model, compressor, communicator=communicator, group_bytes=group_bytes)
    steps(model, optimizer, range(2))
    good, before, counted = digest(weights(model)), digest(state_of(optimizer)), optimizer._grace.context.step
    optimizer.zero_grad()
    gradients = given(2)
    if grace.rank() == 1:
        gradients[where].flat[-1] = BAD[bad]
    model.backward(gradients)
    optimizer.synchronize()
    seen = not torch.isfinite(getattr(model, where).grad).all()
    used(model, optimizer)
    unchanged = digest(state_of(optimizer)) == before
    steps(model, optimizer, [3])
    facts = {
        "seen": seen,
        "memories unchanged": unchanged,
        "steps counted": optimizer._grace.context.step == counted + 2,
        "finite": all(torch.isfinite(p.grad).all() and torch.isfinite(p).all() for p in model.parameters()),
        "dtype": all(p.grad.dtype == DTYPES[dtype] for p in model.parameters()),
        "learned": good != digest(weights(Given(SHAPES, DTYPES[dtype]))),
    }
    assert all(facts.values()), facts
    return good, digest(weights(model))


@pytest.mark.parametrize("compressor", METHODS)
@on_ranks()
def test_a_resumed_run_continues_bit_for_bit(compressor):
    """Three steps at once, and two, a new model and optimizer with what was saved, and one."""
    whole, part, again = Given(SHAPES), Given(SHAPES), Given(SHAPES)
    steps(whole, optimizer_of(whole, compressor), range(3))
    optimizer = optimizer_of(part, compressor)
    steps(part, optimizer, range(2))
    again.load_state_dict(part.state_dict())
    other = optimizer_of(again, compressor)
    other.load_state_dict(optimizer.state_dict())
    steps(again, other, range(2, 3))
    assert digest(whole.state_dict()) == digest(again.state_dict())


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"compressor": "dgc"}, r"momentum 0.9: it would be applied twice.*memory='dgc\(momentum=0.9\)'"),
        ({"compressor": "qsgd", "memory": "dgc"}, "memory dgc cannot serve qsgd: it clears the momentum"),
        ({"compressor": "onebit", "memory": "none"}, "onebit needs error feedback"),
        (
            {"compressor": "sketch", "communicator": "scatter_reduce"},
            "Legal communicators for sketch: allgather, broad",
        ),
    ],
)
@on_ranks()
def test_what_does_not_go_together_is_refused_on_every_rank(choices, message):
    with pytest.raises(grace.ConfigError, match=message):
        distributed(Given(SHAPES), **choices)
