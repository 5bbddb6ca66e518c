"""Training under fully_shard, both collectives Grace's and without loss, beside a replica that is not sharded.

The cases are those of torch's test_fully_shard_training, which is in no wheel.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import grace
from tests.support.pools import on_ranks
from tests.support.sharded import mesh_of
from tests.support.training import digest

DIM = 6
RESHARD: list[bool | int] = [True, False, 2]


class MLP(torch.nn.Module):
    """A perceptron; of the second layer's rows the last of four ranks gets none."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(DIM, 4 * DIM)
        self.down = torch.nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return torch.relu(self.down(torch.relu(self.up(x)))) + x


class Checkpointed(MLP):
    """A perceptron that computes its activations again in backward."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Tied(torch.nn.Module):
    """Words in, words out, by one matrix."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(11, DIM)
        self.body = MLP()
        self.out = torch.nn.Linear(DIM, 11, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(self.body(self.words((100 * x[:, :4].abs()).long() % 11)))


class Twice(torch.nn.Module):
    """A module that is called twice in each forward pass."""

    def __init__(self):
        super().__init__()
        self.inner = MLP()
        self.outer = torch.nn.Linear(DIM, 3)

    def forward(self, x):
        return self.outer(self.inner(self.inner(x)))


class Skipping(torch.nn.Module):
    """Modules of which all ranks leave one out in every other step."""

    def __init__(self):
        super().__init__()
        self.first, self.second = MLP(), MLP()
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        x = self.first(x)
        return self.second(x) if self.steps % 2 else x


class ByMethod(torch.nn.Module):
    """A module that is called by another method than forward."""

    def __init__(self):
        super().__init__()
        self.encoder = MLP()
        self.head = torch.nn.Linear(DIM, 3)

    def encode(self, x):
        return self.head(self.encoder(x))


def stack(make: type[MLP] = MLP) -> torch.nn.Sequential:
    return torch.nn.Sequential(make(), make(), make())


def shard_one(module: Any, **options: Any) -> None:
    """Shard a module, or several as one group, over all ranks."""
    fully_shard(module, **{"mesh": mesh_of(1, 4)["shard"], **options})


def shard_all(model: torch.nn.Module, **options: Any) -> None:
    """Shard each perceptron inside by itself, and the rest."""
    for module in [each for each in model.modules() if isinstance(each, MLP) and each is not model]:
        shard_one(module, **options)
    shard_one(model, **options)


def inputs(step: int, part: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * part + dist.get_rank())
    return torch.randn(3, DIM, generator=generator)


def loss_of(model: torch.nn.Module, step: int, part: int = 0) -> torch.Tensor:
    return model(inputs(step, part)).float().square().mean()


def backward(model: torch.nn.Module, step: int) -> torch.Tensor:
    loss = loss_of(model, step)
    loss.backward()
    return loss.detach()


@contextlib.contextmanager
def exchanged(model: torch.nn.Module):
    """Let both collectives of a sharded model be Grace's."""
    weights = grace.torch.compress_all_gather(model, "none")
    gradients = grace.torch.compress_reduce_scatter(model, "none")
    try:
        yield weights, gradients
    finally:
        gradients.close()
        weights.close()


def average(replica: torch.nn.Module) -> None:
    for p in replica.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def pairs(replica: torch.nn.Module, sharded: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, Any]]:
    """Parameters of both, of which each name is the same."""
    for (name, wanted), (got_name, got) in zip(replica.named_parameters(), sharded.named_parameters(), strict=True):
        assert got_name.replace("_checkpoint_wrapped_module.", "") == name
        yield wanted, got


def check_gradients(replica: torch.nn.Module, sharded: torch.nn.Module) -> None:
    """Both have the same gradients; torch has zeros where a rank has none."""
    for wanted, got in pairs(replica, sharded):
        gradient = torch.zeros_like(wanted) if wanted.grad is None else wanted.grad
        if got.grad is not None:
            torch.testing.assert_close(got.grad.full_tensor(), gradient)
        else:
            assert not gradient.any()


def check_trains_alike(
    make: Callable[[], torch.nn.Module],
    shard: Callable[[torch.nn.Module], Any],
    step_of: Callable[[torch.nn.Module, int], torch.Tensor] = backward,
    steps: int = 2,
) -> str:
    """Losses and gradients of a sharded model are those of a replica, step by step, and so are its weights at the end.

    Args:
        step_of: makes the gradients of a step, and returns its loss.

    Returns:
        a digest of the weights.
    """
    torch.manual_seed(42)
    replica = make()
    sharded = copy.deepcopy(replica)
    shard(sharded)
    both = [(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)) for model in (replica, sharded)]
    with exchanged(sharded) as states:
        for step in range(steps):
            losses = []
            for model, optimizer in both:
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                losses.append(step_of(model, step))
            average(replica)
            torch.testing.assert_close(losses[1], losses[0])
            check_gradients(replica, sharded)
            for _, optimizer in both:
                optimizer.step()
        assert all(state.sent_bytes > 0 for state in states)
    weights = []
    for wanted, got in pairs(replica, sharded):
        weights.append(got.full_tensor().detach())
        torch.testing.assert_close(weights[-1], wanted.detach())
    return digest(weights)


