"""Exchanges under Horovod: in whatever order, in groups, as sums, sparse, and after a rank has joined."""

import time

import pytest
import torch

import grace
from tests.support.pools import on_ranks
from tests.support.training import (
    Given,
    digest,
    distributed,
    made_up,
    net,
    refusal,
    same,
    sgd,
    state_of,
    train,
    train_given,
    weights,
)

SHAPES = {"matrix": (12, 20), "other": (30, 10), "vector": (300,), "tiny": (1,)}


# -- whatever becomes ready first -----------------------------------------------------------------------------------


def out_of_order(compressor, communicator, shuffled, dtype):
    """The order in which gradients became ready, and the weights."""
    model = Given(SHAPES, dtype)
    optimizer = distributed(model, compressor, communicator=communicator)
    ready = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
        p.register_hook(lambda gradient: time.sleep(0.002 * shuffled * grace.rank()))
    names = list(SHAPES)
    for step in range(5):
        given, turn = made_up(SHAPES, step, grace.rank()), shuffled * step * (1 + grace.rank()) % len(names)
        optimizer.zero_grad()
        model.backward({name: given[name] for name in names[turn:] + names[:turn]})
        optimizer.step()
    return ready, digest(weights(model))


@pytest.mark.parametrize(
    ("compressor", "communicator", "dtype"),
    [
        ("topk(ratio=0.1)", "allgather", torch.float32),
        ("threshold(value=0.5)", "allgather", torch.float32),  # sizes differ from rank to rank
        ("randomk(ratio=0.1)", "allreduce", torch.float32),
        ("bf16", "allreduce", torch.float32),
        ("none", "allreduce", torch.bfloat16),
        ("powersgd(rank=2)", "allreduce", torch.float32),
        ("qsgd", "scatter_reduce", torch.float32),
        ("signsgd", "broadcast", torch.float32),
    ],
    ids=str,
)
@on_ranks(2, engine="horovodrun-gloo")
def test_ranks_may_get_ready_in_any_order(compressor, communicator, dtype):
    """The order depends on rank and step, and ranks are not ready at the same time."""
    _, in_order = out_of_order(compressor, communicator, False, dtype)
    ready, ends = out_of_order(compressor, communicator, True, dtype)
    first, second = grace.allgather_object(ready)
    assert first != second
    assert ends == in_order
    return ends


@on_ranks(2, engine="horovodrun-gloo")
def test_a_state_in_the_middle_of_a_step_is_refused_with_the_calls_that_drop_the_step():
    model = Given(SHAPES)
    optimizer = distributed(model, "topk(ratio=0.1)")
    model.backward(made_up(SHAPES, 0, grace.rank()))
    said = refusal(optimizer.state_dict, kind=grace.ExchangeError)
    assert said.endswith("or drop the step before, with optimizer.synchronize() and optimizer.zero_grad()"), said
    optimizer.synchronize()
    optimizer.zero_grad()
    optimizer.state_dict()


# -- groups and operations ------------------------------------------------------------------------------------------


def grouped(method, groups, skip=()):
    """Some training steps; ``groups`` holds names, and rank 1 has no gradient of the parameters to skip."""
    model = Given(SHAPES)
    named = dict(model.named_parameters())
    if isinstance(groups, list):
        groups = [[named[name] for name in group] for group in groups]
    optimizer = distributed(model, method, groups=groups)
    for step in range(2):
        given = made_up(SHAPES, step, grace.rank())
        optimizer.zero_grad()
        model.backward({name: g for name, g in given.items() if grace.rank() == 0 or name not in skip})
        optimizer.step()
    members = {tuple(variable.name for variable in group.variables) for group in optimizer._grace.runner.buckets}
    return members, digest(weights(model))


@pytest.mark.parametrize("method", ["none", "topk(ratio=0.1)", "powersgd(rank=2)"])
@on_ranks(2, engine="horovodrun-gloo")
def test_groups_change_nothing_but_what_travels_together(method):
    found = []
    for skip in ((), ("other", "tiny")):
        members, alone = grouped(method, 9, skip)
        assert members == {(name,) for name in SHAPES}
        for groups in (None, 2, [["other", "tiny"]], [["matrix", "vector", "tiny"], ["other"]]):
            together, ends = grouped(method, groups, skip)
            assert ends == alone
            assert groups or len(together) == (1 if method == "none" else 2)  # "tiny" rides dense
            # "tiny" is too small to be compressed, and rides dense, beside the others of its group
            assert (together == members) == (method != "none" and groups == [["other", "tiny"]])
        found.append(alone)
    return found


def with_groups(method):
    """A model's parameters in two groups, under Horovod itself ("plain") or under Grace."""
    import horovod.torch as hvd

    model = net()
    named = dict(model.named_parameters())
    groups = [list(named.values())[:3], list(named.values())[3:]]
    if method == "plain":
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named.items(), groups=groups)
    else:
        optimizer = distributed(model, method, groups=groups)
    train(model, optimizer, range(4))
    return digest(weights(model))


@on_ranks(2, engine="horovodrun-gloo")
def test_groups_are_horovods_to_the_bit():
    plain = with_groups("plain")
    assert with_groups("none") == plain
    return plain


