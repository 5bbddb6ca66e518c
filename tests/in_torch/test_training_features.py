"""The distributed optimizer in all the ways that people write training loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

import grace
from grace.torch import Allgather, Communicator, Compressor, Memory, Traits
from tests.support.pairwise import pairwise
from tests.support.training import (
    METHODS,
    Given,
    digest,
    distributed,
    gradients,
    loss_of,
    made_up,
    net,
    same,
    sgd,
    state_of,
    train,
    weights,
)

pytestmark = pytest.mark.ranks


def mean_over_ranks(step, model):
    """The mean gradient, from all ranks' losses worked out here."""
    sum(loss_of(model, step, rank) for rank in range(grace.size())).div(grace.size()).backward()


# -- gradient accumulation ---------------------------------------------------------------------------------------


def accumulated(compressor, how):
    model = net()
    passes = 2 if how == "passes" else 1
    optimizer = distributed(model, compressor, backward_passes_per_step=passes)
    for step in (0, 2, 4):
        optimizer.zero_grad()
        if how == "one backward":
            (loss_of(model, step) + loss_of(model, step + 1)).backward()
        elif how == "passes":
            loss_of(model, step).backward()
            loss_of(model, step + 1).backward()
        else:
            with optimizer.no_sync():
                loss_of(model, step).backward()
            loss_of(model, step + 1).backward()
        optimizer.step()
    assert optimizer.traffic.steps == 3
    return weights(model)


@pytest.mark.parametrize("compressor", METHODS)
def test_two_passes_per_step_and_no_sync_are_the_same_bit_for_bit(two_ranks, compressor):
    by_passes = two_ranks.run(accumulated, compressor, "passes")
    by_no_sync = two_ranks.run(accumulated, compressor, "no_sync")
    assert len({digest(answer) for answer in by_passes + by_no_sync}) == 1


@pytest.mark.parametrize("how", ["passes", "no_sync"])
def test_accumulation_adds_gradients_up(ranks, how):
    expected = ranks.run(accumulated, "none", "one backward")[0]
    for answer in ranks.run(accumulated, "none", how):
        for name, value in expected.items():
            torch.testing.assert_close(answer[name], value, rtol=1e-4, atol=1e-6, msg=name)


def step_before_all_passes():
    model, reference = net(), net()
    optimizer = distributed(model, "none", backward_passes_per_step=3)
    loss_of(model, 0).backward()
    optimizer.step()
    mean_over_ranks(0, reference)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_a_step_after_fewer_passes_exchanges_what_there_is(two_ranks):
    two_ranks.run(step_before_all_passes)


def backward_twice():
    model = net()
    optimizer = distributed(model, "none")
    loss_of(model, 0).backward()
    with pytest.raises(grace.ExchangeError) as caught:
        loss_of(model, 1).backward()
    optimizer.zero_grad()
    train(model, optimizer, range(2))
    return str(caught.value), digest(weights(model))


def test_a_second_backward_before_the_step_is_refused_with_what_to_write(two_ranks):
    (first, one), (second, two) = two_ranks.run(backward_twice)
    assert one == two
    for message in (first, second):
        assert "was computed 2 times before step()" in message
        assert "backward_passes_per_step=2" in message
        assert "optimizer.no_sync()" in message


# -- clipping, closures, schedules, zero_grad ----------------------------------------------------------------------


def clipped(compressor):
    """Clipping between synchronize() and step() clips the mean."""
    model, reference = net(), net()
    optimizer, plain = distributed(model, compressor), sgd(reference.parameters())
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.synchronize()
        means = gradients(model)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        for name, p in reference.named_parameters():
            p.grad = means[name]
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        plain.step()
    assert min(norms) > 0.1
    assert optimizer.traffic.steps == 4
    return same(weights(model), weights(reference)), digest(weights(model))


@pytest.mark.parametrize("compressor", ["none", "qsgd", "topk(ratio=0.1)", "powersgd(rank=2)"])
def test_gradients_clipped_after_synchronize_are_what_step_uses(two_ranks, compressor):
    first, second = two_ranks.run(clipped, compressor)
    assert first == second
    assert first[0]


def clipped_too_early(how):
    model = net()
    optimizer = distributed(model, "none")
    loss_of(model, 0).backward()
    if how == "norm":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    elif how == "value":
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    else:
        model.conv.weight.grad = model.conv.weight.grad * 0.5
    with pytest.raises(grace.ExchangeError) as caught:
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, range(2))
    return str(caught.value), digest(weights(model))


