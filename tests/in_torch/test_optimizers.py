"""Every optimizer of torch.optim, and those that share a model, train as in one process."""

import torch

import grace
from tests.support.pools import on_ranks
from tests.support.training import loss_of, net, weights

OTHERS = {"Optimizer", "LBFGS", "SparseAdam"}
"""The base, and those that need a closure or sparse gradients, which other tests train with."""
NAMES = sorted({name for name, kind in vars(torch.optim).items() if isinstance(kind, type)} - OTHERS)


def optimizers(name, model):
    """The optimizer of a name; Muon takes matrices alone, and Adam the other parameters."""
    kind, parameters = getattr(torch.optim, name), list(model.parameters())
    if name != "Muon":
        return [kind(parameters, lr=0.01)]
    others = [p for p in parameters if p.ndim != 2]
    return [kind([p for p in parameters if p.ndim == 2], lr=0.01), torch.optim.Adam(others, lr=0.01)]


def train(model, optimizers, ranks):
    """Three steps on the mean of the losses of ranks."""
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank in ranks:
            (loss_of(model, step, rank) / len(ranks)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return weights(model)


@on_ranks(2)
def test_every_optimizer_trains_as_in_one_process():
    assert {"SGD", "AdamW", "Adafactor"} <= set(NAMES)
    for name in NAMES:
        model, alone = net(), net()
        ours = [grace.DistributedOptimizer(one, model.named_parameters()) for one in optimizers(name, model)]
        got = train(model, ours, [grace.rank()])
        wanted = train(alone, optimizers(name, alone), range(2))
        for key, value in wanted.items():
            assert torch.allclose(got[key], value, atol=2e-5), (name, key, (got[key] - value).abs().max())
        for one in ours:
            one.close()
