"""Refusals on every rank before any gradient is exchanged; nobody hangs."""

import pytest
import torch

import grace
from tests.support.pools import on_ranks
from tests.support.training import Given, ddp, digest, distributed, net, refusal, sgd, train, weights


def refused(build, choices):
    """The error on this rank, and the weights of a step that the same ranks make together afterwards."""
    backend = grace.init()
    before = backend.sent_bytes
    with pytest.raises(grace.GraceError) as caught:
        build(**choices)
    assert backend.sent_bytes == before  # no gradient and no parameter left this rank
    model = net()
    train(model, distributed(model, "topk"), range(1))
    return caught.type.__name__, str(caught.value), digest(weights(model))


def optimizer_of(shapes=(), names=None, **choices):
    model = Given(dict(shapes)) if shapes else net()
    named = list(model.named_parameters())
    if names == "twice":
        named = [("same", p) for _, p in named]
    elif names == "some":
        named = named[1:]
    elif names == "bare":
        named = [p for _, p in named]
    return grace.DistributedOptimizer(sgd(model.parameters()), named, **choices)


EVERYWHERE = {
    "unknown method": ({"compressor": "tokp"}, "did you mean 'topk'"),
    "unknown parameter": ({"compressor": "topk(ration=0.1)"}, "no parameter 'ration'; it has: ratio=0.01"),
    "bad value": ({"compressor": "topk(ratio=2)"}, "ratio must be a number in (0, 1], not 2"),
    "not a spec": ({"compressor": "topk(0.1)"}, "write parameters by name"),
    "allreduce with topk": (
        {"compressor": "topk", "communicator": "allreduce"},
        "Legal communicators for topk: allgather, broadcast",
    ),
    "allreduce with signsgd": ({"compressor": "signsgd", "communicator": "allreduce"}, "allgather, broadcast"),
    "allgather with powersgd": ({"compressor": "powersgd", "communicator": "allgather"}, "for powersgd: allreduce"),
    "powersgd without memory": ({"compressor": "powersgd", "memory": "none"}, "Use memory='residual'"),
    "unknown memory": ({"compressor": "topk", "memory": "residul"}, "did you mean 'residual'"),
    "unknown communicator": ({"compressor": "topk", "communicator": "gossip"}, "unknown communicator 'gossip'"),
    "no seed": ({"seed": None}, "seed must be a whole number, not None"),
    "half a seed": ({"seed": 0.5}, "seed must be a whole number, not 0.5"),
}
OPTIMIZER_ONLY = {
    "duplicate names": ({"names": "twice"}, "the name 'same' more than once"),
    "missing names": ({"names": "some"}, "shape ()) has no name"),
    "names left out": ({"names": "bare"}, "pairs of (name, parameter)"),
    "no passes": ({"backward_passes_per_step": 0}, "backward_passes_per_step must be a whole number of at least 1"),
    "half a byte": ({"group_bytes": 0.5}, "group_bytes must be a whole number of at least 1, not 0.5"),
    "half a group": ({"groups": 1.5}, "groups must be a whole number, or lists of parameters"),
    "no lists of groups": ({"groups": [1, 2]}, "groups must be a whole number, or lists of parameters"),
    "no byte": ({"bucket_bytes": 0}, "bucket_bytes must be a whole number of at least 1, not 0"),
}


def hook_of(**choices):
    return grace.torch.register_ddp_hook(ddp(net()), **choices)


def cases(build, of_both, of_optimizers):
    """Return the cases of an optimizer, or those of them that can be given to DDP's hook."""
    hooks = {name: case for name, case in of_both.items() if "shapes" not in case[0]}
    return {**of_both, **of_optimizers} if build is optimizer_of else hooks


ENTRANCES = pytest.mark.parametrize("build", [optimizer_of, hook_of], ids=["optimizer", "hook"])


@ENTRANCES
@pytest.mark.parametrize("wrong", [[0, 1, 2], [1]], ids=["all", "one"])
@on_ranks(3)
def test_what_cannot_work_is_refused_and_the_others_are_told_whose_it_is_and_why(build, wrong):
    trained, mistaken = [], grace.rank() in wrong
    for name, (bad, words) in cases(build, EVERYWHERE, OPTIMIZER_ONLY).items():
        kind, message, weights = refused(build, bad if mistaken else {"compressor": "topk(ratio=0.1)"})
        assert kind == ("ConfigError" if mistaken else "RankError"), name
        assert words in message, name
        assert mistaken or "rank 1 refused to start" in message, name
        trained.append(weights)
    return trained


