"""Closures given to ``step()``: an optimizer that compares losses sees the same ones on every rank."""

import pytest
import torch

import grace
from tests.support.drawing import THOROUGH
from tests.support.pools import on_ranks
from tests.support.training import digest, distributed, loss_of, net, weights


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=1.0, max_iter=5, line_search_fn="strong_wolfe")


RUNS = [("gloo", 2), ("mpirun-mpi", 3)]
if THOROUGH:  # losses are averaged alike over every engine
    RUNS += [("gloo", 3), ("horovodrun-gloo", 2)]


@pytest.mark.parametrize(("engine", "size"), RUNS, ids=[f"{engine}-{size}ranks" for engine, size in RUNS])
@on_ranks()
def test_a_line_search_takes_the_same_path_on_every_rank_and_that_of_one_process(engine, size):
    return [searched(*way) for way in (("average", True), ("average", False), ("sum", True))]


def searched(op, set_to_none):
    """Three steps with a line search, each rank on its own data; a plain optimizer on all ranks' losses beside it."""
    ours, reference = net(seed=1), net(seed=1)
    optimizer, plain = distributed(ours, "none", optimizer=lbfgs, op=op), lbfgs(reference.parameters())

    def closure():
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(ours, 0)
        loss.backward()
        return loss

    def of_all_ranks():
        plain.zero_grad(set_to_none=set_to_none)
        loss = sum(loss_of(reference, 0, rank) for rank in range(grace.size()))
        loss = loss / (grace.size() if op == "average" else 1)
        loss.backward()
        return loss

    losses = [(optimizer.step(closure), plain.step(of_all_ranks)) for _ in range(3)]
    for mine, wanted in losses:
        assert not mine.requires_grad
        torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-4)
    for name, value in weights(reference).items():
        torch.testing.assert_close(weights(ours)[name], value, rtol=1e-2, atol=1e-3, msg=name)
    assert losses[-1][0] < losses[0][0]
    assert optimizer.traffic.steps > 6
    return digest(weights(ours)), [float(mine) for mine, _ in losses]


@on_ranks()
def test_losses_keep_their_type_and_a_rank_may_have_none():
    """Losses are 1 and 3 in several types; rank 1 has none at the end."""
    model, value, found = net(), 1 + 2 * grace.rank(), []
    optimizer = distributed(model, "none")
    losses = [torch.tensor([value], dtype=torch.float16), float(value), value, None, "text"]
    for loss in [*losses, None if grace.rank() else 5.0]:

        def closure(loss=loss):
            optimizer.zero_grad()
            loss_of(model, 0).backward()
            return loss

        found.append(optimizer.step(closure))
    assert (found[0].dtype, found[0].tolist()) == (torch.float16, [2.0])
    assert found[1:5] == [2.0, 2.0, None, "text"]
    assert found[5] == (None if grace.rank() else 5.0)
