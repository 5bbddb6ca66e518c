"""Clusters of two and one rank: hierarchical reduction, and answers that go once to each node."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import grace
from grace.backends.topology import NodeGroups, Topology
from grace.communicators.reduce_broadcast import Replication
from grace.core.backend import LocalBackend
from tests.support.engine_pools import available, command, environment
from tests.support.limits import HANGS
from tests.support.strategies import assert_close, mixed, mixed_loss, on_the_mean, sgd, train, uneven, weights
from tests.support.training import copied, digest, used

pytestmark = pytest.mark.ranks


def made(model, **options):
    with uneven():
        return grace.DistributedOptimizer(sgd(model.parameters()), model, **options)


def trained(options: dict) -> tuple[dict, str]:
    model = mixed()
    train(model, made(model, **options), range(4))
    return {name: value.numpy() for name, value in weights(model).items()}, digest(weights(model))


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
    ],
    ids=str,
)
def test_the_mean_is_that_of_all_ranks_whatever_the_nodes_sizes(three_ranks, options):
    wanted = on_the_mean(mixed(), 3, range(4))
    answers = three_ranks.run(trained, options)
    assert len({bits for _, bits in answers}) == 1
    assert_close(answers[0][0], {name: value.numpy() for name, value in wanted.items()})


def first_gradients(options: dict) -> np.ndarray:
    model = torch.nn.Linear(40, 5, bias=False)
    optimizer = made(model, **options)
    model.weight.grad = None
    gradient = torch.randn(5, 40, generator=torch.Generator().manual_seed(grace.rank()))
    (model.weight * gradient).sum().backward()
    optimizer.synchronize()
    return model.weight.grad.numpy()


def kept(x: np.ndarray, k: int) -> np.ndarray:
    """The k largest magnitudes."""
    flat = np.zeros(x.size, np.float32)
    largest = np.argsort(-np.abs(x.ravel()), kind="stable")[:k]
    flat[largest] = x.ravel()[largest]
    return flat.reshape(x.shape)


def test_leaders_compress_the_means_of_their_nodes_weighted_by_their_ranks(three_ranks):
    g = [torch.randn(5, 40, generator=torch.Generator().manual_seed(rank)).numpy() for rank in range(3)]
    nodes = [(g[0] + g[1]) / 2 * (2 * 2 / 3), g[2] * (2 / 3)]
    wanted = (kept(nodes[0], 20) + kept(nodes[1], 20)) / 2
    for got in three_ranks.run(first_gradients, {"hierarchical": True, "compressor": "topk(ratio=0.1)"}):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def resumed(options: dict) -> tuple[str, str]:
    whole, part, again = mixed(), mixed(), mixed()
    train(whole, made(whole, **options), range(6))
    optimizer = made(part, **options)
    train(part, optimizer, range(3))
    saved = copied(optimizer.state_dict())
    again.load_state_dict(part.state_dict())
    optimizer = made(again, **options)
    optimizer.load_state_dict(saved)
    train(again, optimizer, range(3, 6))
    return digest(weights(whole)), digest(weights(again))


@pytest.mark.parametrize(
    "options",
    [
        {"hierarchical": True, "compressor": "topk(ratio=0.3)"},
        {"compressor": "topk(ratio=0.3)", "communicator": "reduce_broadcast(destination=1, local_replication=True)"},
        {
            "compressor": "qsgd",
            "communicator": "reduce_broadcast(destination=2, local_replication=True, staleness=1)",
        },
    ],
    ids=["hierarchical", "replicated", "replicated-and-stale"],
)
def test_all_ranks_have_the_same_bits_and_resume(three_ranks, options):
    answers = three_ranks.run(resumed, options)
    assert len({bits for pair in answers for bits in pair}) == 1


def overflowed() -> tuple[list[bool], list[bool]]:
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
    return [*finite, all(bool(torch.isfinite(value).all()) for value in state.values())], present


def test_overflows_and_missing_gradients_reach_all_ranks(three_ranks):
    for finite, present in three_ranks.run(overflowed):
        assert finite == [True, False, True, True, True]
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


def refused() -> str:
    model = mixed()
    optimizer = made(model, hierarchical=True, compressor="topk(ratio=0.3)")
    train(model, optimizer, range(1), mixed_loss)
    saved = copied(optimizer.full_state_dict())
    plain = made(mixed(), compressor="topk(ratio=0.3)")
    try:
        plain.load_state_dict(saved)
    except grace.GraceError as error:
        return str(error)
    return ""


def test_memories_of_leaders_are_not_taken_for_those_of_all_ranks(three_ranks):
    told = three_ranks.run(refused)
    assert "ranks that speak for their nodes" in told[0]
    assert "ranks that speak for their nodes" in told[2]


def test_who_speaks_for_a_node():
    assert Topology(["a", "b", "a", "b"]).members() == [[0, 2], [1, 3]]
    assert Topology(["a", "b", "a", "b"]).members(leader=3) == [[0, 2], [3, 1]]


def alone(period: int) -> dict:
    from grace.strategy.plan import ShardPlan, Strategy, Sync, VariablePlan
    from grace.torch.parameters import find_sparse_parameters, make_variables

    model = mixed()
    found = make_variables(dict(model.named_parameters()), find_sparse_parameters(model))
    plans = tuple(VariablePlan(v, (ShardPlan(Sync("none", period=period)),)) for v in found)
    train(model, made(model, hierarchical=True, strategy=Strategy(plans, 3, 2)), range(period))
    return weights(model)


def test_variables_that_are_averaged_now_and_then_are_so_over_all_ranks(three_ranks):
    def trained_alone(rank):
        model = mixed()
        optimizer = sgd(model.parameters())
        for step in range(2):
            optimizer.zero_grad()
            mixed_loss(model, step, rank).backward()
            optimizer.step()
        return weights(model)

    own = [trained_alone(rank) for rank in range(3)]
    wanted = {name: sum(values[name] for values in own) / 3 for name in own[0]}
    for got in three_ranks.run(alone, 2):
        assert_close(got, wanted)


def both() -> dict:
    model = mixed()
    replicated = "reduce_broadcast(destination=1, local_replication=True)"
    train(model, made(model, hierarchical=True, communicator=replicated), range(4))
    return weights(model)


def test_replication_has_nothing_to_do_where_one_rank_of_each_node_takes_part(three_ranks):
    wanted = on_the_mean(mixed(), 3, range(4))
    for got in three_ranks.run(both):
        assert_close(got, wanted)


def votes(options: dict) -> list[float]:
    """The magnitude of votes before and after the loss scale changes."""
    model = torch.nn.Linear(40, 5, bias=False)
    optimizer = made(model, compressor="signsgd", **options)
    seen = []
    for scale in (1.0, 8.0):
        optimizer._grace.runner.rescale(scale)
        optimizer.zero_grad()
        model(torch.ones(1, 40)).sum().backward()
        optimizer.synchronize()
        seen.append(float(model.weight.grad.abs().max()))
    return seen


@pytest.mark.parametrize("communicator", ["allgather", "reduce_broadcast(destination=1)"])
def test_votes_are_in_units_of_the_loss_scale_on_all_ranks(three_ranks, communicator):
    assert three_ranks.run(votes, {"communicator": communicator}) == [[1.0, 8.0]] * 3


@pytest.mark.slow
@pytest.mark.skipif(not available("horovodrun-gloo"), reason="Horovod is not installed (make horovod)")
def test_replication_over_horovods_process_sets():
    program = Path(__file__).parents[1] / "programs" / "replicated.py"
    for sets, wanted in (("1", "the same: True True"), ("0", "Start it with HOROVOD_DYNAMIC_PROCESS_SETS=1")):
        done = subprocess.run(
            command("horovodrun-gloo", 3, str(program)),
            env={**environment(), "HOROVOD_DYNAMIC_PROCESS_SETS": sets, "PYTHONUNBUFFERED": "1"},
            capture_output=True,
            text=True,
            timeout=HANGS,
        )
        assert wanted in done.stdout + done.stderr
