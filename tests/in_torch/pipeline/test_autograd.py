"""Backward passes that are not the derivative of forward's operations, and blocks under contexts of their own."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import grace
from grace.errors import ConfigError
from grace.pipeline.planning.blocks import blocks
from grace.pipeline.torch import node_costs
from grace.pipeline.torch.atomic_subcomponents import Atoms
from grace.pipeline.torch.autograd_functions import APPLY_IS_NATIVE
from grace.pipeline.torch.capture import capture
from tests.support.pipelines import run_stages, sgd, unmeasured
from tests.support.pools import on_ranks
from tests.support.training import refusal


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor=1.0):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


class Rounding(torch.autograd.Function):
    """Straight-through, in the newer form, of a Function that applies another."""

    @staticmethod
    def forward(x):
        with torch.no_grad():
            return torch.round(Reversal.apply(x))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0] > 0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class Parts(torch.autograd.Function):
    """Several tensors, of which one has no gradient, and an argument that is no tensor."""

    @staticmethod
    def forward(ctx, x, settings, bias):
        mask = x > 0
        ctx.mark_non_differentiable(mask)
        return x * settings["factor"], mask, x + bias

    @staticmethod
    def backward(ctx, first, _, last):
        return 3 * first + last, None, 2 * last.sum(0)


class Writing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x.mul_(2))
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class OfModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x):
        return module(x)

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


@torch.library.custom_op("grace_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: 5 * gradient)
reversal = Reversal.apply  # as programs keep it


class Net(nn.Module):
    """Three layers, and what ``part`` does of the first."""

    def __init__(self, part, change=lambda net: None):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.ones(8))
        self.part = part
        change(self)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.part(self, x)))))


def plain(net, x):
    return net.a(x)


def several(net, x):
    first, mask, last = Parts.apply(net.a(x), {"factor": 2.0}, net.b.bias)
    return first * mask + last


def rounded(net, x):
    h = net.a(x)
    return h + (torch.round(3 * h) - h).detach()


def teacher(net, x):
    with torch.no_grad():
        target = torch.tanh(net.a(x))
        with torch.enable_grad():
            inner = net.b(target)
        target = target + inner + Rounding.apply(net.a(x))
    return net.a(x) + target


def moving_mean(net, x):
    h = net.a(x)
    with torch.no_grad():
        net.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h * net.mean


def casts(net, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = net.a(x)
        with torch.autocast("cpu", enabled=False):
            return net.a(x) + h.float()


def again(reentrant):
    return lambda net, x: checkpoint(lambda h: torch.tanh(net.b(h)), net.a(x), use_reentrant=reentrant)


def hooked(net):
    net.b.register_forward_hook(lambda module, args, kwargs, output: 3 * output, with_kwargs=True)
    net.b.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    net.register_forward_hook(lambda module, args, output: output + 1)


def normed(norm):
    return lambda net: setattr(net, "a", norm(net.a))


def of_kept_apply(net, x):
    return reversal(net.a(x))


CARRIED = {
    "reversal": (lambda net, x: Reversal.apply(net.a(x), 0.3), None),
    "straight-through": (lambda net, x: Rounding.apply(3 * net.a(x)), None),
    "of a weight": (lambda net, x: F.linear(x, Rounding.apply(4 * net.a.weight) / 4), None),
    "several tensors": (several, None),
    "detached": (rounded, None),
    "a custom operation": (lambda net, x: torch.ops.grace_tests.twice(net.a(x)), None),
    "checkpoint": (again(False), None),
    "reentrant checkpoint": (again(True), None),
    "no_grad": (teacher, None),
    "moving mean": (moving_mean, None),
    "autocast": (casts, None),
    "forward hooks": (plain, hooked),
    "weight norm": (plain, normed(nn.utils.parametrizations.weight_norm)),
    "spectral norm": (plain, normed(nn.utils.parametrizations.spectral_norm)),
    "spectral norm by hooks": (plain, normed(nn.utils.spectral_norm)),
    "pruned": (plain, lambda net: prune.l1_unstructured(net.a, "weight", 0.5)),
}
if not APPLY_IS_NATIVE:
    CARRIED["a function that was kept"] = (of_kept_apply, None)


@pytest.mark.parametrize("name", CARRIED)
def test_stages_have_the_models_gradients(name):
    part, change = CARRIED[name]
    torch.manual_seed(0)
    model = Net(part, change or (lambda net: None))
    x = torch.randn(8, 8)
    torch.manual_seed(0)
    cut = Net(part, change or (lambda net: None))  # spectral_norm cannot be copied
    model(x).square().mean().backward()
    atoms = Atoms(capture(cut, (x,)))
    stages = [block.nodes for block in blocks(atoms.graph(8, node_costs.measure_costs(atoms, [x])), 99)]
    assert len(stages) >= 5  # the block's operations are not one node
    run_stages(atoms, stages, (x,)).square().mean().backward()
    for (key, p), q in zip(model.named_parameters(), cut.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), key
        assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-8), key
    for (key, one), other in zip(model.named_buffers(), cut.buffers(), strict=True):
        assert torch.equal(one, other), key


def doubled(gradient):
    return 2 * gradient


def on_a_tensor(net, x):
    h = net.a(x)
    h.register_hook(doubled)
    return h


def on_a_node(net, x):
    h = net.a(x)
    h.grad_fn.register_hook(print)
    return h


def packed(net, x):
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.half, torch.Tensor.float):
        return torch.tanh(net.a(x))


REFUSED = [
    (on_a_tensor, None, r"hook on a tensor at test_autograd.py:\d+ \(doubled, test_autograd.py:\d+\)"),
    (on_a_node, None, r"reads a tensor's grad_fn at test_autograd.py:\d+"),
    (packed, None, r"changes what autograd saves at test_autograd.py:\d+"),
    (lambda net, x: Writing.apply(net.a(x)), None, r"Writing, test_autograd.py:\d+, applied at .*: let it return"),
    (lambda net, x: OfModule.apply(net.b, x), None, "applied at .* to Linear, whose parameters a pipeline cannot know"),
    (
        lambda net, x: Parts.apply(net.a(x), {"factor": x.mean()}, net.a.bias)[0],
        None,
        r"Parts, test_autograd.py:\d+ is applied at .*:\d+ to a list or dict of tensors, which",
    ),
    (lambda net, x: torch.vmap(net.a)(x), None, r"calls torch.vmap or torch.func at test_autograd.py:\d+"),
    (lambda net, x: net.a(x).data, None, r"tensor.detach\(\) is taken"),
    (plain, lambda net: net.b.register_full_backward_hook(print), r"the module 'b' \(Linear\) has a backward hook"),
    (plain, lambda net: net.b.register_full_backward_pre_hook(doubled), r"has a backward hook \(doubled, test_auto"),
    (plain, lambda net: net.a.weight.register_hook(doubled), r"'a.weight' has a hook \(doubled, .*:\d+\).*clip_grad"),
    (plain, lambda net: net.a.bias.register_post_accumulate_grad_hook(doubled), "'a.bias' has a hook"),
]
if APPLY_IS_NATIVE:
    REFUSED.append((of_kept_apply, None, r"Reversal is applied at test_autograd.py:\d+ by a name that kept its"))


@pytest.mark.parametrize(("part", "change", "message"), REFUSED)
def test_what_cannot_be_carried_is_refused_by_name(part, change, message):
    net = Net(part)
    (change or copy.copy)(net)
    with pytest.raises(ConfigError, match=message):
        capture(net, (torch.ones(8, 8),))
    assert torch.ones(1, requires_grad=True).mul(2).grad_fn is not None  # all is as before
    assert Reversal.apply(torch.ones(1)).item() == 1.0


def test_an_older_torch_is_refused(monkeypatch):
    monkeypatch.setattr("grace.pipeline.torch.capture.OLDEST_TORCH", "99.0")
    with pytest.raises(ConfigError, match=r"a pipeline needs torch 99\.0 or newer, and this is "):
        capture(Net(plain), (torch.ones(8, 8),))


@on_ranks()
def test_a_hook_on_one_rank_is_refused_on_all():
    """One rank alone watches a parameter; a model that nobody watches has its gradients."""
    net = Net(several)
    if grace.rank() == 1:
        net.a.weight.register_hook(doubled)
    settings = {"optimizer": sgd, "stages": 2, "microbatches": 2}
    torch.manual_seed(3)
    x, y = torch.randn(8, 8), torch.zeros(8, 4)
    kind = grace.ConfigError if grace.rank() else grace.RankError
    said = refusal(unmeasured, net, x, F.mse_loss, kind=kind, **settings)
    words = "the parameter 'a.weight' has a hook (doubled, "
    assert said.startswith(words if grace.rank() else f"rank 1 refused to start: {words}")
    torch.manual_seed(0)
    engine = unmeasured(Net(several), x, F.mse_loss, **settings)
    engine(x, y).backward()
    engine.exchange()
    torch.manual_seed(0)
    alone = Net(several)
    for i in (0, 4):
        (F.mse_loss(alone(x[i : i + 4]), y[i : i + 4]) / 2).backward()
    for name, p in alone.named_parameters():
        assert torch.allclose(engine.gradient(name), p.grad, atol=1e-6), name
