"""Steps of optimizers on a GPU have the bits of those on a CPU, and its kernels are Triton's."""

import pytest
import torch

import grace
from grace.kernels import kernels_of

pytestmark = pytest.mark.device
METHODS = [
    "none",
    "fp16",
    "qsgd",
    "qsgd(levels=7)",
    "natural",
    "signsgd",
    "efsignsgd",
    "topk(ratio=0.1)",
    "randomk(ratio=0.1)",
]
SHAPES = {"matrix": (20, 30), "vector": (203,), "tiny": (1,)}


class Given(torch.nn.Module):
    """Parameters whose gradients are what a test says."""

    def __init__(self, device):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, device=device)))

    def backward(self, number, bad=0.0):
        """Gradients that are the same on every device; ``bad`` is added to the matrix's first row."""
        generator = torch.Generator().manual_seed(number)
        for p in self.parameters():
            given = torch.randn(p.shape, generator=generator)
            given[:1] += bad if p is self.matrix else 0.0
            (p * given.to(p.device)).sum().backward()


def trained(method, device, optimizer=torch.optim.SGD):
    """The parameters after four steps."""
    model = Given(device)
    made = grace.DistributedOptimizer(optimizer(model.parameters(), lr=0.125), model, method)
    for number in range(4):
        made.zero_grad()
        model.backward(number)
        made.step()
    made.close()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


@pytest.fixture
def local():
    """One process, which exchanges with nobody."""
    grace.init("local")
    yield
    grace.shutdown()


def test_tensors_of_a_gpu_meet_tritons_kernels(device):
    assert kernels_of(torch.zeros(3, device=device)).name == "torch-triton"


@pytest.mark.parametrize("method", METHODS)
def test_steps_have_the_bits_of_a_cpu(local, device, method, monkeypatch):
    found = trained(method, device)
    monkeypatch.undo()  # in the interpreter the CPU's own kernels, from here on
    wanted = trained(method, "cpu")
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
        assert value.any()


def test_powersgd_agrees_with_a_cpu(local, device, monkeypatch):
    found = trained("powersgd(rank=2)", device)
    monkeypatch.undo()
    wanted = trained("powersgd(rank=2)", "cpu")
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=1e-3, rtol=1e-3)


def test_gradients_that_are_no_numbers_leave_memories_as_they_were(local, device):
    model = Given(device)
    made = grace.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.125), model, "topk")
    for number in range(4):
        made.zero_grad()
        before = made._grace.runner.state()["memory"]
        model.backward(number, bad=float("nan") if number == 2 else 0.0)
        made.synchronize()
        assert bool(model.matrix.grad.isnan().any()) == (number == 2)
        if number == 2:
            model.zero_grad()
        made.step()  # which keeps what the exchange left
        after = made._grace.runner.state()["memory"]
        kept = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        assert kept == (number == 2)
    made.close()