A = (("first", (3, 4)), ("second", (5,)), ("third", (6,)))
DIFFERENCES = {
    "another shape": ({"shapes": A}, {"shapes": (A[0], ("second", (7,)), A[2])}, "'second' float32[7]"),
    "another name": ({"shapes": A}, {"shapes": (A[0], ("other", (5,)), A[2])}, "'other' float32[5]"),
    "another order": ({"shapes": A}, {"shapes": (A[0], A[2], A[1])}, "'third' float32[6]"),
    "one variable fewer": ({"shapes": A}, {"shapes": A[:2]}, "rank 0 has variable 'third' float32[6]"),
    "one variable more": ({"shapes": A[:2]}, {"shapes": A}, "has variable 'third' float32[6]"),
    "another compressor": ({"compressor": "topk"}, {"compressor": "qsgd"}, "allgather, qsgd, none"),
    "another parameter": ({"compressor": "topk"}, {"compressor": "topk(ratio=0.2)"}, "topk(ratio=0.2)"),
    "another memory": ({"compressor": "topk"}, {"compressor": "topk", "memory": "none"}, "allgather, topk, none"),
    "another communicator": (
        {"compressor": "topk"}, {"compressor": "topk", "communicator": "broadcast"}, "broadcast, topk, residual",
    ),
    "another seed": ({"seed": 1}, {"seed": 2}, "the seed 2"),
}  # fmt: skip
OPTIMIZER_DIFFERENCES = {
    "other passes": ({}, {"backward_passes_per_step": 2}, "backward_passes_per_step 2"),
    "other groups": ({}, {"group_bytes": 100}, "group_bytes 100"),
    "other buckets": ({}, {"bucket_bytes": 100}, "bucket_bytes 100"),
    "no broadcast": ({}, {"broadcast": False}, "broadcast False"),
    "a sum": ({}, {"op": "sum"}, "op sum"),
    "other predivision": ({}, {"gradient_predivide_factor": 2.0}, "gradient_predivide_factor 2.0"),
    "sparse as dense": ({}, {"sparse_as_dense": True}, "sparse_as_dense True"),
}


@ENTRANCES
@on_ranks(3)
def test_ranks_that_differ_all_raise_and_name_the_first_difference(build):
    trained, last = [], grace.size() - 1
    for name, (one, other, words) in cases(build, DIFFERENCES, OPTIMIZER_DIFFERENCES).items():
        kind, message, weights = refused(build, other if grace.rank() == last else one)
        assert kind == "RankError", name
        assert words in message, name
        assert f"rank {last}" in message, name
        trained.append(weights)
    return trained


def wrap_twice(model, optimizer):
    grace.DistributedOptimizer(optimizer, model.named_parameters())
    grace.DistributedOptimizer(optimizer, model.named_parameters())


def add_a_group(model, optimizer):
    grace.DistributedOptimizer(optimizer, model.named_parameters())
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


def hook_a_plain_model(model, optimizer):
    grace.torch.register_ddp_hook(model)


def hook_a_holder_of_models(model, optimizer):
    inner = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    grace.torch.register_ddp_hook(torch.nn.ModuleDict({"critic": inner}))


def exchange_complex_numbers(model, optimizer):
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    grace.DistributedOptimizer(sgd([p]), [("spin", p)])


def leave_a_layer_lazy(model, optimizer):
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d())
    optimizer = sgd(lazy.parameters())
    for given in (lazy, lazy.named_parameters()):
        with pytest.raises(grace.ConfigError, match=r"'0\.weight' has no shape yet"):
            grace.DistributedOptimizer(optimizer, given)
    grace.broadcast_parameters(lazy)


def cast_to_float64(model, optimizer):
    optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters(), "topk(ratio=0.1)")
    train(model, optimizer, range(1))
    model.head.to(torch.float64)
    model.scale.grad, model.hidden.bias.grad = torch.ones(()), torch.ones(20)
    try:
        optimizer.step()
    finally:  # and it may be made distributed anew
        optimizer.close()
        grace.DistributedOptimizer(optimizer, model.named_parameters(), "topk(ratio=0.1)").step()


def append_a_parameter(model, optimizer):
    optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters())
    group = optimizer.param_groups[0]["params"]
    removed = group.pop()  # is trained no more
    train(model, optimizer, range(1))
    group.append(torch.nn.Parameter(torch.zeros(3)))
    try:
        optimizer.step()
    finally:
        group[-1] = removed
        train(model, optimizer, range(1))


def resize_a_parameter(model, optimizer):
    optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters(), "topk(ratio=0.1)")
    train(model, optimizer, range(1))
    optimizer.zero_grad()
    bias = model.hidden.bias
    bias.data = torch.zeros(10 * bias.numel())
    bias.grad = torch.ones_like(bias)
    try:
        optimizer.step()
    finally:  # and it may be made distributed anew
        optimizer.close()
        grace.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), "topk(ratio=0.1)").step()


def give_an_object_and_a_spec(model, optimizer):
    grace.DistributedOptimizer(optimizer, model.named_parameters(), "topk", communicator=grace.torch.Allgather("topk"))


def give_a_memory_as_compressor(model, optimizer):
    grace.DistributedOptimizer(optimizer, model.named_parameters(), grace.make("memory", "residual"))


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (wrap_twice, "distributed already"),
        (add_a_group, "before grace.DistributedOptimizer"),
        (hook_a_plain_model, "needs a DistributedDataParallel model, not Net"),
        (hook_a_holder_of_models, "this ModuleDict holds one as 'critic': call register_ddp_hook(model.critic, ...)"),
        (exchange_complex_numbers, "'spin' is torch.complex64"),
        (exchange_complex_numbers, "DistributedDataParallel without a hook takes complex ones"),
        (leave_a_layer_lazy, "Run a forward pass first"),
        (cast_to_float64, "'head.weight' is float64 now, and was not when the optimizer was made distributed"),
        (append_a_parameter, "a parameter of shape (3,) was added to param_groups[0] after the optimizer was made"),
        (resize_a_parameter, "'hidden.bias' has the shape (200,) now, and had (20,) when the optimizer was made"),
        (give_an_object_and_a_spec, "do not pass them as well"),
        (give_a_memory_as_compressor, "Residual is a memory, where a compressor is needed"),
    ],
)
@on_ranks()
def test_misuse_is_refused_with_what_would_be_right(misuse, words):
    model = net()
    assert words in refusal(misuse, model, sgd(model.parameters()))