@pytest.mark.parametrize("how", ["norm", "value", "assignment"])
def test_gradients_changed_before_synchronize_are_refused(two_ranks, how):
    (first, one), (second, two) = two_ranks.run(clipped_too_early, how)
    assert one == two
    for message in (first, second):
        assert "was changed after its exchange began" in message
        assert "Call optimizer.synchronize() after backward" in message


def skipping(wrong):
    model = net()
    optimizer = distributed(model, "none")
    loss_of(model, 0).backward()
    if wrong:
        with pytest.raises(grace.ExchangeError), optimizer.skip_synchronize():
            pass
    optimizer.synchronize()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert optimizer.traffic.steps == 1
    return digest(weights(model))


def test_horovods_skip_synchronize_is_understood(two_ranks):
    assert len(set(two_ranks.run(skipping, True) + two_ranks.run(skipping, False))) == 1


def scheduled(when, lrs):
    model = net()
    plain = sgd(model.parameters())
    schedule = None
    if when == "before":
        schedule = torch.optim.lr_scheduler.StepLR(plain, 2, 0.1)
    optimizer = grace.DistributedOptimizer(plain, model.named_parameters(), "efsignsgd")
    if when == "after":
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    for step in range(6):
        if schedule is None:
            optimizer.param_groups[0]["lr"] = lrs[step]
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if schedule is not None:
            assert optimizer.param_groups[0]["lr"] == pytest.approx(lrs[step])
            schedule.step()
    assert optimizer.traffic.steps == 6
    return weights(model)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.filterwarnings("error")
def test_a_schedule_made_before_or_after_wrapping_is_followed(two_ranks, when):
    lrs = [0.05, 0.05, 0.005, 0.005, 0.0005, 0.0005]
    by_hand = two_ranks.run(scheduled, None, lrs)
    scheduled_ones = two_ranks.run(scheduled, when, lrs)
    for answer in scheduled_ones:
        for name, value in by_hand[0].items():
            torch.testing.assert_close(answer[name], value, rtol=1e-5, atol=1e-7, msg=name)
    assert digest(scheduled_ones[0]) == digest(scheduled_ones[1])


def with_closure(how, make):
    model = net()
    optimizer = distributed(model, "topk(ratio=0.1)", optimizer=make)
    losses = []
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        if how == "keyword":
            losses.append(optimizer.step(closure=closure).item())
        elif how == "position":
            losses.append(optimizer.step(closure).item())
        else:
            losses.append(closure().item())
            optimizer.step()
    return np.array(losses), digest(weights(model))


@pytest.mark.parametrize("how", ["keyword", "position"])
def test_step_with_a_closure_is_the_same_step_and_gives_the_mean_loss(two_ranks, how):
    own = two_ranks.run(with_closure, "none", sgd)
    for losses, bits in two_ranks.run(with_closure, how, sgd):
        assert bits == own[0][1]
        np.testing.assert_allclose(losses, (own[0][0] + own[1][0]) / 2, rtol=1e-6)


def zeroed(set_to_none, drop):
    """Optionally a backward whose gradients are dropped before the step, in every second step."""
    model = net()
    optimizer = distributed(model, "topk(ratio=0.1)", group_bytes=2000)
    for step in range(6):
        optimizer.zero_grad(set_to_none=set_to_none)
        if drop and step % 2:
            before = digest(state_of(optimizer))
            loss_of(model, 100 + step).backward()
            optimizer.zero_grad(set_to_none=set_to_none)
            assert digest(state_of(optimizer)) == before
            assert all(p.grad is None if set_to_none else not p.grad.any() for p in model.parameters())
        loss_of(model, step).backward()
        optimizer.step()
    return digest(weights(model))


def test_zero_grad_both_ways_and_after_a_backward_without_step(two_ranks):
    answers = two_ranks.run(zeroed, True, False) + two_ranks.run(zeroed, False, False)
    dropping = two_ranks.run(zeroed, True, True) + two_ranks.run(zeroed, False, True)
    assert len(set(answers + dropping)) == 1


def steps_without_backward():
    model = net()
    optimizer = distributed(model, "topk")
    optimizer.step()
    before = digest(weights(model))
    optimizer.zero_grad()
    optimizer.step()
    assert digest(weights(model)) == before
    assert all(p.grad is None for p in model.parameters())
    train(model, optimizer, range(2))
    return digest(weights(model))


