"""Facts kept from step to step are computed again when their sources have changed."""

import pytest
import torch

import grace
from grace.exchange.header import digest
from grace.torch.parameters import hyperparameters

pytestmark = pytest.mark.usefixtures("local")


def distributed(compressor="none", optimizer=torch.optim.SGD, **settings):
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 3)
    settings = {"lr": 0.1, **settings}
    return model, grace.DistributedOptimizer(optimizer(model.parameters(), **settings), model, compressor)


def step(model, optimizer, factor=1.0):
    optimizer.zero_grad()
    (model(torch.ones(2, 40)).square().sum() * factor).backward()
    optimizer.step()


def in_place(groups):
    groups[0]["lr"].fill_(0.01)


def within(groups):
    groups[0]["betas"] = [0.9, 0.9]
    groups[0]["betas"][1] = 0.99


@pytest.mark.parametrize(
    ("optimizer", "settings", "change"),
    [
        (torch.optim.SGD, {}, lambda groups: groups[0].update(lr=0.01)),
        (torch.optim.SGD, {"lr": torch.tensor(0.1)}, in_place),
        (torch.optim.Adam, {}, within),
        (torch.optim.Adam, {}, lambda groups: groups[0].update(betas=(0.8, 0.9))),
        (torch.optim.SGD, {}, lambda groups: groups[0].update(named=3)),
    ],
)
def test_the_next_exchange_tells_of_changed_hyperparameters(optimizer, settings, change):
    model, distributed_one = distributed("none", optimizer, **settings)
    session = distributed_one._grace
    before = session.digest
    for _ in range(2):
        step(model, distributed_one)
    assert session.context.hyperparameter_digest == before == digest(hyperparameters(distributed_one))
    change(distributed_one.param_groups)
    step(model, distributed_one)
    assert session.context.hyperparameter_digest == digest(hyperparameters(distributed_one)) != before


def test_a_rank_goes_on_from_its_own_hyperparameters_after_it_took_anothers():
    model, optimizer = distributed()
    step(model, optimizer)
    context = optimizer._grace.context
    own, context.hyperparameter_digest = context.hyperparameter_digest, 7
    step(model, optimizer)
    assert context.hyperparameter_digest == own != 7


def test_payloads_are_counted_whenever_one_asks():
    model, optimizer = distributed("topk(ratio=0.1)")
    asked = []
    for _ in range(70):
        step(model, optimizer)
        asked.append(dict(optimizer.traffic.payload_bytes))
    assert asked == [{name: n * count for name, n in asked[0].items()} for count in range(1, 71)]
    assert set(asked[0]) == {"weight", "bias"}
    assert min(asked[0].values()) > 0

    model, other = distributed("topk(ratio=0.1)")
    for _ in range(70):
        step(model, other)
    assert other.traffic.payload_bytes == asked[-1]


def test_residuals_are_right_after_a_step_that_was_dropped():
    """The two buffers that take turns do so per variable, whatever became of the step before."""
    results = []
    for fused in (True, False):
        model, optimizer = distributed("topk(ratio=0.1)")
        for number, factor in enumerate((1.0, 1.0, float("inf"), 1.0, 2.0, float("nan"), 1.0)):
            before = [p.detach().clone() for p in model.parameters()]
            if not fused:
                for bucket in optimizer._grace.runner.buckets:
                    bucket.fuses = False
            step(model, optimizer, factor)
            if factor not in (1.0, 2.0):
                with torch.no_grad():
                    for p, kept in zip(model.parameters(), before, strict=True):
                        p.copy_(kept)
            assert optimizer._grace.context.step == number + 1
        results.append([p.detach().clone() for p in model.parameters()] + list(residuals(optimizer)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert any(r.abs().sum() > 0 for r in results[0][2:])


def residuals(optimizer):
    (memory,) = [c.memory for c in optimizer._grace.runner.communicators if c.memory.stateful]
    return [memory.state[name] for name in sorted(memory.state)]


class Later(grace.Memory):
    """Gets a dict only when it needs one."""

    name = "later"

    def compensate(self, tensor, name):
        if not hasattr(self, "residuals"):
            self.residuals = {}
        return tensor + self.residuals.get(name, 0)

    def update(self, tensor, name, compressor, payload, ctx):
        self.residuals[name] = tensor - compressor.decompress(payload, ctx)


def test_a_part_that_a_users_memory_gets_later_is_found():
    memory = Later()
    model = torch.nn.Linear(40, 3)
    optimizer = grace.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, "topk(ratio=0.1)", memory
    )
    runner = optimizer._grace.runner
    before = runner.step_components()
    for _ in range(2):
        step(model, optimizer)
    assert set(memory.residuals.state.committed) == {"weight", "bias"}
    assert memory.residuals not in before
    assert any(part is memory.residuals for part in runner.step_components())
