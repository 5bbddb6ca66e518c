"""Parameters of all kinds: groups, unused, shared, sparse, of any dtype and layout."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import grace
from grace.torch.initial_sync import empty_tensors, tensor_facts
from tests.support.pairwise import pairwise
from tests.support.pools import on_ranks
from tests.support.training import (
    METHODS,
    Given,
    copied,
    digest,
    distributed,
    gradients,
    loss_of,
    made_up,
    net,
    refusal,
    same,
    sgd,
    state_of,
    weights,
)


@pytest.mark.parametrize("compressor", ["none", "topk(ratio=0.1)", "efsignsgd"])
@on_ranks(2)
def test_parameter_groups_and_frozen_parameters(compressor):
    """Two parameter groups of the optimizer with their own learning rates; the convolution frozen."""
    model, reference = net(), net()
    optimizers = []
    for m in (model, reference):
        m.conv.requires_grad_(False)
        groups = [
            {"params": m.hidden.parameters(), "lr": 0.01},
            {"params": [*m.head.parameters(), m.scale, *m.conv.parameters()]},
        ]
        optimizers.append(torch.optim.SGD(groups, lr=0.1))
    optimizer = grace.DistributedOptimizer(optimizers[0], model.named_parameters(), compressor)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        optimizers[1].zero_grad()
        for name, p in reference.named_parameters():
            p.grad = None if model.get_parameter(name).grad is None else model.get_parameter(name).grad.clone()
        optimizers[1].step()
    assert model.conv.weight.grad is None
    assert "conv.weight" not in optimizer.traffic.payload_bytes
    assert same(weights(model), weights(reference))
    return digest(weights(model))


@on_ranks(2)
def test_entries_of_a_group_may_have_numbers_for_names():
    """A schedule's milestones, and a group's own entry; both are compared, saved and loaded."""
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd.param_groups[0].update({"milestones": {30: 0.1, 7: 0.01}, 5: 0.5})
    optimizer = grace.DistributedOptimizer(sgd, model.named_parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.load_state_dict(copied(optimizer.state_dict()))
    assert optimizer.param_groups[0]["milestones"] == {30: 0.1, 7: 0.01}
    assert {("5", 0.5), ("milestones.30", 0.1), ("milestones.7", 0.01)} <= set(optimizer._grace.hyperparameters[0])


@on_ranks(2)
def test_what_an_optimizer_keeps_of_parameters_in_a_group_is_no_hyperparameter():
    """GrokAdamW keeps its state there, by parameter; with outer rounds it differs by rank."""
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd.param_groups[0]["state"] = {p: {"norm": float(grace.rank())} for p in model.parameters()}
    optimizer = grace.DistributedOptimizer(sgd, model.named_parameters(), outer="none", period=1)
    loss_of(model, grace.rank()).backward()
    optimizer.step()
    assert not [name for name, _ in optimizer._grace.hyperparameters[0] if name.startswith("state")]
    return digest(weights(model))


@pytest.mark.parametrize(("size", "compressor", "group_bytes"), pairwise([2, 3], METHODS, [25 << 20, 1]))
@on_ranks()
def test_unused_parameters(size, compressor, group_bytes):
    """``matrix`` is used on rank 0 only, ``idle`` nowhere; the aggregate counts the others' gradient as zero."""
    shapes = {"matrix": (12, 20), "vector": (300,), "idle": (40, 10)}
    model = Given(shapes)
    optimizer = distributed(model, compressor, group_bytes=group_bytes)
    for step in range(3):
        given = made_up(shapes, step, grace.rank())
        optimizer.zero_grad()
        model.backward({name: given[name] for name in (("vector",) if grace.rank() else ("matrix", "vector"))})
        optimizer.step()
        assert model.idle.grad is None
        assert not any("idle" in state for state in state_of(optimizer).values())
        if compressor == "none":
            expected = torch.from_numpy(made_up(shapes, step, 0)["matrix"]) / size
            torch.testing.assert_close(model.matrix.grad, expected)
    assert model.matrix.grad.any()
    assert not model.idle.any()
    return digest(weights(model)), digest(gradients(model))


