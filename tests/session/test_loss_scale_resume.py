"""A checkpoint's loss scale never reaches the weights, whatever scaler the resumed run has, or none."""

import pytest
import torch

import grace
from grace.session import state_schema
from tests.support.pools import on_ranks
from tests.support.training import Given, copied, ddp, digest, made_up, weights

SHAPES = {"matrix": (20, 30), "vector": (200,)}
STOP, END = 3, 6
METHODS = (
    ("signsgd", None, {}),
    ("efsignsgd", "residual", {}),
    ("topk(ratio=0.1)", None, {}),
    ("signum", None, {}),
    ("dgc(ratio=0.1)", "dgc(clip=0.5)", {}),
    ("threshold(value=0.5)", None, {}),
    ("topk(ratio=0.1)", None, {"communicator": "reduce_broadcast"}),
    ("topk(ratio=0.1)", None, {"communicator": "reduce_broadcast(staleness=2)"}),
    ("qsgd", "residual", {"communicator": "scatter_reduce"}),
)
CHANGES = ((2.0**16, 1.0), (1.0, 2.0**16), (2.0**16, 2.0**10), (2.0**16, "disabled"))


class Run:
    """Plain SGD on gradients that a test makes up, scaled by what stands in ``scale`` (1: no scaler)."""

    def __init__(self, scale, compressor, memory, options):
        self.model, self.scale = Given(SHAPES), 1.0 if scale == "disabled" else scale
        self.scaler = None
        if scale != 1.0:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=self.scale, enabled=scale != "disabled")
            self.scaler.scale(torch.zeros(()))  # a scaler knows its scale from its first use on
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.25)
        self.optimizer = grace.DistributedOptimizer(
            sgd, self.model.named_parameters(), compressor, memory, grad_scaler=self.scaler, **options
        )

    def train(self, steps):
        for step in steps:
            self.optimizer.zero_grad()
            self.model.backward({n: g * self.scale for n, g in made_up(SHAPES, step, grace.rank()).items()})
            self.optimizer.synchronize()
            for p in self.model.parameters():
                if p.grad is not None:  # nothing comes in the first steps of a delayed exchange
                    p.grad /= self.scale
            self.optimizer.step()


def resumed(before, after, method, everyone):
    """Weights and memories of a run whose scale changed when it was resumed."""
    first, second = Run(before, *method), Run(after, *method)
    first.train(range(STOP))
    saved = first.optimizer.full_state_dict() if everyone else first.optimizer.state_dict()
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copied(saved))
    scale = second.optimizer._grace.context.loss_scale
    assert scale == (before if second.optimizer._grace.runner.callbacks.follows_scaler() else 1.0)
    second.train(range(STOP, END))
    return weights(second.model), digest(weights(second.model))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: " ".join(map(str, method)))
@on_ranks(2)
def test_a_resumed_runs_weights_know_nothing_of_the_scale_that_was(method):
    """Every change of the scale ends in the weights of a run without one."""
    plain = Run(1.0, *method)
    plain.train(range(END))
    wanted = digest(weights(plain.model))
    assert [
        (before, after)
        for i, (before, after) in enumerate(CHANGES)
        if resumed(before, after, method, everyone=bool(i % 2))[1] != wanted
    ] == []


@on_ranks(2)
def test_means_that_are_owed_follow_the_scale():
    """Runs that owe means and delay nothing any more end alike, over all changes of the scale."""
    ends = set()
    for before, after in ((1.0, 1.0), *CHANGES):
        first = Run(before, "topk(ratio=0.1)", None, {"communicator": "reduce_broadcast(staleness=2)"})
        second = Run(after, "topk(ratio=0.1)", None, {"communicator": "reduce_broadcast"})
        first.train(range(STOP))
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(copied(first.optimizer.full_state_dict()))
        assert second.optimizer._grace.runner.carried_over
        second.train(range(STOP, END))
        ends.add(digest(weights(second.model)))
    assert len(ends) == 1


@on_ranks(2)
def test_signs_stay_signs_under_ddp_too():
    """The hook loads what a run with a loss scale remembers."""
    first = Run(2.0**16, "signsgd", None, {})
    first.train(range(1))
    model = ddp(torch.nn.Linear(8, 8))
    hook = grace.torch.register_ddp_hook(model, "signsgd")
    scale = first.optimizer.state_dict()["grace"]["loss_scale"]
    saved = state_schema.seal({**hook.state_dict(), "loss_scale": scale})
    hook.load_state_dict(saved)
    model(torch.ones(1, 8)).sum().backward()
    assert sorted({value for p in model.parameters() for value in p.grad.abs().flatten().tolist()}) == [1.0]
