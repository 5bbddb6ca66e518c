"""Forward and backward in one compiled function: the bits of no compiling at all, and exchanges start in backward.
Compiled autograd makes it one graph."""

import contextlib

import pytest
import torch

import grace
from tests.in_torch.test_compiled import NAMES, settings
from tests.support.drawing import THOROUGH
from tests.support.pools import on_ranks
from tests.support.training import batch, ddp, digest, distributed, net, sgd, weights

PLAIN, TOPK = (1, True, False), "topk(ratio=0.1)"
WAYS = {"plain": PLAIN, **({"accumulated, zeros kept, one frozen": (2, False, True)} if THOROUGH else {})}


def trained(backend, method=TOPK, passes=1, set_to_none=True, frozen=False, compiled_autograd=True):
    """Train for three steps, forward and backward in one compiled function. Return the weights, the graphs captured of
    backward, the breaks of graphs, and the number of exchanges that had begun when backward was over, step by step."""
    from torch._dynamo.utils import counters

    with settings(compiled_autograd=compiled_autograd):
        counters.clear()
        model = net()
        optimizer = sgd(model.parameters())
        if method:
            optimizer = distributed(model, method, bucket_bytes=600, backward_passes_per_step=passes)
        if frozen:
            list(model.parameters())[-1].requires_grad_(False)

        def forward_and_backward(images, labels):
            torch.nn.functional.cross_entropy(model(images), labels).backward()

        compiled = torch.compile(forward_and_backward, backend=backend) if backend else forward_and_backward
        begun = []
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            for number in range(passes):
                compiled(*batch(passes * step + number))
            begun.append(len(optimizer._grace.runner.in_flight) if method else 0)
            optimizer.step()
        if method:
            optimizer.close()
        stats = counters["compiled_autograd"]["captures"], counters["stats"]["unique_graphs"]
        return digest(weights(model)), stats, sorted(counters["graph_break"]), begun


@pytest.mark.parametrize("way", WAYS)
@on_ranks()
def test_backward_is_one_graph_and_the_same_bits(way):
    eager, _, _, eagerly = trained(None, TOPK, *WAYS[way])
    compiled, stats, breaks, begun = trained("aot_eager", TOPK, *WAYS[way])
    assert compiled == eager
    if way == "plain":
        _, *alone, _ = trained("aot_eager", None, *PLAIN)
        assert [stats, breaks] == alone
        assert begun == eagerly
        assert begun[0] > 1
    else:
        assert begun == [0, 0, 0]  # what is added to a gradient is there at the graph's end only


BEGUN = [("powersgd(rank=2)", True), (TOPK, False)]


@pytest.mark.parametrize(("method", "compiled_autograd"), BEGUN if THOROUGH else BEGUN[:1])
@on_ranks()
def test_exchanges_start_in_every_backward_that_is_compiled_or_not_and_of_all_methods(method, compiled_autograd):
    """Also of methods of several rounds, beside sums of what is not compressed."""
    (eager, _, _, eagerly), (compiled, _, _, begun) = (
        trained(backend, method, *PLAIN, compiled_autograd) for backend in (None, "aot_eager")
    )
    assert compiled == eager
    assert begun == eagerly
    assert method != TOPK or begun[0] > 1


def trained_by_ddp(backend=None, hooked=True, python=False, passes=1):
    """Train so under DDP, whose reducer is C++ or Python; by compiled autograd if it is Python."""
    from torch._dynamo.utils import counters

    mode = {"optimize_ddp": "python_reducer"} if python else {}
    with settings(compiled_autograd=python and backend is not None, **mode):
        counters.clear()
        model = ddp(net())
        optimizer = sgd(model.parameters())
        state = grace.torch.register_ddp_hook(model, TOPK, optimizer=optimizer) if hooked else None

        def forward_and_backward(images, labels):
            torch.nn.functional.cross_entropy(model(images), labels).backward()

        compiled = torch.compile(forward_and_backward, backend=backend) if backend else forward_and_backward
        for step in range(3):
            optimizer.zero_grad()
            for number in range(passes):
                with contextlib.nullcontext() if number == passes - 1 else model.no_sync():
                    compiled(*batch(passes * step + number))
            optimizer.step()
        if state:
            saved = state.full_state_dict()
            assert saved["step"] == 3
            assert list(saved["pieces"]) == NAMES
            state.close()
        stats = counters["compiled_autograd"]["captures"], counters["stats"]["unique_graphs"]
        return digest(weights(model.module)), stats, sorted(counters["graph_break"])


@pytest.mark.parametrize("passes", [1, 2] if THOROUGH else [1])
@on_ranks()
def test_ddps_hook_breaks_no_graph_of_backward_and_gives_the_same_bits(passes):
    wanted = trained_by_ddp(None, True, False, passes)[0]
    found, *graphs = trained_by_ddp("aot_eager", True, True, passes)
    assert found == wanted
    if passes == 1:
        _, *alone = trained_by_ddp("aot_eager", False, True)
        assert graphs == alone
        assert alone[0][0] == 1  # all of backward
    else:
        assert trained_by_ddp(None, True, True, passes)[0] == wanted


@on_ranks()
def test_ddps_hook_is_not_traced_where_backward_runs_in_a_compiled_function():
    wanted, *_ = trained_by_ddp()
    _, *graphs = trained_by_ddp("aot_eager", False)
    assert trained_by_ddp("aot_eager") == (wanted, *graphs)