@pytest.mark.parametrize("paused", [False, True], ids=["plain", "no_sync"])
@on_ranks(2)
def test_two_optimizers_in_one_loop(paused):
    """Two optimizers; the generator's backward passes through the discriminator."""
    torch.manual_seed(0)
    g, d = torch.nn.Linear(4, 6), torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    g_opt = distributed(g, "topk(ratio=0.2)")
    d_opt = distributed(d, "topk(ratio=0.2)", backward_passes_per_step=2)
    noise = torch.Generator().manual_seed(grace.rank())
    for _ in range(4):
        real, fake = torch.randn(8, 6, generator=noise), g(torch.randn(8, 4, generator=noise))
        d_opt.zero_grad()
        torch.nn.functional.softplus(-d(real)).mean().backward()
        torch.nn.functional.softplus(d(fake.detach())).mean().backward()
        d_opt.step()
        g_opt.zero_grad()
        with d_opt.no_sync() if paused else contextlib.nullcontext():
            torch.nn.functional.softplus(-d(fake)).mean().backward()
        g_opt.step()
    first = digest([weights(g), weights(d)]), g_opt.traffic.steps
    assert first[1] == 4
    return first


def odd_parameters(compressor, dtype):
    """0-d, empty, channels_last and transposed parameters of any dtype."""
    model = torch.nn.Module()
    torch.manual_seed(0)
    model.conv = torch.nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
    model.scalar = torch.nn.Parameter(torch.tensor(0.5))
    model.empty = torch.nn.Parameter(torch.empty(0, 3))
    model.crossed = torch.nn.Parameter(torch.randn(30, 20).t())
    model.to(dtype)
    assert not model.conv.weight.is_contiguous()
    assert not model.crossed.is_contiguous()
    optimizer = distributed(model, compressor)
    generator = torch.Generator().manual_seed(grace.rank())
    for step in range(3):
        optimizer.zero_grad()
        terms = [(p * torch.randn(p.shape, generator=generator).to(dtype)).sum() for p in model.parameters()]
        sum(terms[1:], start=terms[0]).backward()
        local = gradients(model)
        optimizer.step()
        if compressor == "none":
            for name, gradient in local.items():
                total = gradient.contiguous()
                if total.numel():
                    dist.all_reduce(total)
                torch.testing.assert_close(model.get_parameter(name).grad, total / grace.size(), msg=f"{name}, {step}")
    for name, p in model.named_parameters():
        assert p.grad.dtype == dtype
        assert p.grad.shape == p.shape
        assert torch.isfinite(p).all()
        assert name == "empty" or p.grad.any()
    return digest(weights(model))


@pytest.mark.every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@on_ranks(2)
def test_parameters_of_any_dtype_shape_and_memory_layout(dtype):
    return {method: odd_parameters(method, dtype) for method in METHODS}


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        return self.head(self.embedding(words))


@pytest.mark.parametrize("compressor", ["none", "topk(ratio=0.1)"])
@on_ranks()
def test_shared_weights_are_exchanged_once(compressor):
    """All names of a shared weight are given, or one."""
    ends = []
    for all_names in (False, True):
        model = net(make=Tied)
        optimizer = grace.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(remove_duplicate=not all_names), compressor
        )
        words = torch.arange(4) + 4 * grace.rank()
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(words), words).backward()
            optimizer.step()
        assert list(optimizer.traffic.payload_bytes) == ["embedding.weight"]
        ends.append(digest(weights(model)))
    assert ends[0] == ends[1]
    return ends


@pytest.mark.parametrize("as_dense", [False, True])
@on_ranks()
def test_sparse_gradients_are_refused_by_name_or_made_dense(as_dense):
    model = torch.nn.Embedding(10, 4, sparse=True)
    torch.nn.init.ones_(model.weight)
    optimizer = grace.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), "none", sparse_as_dense=as_dense
    )

    def exchange():
        model(torch.tensor([grace.rank(), 9])).sum().backward()
        optimizer.step()

    if as_dense:
        exchange()
        assert model.weight[:, 0].tolist() == [0.5, 0.5, *[1.0] * 7, 0.0]
    else:
        said = refusal(exchange)
        assert "the gradient of 'weight' is sparse" in said
        assert "sparse_as_dense=True" in said


def test_state_of_the_root_comes_to_the_gpu_of_this_rank():
    """Fake tensors have devices that this machine need not have."""
    with FakeTensorMode():
        root, mine = (torch.nn.Parameter(torch.zeros(2, 3, device=device)) for device in ("cuda:0", "cuda:1"))
        facts = tensor_facts([root, torch.zeros((), dtype=torch.float64)])
        received = empty_tensors(facts, torch.optim.SGD([mine], lr=0.1))
    found = [(str(t.device), tuple(t.shape), t.dtype) for t in received]
    assert found == [("cuda:1", (2, 3), torch.float32), ("cpu", (), torch.float64)]
