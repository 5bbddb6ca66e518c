"""DDP's hook exchanges between nodes only, and by strategies, as the optimizer does."""

import copy
import warnings
from typing import Any

import pytest
import torch

import grace
from grace.strategy import ShardPlan, Strategy, Sync, VariablePlan
from grace.torch.parameters import make_variables
from tests.support.pools import on_ranks
from tests.support.strategies import uneven
from tests.support.training import Branches, copied, ddp, digest, distributed, net, refusal, sgd, train, weights

CHOICES: list[dict[str, Any]] = [
    {"hierarchical": True},
    {"hierarchical": True, "compressor": "topk(ratio=0.1)"},
    {"hierarchical": True, "compressor": "powersgd(rank=2)"},
    {"hierarchical": True, "compressor": "topk(ratio=0.1)", "compress_after": 2},
    {"hierarchical": True, "compressor": "topk(ratio=0.1)", "communicator": "reduce_broadcast(destination=1)"},
    {"hierarchical": True, "strategy": "partitioned_ps(min_shard_bytes=0)"},
    {"strategy": "uniform(compressor=topk(ratio=0.1))"},
    {"strategy": "partitioned_all_reduce(min_shard_bytes=0)"},
    {"strategy": "all_reduce(hierarchical=true, compressor=topk(ratio=0.1))"},
]


def by_optimizer(steps: range, **choices: Any):
    model = net()
    with uneven():
        optimizer = distributed(model, choices.pop("compressor", None), **choices)
    train(model, optimizer, steps)
    return weights(model), optimizer.state_dict()["grace"], optimizer.traffic


def by_hook(steps: range, cap: float = 25, **choices: Any):
    model = net()
    wrapped = ddp(model, bucket_cap_mb=cap)
    optimizer = sgd(model.parameters())
    with uneven():
        state = grace.torch.register_ddp_hook(wrapped, optimizer=optimizer, **choices)
    train(wrapped, optimizer, steps)
    return weights(model), state.state_dict(), state.traffic


@pytest.mark.parametrize("cap", [25, 0.001], ids=["one bucket", "many buckets"])
@pytest.mark.parametrize("choices", CHOICES, ids=str)
@on_ranks(3)
def test_hook_and_optimizer_train_alike(choices, cap):
    wanted, other, _ = by_optimizer(range(4), **choices)
    got, state, _ = by_hook(range(4), cap, **choices)
    if "hierarchical" in str(choices):
        assert digest(got) == digest(wanted)
        assert digest(state["state"]) == digest(other["state"])
    for name, value in wanted.items():  # a ring of three ranks sums in the order of the buffer
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5)
    assert state["hierarchical"] == other["hierarchical"]
    return digest(got)


@on_ranks(3)
def test_the_hook_sends_the_payloads_of_the_optimizer():
    choices = {"hierarchical": True, "compressor": "topk(ratio=0.1)"}
    sent = [made(range(2), **choices)[2].payload_bytes for made in (by_hook, by_optimizer)]
    assert sent[0] == sent[1]


@on_ranks(3)
def test_a_hierarchical_hook_goes_on_from_its_state():
    def hooked(model):
        wrapped, optimizer = ddp(model, bucket_cap_mb=0.001), sgd(model.parameters())
        with uneven():
            state = grace.torch.register_ddp_hook(
                wrapped, "topk(ratio=0.1)", optimizer=optimizer, hierarchical=True, bucket_bytes=200
            )
        return wrapped, optimizer, state

    straight, stopped, resumed = net(), net(), net(seed=1)
    wrapped, optimizer, _ = hooked(straight)
    train(wrapped, optimizer, range(4))
    wrapped, optimizer, state = hooked(stopped)
    train(wrapped, optimizer, range(2))
    saved = copied(state.state_dict())
    resumed.load_state_dict(stopped.state_dict())
    momenta = copy.deepcopy(optimizer.state_dict())
    wrapped, optimizer, state = hooked(resumed)
    optimizer.load_state_dict(momenta)
    state.load_state_dict(saved)
    train(wrapped, optimizer, range(2, 4))
    assert digest(weights(resumed)) == digest(weights(straight))
    return digest(weights(resumed))


@on_ranks(3)
def test_overflows_and_unused_parameters_reach_all_nodes():
    """Rank 1, whose node's leader is rank 0, overflows in the second step; rank 2 is alone on its node."""
    model = net(make=lambda: Branches(2))
    wrapped, optimizer = ddp(model, find_unused_parameters=True), sgd(model.parameters())
    with uneven():
        state = grace.torch.register_ddp_hook(
            wrapped, "topk(ratio=0.1)", optimizer=optimizer, hierarchical=True, bucket_bytes=20
        )
    generator = torch.Generator().manual_seed(grace.rank())
    finite = []
    for step in range(4):
        optimizer.zero_grad()
        loss = wrapped(torch.randn(4, 8, generator=generator)).square().mean()
        (loss * (float("nan") if (step, grace.rank()) == (1, 1) else 1)).backward()
        finite.append(bool(model.shared.weight.grad.isfinite().all()))
        if not finite[-1]:
            optimizer.zero_grad()
        optimizer.step()
    assert finite == [True, False, True, True]
    assert all(bool(value.isfinite().all()) for value in state.state_dict()["state"]["memory"].values())
    return digest(weights(model))


@on_ranks(3)
def test_strategies_that_the_hook_cannot_execute_are_refused():
    model = net()
    wrapped = ddp(model)
    register = grace.torch.register_ddp_hook
    variables = make_variables(dict(model.named_parameters()))
    averaged = Strategy(tuple(VariablePlan(v, (ShardPlan(Sync("none", period=2)),)) for v in variables), 3, 2)
    assert "and DDP's hook exchanges in every step: give grace.Distr" in refusal(register, wrapped, strategy=averaged)
    assert "strategy='auto' plans while training runs" in refusal(register, wrapped, strategy="auto")
    assert "leave one of them out" in refusal(register, wrapped, "topk", strategy="ps")
    delayed = {"compressor": "topk", "communicator": "allgather", "hierarchical": grace.rank() == 0}
    assert "hierarchical" in refusal(register, wrapped, **delayed, kind=grace.RankError)


def advice(call, *args, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args, **options)
    return [str(one.message) for one in caught if "hierarchical=True" in str(one.message)]


@on_ranks(3)
def test_one_line_says_that_nodes_have_several_ranks():
    first = grace.rank() == 0
    for call in (by_optimizer, by_hook):
        told = advice(call, range(1), compressor="topk(ratio=0.1)")
        assert len(told) == first
        assert not first or told[0].startswith("3 ranks on 2 nodes each exchange over the network")
        assert not advice(call, range(1), compressor="topk(ratio=0.1)", hierarchical=True)
    assert not advice(distributed, net(), "topk(ratio=0.1)")  # one node
