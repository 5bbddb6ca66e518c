"""Some ranks only, users' own parts, and what the optimizer still is."""

import pytest
import torch
import torch.distributed as dist

import grace
from grace.torch import Allgather, Communicator, Compressor, Memory, Traits
from tests.support.pools import on_ranks
from tests.support.training import digest, distributed, net, refusal, state_of, train, weights

pytestmark = pytest.mark.ranks


def in_a_subgroup():
    """Ranks 1 and 2 train together, rank 0 stays out."""
    group = dist.new_group([1, 2])
    if grace.rank() == 0:
        assert "not a member" in refusal(distributed, net(), "topk(ratio=0.1)", process_group=group)
        return None
    model = net(seed=grace.rank())
    optimizer = distributed(model, "topk(ratio=0.1)", process_group=group)
    assert digest(weights(model)) == digest(weights(net(seed=1)))
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()["grace"]
    assert (saved["rank"], saved["size"]) == (grace.rank() - 1, 2)
    return digest(weights(model))


def test_a_subgroup_of_the_ranks_can_train(three_ranks):
    nobody, first, second = three_ranks.run(in_a_subgroup)
    assert (nobody, first) == (None, second)


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


@on_ranks(2, 3)
def test_users_own_compressor_memory_and_communicator(tmp_path):
    file, ends = tmp_path / f"{grace.rank()}.pt", []
    for communicator in (Allgather, ByReduction):
        model, grc = net(), communicator(Half(), Decaying())
        optimizer = distributed(model, communicator=grc)
        assert grc in optimizer._grace.runner.communicators
        train(model, optimizer, range(4))
        assert state_of(optimizer)["memory"]
        torch.save(optimizer.state_dict(), file)
        again = distributed(net(), communicator=communicator(Half(), Decaying()))
        again.load_state_dict(torch.load(file, weights_only=True))
        assert digest(state_of(again)) == digest(state_of(optimizer))
        ends.append(weights(model))
    plain = net()
    train(plain, distributed(plain, "none"), range(4))
    for name, value in weights(plain).items():
        torch.testing.assert_close(ends[0][name], value, rtol=1e-2, atol=1e-3, msg=name)
    assert digest(ends[0]) == digest(ends[1])
    return digest(ends[0])


@on_ranks()
def test_the_optimizer_stays_of_its_class_and_names_can_be_left_out():
    model = net()
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = grace.DistributedOptimizer(plain, model.named_parameters(), "topk")
    assert optimizer is plain
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert optimizer.defaults["lr"] == 0.01
    unnamed = grace.DistributedOptimizer(torch.optim.SGD(net().parameters(), lr=0.1))
    named = grace.DistributedOptimizer(torch.optim.SGD(net().named_parameters(), lr=0.1))
    assert list(unnamed._grace.parameters)[:2] == ["group0.param0", "group0.param1"]
    assert list(named._grace.parameters) == [name for name, _ in net().named_parameters()]
