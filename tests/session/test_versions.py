"""Ranks with other versions, formats or engines are told apart before anything is exchanged."""

import pytest
import torch

import grace
from grace.core import version
from grace.exchange import layout
from grace.session import state_schema
from grace.strategy import execution
from tests.support.pools import on_ranks
from tests.support.training import distributed, net

WIRES = layout.WIRE_FORMAT
CHANGED = {
    "Grace": (version, "__version__", "9.9", "rank 0 has Grace 0.1.0, rank 1 has Grace 9.9"),
    "torch": (torch, "__version__", "1.2.3+cu130", "rank 1 has torch 1.2.3"),
    "wires": (layout, "WIRE_FORMAT", 7, f"rank 0 has wires of version {WIRES}, rank 1 has wires of version 7"),
    "checkpoints": (state_schema, "VERSION", 9, "rank 1 has checkpoints of version 9"),
    "build": (torch, "__version__", torch.__version__.split("+")[0] + "+cu999", ""),
}


def refusal(**options):
    """Return the message with which a distributed optimizer is refused."""
    try:
        distributed(net(), None if "strategy" in options else "topk", **options)
    except grace.RankError as raised:
        return str(raised)
    return ""


def other():
    """This run's backend as somebody's own class."""
    backend = grace.init().copy_with()
    backend.__class__ = type("Other", (type(backend),), {})
    return backend


@pytest.mark.parametrize("engine", ["gloo", "mpirun-mpi"])
@on_ranks(2)
def test_whatever_differs_is_named_with_both_sides(engine):
    """Every change is made on rank 1 alone."""
    here, found = grace.rank() == 1, {}
    for what, (module, name, value, _) in CHANGED.items():
        with pytest.MonkeyPatch.context() as patch:
            if here:
                patch.setattr(module, name, value)
            found[what] = refusal()
    with pytest.MonkeyPatch.context() as patch:
        if here:
            patch.setenv("GRACE_FUSED", "0")
        found["GRACE_FUSED"] = refusal()
    with pytest.MonkeyPatch.context() as patch:
        if here:
            patch.setattr(execution, "VERSION", 8)
        found["strategies"] = refusal(strategy="all_reduce")
    found["sparse_as_dense"] = refusal(sparse_as_dense=here)
    found["the backend"] = refusal(backend=other() if here else grace.init())
    for what, (*_, message) in CHANGED.items():
        assert message in found[what], what
        assert bool(message) == bool(found[what]), found[what]
    assert "rank 0 has compiled kernels: yes, rank 1 has compiled kernels: no (GRACE_FUSED=0)" in found["GRACE_FUSED"]
    assert "a strategy of version 8" in found["strategies"]
    assert "rank 1 has sparse_as_dense True" in found["sparse_as_dense"]
    assert ".Other" in found["the backend"]