def test_a_step_without_backward_changes_nothing(two_ranks):
    assert len(set(two_ranks.run(steps_without_backward))) == 1


# -- parameters -----------------------------------------------------------------------------------------------------


def with_groups(compressor):
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


@pytest.mark.parametrize("compressor", ["none", "topk(ratio=0.1)", "efsignsgd"])
def test_parameter_groups_and_frozen_parameters(two_ranks, compressor):
    assert len(set(two_ranks.run(with_groups, compressor))) == 1


def unused(compressor, group_bytes):
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
            expected = torch.from_numpy(made_up(shapes, step, 0)["matrix"]) / grace.size()
            torch.testing.assert_close(model.matrix.grad, expected)
    assert model.matrix.grad.any()
    assert not model.idle.any()
    return digest(weights(model)), digest(gradients(model))


@pytest.mark.parametrize(
    ("ranks", "compressor", "group_bytes"), pairwise([2, 3], METHODS, [25 << 20, 1]), indirect=["ranks"]
)
def test_unused_parameters(ranks, compressor, group_bytes):
    assert len(set(ranks.run(unused, compressor, group_bytes))) == 1


def gan(how):
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
        if how == "no_sync":
            with d_opt.no_sync():
                torch.nn.functional.softplus(-d(fake)).mean().backward()
        else:
            torch.nn.functional.softplus(-d(fake)).mean().backward()
        g_opt.step()
    return digest([weights(g), weights(d)]), g_opt.traffic.steps


@pytest.mark.parametrize("how", ["plain", "no_sync"])
def test_two_optimizers_in_one_loop(two_ranks, how):
    first, second = two_ranks.run(gan, how)
    assert first == second
    assert first[1] == 4


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("compressor", METHODS)
def test_parameters_of_any_dtype_shape_and_memory_layout(two_ranks, compressor, dtype):
    assert len(set(two_ranks.run(odd_parameters, compressor, dtype))) == 1


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        return self.head(self.embedding(words))


def tied(compressor, all_names):
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
    return digest(weights(model))


@pytest.mark.parametrize("compressor", ["none", "topk(ratio=0.1)"])
def test_shared_weights_are_exchanged_once(two_ranks, compressor):
    assert len(set(two_ranks.run(tied, compressor, False) + two_ranks.run(tied, compressor, True))) == 1


def sparse(as_dense):
    model = torch.nn.Embedding(10, 4, sparse=True)
    torch.nn.init.ones_(model.weight)
    optimizer = grace.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), "none", sparse_as_dense=as_dense
    )
    try:
        model(torch.tensor([grace.rank(), 9])).sum().backward()
        optimizer.step()
    except grace.ConfigError as error:
        return str(error)
    return model.weight[:, 0].tolist()


def test_sparse_gradients_are_refused_by_name_or_made_dense(two_ranks):
    for message in two_ranks.run(sparse, False):
        assert "the gradient of 'weight' is sparse" in message
        assert "sparse_as_dense=True" in message
    assert two_ranks.run(sparse, True) == [[0.5, 0.5, *[1.0] * 7, 0.0]] * 2


# -- groups, objects, identity --------------------------------------------------------------------------------------


def in_a_subgroup():
    """Ranks 1 and 2 train together, rank 0 stays out."""
    group = dist.new_group([1, 2])
    if grace.rank() == 0:
        with pytest.raises(grace.ConfigError, match="not a member"):
            distributed(net(), "topk(ratio=0.1)", process_group=group)
        return None
    model = net(seed=grace.rank())
    optimizer = distributed(model, "topk(ratio=0.1)", process_group=group)
    assert digest(weights(model)) == digest(weights(net(seed=1)))
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()["grace"]
    return digest(weights(model)), saved["rank"], saved["size"]


def test_a_subgroup_of_the_ranks_can_train(three_ranks):
    nobody, first, second = three_ranks.run(in_a_subgroup)
    assert nobody is None
    assert first[0] == second[0]
    assert (first[1:], second[1:]) == ((0, 2), (1, 2))


class Half(Compressor):
    """A user's compressor in torch operations."""

    traits = Traits(category="quantization", contraction=True)

    def compress(self, tensor, name):
        return [tensor.half()], tensor.shape

    def decompress(self, payload, ctx):
        return payload[0].float().view(ctx)


