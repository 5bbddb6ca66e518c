"""Tensors that a user gives to be exchanged: all but dense floating point numbers are refused before they travel, and
graphs are left behind."""

import numpy as np
import pytest
import torch

import grace
from grace.core.registry import known
from tests.support.pools import on_ranks
from tests.support.training import Given, distributed, refusal, state_of

ONES = torch.ones(4, 4)
REFUSED = {
    "dtype complex64": lambda: ONES.to(torch.complex64),
    "dtype bool": lambda: ONES.bool(),
    "dtype int64": lambda: ONES.long(),
    "dtype float8_e4m3fn": lambda: ONES.to(torch.float8_e4m3fn),
    "sparse (torch.sparse_coo)": lambda: ONES.to_sparse(),
    "sparse (torch.sparse_csr)": lambda: ONES.to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([ONES[0], ONES[0, :2]], layout=torch.jagged),
    "meta device": lambda: ONES.to("meta"),
    "dtype object": lambda: np.array([1, None]),
    "dtype datetime64": lambda: np.array(["2020-01-01"], "M8[D]"),
    "builtins.list": lambda: [1.0, 2.0],
}
METHODS = (("none", "allgather"), ("topk", "allgather"), ("powersgd", "allreduce"), ("signum", "reduce_broadcast"))


@on_ranks()
def test_what_is_no_dense_tensor_of_floats_is_refused_before_it_travels():
    """One rank alone gives a bad tensor, and none waits for it."""
    for method, communicator in (*METHODS, ("fp16", "scatter_reduce")):
        made = known("communicator")[communicator](method)
        made.step(ONES, "layer.w")
        for said, bad in REFUSED.items() if grace.rank() else ():
            error = refusal(made.step, bad(), "layer.w")
            assert said in error, method
            assert "'layer.w'" in error, method
        assert torch.isfinite(made.step(ONES, "layer.w")).all(), method


@pytest.mark.filterwarnings("ignore:Using backward")
@on_ranks()
def test_no_state_holds_on_to_the_graph_of_a_gradient():
    for method, communicator in METHODS:
        made = known("communicator")[communicator](method)
        answer = made.step(torch.nn.Parameter(ONES) * 2, "w")
        model = Given({"w": (6, 6)})
        optimizer = distributed(
            model, method, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), communicator=communicator
        )
        (model.w**3).sum().backward(create_graph=True)
        optimizer.step()
        values = [value for part in made.stateful_parts.values() for value in part.state.values()]
        values += [value for kind in state_of(optimizer).values() for value in kind.values()]
        assert not any(value.requires_grad for value in [answer, *values]), method


class Magnitude(torch.nn.Module):
    """|re + i im|, or that of the conjugate number, whose gradient torch negates only where it is read."""

    def __init__(self, conjugates):
        super().__init__()
        self.re, self.im = (torch.nn.Parameter(torch.tensor(value)) for value in (3.0, 4.0))
        self.conjugates = conjugates

    def forward(self):
        number = torch.complex(self.re, self.im)
        return (number.conj() if self.conjugates else number).abs()


@on_ranks()
def test_numbers_that_torch_negates_where_they_are_read_are_taken_as_what_they_are():
    """They are negated in memory on rank 0 alone."""
    for method in ("none", "efsignsgd"):
        model = Magnitude(grace.rank() == 0)
        optimizer = distributed(model, method, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        (given,) = torch.autograd.grad(model(), model.im)
        model().backward()
        optimizer.step()
        by_hand = known("communicator")["allgather"](method, "none").step(torch.tensor([2 - 3j]).conj().imag, "w")
        assert given.is_neg() == (grace.rank() == 0)
        assert (model.re.grad.item(), model.im.grad.item()) == (pytest.approx(0.6), pytest.approx(0.8))
        assert by_hand.item() == 3.0


def test_numbers_of_another_byte_order_are_taken_as_what_they_are():
    communicator = known("communicator")["allgather"]("none")
    assert communicator.step(np.array([1, 2.5], ">f4"), "w").tolist() == [1, 2.5]
