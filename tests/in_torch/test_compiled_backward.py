"""Backward traced by compiled autograd: one graph, in which exchanges start, and the bits of no compiling at all."""

import pytest
import torch

from tests.in_torch.test_compiled import settings
from tests.support.pools import ranks_of
from tests.support.training import digest, distributed, loss_of, net, sgd, weights

pytestmark = pytest.mark.ranks

PLAIN, TOPK = (1, True, False), "topk(ratio=0.1)"
WAYS = {"plain": PLAIN, "accumulated": (2, True, False), "zeros kept": (1, False, False), "one frozen": (1, True, True)}


def trained(backend, method=TOPK, passes=1, set_to_none=True, frozen=False):
    """What three steps come to, forward and backward in one function that is compiled: the weights, what was captured
    of backward, what broke graphs, and how many exchanges had begun when backward was over, step by step."""
    from torch._dynamo.utils import counters

    with settings(compiled_autograd=True):
        counters.clear()
        model = net()
        optimizer = sgd(model.parameters())
        if method:
            optimizer = distributed(model, method, bucket_bytes=600, backward_passes_per_step=passes)
        if frozen:
            list(model.parameters())[-1].requires_grad_(False)

        def forward_and_backward(number):
            loss_of(model, number).backward()

        compiled = torch.compile(forward_and_backward, backend=backend) if backend else forward_and_backward
        begun = []
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            for number in range(passes):
                compiled(passes * step + number)
            begun.append(len(optimizer._grace.exchanger._begun) if method else 0)
            optimizer.step()
        if method:
            optimizer.close()
        stats = counters["compiled_autograd"]["captures"], counters["stats"]["unique_graphs"]
        return digest(weights(model)), stats, sorted(counters["graph_break"]), begun


@pytest.mark.parametrize("way", WAYS)
def test_backward_is_one_graph_and_the_same_bits(two_ranks, way):
    wanted, found = (two_ranks.run(trained, backend, TOPK, *WAYS[way]) for backend in (None, "aot_eager"))
    for (eager, _, _, eagerly), (compiled, stats, breaks, begun) in zip(wanted, found, strict=True):
        assert compiled == eager
        if way == "plain":
            (_, alone, without, _), *_ = two_ranks.run(trained, "aot_eager", None, *PLAIN)
            assert (stats, breaks) == (alone, without)
            assert begun == eagerly
            assert begun[0] > 1
        elif way == "accumulated":
            assert begun == [0, 0, 0]  # what is added to a gradient is there at the graph's end only


def test_methods_of_several_rounds_and_exact_ones_start_in_graphs_too():
    for method in ("powersgd(rank=2)", "none"):
        (one, *_), (other, *_) = ranks_of(2).run(trained, None, method), ranks_of(2).run(trained, "aot_eager", method)
        assert one[0] == other[0]
        assert one[3] == other[3]
