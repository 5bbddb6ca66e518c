"""Clusters of two and one rank: hierarchical reduction, and answers that go once to each node."""

import gc
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import grace
from grace.backends.topology import NodeGroups, Topology
from grace.communicators.reduce_broadcast import Replication
from grace.core.backend import LocalBackend
from grace.strategy import ShardPlan, Strategy, Sync, VariablePlan
from grace.torch.parameters import find_sparse_parameters, make_variables
from tests.exchange.test_aggregates import largest
from tests.support.engine_pools import available, command, environment
from tests.support.limits import HANGS
from tests.support.pools import on_ranks
from tests.support.strategies import assert_close, mixed, mixed_loss, on_the_mean, sgd, train, uneven, weights
from tests.support.training import copied, digest, refusal, used

pytestmark = pytest.mark.ranks


def made(model, **options):
    with uneven():
        return grace.DistributedOptimizer(sgd(model.parameters()), model, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"hierarchical": True},
        {"hierarchical": True, "sparse_as_dense": True},
        {"hierarchical": True, "group_bytes": 64},
        {"hierarchical": True, "strategy": "ps_load_balancing"},
        {"hierarchical": True, "strategy": "partitioned_ps(min_shard_bytes=0)"},
        {"hierarchical": True, "strategy": "parallax"},
        {"communicator": "reduce_broadcast(destination=1, local_replication=True)"},
        {"communicator": "reduce_broadcast(destination=2, local_replication=True)"},
        # which has nothing to do where one rank of each node takes part
        {"hierarchical": True, "communicator": "reduce_broadcast(destination=1, local_replication=True)"},
    ],
    ids=str,
)
@on_ranks(3)
def test_the_mean_is_that_of_all_ranks_whatever_the_nodes_sizes(options):
    model = mixed()
    train(model, made(model, **options), range(4))
    assert_close(weights(model), on_the_mean(mixed(), 3, range(4)))
    return digest(weights(model))


@on_ranks(3)
def test_nodes_reduce_first_after_a_switch_too():
    model = mixed()
    optimizer = made(model, hierarchical=True)
    with uneven():
        optimizer.use_strategy("uniform(compressor=none)")
    assert optimizer._grace.runner.hierarchical is True
    train(model, optimizer, range(4))
    assert_close(weights(model), on_the_mean(mixed(), 3, range(4)))


def kept(x: np.ndarray, k: int) -> np.ndarray:
    """The k largest magnitudes."""
    places = largest(x.ravel(), k)
    return np.where(np.isin(np.arange(x.size), places), x.ravel(), 0).reshape(x.shape)


@on_ranks(3)
def test_leaders_compress_the_means_of_their_nodes_weighted_by_their_ranks():
    g = [torch.randn(5, 40, generator=torch.Generator().manual_seed(rank)).numpy() for rank in range(3)]
    nodes = [(g[0] + g[1]) / 2 * (2 * 2 / 3), g[2] * (2 / 3)]
    model = torch.nn.Linear(40, 5, bias=False)
    optimizer = made(model, hierarchical=True, compressor="topk(ratio=0.1)")
    (model.weight * torch.from_numpy(g[grace.rank()])).sum().backward()
    optimizer.synchronize()
    wanted = (kept(nodes[0], 20) + kept(nodes[1], 20)) / 2
    np.testing.assert_allclose(model.weight.grad.numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"hierarchical": True, "compressor": "topk(ratio=0.3)"},
        {"compressor": "topk(ratio=0.3)", "communicator": "reduce_broadcast(destination=1, local_replication=True)"},
        {"compressor": "qsgd", "communicator": "reduce_broadcast(destination=2, local_replication=True, staleness=1)"},
    ],
    ids=["hierarchical", "replicated", "replicated-and-stale"],
)
@on_ranks(3)
def test_all_ranks_have_the_same_bits_and_resume(options):
    whole, part, again = mixed(), mixed(), mixed()
    train(whole, made(whole, **options), range(6))
    optimizer = made(part, **options)
    train(part, optimizer, range(3))
    saved = copied(optimizer.state_dict())
    again.load_state_dict(part.state_dict())
    optimizer = made(again, **options)
    optimizer.load_state_dict(saved)
    train(again, optimizer, range(3, 6))
    assert digest(weights(whole)) == digest(weights(again))
    return digest(weights(whole))


@pytest.mark.parametrize(
    "options",
    [{"hierarchical": True}, {"communicator": "reduce_broadcast(local_replication=True, staleness=1)"}],
    ids=["hierarchical", "replicated-and-stale"],
)
@on_ranks(3)
def test_groups_of_nodes_serve_one_optimizer_after_the_other(options):
    """gloo keeps threads for each process group, and groups cannot be freed by all ranks together."""
    groups = []
    for _ in range(4):
        model = mixed()
        optimizer = made(model, **options)
        train(model, optimizer, range(2))
        optimizer._grace.runner.pending_means()  # the thread has sent all
        optimizer.close()
        groups.append(dist.get_pg_count())
    assert len(set(groups)) == 1
    return digest(weights(model))


def dropped_halfway(together):
    """One leader starts an exchange that the other node has not begun, and drops it; the next optimizers train."""
    found = []
    for step in range(3):
        model = mixed()
        optimizer = made(model, hierarchical=True)
        if step == 0 and not together and grace.rank() == 2:
            mixed_loss(model, 0).backward()
        if step > 0:
            train(model, optimizer, range(4))
            assert_close(weights(model), on_the_mean(mixed(), 3, range(4)))
        optimizer._grace.runner.close()  # as at the end of an optimizer that Python collects: waits for nobody
        del optimizer
        gc.collect()
        found.append(len(grace.init().channels.made))
    return found[1] - found[0], found[2] - found[1]