@pytest.mark.parametrize("method", ["none", "topk(ratio=0.1)", "powersgd(rank=2)"])
@on_ranks(2, engine="horovodrun-gloo")
def test_a_sum_is_size_times_the_average_and_predividing_changes_only_the_range(method):
    import horovod.torch as hvd

    ends = set()
    for op, lr, predivide in (
        ("average", 0.05, 1.0),
        (hvd.Average, 0.05, 1.0),
        ("average", 0.05, 4.0),
        ("sum", 0.025, 1.0),
        (hvd.Sum, 0.025, 1.0),
    ):
        model = net()
        make = lambda p, lr=lr: sgd(p, lr)  # noqa: E731
        train(model, distributed(model, method, optimizer=make, op=op, gradient_predivide_factor=predivide), range(4))
        ends.add(digest(weights(model)))
    assert len(ends) == 1
    return ends


@on_ranks(2, engine="horovodrun-gloo")
def test_predividing_keeps_a_sum_in_the_range_of_its_payload():
    """The mean of gradients whose sum is beyond float16."""
    for predivide, mean in ((2.0, [40000.0, 1.0, -49984.0]), (1.0, [float("inf"), 1.0, float("-inf")])):
        model = Given({"w": (3,)})
        optimizer = distributed(model, "fp16", gradient_predivide_factor=predivide)
        model.backward({"w": [40000.0, 1.0, -50000.0]})
        optimizer.synchronize()
        assert model.w.grad.tolist() == mean


WRONG = {
    "Adasum": "op=Adasum combines whole gradients, not compressed ones; use op='average' or 'sum'",
    "Sum": "gradient_predivide_factor goes with op='average' only",
    "Min": "op must be 'average' or 'sum'",
}


@pytest.mark.parametrize("everywhere", [True, False], ids=["on all ranks", "on one rank"])
@on_ranks(2, engine="horovodrun-gloo")
def test_operations_that_make_no_sense_are_refused_on_every_rank(everywhere):
    """Wrong options; the ranks are still in step afterwards."""
    import horovod.torch as hvd

    wrong_here = everywhere or grace.rank() == 0
    for op, words in WRONG.items():
        options = {"op": getattr(hvd, op), **({"gradient_predivide_factor": 2.0} if op == "Sum" else {})}
        kind = grace.ConfigError if wrong_here else grace.RankError
        assert words in refusal(distributed, net(), "topk", kind=kind, **(options if wrong_here else {}))
    model = net()
    train(model, distributed(model, "topk"), range(2))
    return digest(weights(model))


# -- sparse gradients -----------------------------------------------------------------------------------------------


def embedded(method, sparse, as_dense):
    """An embedding and a layer; what they learn, and what was sent."""
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=sparse), torch.nn.Linear(8, 4))
    torch.manual_seed(0)
    torch.nn.init.normal_(model[0].weight)
    torch.nn.init.normal_(model[1].weight)
    torch.nn.init.zeros_(model[1].bias)
    optimizer = distributed(
        model, method, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), sparse_as_dense=as_dense, broadcast=False
    )
    words = torch.Generator().manual_seed(grace.rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randint(50, (6,), generator=words)).square().sum().backward()
        optimizer.step()
    return weights(model), optimizer.traffic, "0.weight" in state_of(optimizer)["memory"]


@on_ranks(2, engine="horovodrun-gloo")
def test_sparse_gradients_go_horovods_way_or_are_made_dense_and_compressed():
    for method in ("topk(ratio=0.1)", "none"):
        dense, traffic, _ = embedded(method, False, False)
        made_dense, same_traffic, remembered = embedded(method, True, True)
        assert same(made_dense, dense)
        assert same_traffic.sent_bytes == traffic.sent_bytes
        assert remembered == (method != "none")
    as_sparse, traffic, remembered = embedded("none", True, False)
    for name, value in dense.items():
        torch.testing.assert_close(as_sparse[name], value, msg=name)
    assert "0.weight" not in traffic.payload_bytes
    assert not remembered
    # of two ranks each sends, per step and word, an index and a row of the embedding
    layer = sum(traffic.payload_bytes.values()) + traffic.header_bytes
    assert traffic.sent_bytes - layer == 4 * 6 * (8 + 8 * 4)
    return digest(dense), digest(as_sparse)


