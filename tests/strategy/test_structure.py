"""The structure of each variable's collective: flat, or inside the node first."""

import pytest
import torch

import grace
from grace.backends.topology import Topology
from grace.core.registry import make
from grace.core.variable import Variable
from grace.strategy import ShardPlan, Strategy, Sync, VariablePlan, schema
from grace.strategy.builder import OneNode
from tests.support.own_parts import InPieces, registered
from tests.support.pools import on_ranks
from tests.support.strategies import assert_close, executed, mixed, on_the_mean, train, variables_of, weights
from tests.support.training import copied, digest, refusal, used

LED = Sync("allgather", hierarchical=True)
FLAT = Sync("allgather")


def by_name(model, plans, **others):
    """A strategy: parts by variables' names, the others' plain."""
    found = variables_of(model)
    parts = [plans.get(v.name, ShardPlan(Sync(hierarchical=i % 2 == 0, **others))) for i, v in enumerate(found)]
    return Strategy(tuple(VariablePlan(v, (p,)) for v, p in zip(found, parts, strict=True)), grace.size(), 2)


def trained(how):
    """The mixed model after a few steps; every other variable inside the node first."""
    model = mixed()
    plans = {"dense.weight": ShardPlan(Sync("reduce_broadcast", destination=1, staleness=0, local_replication=True))}
    train(model, executed(model, by_name(model, plans) if how == "mixed" else how), range(3))
    return weights(model)


@pytest.mark.parametrize(
    ("engine", "how"),
    [("gloo", "mixed"), ("gloo", "all_reduce(hierarchical=true, chunk_size=2)"), ("mpirun-mpi", "mixed")],
)
@on_ranks(3)
def test_the_mean_is_that_of_all_ranks_whatever_each_variables_structure(engine, how):
    found = trained(how)
    assert_close(found, on_the_mean(mixed(), 3, range(3)))
    return digest(found)


@on_ranks(3)
def test_a_communicator_of_the_users_can_be_hierarchical():
    rule = {"match": {}, "sync": {"type": "in_pieces", "most": 50, "hierarchical": True}}
    with registered(InPieces):
        found = trained({"version": 1, "rules": [rule]})
        assert (InPieces.sent > 0) == (grace.rank() != 1)  # the leaders alone
    assert_close(found, on_the_mean(mixed(), 3, range(3)))
    return digest(found)


class Pair(torch.nn.Module):
    """Two variables of one shape."""

    def __init__(self):
        super().__init__()
        self.led, self.flat = (torch.nn.Parameter(torch.zeros(10, 10)) for _ in range(2))


def pair(led=("led",)):
    """The model, and its optimizer, which compresses both."""
    model = Pair()
    plans = {n: ShardPlan(LED if n in led else FLAT, "topk(ratio=0.1)") for n in ("led", "flat")}
    return model, executed(model, by_name(model, plans), lr_one)


def lr_one(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def step(model, optimizer, number, leave_out=False):
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(10 * number + grace.rank())
    gradients = torch.randn(2, 10, 10, generator=generator)
    if not leave_out:
        (model.led * gradients[0] + model.flat * gradients[1]).sum().backward()
        optimizer.step()


@on_ranks(3)
def test_only_leaders_compress_what_is_hierarchical_and_all_ranks_the_rest():
    model, optimizer = pair()
    step(model, optimizer, 0)
    assert 10 < int((model.led != 0).sum()) <= 20
    assert 20 < int((model.flat != 0).sum()) <= 30


@on_ranks(3)
def test_a_run_is_resumed_bit_for_bit_with_the_same_structure_only():
    model, optimizer = pair()
    for number in range(2):
        step(model, optimizer, number)
    saved, values = copied(optimizer.state_dict()), copied(model.state_dict())
    other, again = pair(("flat",))
    assert "hierarchical" in refusal(again.load_state_dict, saved, kind=grace.GraceError)
    other, again = pair()
    other.load_state_dict(values)
    again.load_state_dict(saved)
    for number in range(2, 4):
        step(model, optimizer, number)
        step(other, again, number)
    assert digest(weights(other)) == digest(weights(model))
    return digest(weights(model))


@on_ranks(3)
def test_a_rank_that_leaves_a_step_out_is_noticed_by_all():
    model, optimizer = pair()
    step(model, optimizer, 0)

    def steps():
        for number in range(1, 4):
            step(model, optimizer, number, leave_out=grace.rank() == 1 and number == 1)
        optimizer.synchronize()

    refusal(steps, kind=grace.errors.StepError)


@on_ranks(3)
def test_an_overflow_of_either_structure_reaches_all_ranks_and_no_memory():
    """Rank 1 has a NaN in one of the two variables."""
    for name in ("led", "flat"):
        model, optimizer = pair()
        gradient = torch.ones(10, 10) * (float("nan") if grace.rank() == 1 else 1.0)
        sum((p * (gradient if n == name else 1.0)).sum() for n, p in model.named_parameters()).backward()
        optimizer.synchronize()
        assert [n for n, p in model.named_parameters() if not torch.isfinite(p.grad).all()] == [name]
        used(model, optimizer)
        assert not any(map(len, optimizer._grace.runner.state()["memory"].values()))
        optimizer.close()


@on_ranks(2, engine="horovodrun-gloo")
def test_horovod_decides_itself_and_its_own_switch_is_named():
    said = refusal(trained, "mixed")
    assert "variable 'prime': hierarchical reduction is not for Horovod" in said
    assert "HOROVOD_HIERARCHICAL_ALLREDUCE=1" in said


def test_the_field_is_for_collectives_and_written_only_where_it_is_set():
    v = Variable("w", (4,))
    with pytest.raises(grace.ConfigError, match=r"sync\.hierarchical: is for allgather, .*, not for reduce_broadcast"):
        Strategy((VariablePlan(v, (ShardPlan(Sync("reduce_broadcast", hierarchical=True)),)),))
    with pytest.raises(grace.ConfigError, match=r"sync\.destination: allgather has no such field; it has: none of its"):
        Strategy((VariablePlan(v, (ShardPlan(Sync("allgather", destination=0)),)),))
    document = Strategy((VariablePlan(v, (ShardPlan(Sync(hierarchical=True)),)),)).to_dict()
    assert document["variables"]["w"]["sync"] == {"type": "allreduce", "group": 0, "hierarchical": True}
    assert schema.parse(document).to_dict() == document
    document["variables"]["w"]["sync"] = {"type": "none", "hierarchical": True}
    with pytest.raises(grace.ConfigError, match=r"variables\.w\.sync\.hierarchical: unknown key"):
        schema.parse(document)


@pytest.mark.parametrize(
    ("names", "said", "wanted"),
    [("aab", "auto", True), ("ab", "auto", False), ("aa", "auto", False), ("aa", "true", True)],
)
def test_the_builder_knows_nodes(names, said, wanted):
    builder = make("builder", f"all_reduce(hierarchical={said})")
    (plan,) = builder.build([Variable("w", (4,))], Topology(list(names))).plans
    assert plan.parts[0].sync.hierarchical is wanted


def test_a_builder_refuses_other_words():
    with pytest.raises(grace.ConfigError, match="hierarchical must be one of False, True, not 'ring'"):
        make("builder", "all_reduce(hierarchical=ring)").build([Variable("w", (4,))], OneNode(1))