class Decaying(Memory):
    """A user's memory in torch operations."""

    def compensate(self, tensor, name):
        return tensor + 0.5 * self.state[name] if name in self.state else tensor.clone()

    def update(self, tensor, name, compressor, payload, ctx):
        self.state[name] = tensor - compressor.decompress(payload, ctx)


class ByReduction(Communicator):
    """A user's all-gather, made of an all-reduce of a buffer with a row per rank."""

    def communicate(self, wire):
        rows = wire.new_zeros(self.backend.size, wire.numel())
        rows[self.backend.rank] = wire
        return self.backend.allreduce(rows).map(lambda rows: list(rows.unbind()))


def users_parts(communicator, save_to):
    model = net()
    grc = communicator(Half(), Decaying())
    optimizer = distributed(model, communicator=grc)
    assert grc in optimizer._grace.exchanger.communicators
    train(model, optimizer, range(4))
    if save_to:
        torch.save(optimizer.state_dict(), f"{save_to}/{grace.rank()}.pt")
        again = distributed(net(), communicator=communicator(Half(), Decaying()))
        again.load_state_dict(torch.load(f"{save_to}/{grace.rank()}.pt", weights_only=True))
        assert digest(state_of(again)) == digest(state_of(optimizer))
    assert state_of(optimizer)["memory"]
    return weights(model)


def test_users_own_compressor_memory_and_communicator(ranks, tmp_path):
    by_gather = ranks.run(users_parts, Allgather, str(tmp_path))
    by_reduction = ranks.run(users_parts, ByReduction, None)
    assert len({digest(answer) for answer in by_gather + by_reduction}) == 1
    plain = ranks.run(trained_plainly)[0]
    for name, value in plain.items():
        torch.testing.assert_close(by_gather[0][name], value, rtol=1e-2, atol=1e-3, msg=name)


def trained_plainly():
    model = net()
    train(model, distributed(model, "none"), range(4))
    return weights(model)


def step_of_grace(compressor):
    """GRACE's own interface: one blocking exchange of one tensor."""
    communicator = Allgather(compressor)
    backend = grace.init()
    context = communicator.context
    context.rank, context.size = backend.rank, backend.size
    communicator.bind(context, backend)
    tensor = torch.tensor([1.0, -4.0]) * (grace.rank() + 1)
    return communicator.step(tensor, "w").tolist()


def test_communicator_step_exchanges_one_tensor(two_ranks):
    assert two_ranks.run(step_of_grace, "none") == [[1.5, -6.0]] * 2
    assert two_ranks.run(step_of_grace, "topk(ratio=0.5)") == [[0.0, -6.0]] * 2


def identity():
    model = net()
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = grace.DistributedOptimizer(plain, model.named_parameters(), "topk")
    assert optimizer is plain
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert optimizer.defaults["lr"] == 0.01
    unnamed = grace.DistributedOptimizer(torch.optim.SGD(net().parameters(), lr=0.1))
    named = grace.DistributedOptimizer(torch.optim.SGD(net().named_parameters(), lr=0.1))
    return [list(o._grace.parameters) for o in (unnamed, named)]


def test_the_optimizer_stays_of_its_class_and_names_can_be_left_out(two_ranks):
    unnamed, named = two_ranks.run(identity)[0]
    assert unnamed[:2] == ["group0.param0", "group0.param1"]
    assert named == [name for name, _ in net().named_parameters()]


# -- one process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", METHODS)
def test_every_method_trains_in_one_process(compressor):
    grace.shutdown()
    grace.init("local")
    try:
        model = net()
        optimizer = distributed(model, compressor)
        before = loss_of(model, 0).item()
        for _ in range(10):
            optimizer.zero_grad()
            loss_of(model, 0).backward()
            optimizer.step()
        assert torch.isfinite(loss_of(model, 0))
        assert loss_of(model, 0).item() < before or compressor == "signsgd"
        assert optimizer.traffic.sent_bytes == 0
        assert optimizer.traffic.steps == 10
    finally:
        grace.shutdown()


def test_none_in_one_process_is_the_plain_optimizer_bit_for_bit():
    grace.shutdown()
    grace.init("local")
    try:
        model, reference = net(), net()
        train(model, distributed(model, "none"), range(5))
        train(reference, sgd(reference.parameters()), range(5))
        assert same(weights(model), weights(reference))
    finally:
        grace.shutdown()