class Looked(torch.nn.Module):
    """Makes sparse gradients of a parameter without a layer that says so."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = torch.nn.Parameter(torch.zeros(50, 8)), torch.nn.Linear(8, 4)

    def forward(self, words):
        return self.layer(torch.nn.functional.embedding(words, self.table, sparse=True))


def beside_a_shared_bucket(method, known):
    """Two steps with sparse gradients, of a layer that says so or not; what they bring, and what travels together."""
    torch.manual_seed(0)
    model = Looked()
    if known:
        layer = torch.nn.Embedding(50, 8, sparse=True)
        layer.weight = model.table
        model.lookup = layer  # the same parameter, known by its first name
    optimizer = distributed(model, method, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    for step in range(2):
        optimizer.zero_grad()
        model(torch.tensor([step, grace.rank() + 2])).square().sum().backward()
        optimizer.step()
        assert model.table.grad.is_sparse
    names = [[variable.name for variable in bucket.variables] for bucket in optimizer._grace.runner.buckets]
    return names, digest(weights(model))


@pytest.mark.parametrize("method", ["none", "topk(ratio=0.2)"])
@on_ranks(2, engine="horovodrun-gloo")
def test_sparse_gradients_leave_a_bucket_that_others_share(method):
    shared, ends = beside_a_shared_bucket(method, False)
    apart, same_ends = beside_a_shared_bucket(method, True)
    assert max(len(names) for names in shared if "table" in names) > 1
    assert [names for names in apart if "table" in names] == [["table"]]
    assert ends == same_ends
    return ends


@on_ranks(2, engine="horovodrun-gloo")
def test_a_sparse_gradient_in_a_group_is_refused_by_name():
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 4))
    optimizer = distributed(model, "none", groups=[list(model.parameters())])
    loss = model(torch.tensor([1])).sum()
    with pytest.raises(grace.ConfigError) as refused:
        loss.backward()
    assert not optimizer.state
    message = str(refused.value)
    assert "the gradient of '0.weight' is sparse" in message
    assert "sparse_as_dense=True" in message


# -- what is sent ---------------------------------------------------------------------------------------------------


@on_ranks(2, engine="horovodrun-gloo")
def test_what_is_counted_is_what_the_payloads_hold():
    method = grace.make("compressor", "topk(ratio=0.1)")
    model = Given(SHAPES)
    optimizer = distributed(model, "topk(ratio=0.1)", communicator="allgather")
    train_given(model, optimizer, range(3))
    traffic = optimizer.traffic
    assert traffic.steps == 3
    bits = {name: 32 if name == "tiny" else method.wire_bits(shape) for name, shape in SHAPES.items()}
    payload = {name: 3 * round(bits[name] * torch.Size(shape).numel() / 8) for name, shape in SHAPES.items()}
    assert traffic.payload_bytes == payload
    # of two ranks each sends its buffer once, gathered or summed
    assert traffic.sent_bytes == sum(payload.values()) + traffic.header_bytes
    assert 0 < traffic.header_bytes < 3 * 8 * 2 * len(SHAPES)


# -- ranks with fewer batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["none", "fp16", "randomk(ratio=0.1)", "powersgd(rank=2)"])
@on_ranks(2, engine="horovodrun-gloo")
def test_ranks_with_fewer_batches_join(method):
    """Rank 1 has two batches and joins; rank 0 has five. Then both have two more."""
    model = Given(SHAPES)
    sgd = lambda p: torch.optim.SGD(p, lr=0.5, momentum=0 if method == "none" else 0.9)  # noqa: E731
    optimizer = distributed(model, method, communicator="allreduce", optimizer=sgd)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1 if method == "none" else 0.9)
    for step in range(5 if grace.rank() == 0 else 2):
        train_given(model, optimizer, [step])
        schedule.step()
    assert optimizer.join() == 0
    joined = weights(model)
    if method == "none":  # a rank that has joined counts as zero
        steps = [(made_up(SHAPES, s, 0), made_up(SHAPES, s, 1)) for s in range(5)]
        for name, value in joined.items():
            total = sum(a[name] + (b[name] if step < 2 else 0) for step, (a, b) in enumerate(steps))
            torch.testing.assert_close(value, torch.as_tensor(-0.5 * total / 2).view_as(value))
    train_given(model, optimizer, (5, 6))
    assert optimizer._grace.context.step == 7  # random-k's indices follow it
    shared = {k: dict(c.state) for k, c in optimizer._grace.runner.components if c.shared_state}
    ends = optimizer.state_dict()["state"], optimizer.param_groups[0]["lr"]
    return digest(joined), digest(shared), digest(weights(model)), digest(ends)  # PowerSGD's factors are all ranks'


@pytest.mark.parametrize(
    ("method", "communicator", "what"),
    [
        ("topk(ratio=0.1)", "allgather", "allgather, topk(ratio=0.1), residual"),
        ("qsgd", "scatter_reduce", "scatter_reduce, qsgd, none"),
        ("bf16", "allreduce", "in bfloat16, which Horovod does not sum itself"),
        ("none", "allreduce", "an all-gather of sparse gradients"),
    ],
)
@on_ranks(2, engine="horovodrun-gloo")
def test_where_not_all_is_summed_joining_is_refused_with_what_to_do(method, communicator, what):
    """The ranks are still in step afterwards."""
    sparse = method == "none"
    model = torch.nn.Embedding(5, 4, sparse=True) if sparse else Given(SHAPES)
    optimizer = distributed(model, method, communicator=communicator, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    for step in range(2):
        optimizer.zero_grad()
        model(torch.tensor([step])).sum().backward() if sparse else model.backward(made_up(SHAPES, step, grace.rank()))
        optimizer.step()
        if step == 0:
            message = refusal(optimizer.join)
            assert f"{what}. Choose communicator='allreduce'" in message
            assert "leave out join()" in message
