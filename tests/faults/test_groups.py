"""A rank that fails is named by those who exchange with others than with it: replicas of shards, nodes, and by hand."""

import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import grace
from grace.core import watch
from tests.support.pools import ranks_of
from tests.support.strategies import uneven
from tests.support.training import distributed, loss_of, net


@pytest.fixture
def ranks(request):
    """Ranks of a run that ends in a failure."""
    pool = ranks_of(request.param)
    yield pool
    pool.stop()


def fail(error):
    """End as a program does with an error that nobody catches."""
    sys.excepthook(type(error), error, None)
    grace.shutdown()


def shards_fail():
    """Two replicas of two shards: rank 3 fails when its gradients are to be exchanged with those of rank 1."""
    watch.GIVE_UP_SECONDS = 0.5
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(torch.nn.Linear(8, 6), mesh=mesh["shard"])
    state = grace.torch.register_fsdp_hook(model, mesh["replicate"], compressor="topk(ratio=0.1)")
    if grace.rank() == 3:
        state.exchange_module = lambda *_: fail(ValueError("a mistake on rank 3"))
    try:
        model(torch.ones(2, 8)).sum().backward()
    except grace.ExchangeError as error:
        return str(error)


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_a_replica_that_fails_under_fsdps_hook_is_named_by_its_rank_in_the_run(ranks):
    _, said, _, _ = ranks.run(shards_fail)
    assert said.startswith("rank 1 of the ranks 1, 3: the exchange of bucket 0 "), said
    assert "failed at step 0; rank 3 failed: ValueError: a mistake on rank 3. " in said


def nodes_fail():
    """Ranks 0 and 1 are one node, rank 2 another, which fails; rank 1 waits for what rank 0 is to hand on."""
    watch.GIVE_UP_SECONDS = 0.5
    model = net()
    with uneven():
        optimizer = distributed(model, "topk(ratio=0.1)", hierarchical=True)
    if grace.rank() == 2:
        return fail(ValueError("a mistake on rank 2"))
    try:
        loss_of(model, 0).backward()
        optimizer.step()
    except grace.ExchangeError as error:
        if grace.rank() == 0:
            fail(error)
        return str(error)


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_ranks_of_another_node_name_the_rank_that_failed(ranks):
    leader, follower, _ = ranks.run(nodes_fail)
    assert leader.startswith("rank 0 of the ranks 0, 2: the exchange of bucket 0 "), leader
    assert follower.startswith("rank 1 of the ranks 0, 1: what leaders hand on of bucket 0 "), follower
    for said in (leader, follower):
        assert "; rank 2 failed: ValueError: a mistake on rank 2" in said