def test_groups_over_which_ranks_have_started_other_exchanges_are_not_used_again(three_ranks):
    three_ranks.stop()  # their channels are counted from none on
    assert three_ranks.run(dropped_halfway, True) == [(0, 0)] * 3
    assert three_ranks.run(dropped_halfway, False) == [(1, 0)] * 3
    three_ranks.stop()  # rank 2 waits for ever in the dropped exchange


@on_ranks(3)
def test_overflows_and_missing_gradients_reach_all_ranks():
    """Rank 1, whose node's leader is rank 0, has a NaN in its second step, and nobody has a gradient in the third."""
    model = torch.nn.Linear(30, 4, bias=False)
    optimizer = made(model, hierarchical=True, compressor="topk(ratio=0.2)")
    finite, present = [], []
    for step in range(4):
        optimizer.zero_grad()
        if step != 2:
            gradient = torch.ones(4, 30) * (float("nan") if (step, grace.rank()) == (1, 1) else 1.0)
            (model.weight * gradient).sum().backward()
        optimizer.synchronize()
        present.append(model.weight.grad is not None)
        finite.append(not present[-1] or bool(torch.isfinite(model.weight.grad).all()))
        used(model, optimizer)
    state = optimizer._grace.runner.state()["memory"]
    assert all(bool(torch.isfinite(value).all()) for value in state.values())
    assert finite == [True, False, True, True]
    assert present == [True, True, False, True]


def bytes_sent(options: dict) -> int:
    model = torch.nn.Linear(1000, 10, bias=False)
    optimizer = made(model, **options)
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    return optimizer.traffic.sent_bytes


def test_an_answer_crosses_the_network_once_for_each_node(three_ranks):
    header = 4 * (1 + 3 * 5)  # a status, and the places of three ranks
    plain = three_ranks.run(bytes_sent, {"communicator": "reduce_broadcast(destination=2)"})
    assert plain == [40000 + header, 40000 + header, 2 * (40000 + header)]
    replicated = three_ranks.run(
        bytes_sent, {"communicator": "reduce_broadcast(destination=2, local_replication=True)"}
    )
    assert replicated == [2 * (40000 + header), 40000 + header, 40000 + header]  # rank 0 hands it to rank 1


@pytest.mark.parametrize(("root", "sent"), [(0, [20, 0, 0]), (1, [0, 20, 0]), (2, [10, 0, 10])])
def test_what_a_replicated_answer_costs_is_said_of_every_rank(root, sent):  # ranks 0 and 1 share a node
    groups = NodeGroups(LocalBackend(), 0, None, nodes=2, leader_of=[0, 0, 1], own=0)
    assert [Replication(groups).sent(10, 3, rank, root) for rank in range(3)] == sent


@on_ranks(3)
def test_memories_of_leaders_are_not_taken_for_those_of_all_ranks():
    model = mixed()
    optimizer = made(model, hierarchical=True, compressor="topk(ratio=0.3)")
    train(model, optimizer, range(1))
    saved = copied(optimizer.full_state_dict())
    said = refusal(made(mixed(), compressor="topk(ratio=0.3)").load_state_dict, saved, kind=grace.GraceError)
    assert grace.rank() == 1 or "ranks that speak for their nodes" in said


def test_who_speaks_for_a_node():
    assert Topology(["a", "b", "a", "b"]).members() == [[0, 2], [1, 3]]
    assert Topology(["a", "b", "a", "b"]).members(leader=3) == [[0, 2], [3, 1]]


def trained_alone(rank):
    model = mixed()
    optimizer = sgd(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        mixed_loss(model, step, rank).backward()
        optimizer.step()
    return weights(model)


@on_ranks(3)
def test_variables_that_are_averaged_now_and_then_are_so_over_all_ranks():
    own = [trained_alone(rank) for rank in range(3)]
    wanted = {name: sum(values[name] for values in own) / 3 for name in own[0]}
    model = mixed()
    found = make_variables(dict(model.named_parameters()), find_sparse_parameters(model))
    plans = tuple(VariablePlan(v, (ShardPlan(Sync("none", period=2)),)) for v in found)
    train(model, made(model, hierarchical=True, strategy=Strategy(plans, 3, 2)), range(2))
    assert_close(weights(model), wanted)


@pytest.mark.parametrize("communicator", ["allgather", "reduce_broadcast(destination=1)"])
@on_ranks(3)
def test_votes_are_in_units_of_the_loss_scale_on_all_ranks(communicator):
    model = torch.nn.Linear(40, 5, bias=False)
    optimizer = made(model, compressor="signsgd", communicator=communicator)
    for scale in (1.0, 8.0):
        optimizer._grace.runner.rescale(scale)
        optimizer.zero_grad()
        model(torch.ones(1, 40)).sum().backward()
        optimizer.synchronize()
        assert float(model.weight.grad.abs().max()) == scale


@pytest.mark.slow
@pytest.mark.skipif(not available("horovodrun-gloo"), reason="Horovod is not installed (make horovod)")
def test_replication_over_horovods_process_sets():
    program = Path(__file__).parents[1] / "programs" / "replicated.py"
    env = {**environment(), "HOROVOD_DYNAMIC_PROCESS_SETS": "1", "PYTHONUNBUFFERED": "1"}
    line = command("horovodrun-gloo", 3, str(program))
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=HANGS)
    assert "the same: True True" in done.stdout + done.stderr


@on_ranks(2, engine="horovodrun-gloo")
def test_process_sets_that_horovod_does_not_make_are_refused_with_what_to_do():
    said = refusal(grace.init().split, [0])
    assert said.startswith("Horovod makes no set of the ranks [0]: ")
    assert said.endswith("Start it with HOROVOD_DYNAMIC_PROCESS_SETS=1")
