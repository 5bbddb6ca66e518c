"""Memory that a plan says, beside the bytes of tensors that are alive while it is run."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import grace
from grace.pipeline.torch import node_costs
from grace.pipeline.torch.atomic_subcomponents import Atoms
from grace.pipeline.torch.capture import capture
from grace.pipeline.torch.node_costs import build_graph
from tests.support.live import LiveBytes
from tests.support.pools import on_ranks

pytestmark = pytest.mark.ranks


class Table(nn.Module):
    """Mostly a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(5000, 100))
        self.one, self.two = nn.Linear(100, 256), nn.Linear(256, 10)

    def forward(self, x):
        return self.two(torch.tanh(self.one(self.table[x])))


class Product(nn.Module):
    """A weight that is computed, and kept whatever the rows."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(300))
        self.u, self.v = nn.Parameter(torch.randn(300, 2)), nn.Parameter(torch.randn(2, 300))
        self.head = nn.Linear(300, 10)

    def forward(self, x):
        return self.head(torch.tanh((x * self.scale) @ (self.u @ self.v)))


def frozen():
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(*layers).requires_grad_(False).append(nn.Linear(256, 10))


def layers():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())], nn.Linear(256, 10))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


MODELS = {
    "a buffer": (Table, lambda: torch.randint(5000, (64,))),
    "a product": (Product, lambda: torch.randn(64, 300)),
    "a frozen backbone": (frozen, lambda: torch.randn(64, 256)),
    "layers": (layers, lambda: torch.randn(64, 256)),
    "convolutions": (convolutions, lambda: torch.randn(64, 3, 32, 32)),
}


def planned_and_alive(name, schedule, **settings):
    """Bytes on this rank: what the plan says, the most in a step, and those between steps."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model, x, y = make(), inputs(), torch.randint(10, (64,))
    torch.nn.init.ones_(next(model.parameters()))
    engine = grace.torch.Pipeline(
        model,
        x,
        F.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        inputs="global",
        schedule=schedule,
        microbatches=4,
        **settings,
    )
    engine.step(x, y)
    engine.zero_grad()
    states = [one for of in engine.optimizer.state.values() for one in of.values() if isinstance(one, torch.Tensor)]
    first = engine.stage == 0
    there = [*engine.parameters.values(), *engine.buffers.values(), *states, *([x] if first else [])]
    with LiveBytes(there, [y] if first else [x, y]) as live:
        engine.step(x, y)
    return engine.plan.memory[grace.rank()], live.peak, live.now


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_plan_says_what_is_alive(local, name, schedule):
    says, peak, _ = planned_and_alive(name, schedule)
    assert says == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize(("name", "cut"), [("layers", "tanh_1"), ("convolutions", "relu")])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@on_ranks()
def test_a_plan_says_what_is_alive_on_each_of_two_stages(name, cut, schedule):
    says, peak, between = planned_and_alive(name, schedule, cuts=[cut])
    assert says == pytest.approx(peak, rel=0.1)
    assert between < says


def test_what_does_not_train_is_held_once_and_what_has_no_rows_does_not_shrink():
    graph = build_graph(nn.Sequential(frozen(), nn.Linear(10, 10)), torch.randn(64, 256), dry=True)
    layer = 4.0 * (256 * 256 + 256)
    assert graph.nodes[0].held == {"0.0.weight": 4.0 * 256 * 256, "0.0.bias": 4.0 * 256}
    assert sum(graph.held.values()) == 4 * layer
    assert sum(graph.parameters.values()) == 4.0 * (256 * 10 + 10 + 100 + 10)
    product = build_graph(Product(), torch.randn(64, 300), dry=True)
    assert sum(node.kept_fixed for node in product.nodes) == 4.0 * 300 * 300
    assert sum(node.kept for node in product.nodes) == 4.0 * (300 * 300 + 64 * (300 + 300 + 10))


def test_one_replica_keeps_no_wire_of_its_gradients(local):
    _, _, between = planned_and_alive("layers", "gpipe")
    parameters = sum(p.nbytes for p in layers().parameters())
    assert between < 4.1 * parameters + 64 * 256 * 4  # with gradients, Adam's two and the batch


def test_what_is_kept_is_told_of_where_it_is_made():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.ReLU()), torch.ones(16, 64)
    kept = node_costs.kept_bytes(Atoms(capture(model, (x,))))
    assert kept == {"linear": 4096.0, "linear_1": 0.0, "relu": 4096.0}  # the second layer keeps the first one's value
