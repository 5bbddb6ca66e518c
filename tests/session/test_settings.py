"""Sums and pre-divided means of every method: what a method computes does not depend on them."""

import dataclasses
import importlib
import inspect

import pytest
import torch

from grace.core.registry import make
from grace.session.settings import ReduceOp, Settings
from tests.support.pools import on_ranks
from tests.support.training import SPECS, Given, distributed, state_of, train_given

SHAPES = {"matrix": (20, 30), "vector": (700,), "tiny": (1,)}


def reduced(compressor, memory, communicator, **options):
    """Return the means of two steps, and the memories after them."""
    model = Given(SHAPES)
    optimizer = distributed(
        model,
        compressor,
        optimizer=lambda p: torch.optim.SGD(p, 0.0),
        memory=memory,
        communicator=communicator,
        **options,
    )
    brought = []
    for step in range(2):
        train_given(model, optimizer, [step])
        brought.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return brought, [
        value[key] if isinstance(value, dict) else value
        for state in state_of(optimizer).values()
        for _, value in sorted(state.items())
        for key in (sorted(value) if isinstance(value, dict) else [None])
    ]


CASES = [(spec, None, None) for spec in SPECS] + [
    ("topk(ratio=0.1)", "dgc(clip=0.5)", None),
    ("randomk(ratio=0.1)", "dgc(clip=0.5)", None),
    ("threshold(value=0.5)", "none", "reduce_broadcast"),
    ("signsgd", None, "reduce_broadcast"),
    ("powersgd(rank=2)", None, "reduce_broadcast"),
    ("fp16", "residual", "scatter_reduce"),
]


@pytest.mark.filterwarnings("ignore:.*is not a contraction")
@pytest.mark.parametrize(("compressor", "memory", "communicator"), CASES)
@on_ranks()
def test_what_a_method_computes_does_not_depend_on_the_reduction(compressor, memory, communicator):
    """Averages, sums and pre-divided averages, and pre-divided ones whose factor is no power of two."""
    ways = ({}, {"op": "sum"}, {"gradient_predivide_factor": 4.0}, {"gradient_predivide_factor": 0.3})
    average, total, divided, odd = [reduced(compressor, memory, communicator, **options) for options in ways]
    size = 1 if make("compressor", compressor).votes else 2
    narrow = "16" in compressor  # where the division rounds
    for mean, summed, other, third in zip(average[0], total[0], divided[0], odd[0], strict=True):
        assert torch.equal(summed, mean * size)
        assert torch.equal(other, mean) or narrow
        tolerances = {"rtol": 0.02, "atol": 0.02} if narrow else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(torch.stack([other, third]), mean.expand(2, -1), **tolerances)
    for kept, of_sum, of_divided in zip(average[1], total[1], divided[1], strict=True):
        assert torch.equal(torch.as_tensor(kept), torch.as_tensor(of_sum))
        assert torch.equal(torch.as_tensor(kept), torch.as_tensor(of_divided))


OTHERS = [
    *[{field.name: 3} for field in dataclasses.fields(Settings) if field.name != "reduction"],
    {"reduction": ReduceOp("sum")},
    {"reduction": ReduceOp(predivide=2.0)},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_every_setting_is_saved_and_compared(other):
    usual, changed = Settings(), Settings(**other)
    assert changed.arguments() != usual.arguments()
    assert "seed" in other or changed.facts() != usual.facts()


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_every_setting_is_an_argument_in_both_frameworks(framework):
    if framework == "tensorflow":
        pytest.importorskip("tensorflow", exc_type=ImportError)
    made = importlib.import_module(f"grace.{framework}").DistributedOptimizer
    missing = set(Settings().arguments()) - set(inspect.signature(made).parameters)
    assert not missing, "a setting of one framework is no field of Settings: see docs/adding.md"
