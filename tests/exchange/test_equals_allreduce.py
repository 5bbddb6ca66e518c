"""Without compression Grace is plain all-reduce, and whatever the method all ranks hold the same weights."""

import pytest
import torch
import torch.distributed as dist

import grace
from grace.core.registry import make
from tests.support.pools import on_ranks
from tests.support.training import METHODS, digest, distributed, gradients, loss_of, net, same, sgd, train, weights


def plain_allreduce(layout, steps):
    """Data-parallel SGD written with dist.all_reduce alone.

    ``layout`` lists the names that are summed in one flat buffer each, and the elements behind theirs, in which Grace
    sends statuses and places: gloo's ring adds elements up in an order that depends on where they lie.
    """
    model = net()
    optimizer = sgd(model.parameters())
    parameters = dict(model.named_parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        for names, more in layout:
            grads = [parameters[name].grad for name in names]
            buffer = torch.cat([grad.flatten() for grad in grads] + [torch.ones(more)])
            dist.all_reduce(buffer)
            buffer /= grace.size()
            for grad, mean in zip(grads, buffer.split([g.numel() for g in grads] + [more]), strict=False):
                grad.copy_(mean.view_as(grad))
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize(("group_bytes", "groups"), [(25 << 20, 1), (1000, 3), (1, 7)])
@on_ranks(2, 3)
def test_none_equals_plain_allreduce_bit_for_bit_after_20_steps(group_bytes, groups):
    model = net()
    optimizer = distributed(model, "none", group_bytes=group_bytes)
    train(model, optimizer, range(20))
    layout = [
        ([v.name for v in group.variables], group.program.codec.layouts[0].header)
        for group in optimizer._grace.runner.buckets
    ]
    assert len(layout) == groups
    assert same(weights(model), plain_allreduce(layout, 20))


def trained(compressor, communicator, **choices):
    model = net()
    start = weights(model)
    optimizer = distributed(model, compressor, communicator=communicator, **choices)
    train(model, optimizer, range(5))
    assert not same(start, weights(model))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    return digest(weights(model)), digest(gradients(model))


@pytest.mark.parametrize("compressor", [m for m in METHODS if make("compressor", m).traits.rounds == 1])
@on_ranks(2, 3)
def test_broadcast_equals_allgather_bit_for_bit(compressor):
    ends = trained(compressor, "broadcast")
    assert ends == trained(compressor, "allgather")
    return ends


@pytest.mark.parametrize("compressor", METHODS)
@on_ranks()
def test_the_result_does_not_depend_on_the_grouping_on_two_ranks(compressor):
    assert trained(compressor, None) == trained(compressor, None, group_bytes=1)


@on_ranks(2, 3)
def test_broadcast_parameters_gives_every_rank_the_roots_parameters_and_buffers():
    module = torch.nn.BatchNorm1d(3)
    for dtype in (torch.int16, torch.bool, torch.float64, torch.complex64):
        module.register_buffer(str(dtype).rpartition(".")[2], torch.full((2, 3), grace.rank()).to(dtype).t())
    module.running_mean.fill_(grace.rank() + 1)
    module.register_buffer("empty", torch.empty(0))
    grace.broadcast_parameters(module)
    assert module.running_mean.tolist() == [1, 1, 1]
    assert module.get_buffer("int16").tolist() == [[0, 0]] * 3
    return {name: value.tolist() for name, value in module.state_dict().items()}
