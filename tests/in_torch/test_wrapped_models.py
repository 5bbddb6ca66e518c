"""Models that something else wraps, which averages or shards by itself, are refused by name, with what works."""

from typing import Any

import pytest
import torch

import grace
from tests.support.pools import on_ranks
from tests.support.training import Net, ddp, loss_of, net, sgd, train


def distributed(named: Any, model: torch.nn.Module) -> Any:
    return grace.DistributedOptimizer(sgd(model.parameters()), named, "topk(ratio=0.1)")


def wrapped_before(model: Net) -> None:
    forward = ddp(model)
    distributed(model.named_parameters(), model)
    train(forward, None, range(1))


def given_wrapped(model: Net) -> None:
    forward = torch.compile(ddp(model))
    distributed(forward, forward)


def wrapped_later(model: Net) -> None:
    """Wrap the optimizer first, and then the model, as trainers do when they start."""
    optimizer = distributed(model.named_parameters(), model)
    train(ddp(model, gradient_as_bucket_view=True), optimizer, range(1))


def wrapped_later_and_accumulating(model: Net) -> None:
    optimizer = distributed(model.named_parameters(), model)
    forward = ddp(model)
    with forward.no_sync():
        loss_of(forward, 0).backward()
    loss_of(forward, 1).backward()
    optimizer.step()


def fully_shard(model: Net) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 4)))


def sharded(model: Net) -> None:
    model = fully_shard(model)
    distributed(model.named_parameters(), model)


def sharded_for_the_hook(model: Net) -> None:
    grace.torch.register_ddp_hook(fully_shard(model))


def in_fsdp(model: Net) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def in_first_fsdp(model: Net) -> None:
    sharded = in_fsdp(model.hidden)
    distributed(sharded.named_parameters(), sharded)


def in_first_fsdp_for_the_hook(model: Net) -> None:
    grace.torch.register_ddp_hook(in_fsdp(model.hidden))


def tensor_parallel(model: Net) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = parallelize_module(model, init_device_mesh("cpu", (grace.size(),)), {"hidden": ColwiseParallel()})
    distributed(model, model)


TWICE = ("is in a DistributedDataParallel model", "register_ddp_hook(ddp_model", "do not wrap the model")
PARTS = ("is a DTensor (Shard(dim=0))", "tensor parallelism", "What works today")
SHARDS = ("belongs to FullyShardedDataParallel", "What works today")


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (wrapped_before, TWICE),
        (given_wrapped, TWICE),
        (wrapped_later, TWICE),
        (wrapped_later_and_accumulating, TWICE),
        (sharded, PARTS),
        (sharded_for_the_hook, PARTS),
        (tensor_parallel, PARTS),
        (in_first_fsdp, SHARDS),
        (in_first_fsdp_for_the_hook, SHARDS),
    ],
)
@on_ranks(2)
def test_what_exchanges_or_shards_by_itself_is_refused_by_name(misuse, words):
    sent = grace.init().sent_bytes
    with pytest.raises(grace.ConfigError) as caught:
        misuse(net())
    assert grace.init().sent_bytes == sent or misuse in (wrapped_later, wrapped_later_and_accumulating)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []


@on_ranks(2)
def test_only_a_wrapper_that_exchanges_the_parameters_is_in_the_way():
    """A wrapper that is gone does not count, even when only the collector can tell; nor does one that leaves it out."""
    model = net()
    forward: Any = ddp(model)
    forward.itself = [forward]
    del forward
    optimizer = distributed(model.named_parameters(), model)
    train(model, optimizer, range(1))
    optimizer.close()
    other = torch.nn.Sequential(model, torch.nn.Linear(2, 2))
    kept = [f"0.{name}" for name, _ in model.named_parameters()]
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(other, kept)
    forward = ddp(other)
    train(model, distributed(model.named_parameters(), model), range(1))
    del forward
