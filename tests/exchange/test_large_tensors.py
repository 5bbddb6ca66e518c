"""Tensors of 2^31 elements and more are coded with 64-bit counts, or refused by name before anything is exchanged."""

import numpy as np
import pytest
import torch

import grace
from grace.core.context import Context
from grace.core.registry import known
from grace.core.variable import Variable
from grace.kernels import kernels_of
from grace.kernels.index_coding import encode
from grace.memories.dgc import DGCMemory

BY_POSITION = ["topk", "randomk", "threshold", "dgc", "adaptive", "inceptionn", "topk | qsgd"]
OTHERS = sorted(set(known("compressor")) - {*BY_POSITION, "composed"})


def optimize(spec, columns=1 << 15, **more):
    """An optimizer of a parameter of 2^16 rows, which takes no memory; "many" parts if a strategy cuts it."""
    weight = torch.nn.Parameter(torch.empty(1 << 16, columns, device="meta"))
    return grace.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("table.weight", weight)], spec, broadcast=False, **more
    )


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize("spec", BY_POSITION)
def test_what_counts_in_32_bits_refuses_2_to_the_31_elements_by_name(spec):
    with pytest.raises(grace.ConfigError) as refused:
        optimize(spec)
    message = str(refused.value)
    for told in ("'table.weight'", "2147483648 elements", spec, "partitioned_all_reduce", "none or cast"):
        assert told in message
    optimize(spec, (1 << 15) - 1)


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize("spec", OTHERS)
def test_what_does_not_takes_them(spec):
    optimize(spec)


@pytest.mark.usefixtures("local")
def test_rows_are_counted_in_32_bits_whatever_the_method():
    from grace.communicators import Allgather
    from grace.session.sharding import uniform

    few, many = (Variable("table.weight", (rows, 2), sparse=True) for rows in ((1 << 31) - 1, 1 << 31))
    uniform([few], Allgather("none"))
    with pytest.raises(grace.ConfigError, match=r"'table.weight' has 2147483648 rows"):
        uniform([many], Allgather("none"))


def test_a_direct_call_refuses_them_before_it_touches_them():
    """The tensors are views of one number: to copy one would take 8 GB."""
    many = np.broadcast_to(np.float32(1), (1 << 16, 1 << 15))
    for x in (many, torch.from_numpy(np.ones(1, np.float32)).expand(1 << 16, 1 << 15)):
        for spec in BY_POSITION:
            compressor = grace.make("compressor", spec)
            compressor.bind(Context())
            with pytest.raises(grace.ConfigError, match="2147483648 elements"):
                compressor.compress(x, "w")
        k = kernels_of(x)
        with pytest.raises(grace.ConfigError, match="2147483648 elements"):
            encode(k, k.zeros((3,), "int32", x), x.shape[0] * x.shape[1], fixed=True)


def test_the_memory_that_clears_what_was_sent_refuses_them():
    class Own(grace.Compressor):
        def decompress(self, payload, ctx):
            raise AssertionError("too late")

    memory = DGCMemory()
    memory.state["w"] = {"velocity": np.zeros(1, np.float32)}
    with pytest.raises(grace.ConfigError, match="2147483648 elements"):
        memory.update(np.broadcast_to(np.float32(1), (1 << 16, 1 << 15)), "w", Own(), [np.float32([1])], None)
