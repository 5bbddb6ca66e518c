"""Some ranks only, and what the optimizer still is."""

import torch
import torch.distributed as dist

import grace
from tests.support.pools import on_ranks
from tests.support.training import digest, distributed, net, refusal, train, weights


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