@pytest.mark.parametrize("reshard", RESHARD)
@pytest.mark.parametrize("make", [MLP, stack, Tied, Twice])
@on_ranks(4)
def test_models_of_one_group_and_of_several(make, reshard):
    """Also with shared parameters, and a module that is called twice."""
    return check_trains_alike(make, lambda model: shard_all(model, reshard_after_forward=reshard))


@on_ranks(4)
def test_modules_that_are_grouped():
    def shard(model):
        shard_one([model[0], model[1]])
        shard_one(model)

    return check_trains_alike(stack, shard)


@pytest.mark.parametrize("reshard", RESHARD)
@pytest.mark.parametrize("reduced", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(4)
def test_mixed_precision(reduced, reshard):
    """The replica computes with a copy in bfloat16. Sums are float32 in both."""

    def step_of(model, step):
        low = model if isinstance(model, FSDPModule) else copy.deepcopy(model).bfloat16()
        x = inputs(step)
        loss = low(x if low is model else x.bfloat16()).float().square().mean()
        loss.backward()
        if low is not model:
            for p, q in zip(model.parameters(), low.parameters(), strict=True):
                total = q.grad.float()
                dist.all_reduce(total)
                p.grad = (total / dist.get_world_size()).to(reduced).float()  # average() leaves it as it is
        return loss.detach()

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    return check_trains_alike(
        stack, lambda model: shard_all(model, mp_policy=policy, reshard_after_forward=reshard), step_of
    )


@pytest.mark.parametrize("reshard", RESHARD)
@pytest.mark.parametrize("how", ["wrapped", "inside", "outside"])
@on_ranks(4)
def test_activation_checkpointing(how, reshard):
    """The wrapper is around the layers, in the sharded module, or around it."""

    def shard(model):
        for number, module in enumerate(list(model)):
            inner = checkpoint_wrapper(module) if how == "wrapped" else module
            shard_one(inner, reshard_after_forward=reshard)
            model[number] = checkpoint_wrapper(inner) if how == "outside" else inner
        shard_one(model, reshard_after_forward=reshard)

    return check_trains_alike(lambda: stack(Checkpointed if how == "inside" else MLP), shard)


@pytest.mark.parametrize("reshard", RESHARD)
@pytest.mark.parametrize("synced", ["at last", "always", "the first module always"])
@on_ranks(4)
def test_gradient_accumulation(synced, reshard):
    def step_of(model, step):
        total = torch.zeros(())
        for part in range(3):
            last = part == 2
            if isinstance(model, FSDPModule):
                model.set_is_last_backward(last)
                model.set_reshard_after_backward(last or reshard is True)
                model.set_requires_gradient_sync(last or synced == "always")
                if synced == "the first module always":
                    model[0].set_requires_gradient_sync(True)
            loss = loss_of(model, step, part)
            loss.backward()
            total += loss.detach()
        return total

    return check_trains_alike(stack, lambda model: shard_all(model, reshard_after_forward=reshard), step_of)


@on_ranks(4)
def test_several_forward_passes_before_the_backward_ones():
    def step_of(model, step):
        losses = [loss_of(model, step, part) for part in range(2)]
        for part, loss in enumerate(losses):
            if isinstance(model, FSDPModule):
                model.set_is_last_backward(part == 1)
                model.set_requires_gradient_sync(part == 1)
            loss.backward()
        return torch.stack(losses).detach()

    return check_trains_alike(stack, lambda model: shard_all(model, reshard_after_forward=False), step_of)


@on_ranks(4)
def test_a_module_that_is_left_out():
    return check_trains_alike(Skipping, shard_all, steps=3)


@on_ranks(4)
def test_forward_and_backward_of_a_module_inside():
    def step_of(model, step):
        whole = backward(model, step)
        loss = loss_of(model[0], step, part=1)
        loss.backward()
        return whole + loss.detach()

    return check_trains_alike(stack, shard_all, step_of)


@on_ranks(4)
def test_frozen_parameters():
    def make():
        model = stack()
        model[0].requires_grad_(False)
        model[1].up.bias.requires_grad_(False)
        return model

    return check_trains_alike(make, shard_all)


@on_ranks(4)
def test_modules_that_are_gathered_ahead():
    def shard(model):
        shard_all(model)
        first, second, third = model
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])

    def step_of(model, step):
        if isinstance(model, FSDPModule):
            model.unshard(async_op=True)
        return backward(model, step)

    return check_trains_alike(stack, shard, step_of)


@on_ranks(4)
def test_another_method_than_forward():
    def shard(model):
        shard_all(model)
        register_fsdp_forward_method(model, "encode")

    def step_of(model, step):
        loss = model.encode(inputs(step)).square().mean()
        loss.backward()
        return loss.detach()

    return check_trains_alike(ByMethod, shard, step_of)


@on_ranks(4)
def test_parameters_that_are_cut_along_their_last_dimension():
    def shard(model):
        shard_all(model, shard_placement_fn=lambda p: Shard(1) if p.shape[-1] == 4 * DIM and p.ndim == 2 else None)

    return check_trains_alike(stack, shard)
