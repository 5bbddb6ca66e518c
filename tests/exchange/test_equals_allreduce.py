"""Without compression Grace is plain all-reduce, and whatever the method all ranks hold the same weights."""

import pytest
import torch
import torch.distributed as dist

import grace
from grace.core.registry import make
from tests.support.training import METHODS, digest, distributed, gradients, loss_of, net, same, sgd, train, weights

pytestmark = pytest.mark.ranks


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


def none_against_plain_allreduce(group_bytes, steps):
    model = net()
    optimizer = distributed(model, "none", group_bytes=group_bytes)
    train(model, optimizer, range(steps))
    layout = [
        ([v.name for v in group.variables], group.program.codec.layouts[0].header)
        for group in optimizer._grace.runner.buckets
    ]
    return same(weights(model), plain_allreduce(layout, steps)), len(layout)


@pytest.mark.parametrize(("group_bytes", "groups"), [(25 << 20, 1), (1000, 3), (1, 7)])
def test_none_equals_plain_allreduce_bit_for_bit_after_20_steps(ranks, group_bytes, groups):
    assert ranks.run(none_against_plain_allreduce, group_bytes, 20) == [(True, groups)] * ranks.size


def trained(compressor, communicator, seeds_differ=False, **choices):
    model = net(seed=grace.rank() if seeds_differ else 0)
    start = weights(model)
    optimizer = distributed(model, compressor, communicator=communicator, **choices)
    train(model, optimizer, range(5))
    assert not same(start, weights(model))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    return digest(weights(model)), digest(gradients(model))


@pytest.mark.parametrize("compressor", [m for m in METHODS if make("compressor", m).traits.rounds == 1])
def test_broadcast_equals_allgather_bit_for_bit(ranks, compressor):
    assert ranks.run(trained, compressor, "broadcast") == ranks.run(trained, compressor, "allgather")


@pytest.mark.parametrize("compressor", METHODS)
def test_the_result_does_not_depend_on_the_grouping_on_two_ranks(two_ranks, compressor):
    one_group = two_ranks.run(trained, compressor, None)
    many_groups = two_ranks.run(trained_in_small_groups, compressor)
    assert one_group == many_groups


def trained_in_small_groups(compressor):
    return trained(compressor, None, group_bytes=1)


def test_ranks_that_start_apart_are_given_rank_0s_parameters(ranks):
    together, apart = ranks.run(trained, "none", None), ranks.run(trained, "none", None, True)
    assert apart == together


def parameters_after_wrapping(broadcast):
    model = net(seed=grace.rank())
    distributed(model, "none", broadcast=broadcast)
    return digest(weights(model)) == digest(weights(net(seed=0)))


def test_broadcast_false_leaves_the_parameters_alone(two_ranks):
    assert two_ranks.run(parameters_after_wrapping, False) == [True, False]
    assert two_ranks.run(parameters_after_wrapping, True) == [True, True]


def buffers_after_broadcast():
    module = torch.nn.BatchNorm1d(3)
    for dtype in (torch.int16, torch.bool, torch.float64, torch.complex64):
        module.register_buffer(str(dtype).rpartition(".")[2], torch.full((2, 3), grace.rank()).to(dtype).t())
    module.running_mean.fill_(grace.rank() + 1)
    module.register_buffer("empty", torch.empty(0))
    grace.broadcast_parameters(module)
    return {name: value.tolist() for name, value in module.state_dict().items()}


def test_broadcast_parameters_gives_every_rank_the_roots_parameters_and_buffers(ranks):
    answers = ranks.run(buffers_after_broadcast)
    assert answers[0]["running_mean"] == [1, 1, 1]
    assert answers[0]["int16"] == [[0, 0]] * 3
    assert all(answer == answers[0] for answer in answers)
